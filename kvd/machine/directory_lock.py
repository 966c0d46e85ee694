"""The lock that makes a directory one process's own, until that process ends."""

import fcntl
import time
from functools import partial

SECONDS = 2.0
"""How long a dead process's children may hold its lock."""
pause = partial(time.sleep, 0.01)
"""Between two tries."""


def lock_directory(descriptor: int) -> None:
    """Lock a directory for this process alone.

    A process that is killed while it starts another one leaves its lock to that child, which
    closes it as soon as it runs its own program. So a lock that is held is tried for a while.

    Args:
        descriptor: of the directory; the lock ends with it.

    Raises:
        BlockingIOError: another process has the lock.
        OSError: the file system locks no directory.
    """
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            pause()
        else:
            return
