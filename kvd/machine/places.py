"""Directories that a daemon may put its files in.

Where every user may rename and remove files in a directory, any user can replace the
daemon's, which may run as root, by a link or another file. The sticky bit prevents that, as
on /tmp and /dev/shm.
"""

import stat
from pathlib import Path

from kvd.errors import ConfigError


def danger(path: Path, mode: int) -> str:
    """Return what is wrong with a directory of this mode, and the remedy; empty for nothing."""
    if not mode & stat.S_IWOTH or mode & stat.S_ISVTX:
        return ""
    return (
        f"mode {stat.S_IMODE(mode):04o} lets every user replace the daemon's files there; use a"
        f" directory of its own, or chmod o-w {path}, or chmod +t {path} if others need it"
    )


def check_place(name: str, path: Path) -> None:
    """Check that only the daemon's user, its group and root can replace its files there.

    Args:
        name: the setting that names the directory.
        path: the directory.

    Raises:
        ConfigError: every user may; with the remedy.
        OSError: it is not there.
    """
    problem = danger(path, path.stat().st_mode)
    if problem:
        raise ConfigError(f"{name} = {path}: {problem}")
