"""State files that a daemon leaves to the next one: the pool's directory, known pools.

The pool's directory (mode 0700) is named after the runtime directory's path, so a daemon finds
exactly its predecessor's files::

    <pool_dir>/kvd-<digest>/pool               the bytes of all chunks, and a trailer
    <pool_dir>/kvd-<digest>/manifest.json      identifies the pool
    <pool_dir>/kvd-<digest>/<namespace>.ledger its READY chunks, see kvd.cache.ledger
    <pool_dir>/kvd-<digest>/<namespace>.descriptions   their descriptions for routers
    <pool_dir>/kvd-<digest>/resets             a copy of kvd.resets, see kvd.server.adoption

On hugetlbfs, whose files cannot be written, only the pool lies in pool_dir; the rest lies in a
directory of /dev/shm.

`kvd.pools` in the runtime directory lists the `pool_dir` of each daemon whose pool may still exist,
one path a line, the latest first: a daemon with another `pool_dir` does not touch the earlier pool,
whose memory stays in use. At its start a daemon logs the other pools with the command that frees
them, and drops paths without a pool. It removes their copies of `kvd.resets`, since it does not
write its own resets there: no other daemon adopts those pools.
"""

import contextlib
import logging
import os
import stat
import time
from pathlib import Path
from typing import Annotated, Self

import msgspec

from kvd.cache.recovery import (
    POOL_NAME_BYTES,
    TRAILER_HEAD_BYTES,
    pack_head,
)
from kvd.errors import AlreadyRunning, ConfigError, PoolError
from kvd.machine import process
from kvd.machine.directories import MANIFEST, check_directory, check_pool_dir
from kvd.machine.memory import TRAILER_BYTES, Filesystem, allocated_bytes
from kvd.machine.pools import (
    DESCRIPTIONS,
    LEDGER,
    MAX_MANIFEST_BYTES,
    POOL,
    RESETS,
    PoolClaim,
    pool_directories,
    purge_command,
)
from kvd.machine.process import is_named, try_lock
from kvd_proto.text import format_size

log = logging.getLogger("kvd.daemon")

