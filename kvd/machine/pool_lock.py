"""The lock by which the next daemon sees that a process may still write to the pool."""

import fcntl
import os
import resource

from kvd.errors import PoolError

_HIGH_NUMBER = 64


def hold_pool(pool_fd: int) -> None:
    """Lock the pool's file for as long as anything of this process can write to it.

    The next daemon waits for that. The lock is on a descriptor of this process's own, opened
    before a device or a medium and with a number as low as there is, because the kernel lets go
    of a dying process's descriptors from the highest number down; never closed.

    Raises:
        PoolError: a daemon that takes the pool over holds the lock: this one's is gone.
    """
    descriptor = os.open(f"/proc/self/fd/{pool_fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise PoolError("another daemon is taking the pool over") from error


def move_up(descriptor: int) -> int:
    """Give a descriptor that will be closed a high number, so that a low one is free.

    Raises:
        PoolError: there is none.
    """
    try:
        moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _HIGH_NUMBER)
    except OSError as error:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise PoolError(
            f"no file descriptor from {_HIGH_NUMBER} on is to be had, the limit is {limit};"
            " raise LimitNOFILE, or ulimit -n"
        ) from error
    os.close(descriptor)
    return moved
