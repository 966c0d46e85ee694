"""The kept pool: what a daemon leaves to the next one in files.

A damaged ledger or manifest is renamed, and the latest one stays; a pool never is, since
two do not fit into memory: its file is used again.

A pool that this daemon does not go on with is given up only when the new one is allocated:
the file grows beside the old bytes, new ledgers have names of their own, and no lane writes
until then. The new manifest is the moment at which the old pool is gone. A start that fails
or is killed before leaves everything as it was.
"""

import contextlib
import errno
import logging
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

from kvd.cache.ledger import MAGIC, Ledger
from kvd.cache.namespaces import Keeping, Namespaces
from kvd.daemon.descriptions import DescriptionFile
from kvd.daemon.memory import PoolMemory
from kvd.daemon.pool_files import (
    DESCRIPTIONS,
    LEDGER,
    VERSION,
    Manifest,
    PoolFiles,
    is_own_file,
    kernel_boot,
    remove_tree,
)
from kvd.errors import IntegrityError, LedgerDamaged, PoolError, Refused
from kvd.pool.filling import FillOrder
from kvd_proto.messages import ErrorCode
from kvd_proto.sizes import format_size

log = logging.getLogger("kvd.daemon")

_DRAFT = ".new"  # of a namespace's file beside those of the pool before
_EPOCH_SHIFT = 32
_LAST_CLOCK = 2**32 - 2**24
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

MakeNamespaces = Callable[[Keeping | None, FillOrder], Namespaces]
_Ledgers = dict[Path, mmap.mmap]  # chunks to go on with, by file


