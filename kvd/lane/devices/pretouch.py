"""Put pages into this process's page table before jobs need them.

A page that is first touched by a copy costs several microseconds, which made
the first pass over a new pool ten times slower than the second, and the first load
into a worker's block four times slower than the next (measured on a virtual machine;
reading is a cheaper first touch than writing, for it maps the neighbours too). The
broker allocates the pool's file piece by piece in the order of `kvd.pool.geometry`; only
what is allocated is touched, so a full filesystem is the broker's error and never a
SIGBUS here. Of a worker's memory only pages that are there are touched: one that is
not would be allocated, and charged to this process instead of the worker's.
"""

import ctypes
import os
import threading
from collections.abc import Sequence

import numpy as np

from kvd.pool.geometry import FillOrder

_PAGE = 4096
_STEP = 16 * 2**20
_SHORT_STEP = 2 * 2**20  # `stop` waits for one
_WAIT_SECONDS = 0.01


def touch(mapping: memoryview, begin: int, end: int, stop: threading.Event) -> bool:
    """Read one byte of every page from begin to before end; False where `stop` was set first."""
    pages = np.frombuffer(mapping, np.uint8)
    for at in range(begin, end, _STEP):
        if stop.is_set():
            return False
        np.bitwise_or.reduce(pages[at : min(at + _STEP, end) : _PAGE])  # releases the GIL
    return True


class Pretouch:
    """A thread that reads one byte of every page of a mapping, once.

    Args:
        mapping: the whole file's mapping; in use until `stop` has returned.
        fd: the file; duplicated, stays the caller's.
        fill: the order in which it is allocated, of the mapping's size.
    """

    def __init__(self, mapping: memoryview, fd: int, fill: FillOrder) -> None:
        self._mapping = mapping
        self._fill = fill
        self._fd = os.dup(fd)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvd-pretouch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        done = 0
        for piece in self._fill.order:
            begin, end = self._fill.span(piece)
            before = done - begin
            while begin < end:
                if self._stop.is_set():
                    return
                allocated = os.fstat(self._fd).st_blocks * 512 - before
                until = min(end, allocated, begin + _STEP)
                if until <= begin:
                    self._stop.wait(_WAIT_SECONDS)
                    continue
                touch(self._mapping, begin, until, self._stop)
                done += until - begin
                begin = until

    def stop(self) -> None:
        """End the thread and release the mapping. May be called again."""
        self._stop.set()
        self._thread.join()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class PretouchPresent:
    """A thread that reads one byte of every page that mappings have already, once.

    Args:
        mappings: whole files; in use until `stop` has returned, or the thread has ended.

    Attributes:
        thread: for who waits for its end.
    """

    def __init__(self, mappings: Sequence[memoryview]) -> None:
        self._stop = threading.Event()
        self.thread = threading.Thread(
            target=self._run, args=(mappings,), name="kvd-pretouch-memory", daemon=True
        )
        self.thread.start()

    def _run(self, mappings: Sequence[memoryview]) -> None:
        mincore = ctypes.CDLL(None).mincore
        mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        present = np.empty(_SHORT_STEP // _PAGE, np.uint8)
        for mapping in mappings:
            pages = np.frombuffer(mapping, np.uint8)
            for begin in range(0, len(pages), _SHORT_STEP):
                part = pages[begin : begin + _SHORT_STEP]
                if self._stop.is_set() or mincore(part.ctypes.data, len(part), present.ctypes.data):
                    return
                firsts = part[::_PAGE]
                firsts[(present[: len(firsts)] & 1).nonzero()[0]].any()

    def stop(self) -> None:
        """End the thread and release the mappings. May be called again."""
        self._stop.set()
        self.thread.join()
