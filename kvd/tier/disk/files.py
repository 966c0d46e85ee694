"""Names in a disk tier's directory: only regular files are opened, others are set aside.

Opening a FIFO or a device may block or have effects, and a directory cannot be opened as a file.
"""

import contextlib
import os
import stat

DAMAGED = ".damaged"
_MAX_NAMES = 10
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(folder_fd: int, name: str, flags: int) -> int:
    """Open an existing file, which must be a regular one.

    Raises:
        ValueError: it is none; says what it is.
        OSError: it does not exist, or an I/O error.
    """
    mode = os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mode
    if not stat.S_ISREG(mode):
        raise ValueError(f"{name} is {_KINDS.get(stat.S_IFMT(mode), 'something')}, no regular file")
    return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=folder_fd)


def set_aside(folder_fd: int, name: str) -> None:
    """Rename what has this name, if anything has, to ``.damaged``.

    A number comes before it if that name belongs to something that cannot be replaced.

    Raises:
        OSError: I/O error, or a file system is mounted there.
    """
    for attempt in range(_MAX_NAMES):
        target = f"{name}.{attempt}{DAMAGED}" if attempt else f"{name}{DAMAGED}"
        try:
            os.rename(name, target, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
        except FileNotFoundError:
            return
        except OSError:
            if attempt == _MAX_NAMES - 1:
                raise
        else:
            return


def remove(folder_fd: int, name: str) -> None:
    """Unlink what has this name, if anything has; set a directory aside.

    Raises:
        OSError: I/O error, or a file system is mounted there.
    """
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder_fd)
    except IsADirectoryError:
        set_aside(folder_fd, name)
