"""The directories of a daemon's pool, and the lock on them.

A pool lies in a directory of its own (mode 0700) that is named after the runtime
directory's path, so that a daemon finds what its predecessor left, and no other's::

    <pool_dir>/kvd-<digest>/pool               the bytes of all chunks
    <pool_dir>/kvd-<digest>/manifest.json      which pool this is
    <pool_dir>/kvd-<digest>/<namespace>.ledger its READY chunks, see kvd.cache.ledger

On hugetlbfs, where files cannot be written, only the pool lies there; the rest is in a
directory of /dev/shm.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

from kvd.errors import AlreadyRunning, ConfigError
from kvd.machine.filesystem import Filesystem
from kvd.machine.places import check_place

log = logging.getLogger("kvd.daemon")

NOTES_DIR = Path("/dev/shm")  # where hugetlbfs takes no files that are written


class PoolArea:
    """The locked directories of one runtime directory's pool.

    Args:
        pool_dir: where the pool goes.
        runtime_dir: the daemon's, as an absolute path.

    Attributes:
        place: the pool's directory.
        notes: that of the manifest and the ledgers; the same as a rule.
        own: they have the names by which the next daemon finds them.

    Raises:
        ConfigError: pool_dir is none, cannot be written, or can be written by every user.
        AlreadyRunning: another daemon uses the pool, whatever became of the runtime directory.
    """

    def __init__(self, pool_dir: Path, runtime_dir: Path) -> None:
        if not pool_dir.is_dir():
            raise ConfigError(
                f"pool_dir = {pool_dir}: no such directory; use a tmpfs such as /dev/shm"
            )
        self.own = True
        name = area_name(runtime_dir)
        writable = Filesystem.of(pool_dir).writable
        notes = _notes_area(runtime_dir, pool_dir, writable=writable)
        check_place("pool_dir", pool_dir)
        if notes.parent != pool_dir:
            check_place("the directory of the pool's manifest", notes.parent)
        for area in {pool_dir / name, notes}:
            for litter in area.parent.glob(f"{area.name}-*"):
                remove_tree(litter)
        try:
            self.notes = self._own_directory(notes)
            self.place = (
                self.notes if notes == pool_dir / name else self._own_directory(pool_dir / name)
            )
        except OSError as error:
            raise ConfigError(
                f"pool_dir = {pool_dir}: {error.strerror}; choose a directory that this user may"
                " write, with --pool-dir"
            ) from error
        self._lock_fd = os.open(self.notes, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock_fd)
            raise AlreadyRunning(f"another daemon uses the pool in {self.notes}") from None

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

    def __repr__(self) -> str:
        return f"<PoolArea {self.place}>"


def area_name(*paths: Path) -> str:
    """Return the name of the directory that belongs to a runtime directory, or to several paths."""
    digest = hashlib.blake2b(b"\0".join(map(os.fsencode, paths)), digest_size=6).hexdigest()
    return f"kvd-{digest}"


def _notes_area(runtime_dir: Path, pool_dir: Path, *, writable: bool) -> Path:
    """Return where manifest and ledgers lie: beside the pool, or in a directory for this pool_dir.

    The latter is no other pool's, so that nothing of a pool in NOTES_DIR is taken for its own.
    """
    if writable:
        return pool_dir / area_name(runtime_dir)
    return NOTES_DIR / area_name(runtime_dir, pool_dir.absolute())


def remove_tree(path: Path) -> None:
    """Remove a file or a directory, where this user may."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