MANIFEST_VERSION = 3
_MANIFEST_BYTES = 1024  # fixed size, padded with spaces
_DAMAGED_SUFFIX = ".damaged-"


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Identifies the pool in the directory.

    Attributes:
        pool: random name of the pool, also stored in its trailer.
        cpu_bytes: configured size.
        bytes: size of the chunks; the trailer follows them. Bytes behind the trailer belong to a
            larger pool whose creation was not finished.
        inode: of the pool's file. A copy of the file is rejected: it may be inconsistent.
        kernel: the machine's boot id. After another boot the filesystem may have lost writes.
        epoch: of the daemon that wrote this; each daemon takes a greater one. 32 bits.
        runtime_dir: of that daemon; empty in manifests of older releases.
        access: digest of what decides who may connect to it; see `kvd.server.adoption`.
    """

    version: int
    pool: Annotated[str, msgspec.Meta(pattern=f"^[0-9a-f]{{{POOL_NAME_BYTES}}}$")]
    cpu_bytes: int
    bytes: Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
    inode: int
    kernel: str
    epoch: Annotated[int, msgspec.Meta(ge=0, lt=2**32 - 1)]
    runtime_dir: str = ""
    access: str = ""

    @classmethod
    def read(cls, file: Path) -> Self | None:
        """Return the manifest in a file; None if the file is empty.

        Raises:
            OSError, msgspec.DecodeError: there is no such file, or it is no manifest.
        """
        with file.open("rb") as source:
            content = source.read(MAX_MANIFEST_BYTES + 1)
        if len(content) > MAX_MANIFEST_BYTES:
            raise msgspec.DecodeError(f"it has more than {MAX_MANIFEST_BYTES} bytes")
        return msgspec.json.decode(content, type=cls) if content else None

    def file_bytes(self, filesystem: Filesystem) -> int:
        """Return the size of the pool's file."""
        return self.bytes + filesystem.whole_pages(TRAILER_BYTES)

    def objection(self, pool_file: Path, filesystem: Filesystem) -> str:
        """Return why the pool cannot be reused; empty if it can."""
        if self.version != MANIFEST_VERSION:
            return f"it has version {self.version}, this daemon reads {MANIFEST_VERSION}"
        if self.kernel != kernel_boot():
            return "the machine was rebooted since"
        if self.bytes != filesystem.whole_pages(self.cpu_bytes):
            return f"a pool of {self.cpu_bytes} bytes does not have {self.bytes} bytes of chunks"
        try:
            fd = os.open(pool_file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return f"{pool_file} is gone, or another file"
        try:
            status = os.fstat(fd)
            if not is_own_file(status) or status.st_ino != self.inode:
                return f"{pool_file} is another file"
            if status.st_size < self.file_bytes(filesystem):
                return f"{pool_file} is cut off: it has {status.st_size} bytes"
            if os.pread(fd, TRAILER_HEAD_BYTES, self.bytes) != pack_head(self.pool):
                return f"{pool_file} has the chunks of another pool, or none"
        finally:
            os.close(fd)
        return ""


class PoolFiles:
    """The directories of one runtime directory's pool, locked, and the files in them.

    Attributes:
        directory: of the pool's file.
        metadata_dir: directory of manifest, ledgers and descriptions; equals `directory` except on
            hugetlbfs.
        pool: path of the pool's file.
        resets: path of the copy of the reset table.
        discoverable: the directories have the names under which the next daemon looks for them.

    Raises:
        ConfigError, AlreadyRunning: see `PersistentPool`.
    """

    def __init__(self, pool_dir: Path, runtime_dir: Path) -> None:
        check_pool_dir(pool_dir)
        self.discoverable = True
        own_dir, metadata_dir = pool_directories(pool_dir, runtime_dir)
        self._filesystem = Filesystem.of(pool_dir)
        if metadata_dir.parent != pool_dir:
            check_directory("the directory of the pool's manifest", metadata_dir.parent)
        for area in {own_dir, metadata_dir}:
            for leftover in area.parent.glob(f"{area.name}-*"):
                remove_tree(leftover)
        self._lock_fds: list[int] = []
        with contextlib.ExitStack() as undo:
            undo.callback(self._unlock)
            try:
                self.directory = self._lock(own_dir)
                self.metadata_dir = (
                    self.directory if metadata_dir == own_dir else self._lock(metadata_dir)
                )
            except OSError as error:
                raise ConfigError(
                    f"pool_dir = {pool_dir}: {error.strerror}; choose a directory that this user"
                    " may write, with --pool-dir"
                ) from error
            undo.pop_all()
        self.pool = self.directory / POOL
        self.resets = self.metadata_dir / RESETS
        self._manifest = self.metadata_dir / MANIFEST

    def read_manifest(self) -> Manifest | None:
        """Return the previous manifest; None, and log why, if its pool cannot be reused."""
        try:
            manifest = Manifest.read(self._manifest)
        except FileNotFoundError:
            manifest = None
        except (OSError, msgspec.DecodeError) as error:
            self.set_aside(self._manifest, f"it cannot be read: {error}")
            return None
        if manifest is not None:
            reason = manifest.objection(self.pool, self._filesystem)
        elif self.pool.exists() or self.ledgers():
            reason = f"there is no {MANIFEST}; the cache starts empty"
        else:
            return None
        if reason:
            log.warning("the kept pool in %s is not used: %s", self.metadata_dir, reason)
            return None
        return manifest

    def write_manifest(self, manifest: Manifest) -> None:
        """Overwrite the manifest in place, which needs no free space if it exists.

        A single write within a page is atomic if this process is killed.

        Raises:
            PoolError: the manifest does not exist and there is no space for it.
        """
        content = msgspec.json.encode(manifest).ljust(_MANIFEST_BYTES)
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(self._manifest, flags, 0o600)
            try:
                os.pwrite(fd, content, 0)
                os.ftruncate(fd, len(content))
            finally:
                os.close(fd)
        except OSError as error:
            raise PoolError(
                f"{self._manifest} cannot be written: {error.strerror}; make room there, or choose"
                " another --pool-dir"
            ) from error

    def file_bytes(self, manifest: Manifest) -> int:
        """Return the size of the file of the manifest's pool."""
        return manifest.file_bytes(self._filesystem)

    def ledgers(self) -> list[Path]:
        """Return the paths of the ledgers; they may be foreign or damaged files."""
        return sorted(self.metadata_dir.glob(f"*{LEDGER}"))

    def namespace_files(self, suffix: str = "") -> list[Path]:
        """Return the ledgers and descriptions whose names end with `suffix`."""
        kinds = (LEDGER, DESCRIPTIONS)
        return sorted(file for kind in kinds for file in self.metadata_dir.glob(f"*{kind}{suffix}"))

    def set_aside(self, file: Path, reason: str) -> None:
        """Rename a damaged file so that it can be examined; only the latest one is retained."""
        for older in self.metadata_dir.glob(f"*{_DAMAGED_SUFFIX}*"):
            remove_tree(older)
        renamed = file.with_name(f"{file.name}{_DAMAGED_SUFFIX}{int(time.time())}")
        file.rename(renamed)
        log.error("%s: %s; it is renamed to %s, its chunks are lost", file, reason, renamed.name)

    def remove(self) -> None:
        """Remove the directories with all files in them."""
        for directory in {self.directory, self.metadata_dir}:
            remove_tree(directory)

    def close(self) -> None:
        """Remove the directories if they have no pool and no ledger, and unlock them."""
        if not self.pool.exists():
            remove_tree(self.resets)
        for directory in {self.directory, self.metadata_dir}:
            with contextlib.suppress(OSError):
                directory.rmdir()
        self._unlock()

    def is_empty(self) -> bool:
        """Return whether the directories have no files."""
        directories = {self.directory, self.metadata_dir}
        return not any(file for directory in directories for file in directory.iterdir())

    def adopt(self, claim: PoolClaim) -> None:
        """Replace the directories, which are empty, by those of another pool, with their locks.

        Raises:
            OSError: a directory cannot be moved.
        """
        pool = claim.pool
        pool.directory.rename(self.directory)
        self._unlock()
        self._lock_fds = claim.take_directory_locks()
        if pool.metadata_dir is not None and pool.metadata_dir != pool.directory:
            pool.metadata_dir.rename(self.metadata_dir)

    def _lock(self, path: Path) -> Path:
        """Create and lock a directory; return its path, which may be another one.

        It starts over if the directory was removed or moved before it was locked.
        """
        while True:
            directory = self._private_directory(path)
            try:
                fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            self._lock_fds.append(fd)
            deadline = time.monotonic() + process.LOCK_SECONDS
            while not try_lock(fd, process.LOCK_RETRY_SECONDS) and is_named(fd, directory):
                if time.monotonic() >= deadline:
                    raise AlreadyRunning(f"another daemon uses the pool in {directory}")
            if is_named(fd, directory):
                return directory
            os.close(self._lock_fds.pop())

    def _unlock(self) -> None:
        while self._lock_fds:
            os.close(self._lock_fds.pop())

    def _private_directory(self, path: Path) -> Path:
        """Create and return `path` as a private directory; another path if it is foreign."""
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        try:
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                path.chmod(0o700)
                return path
        except FileNotFoundError:  # it was removed since
            return path
        import tempfile  # noqa: PLC0415  # rarely needed, and slow to import

        other = Path(tempfile.mkdtemp(prefix=f"{path.name}-", dir=path.parent))
        log.error(
            "%s belongs to uid %d or is no directory: the pool lies in %s and is removed when the"
            " daemon ends; remove %s to keep pools",
            path,
            status.st_uid,
            other,
            path,
        )
        self.discoverable = False
        return other


def kernel_boot() -> str:
    """Return the boot id of the running kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def is_own_file(status: os.stat_result) -> bool:
    """Return whether it is a regular file of this user."""
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def remove_tree(path: Path) -> None:
    """Remove a file or a directory tree; ignore what this user may not remove."""
    if path.is_dir() and not path.is_symlink():
        import shutil  # noqa: PLC0415  # seldom needed, and slow to import

        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


POOLS_FILE = "kvd.pools"
_MAX_POOLS_FILE_BYTES = 2**16


def last_pool_dir(runtime_dir: Path) -> Path | None:
    """Return the `pool_dir` of the latest daemon, which may still run; None if unknown."""
    return next(iter(_read(runtime_dir / POOLS_FILE)), None)


def remember_pool_dir(runtime_dir: Path, pool_dir: Path) -> None:
    """Record this daemon's `pool_dir`.

    Those of earlier daemons that still hold a pool are logged and kept; the rest are forgotten.

    Args:
        runtime_dir: of this daemon, locked, an absolute path.
        pool_dir: of this daemon.
    """
    file, own_dir = runtime_dir / POOLS_FILE, pool_dir.absolute()
    recorded = _read(file)
    others: list[Path] = []
    for earlier_dir in recorded:
        nbytes = 0
        with contextlib.suppress(OSError):  # another user's directory, or a lost mount
            directory, metadata_dir = pool_directories(earlier_dir, runtime_dir)
            nbytes = allocated_bytes(directory / POOL)
        if nbytes and earlier_dir.resolve() != own_dir.resolve():
            others.append(earlier_dir)
            remove_tree(metadata_dir / RESETS)
            log.warning(
                "pool_dir is %s; the pool that an earlier daemon left in %s still takes %s of"
                " memory; to free it: %s",
                own_dir,
                earlier_dir,
                format_size(nbytes),
                purge_command(runtime_dir, earlier_dir),
            )
    if recorded != [own_dir, *others]:
        _write(file, [own_dir, *others])


def forget_pool_dir(runtime_dir: Path, pool_dir: Path) -> None:
    """Remove this daemon's `pool_dir` from the record: it leaves no pool there."""
    recorded = _read(runtime_dir / POOLS_FILE)
    _write(runtime_dir / POOLS_FILE, [path for path in recorded if path != pool_dir.absolute()])


def _read(file: Path) -> list[Path]:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(file, flags)
        try:
            status = os.fstat(fd)
            # `kvd purge` as root names the user to run it as, even while that user's daemon runs.
            readable = is_own_file(status) or (os.geteuid() == 0 and stat.S_ISREG(status.st_mode))
            content = os.read(fd, _MAX_POOLS_FILE_BYTES) if readable else b""
        finally:
            os.close(fd)
    except OSError:
        return []
    return [Path(os.fsdecode(line)) for line in content.split(b"\n") if line.startswith(b"/")]


def _write(file: Path, pool_dirs: list[Path]) -> None:
    """Replace the list of pool directories atomically; an error is only logged."""
    draft = file.with_name(f"{file.name}.new")
    content = b"".join(os.fsencode(path) + b"\n" for path in pool_dirs)
    try:
        if not pool_dirs:
            file.unlink(missing_ok=True)
            return
        draft.unlink(missing_ok=True)
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as sink:
            sink.write(content)
        draft.replace(file)
    except OSError as error:
        log.warning(
            "%s cannot be written: %s; if pool_dir changes, the next start does not name the pool"
            " that stays in this one",
            file,
            error.strerror,
        )
