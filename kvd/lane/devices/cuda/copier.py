"""How a transfer's runs are moved: by the copy engine, the short ones by a kernel.

The copy engine is given a piece's runs in one call where driver and device take
it (`cuMemcpyBatchAsync`), else one by one.

Sources of stores are read in stream order only: the engine may reuse its blocks as
soon as the event after the copies is reached, not before, and reads ahead of the
stream could see what it has not yet computed. Sources of loads lie in the pool,
which does not change while the chunk is leased; they may be read in any order.
"""

import ctypes
import mmap
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvd.lane.devices.cuda import driver
from kvd.lane.devices.cuda.binding import Cleanup, Stream
from kvd.lane.devices.cuda.driver import Addresses, BatchCopy
from kvd.lane.devices.device import Direction

KERNEL = Path(__file__).with_name("kernel.ptx")
RUN_BYTES = 24
RUNS_PER_LIST = 4096
_BLOCKS = 8  # of the device's many: the engine keeps nearly all of them
_THREADS = 512


@dataclass(frozen=True, slots=True)
class Runs:
    """Byte ranges by address: uint64[n] each.

    kernel_shift: what is added to the host side's address for a kernel to find it.
    """

    host: Addresses
    device: Addresses
    nbytes: Addresses
    kernel_shift: Addresses

    def ends(self, direction: Direction) -> tuple[Addresses, Addresses]:
        """Targets and sources."""
        if direction is Direction.STORE:
            return self.host, self.device
        return self.device, self.host

    def select(self, which: npt.NDArray[np.bool_]) -> "Runs":
        """Some of them."""
        return Runs(
            self.host[which], self.device[which], self.nbytes[which], self.kernel_shift[which]
        )

    def __len__(self) -> int:
        return len(self.nbytes)


class CopyEngine(ABC):
    """Enqueues copies between pinned host memory and device memory."""

    @abstractmethod
    def enqueue(self, runs: Runs, direction: Direction, stream: Stream) -> None:
        """Enqueue all runs.

        Raises:
            CudaError: some may have been enqueued.
        """


@dataclass(frozen=True, slots=True)
class BatchEngine(CopyEngine):
    """All runs in one call."""

    batch: BatchCopy

    def enqueue(self, runs: Runs, direction: Direction, stream: Stream) -> None:
        """See CopyEngine."""
        targets, sources = runs.ends(direction)
        self.batch.enqueue(
            targets,
            sources,
            runs.nbytes,
            stream,
            source_in_any_order=direction is Direction.LOAD,
        )


class LoopEngine(CopyEngine):
    """One call per run; sources are read in stream order both ways."""

    def enqueue(self, runs: Runs, direction: Direction, stream: Stream) -> None:
        """See CopyEngine."""
        targets, sources = runs.ends(direction)
        columns = (targets.tolist(), sources.tolist(), runs.nbytes.tolist())
        for target, source, nbytes in zip(*columns, strict=True):
            driver.copy(target, source, nbytes, stream)


class MoveKernel:
    """The kernel for short runs, with its lists of runs in pinned memory.

    A list must stay as it is until the kernel has ended; so each launch has one of its own.

    Args:
        lists: how many launches may be in flight.

    Raises:
        CudaError: it cannot be loaded here.
    """

    def __init__(self, lists: int) -> None:
        nbytes = lists * RUNS_PER_LIST * RUN_BYTES
        self._memory = mmap.mmap(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        words = np.frombuffer(self._memory, np.uint64, nbytes // 8)
        address = words.ctypes.data
        self._cleanup = Cleanup()
        with self._cleanup.on_failure():
            driver.register_host(address, len(self._memory))
            self._cleanup.add(lambda: driver.unregister_host(address))
            self._kernel_address = driver.device_address(address)
            module = driver.load_module(KERNEL.read_bytes())
            self._cleanup.add(lambda: driver.unload_module(module))
            self._function = driver.find_function(module, "kvd_move")
        self._lists = words.reshape(lists, RUNS_PER_LIST, 3)
        self._free = list(range(lists))

    def take_list(self) -> int | None:
        """A list for one launch, or None where all are in use."""
        return self._free.pop() if self._free else None

    def give_back(self, number: int) -> None:
        """The launch that used this list has ended."""
        self._free.append(number)

    def enqueue(self, runs: Runs, direction: Direction, stream: Stream, number: int) -> None:
        """Enqueue at most RUNS_PER_LIST runs, by way of list `number`.

        Raises:
            CudaError: nothing was enqueued.
        """
        host = runs.host + runs.kernel_shift
        mine = self._lists[number, : len(runs)]
        store = direction is Direction.STORE
        mine[:, 0], mine[:, 1] = (runs.device, host) if store else (host, runs.device)
        mine[:, 2] = runs.nbytes
        driver.launch(
            self._function,
            blocks=min(_BLOCKS, len(runs)),
            threads=_THREADS,
            values=(self._kernel_address + number * RUNS_PER_LIST * RUN_BYTES, len(runs)),
            types=(ctypes.c_uint64, ctypes.c_uint32),
            stream=stream,
        )

    def close(self) -> None:
        """Unload it; none may be in flight.

        Raises:
            CudaError: the driver refuses.
        """
        self._cleanup.run()

    def __repr__(self) -> str:
        return f"<MoveKernel {len(self._free)} of {len(self._lists)} lists free>"


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Runs shorter than this many bytes go by the kernel; 0: none do."""

    load: int = 0
    store: int = 0

    def of(self, direction: Direction) -> int:
        """For one direction."""
        return self.load if direction is Direction.LOAD else self.store


class Copier:
    """Moves runs, each the way that is faster for its length."""

    def __init__(
        self, engine: CopyEngine, kernel: MoveKernel | None, thresholds: Thresholds
    ) -> None:
        self.engine = engine
        self.kernel = kernel
        self.thresholds = thresholds

    def take_list(self, runs: Runs, direction: Direction) -> int | None:
        """A list of the kernel's for these runs, if they have short ones and one is free."""
        if self.kernel is None or not (runs.nbytes < self.thresholds.of(direction)).any():
            return None
        return self.kernel.take_list()

    def give_back(self, number: int | None) -> None:
        """The runs for which `take_list` gave this list have ended."""
        if self.kernel is not None and number is not None:
            self.kernel.give_back(number)

    def enqueue(self, runs: Runs, direction: Direction, stream: Stream, number: int | None) -> None:
        """Enqueue all runs; the short ones by the kernel where there is a list for them.

        Raises:
            CudaError: some may have been enqueued.
        """
        if self.kernel is not None and number is not None:
            short = runs.nbytes < self.thresholds.of(direction)
            # What does not fit the list goes the other way.
            short &= np.cumsum(short) <= RUNS_PER_LIST
            self.kernel.enqueue(runs.select(short), direction, stream, number)
            runs = runs.select(~short)
        if len(runs):
            self.engine.enqueue(runs, direction, stream)

    def close(self) -> None:
        """Unload the kernel; nothing may be in flight."""
        if self.kernel is not None:
            self.kernel.close()

    def __repr__(self) -> str:
        return f"<Copier {type(self.engine).__name__}, {self.kernel!r}, {self.thresholds}>"
