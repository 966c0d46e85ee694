"""Copies on memory of the lane's own: whether they are right, and how long they take."""

import mmap
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvd.lane.devices.cuda import driver
from kvd.lane.devices.cuda.copier import Copier, Way
from kvd.lane.devices.cuda.driver import Stream, Undo
from kvd.lane.devices.cuda.moves import DEVICE, HOST, NBYTES, Columns, Runs
from kvd.lane.devices.device import Direction

SCRATCH_BYTES = 8 * 2**20
LENGTHS = (4096, 8192, 12288, 16384, 24576, 32768, 49152, 65536)
COUNTS = (8, 32, 128, 512)  # powers of two
# So much faster must a kernel be: it takes the device from the engine's, the copy engine does not.
KERNEL_WORTH = 1.25
# And so much loads in any order.
ORDER_WORTH = 1.05
_WARM_SECONDS = 0.1  # an idle device has low clocks
_REPEATS = 3
_ORDER_BATCHES, _ORDER_RUNS, _ORDER_LENGTH = 4, 64, 32768


class Scratch:
    """Pinned host memory and as much device memory.

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
        address = self.bytes.ctypes.data
        driver.register_host(address, nbytes)
        undo.add(driver.unregister_host, address)
        self._host = driver.device_address(address)
        self._device = driver.allocate(nbytes)
        undo.add(driver.free, self._device)

    def runs(self, length: int, count: int) -> Runs:
        """This many runs of this many bytes, no two of them neighbours where there is room."""
        stride = max(length, self.nbytes // count // 16 * 16)
        table = np.empty((3, count), np.uint64)
        offsets = np.arange(count, dtype=np.uint64) * np.uint64(stride)
        table[HOST] = offsets + np.uint64(self._host)
        table[DEVICE] = offsets + np.uint64(self._device)
        table[NBYTES] = length
        return Columns(table).all

    def moved_there_and_back(self, way: Way, stream: Stream) -> bool:
        """Whether a way loads and stores the right bytes; waits for them.

        Raises:
            CudaError: it cannot.
        """
        length = 1000
        runs = self.runs(length, 2)
        wanted = np.zeros(self.nbytes, np.uint8)
        for begin in (runs.table[HOST] - np.uint64(self._host)).tolist():
            wanted[begin : begin + length] = np.arange(length) % 251 + 1
        self.bytes[:] = wanted
        way(runs, Direction.LOAD, stream)
        driver.wait_for_stream(stream)
        self.bytes[:] = 0
        way(runs, Direction.STORE, stream)
        driver.wait_for_stream(stream)
        return bool((self.bytes == wanted).all())

    def warm(self, stream: Stream) -> None:
        """Copy there and back until the device has its usual clocks; waits.

        Raises:
            CudaError: it cannot.
        """
        end = time.monotonic() + _WARM_SECONDS
        while time.monotonic() < end:
            driver.copy(self._device, self._host, self.nbytes, stream)
            driver.copy(self._host, self._device, self.nbytes, stream)
            driver.wait_for_stream(stream)

    def seconds(
        self, way: Way, runs: Runs, direction: Direction, stream: Stream, times: int = 1
    ) -> float:
        """The shortest of some tries until everything has arrived; enqueueing counts too."""
        tries = []
        for _ in range(_REPEATS):
            begin = time.perf_counter()
            for _ in range(times):
                way(runs, direction, stream)
            driver.wait_for_stream(stream)
            tries.append(time.perf_counter() - begin)
        return min(tries)


def crossover(lengths: Sequence[int], kernel_wins: Callable[[int], bool]) -> int:
    """The shortest length for which the engine is better; where it always is, 0.

    Args:
        lengths: increasing; twice the last one stands for a kernel that always is.
        kernel_wins: for one of them; where it does not, it does not for longer ones either.
    """
    low, high = 0, len(lengths)
    while low < high:
        middle = (low + high) // 2
        if kernel_wins(lengths[middle]):
            low = middle + 1
        else:
            high = middle
    if low == 0:
        return 0
    return lengths[low] if low < len(lengths) else 2 * lengths[-1]


def row(measured: Sequence[tuple[int, int]]) -> list[int]:
    """Thresholds for 1, for 2 and 3, for 4 to 7 runs and so on.

    Args:
        measured: number of runs, a power of two, and its threshold; increasing. Fewer runs than
            the first go by the engine; numbers between two are as the smaller one.
    """
    thresholds: list[int] = []
    for count, below in measured:
        last = thresholds[-1] if thresholds else 0
        thresholds += [last] * (count.bit_length() - 1 - len(thresholds))
        thresholds.append(below)
    return thresholds


def measure_kernel(
    copier: Copier, kernel: Way, scratch: Scratch, stream: Stream
) -> dict[Direction, list[int]]:
    """By direction and number, below which length the kernel is faster by KERNEL_WORTH.

    Raises:
        CudaError: a copy fails.
    """

    def threshold(direction: Direction, count: int) -> int:
        def kernel_wins(length: int) -> bool:
            runs = scratch.runs(length, min(count, scratch.nbytes // length))
            by_engine, by_kernel = (
                scratch.seconds(way, runs, direction, stream) for way in (copier.by_engine, kernel)
            )
            return by_kernel * KERNEL_WORTH < by_engine

        return crossover(LENGTHS, kernel_wins)

    return {
        direction: row([(count, threshold(direction, count)) for count in COUNTS])
        for direction in Direction
    }


def measure_order(copier: Copier, scratch: Scratch, stream: Stream) -> bool:
    """Whether loads in any order are faster by ORDER_WORTH.

    Raises:
        CudaError: a copy fails.
    """
    runs, took = scratch.runs(_ORDER_LENGTH, _ORDER_RUNS), {}
    for copier.any_order in (False, True):
        took[copier.any_order] = scratch.seconds(
            copier.by_engine, runs, Direction.LOAD, stream, _ORDER_BATCHES
        )
    return took[True] * ORDER_WORTH < took[False]
