"""State files that a daemon leaves to the next one: the pool's directory, known pools, resets.

The pool's directory (mode 0700) is named after the runtime directory's path, so a daemon finds
exactly its predecessor's files::

    <pool_dir>/kvd-<digest>/pool               the bytes of all chunks, and a trailer
    <pool_dir>/kvd-<digest>/manifest.json      identifies the pool
    <pool_dir>/kvd-<digest>/<namespace>.ledger its READY chunks, see kvd.cache.ledger
    <pool_dir>/kvd-<digest>/<namespace>.descriptions   their descriptions for routers

On hugetlbfs, whose files cannot be written, only the pool lies in pool_dir; the rest lies in a
directory of /dev/shm.

`kvd.pools` in the runtime directory lists the `pool_dir` of each daemon whose pool may still exist,
one path a line, the latest first: a daemon with another `pool_dir` does not touch the earlier pool,
whose memory stays in use. At its start a daemon logs the other pools with the command that frees
them, and drops paths without a pool.

`kvd.resets` in the runtime directory is the table of resets (`kvd.cache.recovery`). A tier may be
down or hung during a reset, and the daemon may be killed before the tier has recorded it. So the
daemon writes a reset to this file before it replies. The file does not depend on the pool: it
survives another pool, ``--cold`` and `kvd purge`. On tmpfs a write never waits for a disk.
"""

import contextlib
import logging
import os
import shlex
import stat
import time
from pathlib import Path
from typing import Annotated

import msgspec

from kvd.cache.recovery import (
    POOL_NAME_BYTES,
    RESET_BYTES,
    TRAILER_HEAD_BYTES,
    ResetTable,
    pack_head,
)
from kvd.errors import AlreadyRunning, ConfigError, LedgerDamaged, PoolError
from kvd.machine.directories import (
    MANIFEST,
    check_directory,
    check_pool_dir,
    metadata_directory,
)
from kvd.machine.memory import (
    TRAILER_BYTES,
    Filesystem,
    allocated_bytes,
    pool_directory_name,
)
from kvd.machine.process import lock_directory
from kvd_proto.text import format_size

log = logging.getLogger("kvd.daemon")

