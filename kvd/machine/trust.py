"""Which directories and files the daemon may trust, which may run as root."""

import fcntl
import os
import stat
from pathlib import Path

from kvd.errors import ConfigError, ImportFailed

HOW = "memfd_create(MFD_ALLOW_SEALING), ftruncate, then fcntl(F_ADD_SEALS, F_SEAL_SHRINK)"


def danger(path: Path, mode: int) -> str:
    """Return what is wrong with a directory of this mode, and the remedy; empty for nothing.

    Where every user may rename and remove files, any user can replace the daemon's by a link or
    another file. The sticky bit prevents that, as on /tmp and /dev/shm.
    """
    if not mode & stat.S_IWOTH or mode & stat.S_ISVTX:
        return ""
    return (
        f"mode {stat.S_IMODE(mode):04o} lets every user replace the daemon's files there; use a"
        f" directory of its own, or chmod o-w {path}, or chmod +t {path} if others need it"
    )


def check_place(name: str, path: Path) -> None:
    """Check that only the daemon's user, its group and root can replace its files there.

    Raises:
        ConfigError: every user may; with the remedy.
        OSError: it is not there.
    """
    problem = danger(path, path.stat().st_mode)
    if problem:
        raise ConfigError(f"{name} = {path}: {problem}")


def size_of(fd: int, what: str) -> int:
    """Return the size of a file that a worker shares, and that cannot be shortened.

    A file that loses its pages under a mapping ends the process that touches them, and a file of
    any other kind is served by a file system whose owner may answer late or never: it is asked
    nothing, not even its size.

    Raises:
        ImportFailed: it is another kind of file, or could be shortened; how to make one.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)  # answered by the kernel alone
    except OSError:
        raise ImportFailed(f"{what} is no memory file; make it with {HOW}") from None
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ImportFailed(f"{what} could be shortened while it is mapped; make it with {HOW}")
    return os.fstat(fd).st_size
