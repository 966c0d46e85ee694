"""The kept pool: what a daemon leaves to the next one in files.

A damaged ledger or manifest is renamed, and the latest one stays; a pool never is, since
two do not fit into memory: its file is used again, or removed.

A pool that this daemon does not go on with is given up only when the new one is allocated:
the file grows beside the old bytes, new ledgers have names of their own, and no lane writes
until then. The old pool is gone when the header of its trailer is cleared, before anything
else of it changes: an older manifest that is put back later is not believed. A start that
fails or is killed before leaves everything as it was.

Where no manifest says which pool the file holds, any trailers may lie in it. Then the file is
made anew, once it is known that the new pool fits.
"""

import contextlib
import errno
import logging
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

from kvd.broker.effects import OpenPool
from kvd.cache.ledger import MAGIC, Ledger
from kvd.cache.namespaces import LedgerSetup, Namespaces
from kvd.cache.recovery import EPOCH_SHIFT, POOL_NAME_BYTES, PoolTrailer
from kvd.errors import IntegrityError, LedgerDamaged, PoolError, Refusal
from kvd.machine.memory import allocated_bytes
from kvd.pool.geometry import FillOrder
from kvd.server.client_files import DescriptionFile
from kvd.server.pool_memory import PoolMemory, shortage_remedy
from kvd.server.state_files import (
    DESCRIPTIONS,
    LEDGER,
    VERSION,
    Manifest,
    PoolFiles,
    is_own_file,
    kernel_boot,
    purge_command,
    remove_tree,
)
from kvd_proto.messages import ErrorCode
from kvd_proto.text import format_size

log = logging.getLogger("kvd.daemon")

_DRAFT = ".new"  # of a namespace's file beside those of the pool before
_LAST_CLOCK = 2**32 - 2**24
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

MakeNamespaces = Callable[[LedgerSetup | None, FillOrder], Namespaces]
_Ledgers = dict[Path, mmap.mmap]  # chunks to go on with, by file


