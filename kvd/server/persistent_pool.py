"""The persistent pool: the pool's memory and the files that let the next daemon reuse its chunks.

Replacing a pool is a transaction. A start that fails or is killed before `commit` leaves the
previous pool unchanged:

1. `open` extends the file beyond the previous pool's bytes and creates ledgers under draft names.
   No lane writes to the pool yet.
2. `commit` clears the header of the previous pool's trailer before it changes anything else, so no
   restored manifest of that pool is accepted later. Then it removes the previous ledgers, writes
   the manifest and renames the drafts.

A damaged ledger or manifest is renamed, and only the latest such file is retained. A pool's file is
never renamed because two pools do not fit into memory: it is reused or removed. Without a valid
manifest the file may contain any trailer, so it is created anew once the new pool is known to fit.
"""

import contextlib
import errno
import logging
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvd.broker.effects import OpenPool
from kvd.cache.ledger import MAGIC, Ledger
from kvd.cache.namespaces import LedgerSetup, Namespaces
from kvd.cache.recovery import EPOCH_SHIFT, POOL_NAME_BYTES, PoolTrailer
from kvd.errors import IntegrityError, LedgerDamaged, MemoryShortage, PoolError, Refusal
from kvd.machine.directories import replaced_pool_text
from kvd.machine.memory import allocated_bytes
from kvd.machine.pools import DESCRIPTIONS, LEDGER, purge_command, unused_pools, unused_text
from kvd.pool.geometry import FillOrder
from kvd.server.adoption import adopt_newest
from kvd.server.client_files import DescriptionFile
from kvd.server.pool_memory import PoolMemory, shortage_remedy
from kvd.server.reset_file import ResetFile
from kvd.server.state_files import (
    MANIFEST_VERSION,
    Manifest,
    PoolFiles,
    is_own_file,
    kernel_boot,
    remove_tree,
)
from kvd_proto.messages import ErrorCode
from kvd_proto.text import format_size

log = logging.getLogger("kvd.daemon")

_DRAFT = ".new"  # suffix of a new pool's files before `commit`
_LAST_CLOCK = 2**32 - 2**24
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

MakeNamespaces = Callable[[LedgerSetup | None, FillOrder], Namespaces]
_Ledgers = dict[Path, mmap.mmap]  # mapped ledgers of the previous daemon, by file