class KeptPool:
    """The files of one runtime directory's pool; only its daemon may use this.

    Args:
        pool_dir: where the pool goes.
        runtime_dir: the daemon's, as an absolute path.
        keeps: leave it all to the next daemon; else it goes with this one, and nothing that is
            there is used.
        cold: begin without what is there.

    Raises:
        ConfigError: pool_dir is none, cannot be written, or can be written by every user.
        AlreadyRunning: another daemon uses the pool, whatever became of the runtime directory.
    """

    def __init__(
        self, pool_dir: Path, runtime_dir: Path, *, keeps: bool, cold: bool = False
    ) -> None:
        self._files = PoolFiles(pool_dir, runtime_dir)
        self.keeps = keeps and self._files.own
        self._cold = cold
        self._before = self._files.read_manifest()  # this daemon's own once it is settled
        self._goes_on = False
        self._fresh = False  # nothing of an older pool is left
        self._new: tuple[Manifest, PoolMemory] | None = None  # not there yet

    # ---------------------------------------------------------------- start

    def kept_bytes(self) -> int | None:
        """Return `cpu_bytes` of the pool that is there and can be used again; None without one."""
        manifest = self._usable
        return manifest.cpu_bytes if manifest is not None else None

    def held_bytes(self) -> int:
        """Return the memory that the pool's file takes now, which this daemon uses or frees."""
        try:
            return self._files.pool.lstat().st_blocks * 512
        except OSError:
            return 0

    def open(
        self, cpu_bytes: int, make_namespaces: MakeNamespaces
    ) -> tuple[PoolMemory, Namespaces]:
        """Open a pool of `cpu_bytes`, with every chunk of the daemon before that is undamaged.

        What this daemon does not go on with stays until `settle`.

        Args:
            cpu_bytes: the budget.
            make_namespaces: makes them without any namespace; called again where one is damaged.

        Raises:
            PoolError: the memory cannot be had, or no descriptor is left; nothing is lost.
            Refused: a directory cannot be made now.
        """
        name, epoch, ledgers = self._find(cpu_bytes)
        try:
            pool = PoolMemory(self._files.pool, cpu_bytes)
        except PoolError as error:
            raise PoolError(f"{error}{self.what_stays}") from error
        manifest = Manifest(
            version=VERSION,
            pool=name,
            cpu_bytes=cpu_bytes,
            bytes=pool.nbytes,
            inode=os.fstat(pool.fd).st_ino,
            kernel=kernel_boot(),
            epoch=epoch,
        )
        keeping = Keeping(self.make_ledger, name, epoch << _EPOCH_SHIFT) if self.keeps else None
        self._new = manifest, pool
        try:
            if self._goes_on or pool.fresh:  # nothing is given up for it
                self.settle()
            while True:
                namespaces = make_namespaces(keeping, pool.fill)
                if self._restore(ledgers, namespaces):
                    self._drop_orphans(ledgers)
                    return pool, namespaces
        except (PoolError, Refused):
            pool.close()
            raise

    def _find(self, cpu_bytes: int) -> tuple[str, int, _Ledgers]:
        """Return name and epoch of a pool of `cpu_bytes`, and what it can go on with."""
        self._undo()
        manifest = self._usable
        if manifest is not None and manifest.cpu_bytes != cpu_bytes:
            log.warning(
                "the kept pool has %s, %s are wanted: it is given up when the new one is there, and"
                " the cache starts empty",
                format_size(manifest.cpu_bytes),
                format_size(cpu_bytes),
            )
            manifest = None
        self._goes_on = manifest is not None
        # The clock makes epochs grow even where no manifest is left to tell the last one. It may
        # be wrong by any number of years: they must fit 32 bits, with room for more restarts.
        now = max(0, min(int(time.time()), _LAST_CLOCK))
        epoch = max(now, self._before.epoch + 1) if self._before is not None else now
        if manifest is None:
            with contextlib.suppress(OSError):  # a file is used again, for its memory
                if not is_own_file(self._files.pool.lstat()):
                    remove_tree(self._files.pool)
            return os.urandom(16).hex(), epoch, {}
        ledgers: _Ledgers = {}
        for file in self._files.ledgers():
            try:
                self._open_ledger(file, ledgers)
            except OSError as error:
                raise PoolError(
                    f"{file} cannot be opened now: {error.strerror}; raise LimitNOFILE (ulimit -n)"
                    f" or free memory{self.what_stays}"
                ) from error
        if not ledgers:
            log.info("the kept pool of %s is used again; it has no chunks", format_size(cpu_bytes))
        return manifest.pool, epoch, ledgers

    def _restore(self, ledgers: _Ledgers, namespaces: Namespaces) -> bool:
        """Reopen every ledger; return False where one was set aside and all must begin again."""
        for file, buffer in list(ledgers.items()):
            began = time.perf_counter()
            try:
                ledger = Ledger(buffer)
                if ledger.kept.namespace != file.name.removesuffix(LEDGER):
                    raise LedgerDamaged(f"it is that of namespace {ledger.kept.namespace}")
                if not len(ledger) and not ledger.epoch:  # tiers may keep more of it
                    file.unlink()
                    del ledgers[file]
                    continue
                if namespaces.is_outdated(ledger):
                    log.warning(
                        "%s: its namespace was reset while another pool was in use: its chunks are"
                        " not used",
                        file,
                    )
                    file.unlink()
                    del ledgers[file]
                    continue
                namespace = namespaces.reopen(ledger)
            except LedgerDamaged as error:
                self._files.set_aside(file, str(error))
                del ledgers[file]
                return False
            except IntegrityError as error:
                # Two ledgers name the same bytes; either may be wrong.
                for other in ledgers:
                    self._files.set_aside(other, str(error))
                ledgers.clear()
                return False
            ready = namespace.table.slots.stats()["ready"]
            log.info(
                "namespace %s (%s): %d chunks, %s, of the daemon before are here again (%.0f ms)",
                file.name[:8],
                namespace.label,
                ready,
                format_size(ready * namespace.geometry.bytes_per_chunk),
                (time.perf_counter() - began) * 1000,
            )
        return True

    def _drop_orphans(self, ledgers: _Ledgers) -> None:
        """Remove descriptions of chunks that no ledger of this daemon's pool has."""
        if self._new is None:
            for file in self._files.of_namespaces():
                if file.suffix == DESCRIPTIONS and file.with_suffix(LEDGER) not in ledgers:
                    remove_tree(file)

    def settle(self) -> None:
        """Give up what this daemon does not go on with: the new pool is there, and is its own.

        Does nothing where that is done.

        Raises:
            PoolError: there is no room for the manifest.
        """
        if self._new is None:
            return
        manifest, pool = self._new
        if not self._goes_on:
            if self._before is not None:
                log.info("the new pool is there: the one that was kept is given up")
            for file in self._files.of_namespaces():
                remove_tree(file)
        self._files.write_manifest(manifest)
        self._before, self._new, self._fresh = manifest, None, not self._goes_on
        for draft in self._files.of_namespaces(_DRAFT):
            draft.rename(draft.with_suffix(""))
        pool.settle()

    def failed(self) -> None:
        """The pool cannot be allocated: what this daemon made goes with it."""
        if self._fresh:
            self.keeps = False  # it will not fit next time either

    @property
    def what_stays(self) -> str:
        """What a start that fails leaves, for the end of an error; empty for nothing."""
        if self._before is None or self._fresh:
            return ""
        return f"; the kept pool of {format_size(self._before.cpu_bytes)} stays as it was"

    def make_ledger(self, name: str, nbytes: int) -> mmap.mmap:
        """Zeroed memory of `nbytes` for the ledger of a namespace, by its id in hex.

        All of it is allocated: a page that a full filesystem has not would be a SIGBUS later.

        Raises:
            Refused: NOT_READY where there is no room or descriptor for it now.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(self._file(name, LEDGER), flags, 0o600)
            try:
                os.posix_fallocate(fd, 0, nbytes)
                return mmap.mmap(fd, nbytes)
            finally:
                os.close(fd)
        except OSError as error:
            raise Refused(
                ErrorCode.NOT_READY,
                f"no ledger of {format_size(nbytes)} can be made in {self._files.notes} now:"
                f" {error.strerror}; make room there, it is tried again",
            ) from error

    def open_descriptions(self, name: str, record_bytes: int) -> DescriptionFile:
        """Open the descriptions of a namespace, by its id in hex: the kept ones, where they are.

        Raises:
            OSError: that cannot be now.
        """
        return DescriptionFile(self._file(name, DESCRIPTIONS), record_bytes, kept=self.keeps)

    def drop(self, name: str) -> None:
        """Remove the files of a namespace that is closed."""
        for kind in (LEDGER, DESCRIPTIONS):
            self._file(name, kind).unlink(missing_ok=True)

    # ------------------------------------------------------------------ end

    def close(self) -> None:
        """Leave the files to the next daemon, or remove them; close the pool's memory before."""
        if self._new is not None:
            self._undo()
        elif self._fresh and not self.keeps:
            self.remove()
        self._files.close()

    def remove(self) -> int:
        """Remove all files; return how many bytes the pool had."""
        held = self.held_bytes()
        self._files.remove()
        return held

    # -------------------------------------------------------------- helpers

    @property
    def _usable(self) -> Manifest | None:
        """The same, where this daemon may go on with it."""
        return self._before if self.keeps and not self._cold else None

    def _undo(self) -> None:
        """Remove what an unfinished start has made, this one's or another's."""
        self._new = None
        for draft in self._files.of_namespaces(_DRAFT):
            remove_tree(draft)
        with contextlib.suppress(FileNotFoundError):
            if self._before is not None and self._files.pool.lstat().st_size > self._before.bytes:
                os.truncate(self._files.pool, self._before.bytes)

    def _file(self, name: str, kind: str) -> Path:
        """The ledger, or the descriptions, of a namespace of this daemon."""
        beside = _DRAFT if self._new is not None else ""
        return self._files.notes / f"{name}{kind}{beside}"

    def _open_ledger(self, file: Path, ledgers: _Ledgers) -> None:
        """Map a ledger; one whose making was cut short by a kill never held anything.

        Raises:
            OSError: no descriptor or memory is left; the ledger may be sound.
        """
        try:
            fd = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in _SHORTAGES:
                raise
            self._files.set_aside(file, f"it cannot be opened: {error.strerror}")
            return
        try:
            status = os.fstat(fd)
            if not is_own_file(status):
                self._files.set_aside(file, "it is no file of this user's")
            elif os.pread(fd, len(MAGIC), 0).strip(b"\0") == b"":
                file.unlink()
                log.warning("%s is empty: its namespace starts without chunks", file)
            else:
                ledgers[file] = mmap.mmap(fd, status.st_size)
        finally:
            os.close(fd)

    def __repr__(self) -> str:
        return f"<KeptPool {self._files.place}{'' if self.keeps else ', not kept'}>"
