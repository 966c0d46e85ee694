"""What a daemon leaves to the next one: the pool's file, the ledgers, a manifest.

They lie in a directory of their own (mode 0700) that the runtime directory's path
names, so that a daemon finds what its predecessor left, and nobody else's::

    <pool_dir>/kvd-<digest>/pool               the bytes of all chunks
    <pool_dir>/kvd-<digest>/manifest.json      which pool this is
    <pool_dir>/kvd-<digest>/<namespace>.ledger its READY chunks, see kvd.state.ledger

On hugetlbfs, where files cannot be written, only the pool lies there; the rest is in
/dev/shm. What cannot be believed is set aside under another name, the latest of it only;
a pool never is, since two do not fit into memory: its file is used again, without its
chunks, where the size is right, and is removed where it is not.
"""

import contextlib
import fcntl
import hashlib
import logging
import mmap
import os
import shutil
import stat
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvd.broker.filesystem import Filesystem
from kvd.errors import AlreadyRunning, ConfigError, LedgerDamaged, PoolError, Refused
from kvd.settings import Settings
from kvd.state.ledger import MAGIC
from kvd_proto.messages import ErrorCode
from kvd_proto.sizes import format_size

log = logging.getLogger("kvd.broker")

_VERSION = 1
MANIFEST = "manifest.json"
POOL = "pool"
NOTES_DIR = Path("/dev/shm")  # where hugetlbfs takes no files that are written
_LEDGER = ".ledger"
_ASIDE = ".damaged-"
_EPOCH_SHIFT = 32
_LAST_EPOCH = 2**32 - 1
_LAST_CLOCK = 2**32 - 2**24


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which pool this is.

    inode, bytes: of the pool's file, so that no other file is taken for it.
    kernel: the machine's boot, for a filesystem that outlives it may have lost some writes.
    epoch: the daemon that wrote this; the next one has a greater one.
    """

    version: int
    pool: str
    cpu_bytes: int
    bytes: int
    inode: int
    kernel: str
    epoch: int


@dataclass(slots=True)
class Found:
    """What is there to go on with: ledgers by namespace in hex; `pool` names the pool."""

    pool: str
    epoch: int
    ledgers: dict[str, mmap.mmap] = field(default_factory=dict)

    @property
    def generation_base(self) -> int:
        """Generations of this daemon are greater than this, and than those of all before."""
        return self.epoch << _EPOCH_SHIFT


class Keep:
    """The kept files of one runtime directory; only its daemon may use this.

    Args:
        pool_dir: where the pool goes.
        runtime_dir: the daemon's, as an absolute path.
        keeps: leave it all to the next daemon; else it goes with this one, and nothing that is
            there is used.
        cold: begin without what is there.

    Raises:
        ConfigError: pool_dir is none, or cannot be written.
        AlreadyRunning: another daemon uses the pool, whatever became of the runtime directory.
    """

    def __init__(
        self, pool_dir: Path, runtime_dir: Path, *, keeps: bool, cold: bool = False
    ) -> None:
        if not pool_dir.is_dir():
            raise ConfigError(
                f"pool_dir = {pool_dir}: no such directory; use a tmpfs such as /dev/shm"
            )
        self.keeps = keeps
        self._cold = cold
        name = area_name(runtime_dir)
        self._filesystem = Filesystem.of(pool_dir)
        notes_dir = pool_dir if self._filesystem.writable else NOTES_DIR
        for litter in {*pool_dir.glob(f"{name}-*"), *notes_dir.glob(f"{name}-*")}:
            _remove_tree(litter)
        try:
            self._notes = self._own_directory(notes_dir / name)
            self._place = (
                self._notes if notes_dir == pool_dir else self._own_directory(pool_dir / name)
            )
        except OSError as error:
            raise ConfigError(
                f"pool_dir = {pool_dir}: {error.strerror}; choose a directory that this user may"
                " write, with --pool-dir"
            ) from error
        self._lock_fd = os.open(self._notes, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock_fd)
            raise AlreadyRunning(f"another daemon uses the pool in {self._notes}") from None
        self.pool_file = self._place / POOL
        self._manifest_file = self._notes / MANIFEST

    @classmethod
    def of(cls, settings: Settings, runtime_dir: Path, *, cold: bool = False) -> "Keep":
        """As the settings say; see above."""
        keeps = settings.keep_pool == "yes"
        return cls(Path(settings.pool_dir), runtime_dir, keeps=keeps, cold=cold)

    # ---------------------------------------------------------------- start

    def kept_bytes(self) -> int | None:
        """`cpu_bytes` of the pool that is there and can be used again; None without one."""
        manifest = self._believable()
        return manifest.cpu_bytes if manifest is not None else None

    def held_bytes(self) -> int:
        """Memory that the pool's file takes now, which this daemon uses again or gives back."""
        try:
            return self.pool_file.lstat().st_blocks * 512
        except OSError:
            return 0

    def open(self, cpu_bytes: int) -> Found:
        """Find what a pool of `cpu_bytes` can go on with; what it cannot is cleared away."""
        manifest = self._believable()
        if manifest is not None and manifest.cpu_bytes != cpu_bytes:
            log.warning(
                "the kept pool has %s, %s are wanted: it is given back, and the cache starts empty",
                format_size(manifest.cpu_bytes),
                format_size(cpu_bytes),
            )
            manifest = None
        # The clock makes epochs grow even where no manifest is left to tell the last one. It may
        # be wrong by any number of years: they must fit 32 bits, with room for more restarts.
        now = max(0, min(int(time.time()), _LAST_CLOCK))
        if manifest is None:
            self._forget_chunks()
            self._check_pool_file(cpu_bytes)
            return Found(os.urandom(16).hex(), now)
        found = Found(manifest.pool, max(now, manifest.epoch + 1))
        for file in sorted(self._notes.glob(f"*{_LEDGER}")):
            self._open_ledger(file, found)
        return found

    def commit(self, found: Found, cpu_bytes: int, pool_fd: int) -> None:
        """From here on the next daemon may go on with this pool.

        Call it when its file is there and before any chunk is kept.

        Raises:
            PoolError: there is no room for the manifest.
        """
        status = os.fstat(pool_fd)
        self._write(
            Manifest(
                version=_VERSION,
                pool=found.pool,
                cpu_bytes=cpu_bytes,
                bytes=status.st_size,
                inode=status.st_ino,
                kernel=_kernel_boot(),
                epoch=found.epoch,
            )
        )

    def make_ledger(self, name: str, nbytes: int) -> mmap.mmap:
        """Zeroed memory of `nbytes` for the ledger of a namespace, by its id in hex.

        All of it is allocated: a page that a full filesystem has not would be a SIGBUS later.

        Raises:
            Refused: NOT_READY where there is no room or descriptor for it now.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(self._notes / f"{name}{_LEDGER}", flags, 0o600)
            try:
                os.posix_fallocate(fd, 0, nbytes)
                return mmap.mmap(fd, nbytes)
            finally:
                os.close(fd)
        except OSError as error:
            raise Refused(
                ErrorCode.NOT_READY,
                f"no ledger of {format_size(nbytes)} can be made in {self._notes} now:"
                f" {error.strerror}; make room there, it is tried again",
            ) from error

    def drop_ledger(self, name: str) -> None:
        """The namespace is closed."""
        (self._notes / f"{name}{_LEDGER}").unlink(missing_ok=True)

    def set_aside(self, name: str, reason: LedgerDamaged | str) -> None:
        """The ledger of a namespace cannot be believed: keep it under another name, to look at."""
        self._set_aside(self._notes / f"{name}{_LEDGER}", str(reason))

    # ------------------------------------------------------------------ end

    def close(self) -> None:
        """Leave everything to the next daemon, or remove it."""
        if not self.keeps:
            self.remove()
        for place in {self._place, self._notes}:
            with contextlib.suppress(OSError):  # only where nothing was ever put there
                place.rmdir()
        os.close(self._lock_fd)

    def remove(self) -> int:
        """Give everything back; how many bytes that were."""
        held = self.held_bytes()
        for place in {self._place, self._notes}:
            _remove_tree(place)
        return held

    # -------------------------------------------------------------- helpers

    def _own_directory(self, path: Path) -> Path:
        """A directory that only this user can enter; another one where `path` is not."""
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
            path.chmod(0o700)
            return path
        other = Path(tempfile.mkdtemp(prefix=f"{path.name}-", dir=path.parent))
        log.error(
            "%s belongs to uid %d or is no directory: the pool lies in %s and is not kept when the"
            " daemon ends; remove the former",
            path,
            status.st_uid,
            other,
        )
        self.keeps = False
        return other

    def _believable(self) -> Manifest | None:
        """The manifest, where the pool it speaks of is there and may be used."""
        if self._cold or not self.keeps:
            return None
        try:
            manifest = msgspec.json.decode(self._manifest_file.read_bytes(), type=Manifest)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            self._set_aside(self._manifest_file, f"it cannot be read: {error}")
            return None
        reason = objection(manifest, self.pool_file)
        if reason:
            log.warning("what is kept in %s is not used: %s", self._notes, reason)
            self._manifest_file.unlink()
            return None
        return manifest

    def _check_pool_file(self, cpu_bytes: int) -> None:
        """Without chunks the file's memory is worth keeping, if it is ours and of that size."""
        try:
            status = self.pool_file.lstat()
        except OSError:
            return
        if (
            not stat.S_ISREG(status.st_mode)
            or status.st_uid != os.geteuid()
            or status.st_size != self._filesystem.whole_pages(cpu_bytes)
        ):
            _remove_tree(self.pool_file)

    def _forget_chunks(self) -> None:
        for file in [*self._notes.glob(f"*{_LEDGER}"), self._manifest_file]:
            _remove_tree(file)

    def _open_ledger(self, file: Path, found: Found) -> None:
        """Map a ledger; one whose making was cut short by a kill never held anything."""
        try:
            fd = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            self._set_aside(file, f"it cannot be opened: {error.strerror}")
            return
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                self._set_aside(file, "it is no file of this user's")
            elif os.pread(fd, len(MAGIC), 0).strip(b"\0") == b"":
                file.unlink()
            else:
                found.ledgers[file.name.removesuffix(_LEDGER)] = mmap.mmap(fd, status.st_size)
        finally:
            os.close(fd)

    def _set_aside(self, file: Path, reason: str) -> None:
        for older in self._notes.glob(f"*{_ASIDE}*"):
            _remove_tree(older)
        aside = file.with_name(f"{file.name}{_ASIDE}{int(time.time())}")
        file.rename(aside)
        log.error("%s: %s; it is set aside as %s, its chunks are lost", file, reason, aside.name)

    def _write(self, manifest: Manifest) -> None:
        """All of it or nothing, whenever this process is killed."""
        draft = self._manifest_file.with_suffix(".new")
        try:
            draft.touch(mode=0o600)
            draft.write_bytes(msgspec.json.encode(manifest))
            draft.rename(self._manifest_file)
        except OSError as error:
            raise PoolError(
                f"{draft} cannot be written: {error.strerror}; make room there, or choose another"
                " --pool-dir"
            ) from error

    def __repr__(self) -> str:
        return f"<Keep {self._place}{'' if self.keeps else ', not kept'}>"


def area_name(runtime_dir: Path) -> str:
    """What the directory of this runtime directory's pool is called."""
    digest = hashlib.blake2b(os.fsencode(runtime_dir), digest_size=6).hexdigest()
    return f"kvd-{digest}"


def objection(manifest: Manifest, pool_file: Path) -> str:
    """Why the pool that a manifest speaks of cannot be used; empty where it can."""
    if manifest.version != _VERSION:
        return f"it has version {manifest.version}, this daemon reads {_VERSION}"
    if not 0 <= manifest.epoch < _LAST_EPOCH:
        return f"its epoch {manifest.epoch} is the last one, or none"
    if manifest.kernel != _kernel_boot():
        return "the machine was started anew since"
    try:
        status = pool_file.lstat()
    except OSError as error:
        return f"its pool cannot be found: {error.strerror}"
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        return "its pool is no file of this user's"
    if (status.st_ino, status.st_size) != (manifest.inode, manifest.bytes):
        return (
            f"its pool is another file: inode {status.st_ino} of {status.st_size} bytes,"
            f" not {manifest.inode} of {manifest.bytes}"
        )
    return ""


def _kernel_boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _remove_tree(path: Path) -> None:
    """Remove a file or a directory, if it is this user's to remove."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
