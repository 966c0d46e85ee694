"""The files of a daemon's pool, the lock on their directories, and where daemons have left pools.

A pool lies in a directory of its own (mode 0700) that is named after the runtime
directory's path, so that a daemon finds what its predecessor left, and no other's::

    <pool_dir>/kvd-<digest>/pool               the bytes of all chunks, and a trailer
    <pool_dir>/kvd-<digest>/manifest.json      which pool this is
    <pool_dir>/kvd-<digest>/<namespace>.ledger its READY chunks, see kvd.cache.ledger
    <pool_dir>/kvd-<digest>/<namespace>.descriptions what routers need to know of them

On hugetlbfs, where files cannot be written, only the pool lies there; the rest is in a
directory of /dev/shm.

A daemon with another `pool_dir` has a pool of its own and does not touch the one before, whose
memory stays taken. So each daemon writes down its `pool_dir` in `kvd.pools` of the runtime
directory, and names at its start the others that still hold a pool, with the command that frees
them. The file has one path a line, that of the last daemon first. A directory whose pool is gone is
left out at the next start.
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
from kvd.machine.memory import (
    TRAILER_BYTES,
    Filesystem,
    allocated_bytes,
    pool_directory_name,
)
from kvd.machine.process import check_directory, lock_directory
from kvd_proto.text import format_size

log = logging.getLogger("kvd.daemon")

NOTES_DIR = Path("/dev/shm")  # where hugetlbfs takes no files that are written
MANIFEST = "manifest.json"
LEDGER = ".ledger"
DESCRIPTIONS = ".descriptions"
VERSION = 3
_MANIFEST_BYTES = 512  # of the file, whatever is in it
_LONGEST_MANIFEST = 4096  # that is read: a longer file is none
_ASIDE = ".damaged-"


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which pool this is.

    pool: its name, of random letters; the trailer of its file has it, too.
    inode: of its file: a copy of the file, which may have been made while a daemon wrote, is none.
    bytes: of the chunks; the trailer follows them. What the file has beyond that is of a larger
        pool that was not made.
    kernel: the machine's boot, for a filesystem that outlives it may have lost some writes.
    epoch: the daemon that wrote this; the next one has a greater one, of 32 bits.
    """

    version: int
    pool: Annotated[str, msgspec.Meta(pattern=f"^[0-9a-f]{{{POOL_NAME_BYTES}}}$")]
    cpu_bytes: int
    bytes: Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
    inode: int
    kernel: str
    epoch: Annotated[int, msgspec.Meta(ge=0, lt=2**32 - 1)]

    def file_bytes(self, filesystem: Filesystem) -> int:
        """Return the size of the file of this pool."""
        return self.bytes + filesystem.whole_pages(TRAILER_BYTES)

    def objection(self, pool_file: Path, filesystem: Filesystem) -> str:
        """Return why the pool cannot be used; empty where it can."""
        if self.version != VERSION:
            return f"it has version {self.version}, this daemon reads {VERSION}"
        if self.kernel != kernel_boot():
            return "the machine was started anew since"
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
    """The locked directories of one runtime directory's pool, and what lies in them.

    Attributes:
        place: the pool's directory.
        notes: that of the manifest and the ledgers; the same as a rule.
        pool: the pool's file.
        own: they have the names by which the next daemon finds them.

    Raises:
        ConfigError, AlreadyRunning: see `PersistentPool`.
    """

    def __init__(self, pool_dir: Path, runtime_dir: Path) -> None:
        if not pool_dir.is_dir():
            what = "this is not a directory" if pool_dir.exists() else "no such directory"
            raise ConfigError(f"pool_dir = {pool_dir}: {what}; use a tmpfs such as /dev/shm")
        self.own = True
        place = notes = pool_dir / pool_directory_name(runtime_dir)
        filesystem = Filesystem.of(pool_dir)
        self._filesystem = filesystem
        if not filesystem.writable:
            # No other pool's: nothing of a pool that lies in NOTES_DIR is taken for this one's.
            notes = NOTES_DIR / pool_directory_name(runtime_dir, pool_dir.resolve())
        check_directory("pool_dir", pool_dir)
        if notes.parent != pool_dir:
            check_directory("the directory of the pool's manifest", notes.parent)
        for area in {place, notes}:
            for litter in area.parent.glob(f"{area.name}-*"):
                remove_tree(litter)
        try:
            self.notes = self._own_directory(notes)
            self.place = self.notes if notes == place else self._own_directory(place)
        except OSError as error:
            raise ConfigError(
                f"pool_dir = {pool_dir}: {error.strerror}; choose a directory that this user may"
                " write, with --pool-dir"
            ) from error
        self._lock_fd = os.open(self.notes, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            lock_directory(self._lock_fd)
        except BlockingIOError:
            os.close(self._lock_fd)
            raise AlreadyRunning(f"another daemon uses the pool in {self.notes}") from None
        self.pool = self.place / "pool"
        self._manifest = self.notes / MANIFEST

    def read_manifest(self) -> Manifest | None:
        """Return which pool is there; None where none can be used, and the log says why."""
        try:
            with self._manifest.open("rb") as file:
                content = file.read(_LONGEST_MANIFEST + 1)
            if len(content) > _LONGEST_MANIFEST:
                self.set_aside(self._manifest, f"it has more than {_LONGEST_MANIFEST} bytes")
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
            log.warning("what is kept in %s is not used: %s", self.notes, reason)
            return None
        return manifest

    def write_manifest(self, manifest: Manifest) -> None:
        """Write which pool is there, over what was there: that takes no room, of which none may be.

        One write within a page is done or not done, whenever this process is killed.

        Raises:
            PoolError: there is none, and no room for one.
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
        """Return the size of the file of this pool."""
        return manifest.file_bytes(self._filesystem)

    def ledgers(self) -> list[Path]:
        """Return the ledgers, or what stands in their places."""
        return sorted(self.notes.glob(f"*{LEDGER}"))

    def of_namespaces(self, suffix: str = "") -> list[Path]:
        """Return the ledgers and files of descriptions whose names have this at their end."""
        kinds = (LEDGER, DESCRIPTIONS)
        return sorted(file for kind in kinds for file in self.notes.glob(f"*{kind}{suffix}"))

    def set_aside(self, file: Path, reason: str) -> None:
        """Rename what is damaged, so that it can be looked at; only the latest stays."""
        for older in self.notes.glob(f"*{_ASIDE}*"):
            remove_tree(older)
        aside = file.with_name(f"{file.name}{_ASIDE}{int(time.time())}")
        file.rename(aside)
        log.error("%s: %s; it is set aside as %s, its chunks are lost", file, reason, aside.name)

    def remove(self) -> None:
        """Remove the directories with all that is in them."""
        for place in {self.place, self.notes}:
            remove_tree(place)

    def close(self) -> None:
        """Unlock the directories; remove them where they are empty."""
        for place in {self.place, self.notes}:
            with contextlib.suppress(OSError):
                place.rmdir()
        os.close(self._lock_fd)

    def _own_directory(self, path: Path) -> Path:
        """Return `path` as a directory of this user alone; another one where it is not."""
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
            path.chmod(0o700)
            return path
        import tempfile  # noqa: PLC0415  # seldom needed, and slow to import

        other = Path(tempfile.mkdtemp(prefix=f"{path.name}-", dir=path.parent))
        log.error(
            "%s belongs to uid %d or is no directory: the pool lies in %s and is not kept when the"
            " daemon ends; remove the former",
            path,
            status.st_uid,
            other,
        )
        self.own = False
        return other


def kernel_boot() -> str:
    """Return the id of the machine's boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def is_own_file(status: os.stat_result) -> bool:
    """Return whether this is a plain file of this user's."""
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def remove_tree(path: Path) -> None:
    """Remove a file or a directory, where this user may."""
    if path.is_dir() and not path.is_symlink():
        import shutil  # noqa: PLC0415  # seldom needed, and slow to import

        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


POOLS_FILE = "kvd.pools"
_POOLS_FILE_BYTES = 2**16  # that are read


def purge_command(runtime_dir: Path, pool_dir: Path) -> str:
    """Return the command that frees the pool of a runtime directory in `pool_dir`."""
    return shlex.join(
        ["kvd", "purge", "--runtime-dir", str(runtime_dir), "--pool-dir", str(pool_dir)]
    )


def last_pool_dir(runtime_dir: Path) -> Path | None:
    """Return the `pool_dir` of the last daemon, which may be running; None: it is not known."""
    return next(iter(_read(runtime_dir / POOLS_FILE)), None)


def remember_pool_dir(runtime_dir: Path, pool_dir: Path) -> None:
    """Write down the `pool_dir` of this daemon, and name other ones that still hold a pool.

    Args:
        runtime_dir: this daemon's, locked, as an absolute path.
        pool_dir: this daemon's.
    """
    file, own = runtime_dir / POOLS_FILE, pool_dir.absolute()
    known, others = _read(file), list[Path]()
    for other in known:
        held = 0
        with contextlib.suppress(OSError):  # a directory of another user, or of a lost mount
            held = allocated_bytes(other / pool_directory_name(runtime_dir) / "pool")
        if held and other.resolve() != own.resolve():
            others.append(other)
            log.warning(
                "pool_dir is %s; the pool that a daemon before left in %s still takes %s of memory;"
                " to free it: %s",
                own,
                other,
                format_size(held),
                purge_command(runtime_dir, other),
            )
    if known != [own, *others]:
        _write(file, [own, *others])


def forget_pool_dir(runtime_dir: Path, pool_dir: Path) -> None:
    """Leave out the `pool_dir` of this daemon, which leaves no pool there."""
    known = _read(runtime_dir / POOLS_FILE)
    _write(runtime_dir / POOLS_FILE, [path for path in known if path != pool_dir.absolute()])


def _read(file: Path) -> list[Path]:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(file, flags)
        try:
            status = os.fstat(fd)
            # To root `kvd purge` says as which user it must run, also while that one's daemon runs.
            readable = is_own_file(status) or (os.geteuid() == 0 and stat.S_ISREG(status.st_mode))
            content = os.read(fd, _POOLS_FILE_BYTES) if readable else b""
        finally:
            os.close(fd)
    except OSError:
        return []
    return [Path(os.fsdecode(line)) for line in content.split(b"\n") if line.startswith(b"/")]


def _write(file: Path, pool_dirs: list[Path]) -> None:
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
            "%s cannot be written: %s; when pool_dir changes, the start does not name the pool that"
            " is left",
            file,
            error.strerror,
        )


