"""Put the pool's pages into this process's page table before jobs need them.

A page that is first touched by a copy costs several microseconds, which made
the first pass over a new pool ten times slower than the second (measured on a
virtual machine; reading is a cheaper first touch than writing). The broker
allocates the file piece by piece in the order of `kvd.pool.filling`; only what is
allocated is touched, so a full filesystem is the broker's error and never a
SIGBUS here.
"""

import os
import threading
from collections.abc import Callable

import numpy as np

from kvd.pool.filling import FillOrder

_PAGE = 4096
_STEP = 16 * 2**20
_WAIT_SECONDS = 0.01


class Pretouch:
    """A thread that reads one byte of every page of a mapping, once.

    Args:
        mapping: the whole file's mapping; in use until `stop` has returned.
        fd: the file; duplicated, stays the caller's.
        fill: the order in which it is allocated, of the mapping's size.
        touched: called in the thread with each piece whose pages are there; whether to go on.
    """

    def __init__(
        self,
        mapping: memoryview,
        fd: int,
        fill: FillOrder,
        touched: Callable[[int], bool] = lambda _piece: True,
    ) -> None:
        self._mapping = mapping
        self._fill = fill
        self._touched = touched
        self._fd = os.dup(fd)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvd-pretouch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        pages = np.frombuffer(self._mapping, np.uint8)
        done = 0
        for piece in self._fill.order:
            begin, end = self._fill.span(piece)
            before = done - begin
            while begin < end and not self._stop.is_set():
                allocated = os.fstat(self._fd).st_blocks * 512 - before
                until = min(end, allocated, begin + _STEP)
                if until <= begin:
                    self._stop.wait(_WAIT_SECONDS)
                    continue
                np.bitwise_or.reduce(pages[begin:until:_PAGE])  # releases the GIL
                done += until - begin
                begin = until
            if self._stop.is_set() or not self._touched(piece):
                return

    def stop(self) -> None:
        """End the thread and release the mapping. May be called again."""
        self._stop.set()
        self._thread.join()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
