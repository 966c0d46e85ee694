"""The driver's own ways to copy, called directly: what kvd is held against."""

import ctypes
import time
from collections.abc import Callable
from functools import cached_property

import numpy as np
import numpy.typing as npt
from gpu_device import Gpu, Pinned

from kvd.errors import CudaError
from kvd.lane.devices.cuda import driver
from kvd.lane.devices.cuda.driver import Addresses, BatchCopy, Undo
from kvd.lane.devices.cuda.move_kernel import BLOCKS, KERNEL
from kvd.lane.devices.device import Direction

PIECE_BYTES = 32 * 2**20  # of a call: as much as the lane gives to one where nobody else waits
KERNEL_THREADS = 256
_WORD = 8
_RUN_WORDS = 3

Places = tuple[Addresses, Addresses]


class Reference:
    """Pinned host memory and device memory, one part of each for loads and one for stores.

    Every method moves `nbytes` in each of the directions that it is given, all at once, and
    gives GB/s, bytes of all together.

    Args:
        gpu: whose.
        nbytes: of each part.
    """

    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        self._gpu = gpu
        self.nbytes = nbytes
        self._pinned = Pinned(2 * nbytes)
        self._host = self._pinned.device_address
        self._device = driver.allocate(2 * nbytes)
        self._undo = Undo()
        self._batches: dict[bool, BatchCopy] = {}
        self._places: dict[int, Places] = {}
        self._lists: dict[tuple[int, int, Direction], list[tuple[int, int]]] = {}
        self._kept: list[Pinned] = []

    def _batch(self, *, overlap: bool) -> BatchCopy:
        if overlap not in self._batches:
            self._batches[overlap] = BatchCopy(overlap=overlap)
        return self._batches[overlap]

    @cached_property
    def _kernel(self) -> driver.Function:
        return driver.load_kernel(KERNEL.read_bytes(), "kvd_move", self._undo)

    def failures(self, fragment: int) -> dict[str, str]:
        """By way: why it cannot be used here, empty where it can. The context may be lost then."""
        ways: dict[str, Callable[..., float]] = {"batch": self.batched, "kernel": self.by_kernel}
        return {name: self._failure(way, fragment) for name, way in ways.items()}

    def _failure(self, way: Callable[..., float], fragment: int) -> str:
        there, here = self._scattered(fragment)
        data = np.random.default_rng(1).integers(0, 256, self.nbytes, np.uint8)
        host: npt.NDArray[np.uint8] = np.frombuffer(self._pinned.bytes, np.uint8)
        loaded, stored = host[: self.nbytes], host[self.nbytes :]
        wanted = np.empty_like(data)
        try:
            for direction in Direction:
                loaded[:], stored[:] = data, 0
                self._gpu.write(self._device, np.zeros_like(data))
                self._gpu.write(self._device + self.nbytes, data)
                way(fragment, direction)
                for to, from_ in zip(there.tolist(), here.tolist(), strict=True):
                    wanted[to : to + fragment] = data[from_ : from_ + fragment]
                load = direction is Direction.LOAD
                found = self._gpu.read(self._device, self.nbytes) if load else stored
                if not np.array_equal(found, wanted):
                    return f"{direction}: it moves the wrong bytes"
        except CudaError as error:
            return str(error)
        return ""

    def raw(self, *directions: Direction) -> float:
        """One `cuMemcpyAsync` each."""

        def enqueue() -> None:
            for direction in directions:
                target, source = self._ends(direction)
                driver.copy(target, source, self.nbytes, self._gpu.streams[direction])

        return self._rate(enqueue, self.nbytes * len(directions))

    def batched(
        self,
        fragment: int,
        *directions: Direction,
        at_once: int | None = None,
        overlap: bool = False,
        any_order: bool = True,
    ) -> float:
        """`cuMemcpyBatchAsync` between places in another order on the two sides.

        Args:
            fragment: bytes of a run.
            directions: see the class.
            at_once: runs of a call; as many as a large piece of the lane has where None.
            overlap: see BatchCopy.
            any_order: sources of loads may be read at any time.

        Raises:
            CudaError: this driver has none, or refuses.
        """
        batch = self._batch(overlap=overlap)
        step = at_once or max(1, PIECE_BYTES // fragment)
        there, here = self._scattered(fragment)
        sizes = np.full(len(there), fragment, np.uint64)
        ends = {
            direction: [
                np.uint64(end) + places
                for end, places in zip(self._ends(direction), (there, here), strict=True)
            ]
            for direction in directions
        }

        def enqueue() -> None:
            for begin in range(0, len(sizes), step):
                for direction, (targets, sources) in ends.items():
                    batch.enqueue(
                        targets[begin:].ctypes.data,
                        sources[begin:].ctypes.data,
                        sizes.ctypes.data,
                        min(step, len(sizes) - begin),
                        self._gpu.streams[direction],
                        source_in_any_order=any_order and direction is Direction.LOAD,
                    )

        return self._rate(enqueue, len(sizes) * fragment * len(directions))

    def by_kernel(self, fragment: int, *directions: Direction, blocks: int = BLOCKS) -> float:
        """The lane's kernel between the same places, a launch for as much as a large piece.

        Raises:
            CudaError: it cannot be loaded, or fails.
        """
        lists = {way: self._runs(fragment, way) for way in directions}
        launches = list(zip(*lists.values(), strict=True))

        def enqueue() -> None:
            for launch in launches:
                for way, (address, count) in zip(lists, launch, strict=True):
                    driver.launch(
                        self._kernel,
                        blocks=min(blocks, count),
                        threads=KERNEL_THREADS,
                        values=(address, count),
                        types=(ctypes.c_uint64, ctypes.c_uint32),
                        stream=self._gpu.streams[way],
                    )

        return self._rate(enqueue, len(self._scattered(fragment)[0]) * fragment * len(directions))

    def close(self) -> None:
        """Give the memory back."""
        self._undo.close()
        for pinned in [*self._kept, self._pinned]:
            pinned.close()
        driver.free(self._device)

    def _runs(self, fragment: int, direction: Direction) -> list[tuple[int, int]]:
        """Where lists of runs for the kernel lie, and how many runs each has; see MoveKernel."""
        step = max(1, PIECE_BYTES // fragment)
        key = (fragment, step, direction)
        if key not in self._lists:
            there, here = self._scattered(fragment)
            pinned = Pinned(len(there) * _RUN_WORDS * _WORD)
            self._kept.append(pinned)
            words: npt.NDArray[np.uint64] = np.frombuffer(pinned.bytes, np.uint64)
            target, source = self._ends(direction)
            found = self._lists[key] = []
            for begin in range(0, len(there), step):
                count = min(step, len(there) - begin)
                at, part = _RUN_WORDS * begin, slice(begin, begin + count)
                columns = words[at : at + _RUN_WORDS * count].reshape(_RUN_WORDS, count)
                columns[0] = here[part] + np.uint64(source)
                columns[1] = there[part] + np.uint64(target)
                columns[2] = fragment
                found.append((pinned.device_address + at * _WORD, count))
        return self._lists[key]

    def _scattered(self, fragment: int) -> Places:
        if fragment not in self._places:
            count = max(1, self.nbytes // fragment)
            rng = np.random.default_rng(0)
            there, here = (rng.permutation(count).astype(np.uint64) * fragment for _ in range(2))
            self._places[fragment] = there, here
        return self._places[fragment]

    def _ends(self, direction: Direction) -> tuple[int, int]:
        """Target and source."""
        if direction is Direction.LOAD:
            return self._device, self._host
        return self._host + self.nbytes, self._device + self.nbytes

    def _rate(self, enqueue: Callable[[], None], nbytes: int) -> float:
        self._gpu.wait()
        started = time.perf_counter()
        enqueue()
        self._gpu.wait()
        return nbytes / (time.perf_counter() - started) / 1e9