_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class ResetFile(ResetTable):
    """The table of resets, kept in a file; the first reset creates the file.

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
                "%s cannot be believed (%s): chunks of before, in memory and in tiers, are not"
                " used, since some of them may have been dropped by a reset",
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
                raise LedgerDamaged("it is no file of this user's")
            return os.read(fd, RESET_BYTES + 1)
        finally:
            os.close(fd)

    def _save(self) -> str:
        """Write the page; return why that failed, with the remedy; empty if it did not."""
        try:
            if self._is_whole():  # overwriting needs no free space
                self._write(self._path)
            else:
                self._replace()
        except OSError as error:
            return self._lack(f"{self._path} cannot be written: {error.strerror}")
        if self._failed:
            self._failed = ""
            log.info("%s can be written again", self._path)
        return ""

    def _is_whole(self) -> bool:
        """Whether the file exists, is this user's and has the full size."""
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
                raise OSError(0, "it was written in part")
        finally:
            os.close(fd)

    def _lack(self, why: str) -> str:
        """Log the reason unless it was logged last time; return the text for the reply."""
        if why != self._failed:
            self._failed = why
            log.error(
                "%s; until it can be, a reset is answered as failed and tried again, since tiers"
                " might not know of it after the next start: make room there, or let this user"
                " write there",
                why,
            )
        return (
            f"{why}; the chunks are dropped, but a tier might not know of it after the daemon's"
            " next start: make room there, and try again"
        )