class PersistentPool:
    """The pool of one runtime directory, locked for this daemon.

    Args:
        pool_dir: the directory of pools.
        runtime_dir: the daemon's runtime directory, an absolute path.
        persistent: leave the pool to the next daemon. If false, the pool is removed at the end, and
            chunks of the previous daemon are not used.
        cold: do not use the chunks of the previous daemon.
        resets: the daemon's table of resets, which is copied beside the pool.
        access: `kvd.server.adoption.access_digest` of the daemon, for the manifest.

    Raises:
        ConfigError: pool_dir is no directory, is not writable, or is writable by every user.
        AlreadyRunning: another daemon uses the pool, even if the runtime directory was replaced.
    """

    def __init__(
        self,
        pool_dir: Path,
        runtime_dir: Path,
        *,
        persistent: bool,
        cold: bool = False,
        resets: ResetFile | None = None,
        access: str = "",
    ) -> None:
        self._files = PoolFiles(pool_dir, runtime_dir)
        self._pool_dir, self._runtime_dir = pool_dir.absolute(), runtime_dir
        self.persistent = persistent and self._files.discoverable
        self._cold = cold
        self._resets = resets
        self._access = access
        self._previous = self._files.read_manifest()  # this daemon's own after `commit`
        self._reuses_pool = False
        self._all_new = False  # committed, and no bytes of the previous pool are left
        self._pending: tuple[Manifest, PoolMemory] | None = None  # None after `commit`
        self._trailer: PoolTrailer | None = None
        self._trailer_map: mmap.mmap | None = None  # the mapped trailer of the pool's file

    # ---------------------------------------------------------------- start

    def adopt(self, cpu_bytes: int | None) -> None:
        """Take over the newest unused pool that matches, unless this daemon has files of its own.

        Args:
            cpu_bytes: the configured size; None for `auto`.
        """
        resets = self._resets
        if resets is None or not self.persistent or self._cold or not self._files.is_empty():
            return
        adopt_newest(self._files, self._runtime_dir, resets, self._access, cpu_bytes)
        self._previous = self._files.read_manifest()
        if self._previous is not None:
            resets.copy_to(self._files.resets)
            manifest = msgspec.structs.replace(self._previous, runtime_dir=self._named_runtime_dir)
            self._files.write_manifest(manifest)

    def reusable_cpu_bytes(self) -> int | None:
        """Return `cpu_bytes` of the previous pool if it can be reused, else None."""
        manifest = self._reusable_manifest
        return manifest.cpu_bytes if manifest is not None else None

    def allocated_bytes(self) -> int:
        """Return the memory that the pool's file takes now; this daemon reuses or frees it."""
        return allocated_bytes(self._files.pool)

    def open(
        self, cpu_bytes: int, make_namespaces: MakeNamespaces, engine: OpenPool | None = None
    ) -> tuple[PoolMemory, Namespaces]:
        """Open a pool of `cpu_bytes` with all undamaged chunks of the previous daemon.

        A previous pool that is not reused stays unchanged until `commit`.

        Args:
            cpu_bytes: size of the pool.
            make_namespaces: returns an empty `Namespaces`; called again if a ledger is damaged.
            engine: the engine whose layouts decide the size; None if the size is configured.

        Raises:
            PoolError: there is no memory or descriptor; the previous pool is unchanged.
            Refusal: a namespace's directory cannot be created now.
        """
        if self._resets is not None:
            self._resets.copy_to(self._files.resets)
        name, ledgers = self._load_previous(cpu_bytes)
        try:
            create_anew = self._previous is None
            pool = PoolMemory(self._files.pool, cpu_bytes, create_anew=create_anew, engine=engine)
        except MemoryShortage as error:
            raise PoolError(self.shortage_text(str(error))) from error
        except PoolError as error:
            raise PoolError(f"{error}{self.retained_text}") from error
        try:
            return pool, self._open_namespaces(cpu_bytes, name, pool, ledgers, make_namespaces)
        except (PoolError, Refusal):
            self._unmap()
            pool.close()
            raise

    def _open_namespaces(
        self,
        cpu_bytes: int,
        name: str,
        pool: PoolMemory,
        ledgers: _Ledgers,
        make_namespaces: MakeNamespaces,
    ) -> Namespaces:
        """Return namespaces with the chunks of `ledgers`; commit if no pool is replaced."""
        if self._reuses_pool:
            self._trailer_map = pool.map_trailer()
            trailer = PoolTrailer(self._trailer_map)
        else:
            trailer = PoolTrailer.create(name)
        self._trailer = trailer
        epoch = self._next_epoch(trailer)
        trailer.number = max(trailer.number, epoch << EPOCH_SHIFT)
        manifest = Manifest(
            version=MANIFEST_VERSION,
            pool=name,
            cpu_bytes=cpu_bytes,
            bytes=pool.nbytes,
            inode=os.fstat(pool.fd).st_ino,
            kernel=kernel_boot(),
            epoch=epoch,
            runtime_dir=self._named_runtime_dir,
            access=self._access,
        )
        self._pending = manifest, pool
        if self._reuses_pool or pool.fresh:  # no previous pool is replaced
            self.commit()
        ledger_setup = None
        if self.persistent:
            ledger_setup = LedgerSetup(self.make_ledger, name, trailer, epoch << EPOCH_SHIFT)
        while True:
            namespaces = make_namespaces(ledger_setup, pool.fill)
            if self._reopen_ledgers(ledgers, namespaces, trailer):
                self._remove_orphaned_descriptions(ledgers)
                trailer.retain(file.name.removesuffix(LEDGER) for file in ledgers)
                return namespaces

    def _next_epoch(self, trailer: PoolTrailer) -> int:
        """Return an epoch above those of the clock, the previous manifest and the trailer.

        The clock makes epochs grow even if all files were lost. It may be wrong by years, so it is
        bounded: epochs have 32 bits and must leave numbers for more restarts.
        """
        now = max(0, min(int(time.time()), _LAST_CLOCK))
        previous_epoch = self._previous.epoch if self._previous is not None else 0
        return max(now, previous_epoch + 1, (trailer.number >> EPOCH_SHIFT) + 1)

    def _load_previous(self, cpu_bytes: int) -> tuple[str, _Ledgers]:
        """Undo an unfinished replacement, and decide whether the previous pool is reused.

        Returns:
            The pool's name, a new one if it is not reused, and its ledgers, mapped. Damaged ledgers
            are set aside.

        Raises:
            PoolError: a ledger cannot be opened now, as descriptors or memory are short.
        """
        self._undo_unfinished()
        manifest = self._reusable_manifest
        if manifest is not None and manifest.cpu_bytes != cpu_bytes:
            log.warning("%s", replaced_pool_text(manifest.cpu_bytes, cpu_bytes))
            manifest = None
        self._reuses_pool = manifest is not None
        if manifest is None:
            return os.urandom(POOL_NAME_BYTES // 2).hex(), {}
        ledgers: _Ledgers = {}
        for file in self._files.ledgers():
            try:
                self._map_ledger(file, ledgers)
            except OSError as error:
                raise PoolError(
                    f"{file} cannot be opened now: {error.strerror}{shortage_remedy(error)}"
                    f"{self.retained_text}"
                ) from error
        if not ledgers:
            log.info("the kept pool of %s is used again; it has no chunks", format_size(cpu_bytes))
        return manifest.pool, ledgers

    def _reopen_ledgers(
        self, ledgers: _Ledgers, namespaces: Namespaces, trailer: PoolTrailer
    ) -> bool:
        """Reopen all namespaces; return False if a ledger was set aside: all must be repeated."""
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
                # Two ledgers claim the same bytes; either may be wrong.
                for other in ledgers:
                    self._files.set_aside(other, str(error))
                ledgers.clear()
                return False
            ready = namespace.table.slots.stats()["ready"]
            log.info(
                "namespace %s (%s): %d chunks, %s, of the previous daemon are restored (%.0f ms)",
                file.name[:8],
                namespace.model,
                ready,
                format_size(ready * namespace.geometry.bytes_per_chunk),
                (time.perf_counter() - began) * 1000,
            )
        return True

    def _remove_orphaned_descriptions(self, ledgers: _Ledgers) -> None:
        """Remove descriptions of namespaces without a ledger in this daemon's pool."""
        if self._pending is None:
            for file in self._files.namespace_files():
                if file.suffix == DESCRIPTIONS and file.with_suffix(LEDGER) not in ledgers:
                    remove_tree(file)

    def commit(self) -> None:
        """Replace the previous pool by the new one; repeated calls do nothing.

        1. Clear the previous trailer's header, and remove the previous namespaces' files.
        2. Write the new trailer and the manifest.
        3. Rename the drafts, and cut the file to the new size.

        Raises:
            PoolError: there is no space for the manifest, or no descriptor for the trailer.
        """
        if self._pending is None:
            return
        manifest, pool = self._pending
        if not self._reuses_pool:
            self._trailer_map = self._trailer_map or pool.map_trailer()
            if self._previous is not None:
                pool.clear_trailer(self._previous.bytes)
                log.info("the new pool is allocated: the previous one is dropped")
            for file in self._files.namespace_files():
                remove_tree(file)
            # The trailer overwrites bytes of the previous pool, whose chunks are gone.
            if self._trailer is not None:
                self._trailer.move(self._trailer_map)
        self._files.write_manifest(manifest)
        self._previous, self._pending, self._all_new = manifest, None, not self._reuses_pool
        for draft in self._files.namespace_files(_DRAFT):
            draft.rename(draft.with_suffix(""))
        pool.commit()

    def allocation_failed(self) -> None:
        """Remove this daemon's new pool at `close`: its memory cannot be allocated."""
        if self._all_new:
            self.persistent = False  # it would not fit next time either

    def unused_text(self) -> str:
        """Return the other pools in `pool_dir` that no process uses, and how to free them."""
        pools = unused_pools(self._pool_dir, self._runtime_dir)
        return unused_text(pools, self._pool_dir, self._runtime_dir)

    def shortage_text(self, reason: str) -> str:
        """Return an error text: memory does not suffice for `reason`; names what could be freed."""
        text = self.unused_text()
        return f"{reason}{f'; {text}' if text else ''}{self.retained_text}"

    @property
    def retained_text(self) -> str:
        """End of an error text: the previous pool that a failed start leaves; empty if none."""
        if self._previous is None or self._all_new:
            return ""
        return f"; the kept pool of {format_size(self._previous.cpu_bytes)} stays as it was"

    def make_ledger(self, name: str, nbytes: int) -> mmap.mmap:
        """Return zeroed mapped memory of `nbytes` for a namespace's ledger.

        All pages are allocated now: a missing page on a full filesystem would be a SIGBUS later.

        Args:
            name: the namespace's id in hex.
            nbytes: of the ledger.

        Raises:
            Refusal: NOT_READY if there is no space or descriptor now.
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
                f"no ledger of {format_size(nbytes)} can be created in {self._files.metadata_dir}"
                f" now: {error.strerror}; free space there, the engine retries",
            ) from error

    def open_descriptions(self, name: str, record_bytes: int) -> DescriptionFile:
        """Open a namespace's descriptions; those of the previous daemon are retained.

        Raises:
            OSError: the file cannot be opened now.
        """
        return DescriptionFile(
            self._file(name, DESCRIPTIONS), record_bytes, persistent=self.persistent
        )

    def drop(self, name: str) -> None:
        """Remove the files of a closed namespace (`name`: its id in hex)."""
        for suffix in (LEDGER, DESCRIPTIONS):
            self._file(name, suffix).unlink(missing_ok=True)
        if self._trailer is not None:
            self._trailer.drop(name)

    # ------------------------------------------------------------------ end

    def close(self) -> None:
        """Leave the files to the next daemon or remove them; `PoolMemory.close` comes first."""
        self._unmap()
        if self._pending is not None:
            self._undo_unfinished()
        elif self._all_new and not self.persistent:
            self.remove()
        self._files.close()

    def remaining_text(self, num_chunks: int) -> str:
        """Return what stays after `close`, as the end of the last log line; empty if nothing.

        Args:
            num_chunks: READY chunks in this daemon's pool.
        """
        try:
            nbytes = self.allocated_bytes()
        except OSError as error:
            return f"; {self._files.pool} cannot be examined: {error.strerror}"
        if not nbytes:
            return ""
        size = format_size(nbytes)
        if self._reuses_pool or self._all_new:
            size += f" with {num_chunks} chunks"
        command = purge_command(self._runtime_dir, self._pool_dir)
        return (
            f"; {size} stay in {self._files.directory} for the next daemon; to free it: {command}"
        )

    def remove(self) -> int:
        """Remove all files; return the memory that the pool took."""
        nbytes = self.allocated_bytes()
        self._files.remove()
        return nbytes

    # -------------------------------------------------------------- helpers

    @property
    def _reusable_manifest(self) -> Manifest | None:
        """The previous manifest, if this daemon may reuse its pool; else None."""
        return self._previous if self.persistent and not self._cold else None

    @property
    def _named_runtime_dir(self) -> str:
        """The runtime directory for the manifest, which is UTF-8."""
        return os.fsencode(self._runtime_dir).decode(errors="replace")

    def _unmap(self) -> None:
        if self._trailer is not None:
            self._trailer.release()
        if self._trailer_map is not None:
            self._trailer_map.close()
        self._trailer = self._trailer_map = None

    def _undo_unfinished(self) -> None:
        """Undo an unfinished replacement of the pool, by this start or an earlier one."""
        self._pending = None
        for draft in self._files.namespace_files(_DRAFT):
            remove_tree(draft)
        with contextlib.suppress(FileNotFoundError):
            if self._previous is not None:
                size = self._files.file_bytes(self._previous)
                if self._files.pool.lstat().st_size > size:
                    os.truncate(self._files.pool, size)

    def _file(self, name: str, kind: str) -> Path:
        """Return the path of a namespace's ledger or descriptions; a draft before `commit`."""
        suffix = _DRAFT if self._pending is not None else ""
        return self._files.metadata_dir / f"{name}{kind}{suffix}"

    def _map_ledger(self, file: Path, ledgers: _Ledgers) -> None:
        """Map a ledger into `ledgers`; set aside a foreign or unreadable one.

        A ledger of zeros was being created when its daemon was killed; it is removed.

        Raises:
            OSError: no descriptor or memory is left; the ledger may be undamaged.
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
                self._files.set_aside(file, "it is not a file of this user")
            elif os.pread(fd, len(MAGIC), 0).strip(b"\0") == b"":
                file.unlink()
                log.warning("%s is empty: its namespace starts without chunks", file)
            else:
                ledgers[file] = mmap.mmap(fd, status.st_size)
        finally:
            os.close(fd)