LEDGER = ".ledger"
DESCRIPTIONS = ".descriptions"
MANIFEST_VERSION = 3
_MANIFEST_BYTES = 512  # fixed size, padded with spaces
_MAX_MANIFEST_BYTES = 4096  # a longer file is rejected
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
    """

    version: int
    pool: Annotated[str, msgspec.Meta(pattern=f"^[0-9a-f]{{{POOL_NAME_BYTES}}}$")]
    cpu_bytes: int
    bytes: Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
    inode: int
    kernel: str
    epoch: Annotated[int, msgspec.Meta(ge=0, lt=2**32 - 1)]

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
        discoverable: the directories have the names under which the next daemon looks for them.

    Raises:
        ConfigError, AlreadyRunning: see `PersistentPool`.
    """

    def __init__(self, pool_dir: Path, runtime_dir: Path) -> None:
        check_pool_dir(pool_dir)
        self.discoverable = True
        own_dir = pool_dir / pool_directory_name(runtime_dir)
        filesystem = Filesystem.of(pool_dir)
        self._filesystem = filesystem
        metadata_dir = metadata_directory(filesystem, runtime_dir)
        if metadata_dir.parent != pool_dir:
            check_directory("the directory of the pool's manifest", metadata_dir.parent)
        for area in {own_dir, metadata_dir}:
            for leftover in area.parent.glob(f"{area.name}-*"):
                remove_tree(leftover)
        try:
            self.metadata_dir = self._private_directory(metadata_dir)
            self.directory = (
                self.metadata_dir if metadata_dir == own_dir else self._private_directory(own_dir)
            )
        except OSError as error:
            raise ConfigError(
                f"pool_dir = {pool_dir}: {error.strerror}; choose a directory that this user may"
                " write, with --pool-dir"
            ) from error
        self._lock_fd = os.open(self.metadata_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            lock_directory(self._lock_fd)
        except BlockingIOError:
            os.close(self._lock_fd)
            raise AlreadyRunning(f"another daemon uses the pool in {self.metadata_dir}") from None
        self.pool = self.directory / "pool"
        self._manifest = self.metadata_dir / MANIFEST

    def read_manifest(self) -> Manifest | None:
        """Return the previous manifest; None, and log why, if its pool cannot be reused."""
        try:
            with self._manifest.open("rb") as file:
                content = file.read(_MAX_MANIFEST_BYTES + 1)
            if len(content) > _MAX_MANIFEST_BYTES:
                self.set_aside(self._manifest, f"it has more than {_MAX_MANIFEST_BYTES} bytes")
                return None
            manifest = msgspec.json.decode(content, type=Manifest) if content else None
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
        """Remove the directories if they are empty, and unlock them."""
        for directory in {self.directory, self.metadata_dir}:
            with contextlib.suppress(OSError):
                directory.rmdir()
        os.close(self._lock_fd)

    def _private_directory(self, path: Path) -> Path:
        """Create and return `path` as a private directory; another path if it is foreign."""
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
            path.chmod(0o700)
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


def purge_command(runtime_dir: Path, pool_dir: Path) -> str:
    """Return the shell command that frees the runtime directory's pool in `pool_dir`."""
    return shlex.join(
        ["kvd", "purge", "--runtime-dir", str(runtime_dir), "--pool-dir", str(pool_dir)]
    )


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
            nbytes = allocated_bytes(earlier_dir / pool_directory_name(runtime_dir) / "pool")
        if nbytes and earlier_dir.resolve() != own_dir.resolve():
            others.append(earlier_dir)
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


_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class ResetFile(ResetTable):
    """The table of resets, stored in a file; the first reset creates the file.

    A save overwrites the page by one write, which is atomic. A damaged or foreign file is replaced
    by a table with a new base, so no earlier chunk is used. If the file cannot be written, the
    reset is answered as failed, and the client retries it.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._failed = ""  # why the last write failed
        try:
            self.load(self._read())
        except FileNotFoundError:
            return
        except (OSError, LedgerDamaged) as error:
            self.draw_base()
            log.error(  # noqa: TRY400  # the message names the reason
                "%s is not valid (%s): earlier chunks, in memory and in tiers, are not used, since"
                " a reset may have dropped some of them",
                path,
                error,
            )
            self._save()

    def draw(self, namespace: str) -> str:
        """Write the new salt to the file before returning; see `ResetTable.draw`."""
        super().draw(namespace)
        return self._save()

    def _read(self) -> bytes:
        fd = os.open(self._path, os.O_RDONLY | _FLAGS)
        try:
            if not is_own_file(os.fstat(fd)):
                raise LedgerDamaged("it is not a file of this user")
            return os.read(fd, RESET_BYTES + 1)
        finally:
            os.close(fd)

    def _save(self) -> str:
        """Write the page; return why that failed and the remedy, or an empty string."""
        try:
            if self._is_complete():  # overwriting needs no free space
                self._write(self._path)
            else:
                self._replace()
        except OSError as error:
            return self._report_failure(f"{self._path} cannot be written: {error.strerror}")
        if self._failed:
            self._failed = ""
            log.info("%s can be written again", self._path)
        return ""

    def _is_complete(self) -> bool:
        """Whether the file exists, belongs to this user and has the full size."""
        try:
            status = self._path.lstat()
        except FileNotFoundError:
            return False
        return is_own_file(status) and status.st_size == RESET_BYTES

    def _replace(self) -> None:
        """Replace the file by a rename, so that no partial file is ever read."""
        draft = self._path.with_name(f"{self._path.name}.new")
        remove_tree(draft)
        self._write(draft, os.O_CREAT | os.O_EXCL)
        if self._path.is_dir() and not self._path.is_symlink():
            remove_tree(self._path)
        draft.rename(self._path)

    def _write(self, path: Path, flags: int = 0) -> None:
        fd = os.open(path, os.O_WRONLY | _FLAGS | flags, 0o600)
        try:
            if os.pwrite(fd, self.pack(), 0) != RESET_BYTES:
                raise OSError(0, "only a part was written")
        finally:
            os.close(fd)

    def _report_failure(self, reason: str) -> str:
        """Log the reason unless it was logged last time; return the text for the reply."""
        if reason != self._failed:
            self._failed = reason
            log.error(
                "%s; until then a reset is answered as failed and retried, since tiers might miss"
                " it after the next start: free space there, or let this user write there",
                reason,
            )
        return (
            f"{reason}; the chunks are dropped, but a tier might miss the reset after the daemon's"
            " next start: free space there, and retry"
        )
