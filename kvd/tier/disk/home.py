"""The directory of a disk tier: whose it is, who uses it now, and how much room is left.

It holds a file ``kvd-disk``, which says what it is, the namespaces and the slabs. One process at
a time: an flock on the directory, which the kernel drops with the process.

A directory without that file becomes a tier's only where it is empty. Files of others that come
into it later are left alone.
"""

import contextlib
import errno
import fcntl
import logging
import os
import re
import stat
from pathlib import Path

from kvd.errors import TierError
from kvd.machine.files import danger
from kvd.tier.disk import namespaces

MARK = "kvd-disk"
_TEXT = b"kvd disk tier, version 1\n"
_MARK_BYTES = 4096  # a block
_MODE = 0o700
_SLAB = re.compile(r"(\d{6})(?:\.slab|\.index|\.slab\.new)")
_ASIDE = ".damaged"
_OTHERS = {MARK, namespaces.NAME, f"{namespaces.NAME}.new"}
_OF_THE_FILE_SYSTEM = {"lost+found"}  # of ext4, at a mount
_log = logging.getLogger(__name__)


class Home:
    """The directory, locked.

    Raises:
        TierError: it cannot be used; says why and what to do.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with contextlib.ExitStack() as undo:
            try:
                self.fd = _open(path)
                undo.callback(os.close, self.fd)
                self._check_owner()
                self._lock()
                self._mark()
            except OSError as error:
                raise TierError(f"disk:{path}: {_explained(error)}") from error
            undo.pop_all()

    def _check_owner(self) -> None:
        found = os.fstat(self.fd)
        if found.st_uid != os.geteuid():
            raise TierError(
                f"disk:{self.path} belongs to user {found.st_uid}, kvd runs as {os.geteuid()};"
                f" give it to that user (chown {os.geteuid()} {self.path}) or choose another one"
            )

    def _lock(self) -> None:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TierError(
                f"disk:{self.path} is in use by another daemon, or by a process of a tier that"
                f" has not ended yet (fuser {self.path}); give each daemon a directory of its own"
            ) from None

    def _mark(self) -> None:
        """Mark the directory as kvd's where it is empty, else check that it is marked.

        Raises:
            TierError: it holds files and no mark, or the mark of another version.
        """
        names = self._names() - _OF_THE_FILE_SYSTEM
        flags = os.O_CLOEXEC | os.O_NOFOLLOW
        if MARK in names:
            fd = os.open(MARK, os.O_RDONLY | flags, dir_fd=self.fd)
            try:
                text = os.read(fd, 256)
            finally:
                os.close(fd)
            # A process that ended between making the file and writing it has left nothing else.
            if text != _TEXT and (text or len(names) > 1):
                raise TierError(
                    f"disk:{self.path}: {MARK} says {text[:80]!r}, this kvd needs"
                    f" {_TEXT.decode().strip()!r}; use the kvd that made it, or another directory"
                )
            foreign = sorted(name for name in names if not _is_kvds(name))
            if foreign:
                _log.warning(
                    "disk:%s: %s: not kvd's (%d in all), so left alone, and not counted in size",
                    *(self.path, ", ".join(foreign[:3]), len(foreign)),
                )
        elif names:
            some = ", ".join(sorted(names)[:3])
            raise TierError(
                f"disk:{self.path} holds what no disk tier has made ({some}); give an empty or a"
                " new directory"
            )
        os.fchmod(self.fd, _MODE)
        fd = os.open(MARK, os.O_WRONLY | os.O_CREAT | flags, 0o600, dir_fd=self.fd)
        try:
            os.write(fd, _TEXT)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.fsync(self.fd)

    def _names(self) -> set[str]:
        return set(os.listdir(self.fd))  # noqa: PTH208  # of a descriptor

    def slabs(self) -> list[int]:
        """Numbers of the slabs that have left any file here, ascending."""
        found = (_SLAB.fullmatch(name) for name in self._names())
        return sorted({int(match[1]) for match in found if match})

    def has(self, name: str) -> bool:
        """Whether there is anything of this name."""
        try:
            os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def bytes_beside_slabs(self) -> int:
        """Most bytes of kvd's other files: the mark, the table of namespaces, damaged files."""
        names = [name for name in self._names() if name.endswith(_ASIDE)]
        aside = (os.stat(name, dir_fd=self.fd, follow_symlinks=False).st_blocks for name in names)
        return _MARK_BYTES + namespaces.MOST_BYTES + 512 * sum(aside)

    def filesystem_bytes(self) -> tuple[int, int]:
        """Bytes of the file system, and how many of them are free for this user.

        Raises:
            TierError: the file system does not say.
        """
        try:
            found = os.fstatvfs(self.fd)
        except OSError as error:
            raise TierError(f"disk:{self.path}: statvfs: {error.strerror}") from error
        return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize

    def close(self) -> None:
        """Let another process use it."""
        os.close(self.fd)

    def __repr__(self) -> str:
        return f"<Home {self.path}>"


def _is_kvds(name: str) -> bool:
    return bool(_SLAB.fullmatch(name)) or name in _OTHERS or name.endswith(_ASIDE)


def _open(path: Path) -> int:
    """Open the directory; made where only its last part is missing, so no mount is written past."""
    parent = path.parent
    problem = danger(parent, parent.stat().st_mode)
    if problem:
        raise TierError(f"disk:{path}: its directory {parent}: {problem}")
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=_MODE)
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise TierError(f"disk:{path} is a symbolic link; give its target, {path.resolve()}")
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)


def _explained(error: OSError) -> str:
    text = f"{error.filename or ''}: {error.strerror}".removeprefix(": ")
    if error.errno == errno.EROFS:
        return f"{text}; mount it writable, or choose another directory"
    if error.errno == errno.ENOENT:
        return f"{text}; make its parent directory, or mount what belongs there"
    if error.errno == errno.ENOTDIR:
        return f"{text}; give a directory"
    return text
