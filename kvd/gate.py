"""File descriptors run out: be gone from where newcomers look before the last one is taken.

libzmq accepts connections by itself and ends the whole process where a descriptor for one
is missing. So while few are left the socket has another name and no rights, and nobody
new finds it; whoever is connected notices nothing. When descriptors are free again the
socket is back under its name.
"""

import os
import resource
from pathlib import Path

from kvd.errors import KvdError

RESERVED_PART = 8  # newcomers may not take the last eighth: it is what a flood has until it is seen
LEAST_RESERVE = 12
PLENTY = 2**20
_HIDDEN = "-closed"
_SOCKET_MODE = 0o660


def reserve_of(limit: int) -> int:
    """How many descriptors of `limit` newcomers may not take."""
    return max(LEAST_RESERVE, limit // RESERVED_PART)


def descriptors_left() -> tuple[int, int]:
    """Descriptors that this process may still open, and how many it may have in all.

    Reads /proc: about 10 µs, and 1 ms for every few thousand that are open.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return PLENTY, PLENTY
    try:
        return max(0, limit - len(os.listdir("/proc/self/fd"))), limit  # noqa: PTH208  # only the number
    except OSError:  # not even one to count the others
        return 0, limit


class Gate:
    """One listening socket's file, there or hidden.

    Args:
        path: where newcomers look for it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.hidden = path.with_name(f"{path.name}{_HIDDEN}")
        self.is_open = True

    def turn(self) -> bool:
        """Hide the file or bring it back, as descriptors are left; whether that has changed.

        It comes back when there are twice as many as it takes to hide it, so that it does
        not flap.
        """
        left, limit = descriptors_left()
        reserve = reserve_of(limit)
        enough = left >= (reserve if self.is_open else 2 * reserve)
        if enough == self.is_open:
            return False
        if enough:
            self.hidden.chmod(_SOCKET_MODE)
            self.hidden.rename(self.path)
        else:
            self.path.chmod(0)
            self.path.rename(self.hidden)
        self.is_open = enough
        return True

    def remove(self) -> None:
        """The listener is closed: leave no file."""
        for path in (self.path, self.hidden):
            path.unlink(missing_ok=True)

    def check_integrity(self) -> None:
        """The file is under one of its names, the right one.

        Raises:
            KvdError: it is not.
        """
        there, gone = (self.path, self.hidden) if self.is_open else (self.hidden, self.path)
        if not there.exists() or gone.exists():
            raise KvdError(f"{self!r}: its file is under the wrong name")

    def __repr__(self) -> str:
        return f"<Gate {self.path} {'open' if self.is_open else 'hidden'}>"
