"""What works and what is fast on this device: found out at start, on memory of the lane's own.

The way of the copy engine is chosen by copying a few bytes there and back. Below which
length of run the kernel is faster than the copy engine depends on device, driver and board;
it is measured, in a fraction of a second.
"""

import logging
import mmap
import time
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from kvd.errors import CudaError
from kvd.lane.devices.cuda import driver
from kvd.lane.devices.cuda.copier import Copier, MoveKernel, Runs
from kvd.lane.devices.cuda.driver import BatchCopy, Stream, Undo
from kvd.lane.devices.device import Direction

_log = logging.getLogger(__name__)

LENGTHS = (4096, 8192, 16384, 24576, 32768, 65536)
_SCRATCH_BYTES = 2 * 2**20
_REPEATS = 3

_Way = Callable[[Runs, Direction, Stream], None]


def choose(priority: int, below: Mapping[Direction, int] | None, undo: Undo) -> Copier:
    """Try and time the ways to copy on scratch memory.

    Args:
        priority: of the stream for it.
        below: runs shorter than this many bytes go by the kernel; None: as measured.
        undo: gets what lets go of the kernel.

    Raises:
        CudaError: there is no scratch memory.
    """
    with Undo() as trial:
        scratch = Scratch(_SCRATCH_BYTES, trial)
        stream = driver.create_stream(priority)
        trial.add(driver.destroy_stream, stream)
        copier = _choose_engine(scratch, stream)
        if below is None or any(below.values()):
            _add_kernel(copier, below, scratch, stream, undo)
    return copier


class Scratch:
    """Pinned host memory and as much device memory, to try and to time copies.

    Args:
        nbytes: of each; a multiple of the page size.
        undo: frees it; nothing may be in flight then.

    Raises:
        CudaError: it cannot be had.
    """

    def __init__(self, nbytes: int, undo: Undo) -> None:
        self.nbytes = nbytes
        self._memory = mmap.mmap(-1, nbytes)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8)
        self._host = self.bytes.ctypes.data
        driver.register_host(self._host, nbytes)
        undo.add(driver.unregister_host, self._host)
        self._shift = (driver.device_address(self._host) - self._host) % 2**64
        self._device = driver.allocate(nbytes)
        undo.add(driver.free, self._device)

    def runs(self, nbytes: int, count: int) -> Runs:
        """This many runs of this many bytes, no two of them neighbours where there is room."""
        stride = max(nbytes, self.nbytes // count // 16 * 16)
        offsets = np.arange(count, dtype=np.uint64) * np.uint64(stride)
        return Runs(
            host=offsets + np.uint64(self._host),
            device=offsets + np.uint64(self._device),
            nbytes=np.full(count, nbytes, np.uint64),
            kernel_shift=np.full(count, self._shift, np.uint64),
        )

    def moved_there_and_back(self, way: _Way, stream: Stream) -> bool:
        """Whether a way loads and stores the right bytes; waits for them.

        Raises:
            CudaError: it cannot.
        """
        data = (np.arange(self.nbytes) % 251).astype(np.uint8)
        runs = self.runs(nbytes=1000, count=2)
        self.bytes[:] = data
        way(runs, Direction.LOAD, stream)
        driver.wait_for_stream(stream)
        self.bytes[:] = 0
        way(runs, Direction.STORE, stream)
        driver.wait_for_stream(stream)
        wanted = np.zeros_like(data)
        for begin in (runs.host - np.uint64(self._host)).tolist():
            wanted[begin : begin + 1000] = data[begin : begin + 1000]
        return bool((self.bytes == wanted).all())


def _choose_engine(scratch: Scratch, stream: Stream) -> Copier:
    """Batches if a trial moves the right bytes, else one copy after the other."""
    try:
        copier = Copier(BatchCopy())
        if scratch.moved_there_and_back(copier.by_engine, stream):
            return copier
        _log.warning("copies are enqueued one by one: a batch did not move the right bytes")
    except CudaError as error:
        driver.wait_for_stream(stream)  # some of the copies may be on their way
        _log.info("copies are enqueued one by one: %s", error)
    return Copier(None)


def _add_kernel(
    copier: Copier,
    below: Mapping[Direction, int] | None,
    scratch: Scratch,
    stream: Stream,
    undo: Undo,
) -> None:
    """Give the copier the kernel, if that works here."""
    with Undo() as mine:
        try:
            kernel = MoveKernel(mine)

            def by_kernel(runs: Runs, direction: Direction, stream: Stream) -> None:
                kernel.enqueue(runs, direction, stream, 0)

            if not scratch.moved_there_and_back(by_kernel, stream):
                _log.warning("the kernel does not work here: it moves the wrong bytes")
                return
            if below is None:
                below = {
                    direction: _crossover(copier.by_engine, by_kernel, scratch, stream, direction)
                    for direction in Direction
                }
        except CudaError as error:
            driver.wait_for_stream(stream)
            _log.warning("the kernel does not work here: %s", error)
            return
        copier.kernel, copier.below = kernel, below
        undo.push(mine.pop_all())


def _crossover(
    engine: _Way, kernel: _Way, scratch: Scratch, stream: Stream, direction: Direction
) -> int:
    """The shortest measured length for which the engine is as fast; twice the longest if none."""
    for length in LENGTHS:
        runs = scratch.runs(length, scratch.nbytes // length)
        by_engine, by_kernel = (
            min(_seconds(way, runs, direction, stream) for _ in range(_REPEATS))
            for way in (engine, kernel)
        )
        if by_engine <= by_kernel:
            return length if length > LENGTHS[0] else 0
    return 2 * LENGTHS[-1]


def _seconds(way: _Way, runs: Runs, direction: Direction, stream: Stream) -> float:
    """Time until everything has arrived; what enqueueing costs counts too."""
    begin = time.perf_counter()
    way(runs, direction, stream)
    driver.wait_for_stream(stream)
    return time.perf_counter() - begin