class PersistentPool:
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
        self._pool_dir, self._runtime_dir = pool_dir.absolute(), runtime_dir
        self.keeps = keeps and self._files.own
        self._cold = cold
        self._before = self._files.read_manifest()  # this daemon's own once it is settled
        self._goes_on = False
        self._fresh = False  # nothing of an older pool is left
        self._new: tuple[Manifest, PoolMemory] | None = None  # not there yet
        self._trailer: PoolTrailer | None = None
        self._mapped: mmap.mmap | None = None  # the trailer, in the pool's file

    # ---------------------------------------------------------------- start

    def reusable_cpu_bytes(self) -> int | None:
        """Return `cpu_bytes` of the pool that is there and can be used again; None without one."""
        manifest = self._usable
        return manifest.cpu_bytes if manifest is not None else None

    def allocated_bytes(self) -> int:
        """Return the memory that the pool's file takes now, which this daemon uses or frees."""
        return allocated_bytes(self._files.pool)

    def open(
        self, cpu_bytes: int, make_namespaces: MakeNamespaces, engine: OpenPool | None = None
    ) -> tuple[PoolMemory, Namespaces]:
        """Open a pool of `cpu_bytes`, with every chunk of the daemon before that is undamaged.

        What this daemon does not go on with stays until `settle`.

        Args:
            cpu_bytes: the budget.
            make_namespaces: makes them without any namespace; called again where one is damaged.
            engine: that decides the pool's size; None where it is fixed.

        Raises:
            PoolError: the memory cannot be had, or no descriptor is left; nothing is lost.
            Refusal: a directory cannot be made now.
        """
        name, ledgers = self._find(cpu_bytes)
        try:
            anew = self._before is None
            pool = PoolMemory(self._files.pool, cpu_bytes, anew=anew, engine=engine)
        except PoolError as error:
            raise PoolError(f"{error}{self.what_stays}") from error
        try:
            return pool, self._fill(cpu_bytes, name, pool, ledgers, make_namespaces)
        except (PoolError, Refusal):
            self._unmap()
            pool.close()
            raise

    def _fill(
        self,
        cpu_bytes: int,
        name: str,
        pool: PoolMemory,
        ledgers: _Ledgers,
        make_namespaces: MakeNamespaces,
    ) -> Namespaces:
        """Return the namespaces of a pool, with the chunks of these ledgers."""
        if self._goes_on:
            self._mapped = pool.map_trailer()
            trailer = PoolTrailer(self._mapped)
        else:
            trailer = PoolTrailer.create(name)
        self._trailer = trailer
        epoch = self._next_epoch(trailer)
        trailer.number = max(trailer.number, epoch << EPOCH_SHIFT)
        manifest = Manifest(
            version=VERSION,
            pool=name,
            cpu_bytes=cpu_bytes,
            bytes=pool.nbytes,
            inode=os.fstat(pool.fd).st_ino,
            kernel=kernel_boot(),
            epoch=epoch,
        )
        self._new = manifest, pool
        if self._goes_on or pool.fresh:  # nothing is given up for it
            self.settle()
        ledger_setup = None
        if self.keeps:
            ledger_setup = LedgerSetup(self.make_ledger, name, trailer, epoch << EPOCH_SHIFT)
        while True:
            namespaces = make_namespaces(ledger_setup, pool.fill)
            if self._restore(ledgers, namespaces, trailer):
                self._drop_orphans(ledgers)
                trailer.retain(file.name.removesuffix(LEDGER) for file in ledgers)
                return namespaces

    def _next_epoch(self, trailer: PoolTrailer) -> int:
        """Return an epoch greater than that of any daemon before, as far as files tell.

        The clock makes epochs grow even where no file is left to tell the last one. It may be
        wrong by any number of years: they must fit 32 bits, with room for more restarts.
        """
        now = max(0, min(int(time.time()), _LAST_CLOCK))
        before = self._before.epoch if self._before is not None else 0
        return max(now, before + 1, (trailer.number >> EPOCH_SHIFT) + 1)

    def _find(self, cpu_bytes: int) -> tuple[str, _Ledgers]:
        """Return the name of a pool of `cpu_bytes`, and what it can go on with."""
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
        if manifest is None:
            return os.urandom(POOL_NAME_BYTES // 2).hex(), {}
        ledgers: _Ledgers = {}
        for file in self._files.ledgers():
            try:
                self._open_ledger(file, ledgers)
            except OSError as error:
                raise PoolError(
                    f"{file} cannot be opened now: {error.strerror}{shortage_remedy(error)}"
                    f"{self.what_stays}"
                ) from error
        if not ledgers:
            log.info("the kept pool of %s is used again; it has no chunks", format_size(cpu_bytes))
        return manifest.pool, ledgers

    def _restore(self, ledgers: _Ledgers, namespaces: Namespaces, trailer: PoolTrailer) -> bool:
        """Reopen every ledger; return False where one was set aside and all must begin again."""
        for file, buffer in list(ledgers.items()):
            began = time.perf_counter()
            try:
                ledger = Ledger(buffer, trailer)
                if ledger.description.namespace != file.name.removesuffix(LEDGER):
                    raise LedgerDamaged(f"it is that of namespace {ledger.description.namespace}")
                outdated = namespaces.is_outdated(ledger)
                if outdated and len(ledger):
                    log.warning(
                        "%s: its namespace was reset while another pool was in use, or the record"
                        " of resets is lost: its chunks are not used",
                        file,
                    )
                if outdated or not len(ledger):
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
            PoolError: there is no room for the manifest, or no descriptor for the trailer.
        """
        if self._new is None:
            return
        manifest, pool = self._new
        if not self._goes_on:
            self._mapped = self._mapped or pool.map_trailer()
            if self._before is not None:
                pool.clear_trailer(self._before.bytes)
                log.info("the new pool is there: the one that was kept is given up")
            for file in self._files.of_namespaces():
                remove_tree(file)
            if self._trailer is not None:  # over bytes of the old pool, which has no chunks now
                self._trailer.move(self._mapped)
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
            Refusal: NOT_READY where there is no room or descriptor for it now.
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
            raise Refusal(
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
        if self._trailer is not None:
            self._trailer.drop(name)

    # ------------------------------------------------------------------ end

    def close(self) -> None:
        """Leave the files to the next daemon, or remove them; close the pool's memory before."""
        self._unmap()
        if self._new is not None:
            self._undo()
        elif self._fresh and not self.keeps:
            self.remove()
        self._files.close()

    def left(self, chunks: int) -> str:
        """Return what stays after `close`, for the last line of the log; empty for nothing.

        Args:
            chunks: READY in the pool of this daemon.
        """
        try:
            held = self.allocated_bytes()
        except OSError as error:
            return f"; {self._files.pool} cannot be looked at: {error.strerror}"
        if not held:
            return ""
        own = self._goes_on or self._fresh
        what = f"{format_size(held)} with {chunks} chunks" if own else format_size(held)
        command = purge_command(self._runtime_dir, self._pool_dir)
        return f"; {what} stay in {self._files.place} for the next daemon; to free them: {command}"

    def remove(self) -> int:
        """Remove all files; return how many bytes the pool had."""
        held = self.allocated_bytes()
        self._files.remove()
        return held

    # -------------------------------------------------------------- helpers

    @property
    def _usable(self) -> Manifest | None:
        """The same, where this daemon may go on with it."""
        return self._before if self.keeps and not self._cold else None

    def _unmap(self) -> None:
        if self._trailer is not None:
            self._trailer.release()
        if self._mapped is not None:
            self._mapped.close()
        self._trailer = self._mapped = None

    def _undo(self) -> None:
        """Remove what an unfinished start has made, this one's or another's."""
        self._new = None
        for draft in self._files.of_namespaces(_DRAFT):
            remove_tree(draft)
        with contextlib.suppress(FileNotFoundError):
            if self._before is not None:
                size = self._files.file_bytes(self._before)
                if self._files.pool.lstat().st_size > size:
                    os.truncate(self._files.pool, size)

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
