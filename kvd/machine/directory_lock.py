"""The lock that makes a directory one process's own, until that process ends."""

import fcntl
import time

WAIT_SECONDS = 2.0
"""How long a lock is tried that another process has."""
RETRY_SECONDS = 0.01


def lock_directory(descriptor: int) -> None:
    """Lock a directory for this process alone.

    A process that is killed while it starts another one leaves its lock to that child, which
    closes it as soon as it runs its own program. So a lock that is held is tried for
    `WAIT_SECONDS`.

    Args:
        descriptor: of the directory; the lock ends with it.

    Raises:
        BlockingIOError: another process has the lock.
        OSError: the file system locks no directory.
    """
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(RETRY_SECONDS)
        else:
            return
