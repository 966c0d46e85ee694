"""The pipe by whose end of file workers know that this process is gone.

Its write end stays open here alone, for life. The kernel lets go of a dying
process's descriptors from the highest number down (seen by timing it), and a
device's driver stops its copies when its own descriptors go. So the pipe must
have a lower number than they: then end of file means that nothing of this
process moves bytes any more.
"""

import fcntl
import os
import resource

from kvd.errors import LaneError

_HIGH = 64


def open_lifeline() -> int:
    """The read end; to be called before a device is opened.

    The write end takes the lowest number that is free now, and nothing below it may be closed
    while the process lives.

    Raises:
        LaneError: no descriptor is left.
    """
    read_end, write_end = os.pipe()
    moved = move_up(read_end)
    lower = os.dup(write_end)
    if lower > write_end:
        os.close(lower)
    else:
        os.close(write_end)
    return moved


def hold_pool(pool_fd: int) -> None:
    """Lock the pool's file for as long as anything of this process can write to it.

    The next daemon waits for that. The lock is on a descriptor of this process's own, opened
    like the lifeline before a device and with a number as low as there is; never closed.

    Raises:
        LaneError: a daemon that takes the pool over holds the lock: this one's is gone.
    """
    descriptor = os.open(f"/proc/self/fd/{pool_fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise LaneError("another daemon is taking the pool over") from error


def move_up(descriptor: int) -> int:
    """Give a descriptor that will be closed another, high number.

    Raises:
        LaneError: there is none.
    """
    try:
        moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    except OSError as error:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise LaneError(
            f"no file descriptor from {_HIGH} on is to be had, the limit is {limit};"
            " raise LimitNOFILE, or ulimit -n"
        ) from error
    os.close(descriptor)
    return moved
