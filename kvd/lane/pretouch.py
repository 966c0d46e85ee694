"""Pretouch: puts pages into this process's page table before jobs need them.

A page that a copy touches first costs several microseconds: the first pass over a new pool was ten
times slower than the second, the first load into a worker's block four times slower than the next
(measured on a virtual machine). Reading is a cheaper first touch than writing, since it maps
neighbours too.

Of the pool, only bytes that the broker has allocated (in `FillOrder`) are touched, so a full file
system is the broker's error and never a SIGBUS here. Of a worker's memory, only pages that are
present are touched: others would be allocated and charged to this process.
"""

import ctypes
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvd.lane.device import MemoryId
from kvd.pool.geometry import FillOrder

_PAGE = 4096
_STEP = 16 * 2**20
SHORT_STEP = 2 * 2**20  # `remove` waits for one
_WAIT_SECONDS = 0.01
BUSY_SECONDS, _IDLE_SECONDS = 0.01, 1e-4  # between two steps: while transfers move, and otherwise


def touch_pages(mapping: memoryview, begin: int, end: int, stop: threading.Event) -> bool:
    """Read one byte of every page in bytes begin..end - 1; return False if `stop` was set first."""
    content = np.frombuffer(mapping, np.uint8)
    for offset in range(begin, end, _STEP):
        if stop.is_set():
            return False
        np.bitwise_or.reduce(content[offset : min(offset + _STEP, end) : _PAGE])  # frees the GIL
    return True


class PoolPretouch:
    """A thread that reads one byte of every page of the pool, as the pool is allocated.

    `mapping` is in use until `stop` has returned. The broker allocates the file `fd`, which stays
    the caller's, in the order of `fill`.
    """

    def __init__(self, mapping: memoryview, fd: int, fill: FillOrder) -> None:
        self._mapping = mapping
        self._fill = fill
        self._fd = os.dup(fd)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvd-pretouch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        touched = 0  # bytes
        for piece in self._fill.order:
            begin, end = self._fill.span(piece)
            skipped = touched - begin
            while begin < end:
                if self._stop.is_set():
                    return
                allocated = os.fstat(self._fd).st_blocks * 512 - skipped
                until = min(end, allocated, begin + _STEP)
                if until <= begin:
                    self._stop.wait(_WAIT_SECONDS)
                    continue
                touch_pages(self._mapping, begin, until, self._stop)
                touched += until - begin
                begin = until

    def stop(self) -> None:
        """End the thread and release the mapping. May be called again."""
        self._stop.set()
        self._thread.join()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass(slots=True, eq=False)
class _Span:
    """Mapped bytes of a memory file. `done` of them have been touched or are not present.

    file: descriptor of its own open file, since SEEK_DATA moves the file's position.
    offset: of the first byte in the file.
    """

    memory: MemoryId
    file: int
    offset: int
    content: npt.NDArray[np.uint8]
    done: int = 0


class MemoryPretouch:
    """One thread that reads one byte of every page that the workers' memory already has.

    Workers take turns, a step each. Holes of a file are skipped, so each step finds a page that its
    worker has paid for, however large and sparse the file is. Huge pages are left out: touching
    them saves little.

    Args:
        is_busy: whether transfers move; then a step is made every `BUSY_SECONDS` only.
    """

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        self._is_busy = is_busy
        self._mincore = ctypes.CDLL(None).mincore
        self._mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        self._present = np.empty(SHORT_STEP // _PAGE, np.uint8)
        untouched = np.frombuffer(mmap.mmap(-1, _PAGE), np.uint8)
        # gVisor's says that all pages are present.
        self._is_told = not self._read_present(untouched) and not self._present[0] & 1
        self._spans: deque[_Span] = deque()
        self._changed = threading.Condition()  # guards the spans, also while a step is made
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvd-pretouch-memory", daemon=True)
        self._thread.start()

    def add(self, memory: MemoryId, fd: int, offset: int, mapping: memoryview) -> None:
        """Touch the present pages of a mapping, which is in use until `remove` has returned.

        Args:
            memory: for `remove`.
            fd: the mapped memory file; stays the caller's.
            offset: of the mapping in the file. Both begin with a page.
            mapping: the bytes.
        """
        # hugetlbfs does not tell holes.
        if not self._is_told or os.statvfs(fd).f_bsize > mmap.PAGESIZE:
            return
        try:
            file = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # no descriptor is left, or the file's mode forbids it: copies touch first
            return
        with self._changed:
            self._spans.append(_Span(memory, file, offset, np.frombuffer(mapping, np.uint8)))
            self._changed.notify()

    def remove(self, memory: MemoryId) -> None:
        """Release a worker's mappings."""
        with self._changed:
            for span in [span for span in self._spans if span.memory == memory]:
                self._spans.remove(span)
                os.close(span.file)

    def stop(self) -> None:
        """End the thread and release all mappings."""
        self._stop.set()
        with self._changed:
            self._changed.notify()
        self._thread.join()
        for memory in {span.memory for span in self._spans}:
            self.remove(memory)

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._changed:
                if not self._spans:
                    self._changed.wait_for(lambda: self._spans or self._stop.is_set())
                    continue
                if self._touch_some(self._spans[0]):
                    self._spans.rotate(-1)
                else:
                    os.close(self._spans.popleft().file)
            # A wait also lets `remove` have the lock.
            self._stop.wait(BUSY_SECONDS if self._is_busy() else _IDLE_SECONDS)

    def _touch_some(self, span: _Span) -> bool:
        """Touch pages of the next `SHORT_STEP` bytes that are no hole; return whether some are."""
        try:
            begin = os.lseek(span.file, span.offset + span.done, os.SEEK_DATA)
            end = min(os.lseek(span.file, begin, os.SEEK_HOLE), begin + SHORT_STEP)
        except OSError:  # ENXIO: only a hole follows
            return False
        step = span.content[begin - span.offset : end - span.offset]
        if not len(step) or self._read_present(step):
            return False
        page_starts = step[::_PAGE]
        page_starts[(self._present[: len(page_starts)] & 1).nonzero()[0]].any()
        span.done = begin - span.offset + len(step)
        return True

    def _read_present(self, content: npt.NDArray[np.uint8]) -> bool:
        """Read which pages the memory has into `_present`; return whether that failed."""
        address, present = content.ctypes.data, self._present.ctypes.data
        return bool(self._mincore(address, len(content), present))
