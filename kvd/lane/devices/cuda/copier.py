"""How a transfer's runs are moved: by the copy engine, the short ones by a kernel.

The copy engine is given a piece's runs in one call where driver and device take
it (`cuMemcpyBatchAsync`), else one by one. Which of the two is found out once, at
start, by copying a few bytes there and back.

Sources of stores are read in stream order only: the engine may reuse its blocks as
soon as the event after the copies is reached, not before, and reads ahead of the
stream could see what it has not yet computed. Sources of loads lie in the pool,
which nobody changes while the chunk is leased; they may be read in any order.
"""

import ctypes
import logging
import mmap
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from kvd.errors import CudaError, LaneError
from kvd.lane.devices.cuda import driver, ptx
from kvd.lane.devices.cuda.binding import Stream, is_lost
from kvd.lane.devices.cuda.cleanup import Cleanup
from kvd.lane.devices.cuda.driver import BatchCopy
from kvd.lane.devices.cuda.runs import Runs
from kvd.lane.devices.cuda.scratch import Scratch
from kvd.lane.devices.device import Direction

_log = logging.getLogger(__name__)

RUN_BYTES = 24
RUNS_PER_LIST = 4096
_BLOCKS = 8  # of the device's many: the engine keeps nearly all of them
_THREADS = 512


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


def choose_engine(scratch: Scratch, stream: Stream) -> CopyEngine:
    """The batch engine if a trial on scratch memory moves the right bytes, else the loop.

    Raises:
        CudaError: the device is lost, or what was tried does not end.
    """
    try:
        engine = BatchEngine(BatchCopy.find())
        right = moves_there_and_back(engine, scratch, stream)
    except CudaError as error:
        if is_lost(error):
            raise
        driver.wait_for_stream(stream)  # some of the copies may be on their way
        _log.info("copies are enqueued one by one: %s", error)
        return LoopEngine()
    if not right:
        _log.warning("copies are enqueued one by one: a batch did not move the right bytes")
        return LoopEngine()
    return engine


def moves_there_and_back(engine: CopyEngine, scratch: Scratch, stream: Stream) -> bool:
    """Whether an engine loads and stores the right bytes; waits for them.

    Raises:
        CudaError: it cannot.
    """
    data = (np.arange(scratch.nbytes) % 251).astype(np.uint8)
    runs = scratch.runs(nbytes=1000, count=2)
    scratch.bytes[:] = data
    engine.enqueue(runs, Direction.LOAD, stream)
    driver.wait_for_stream(stream)
    scratch.bytes[:] = 0
    engine.enqueue(runs, Direction.STORE, stream)
    driver.wait_for_stream(stream)
    wanted = np.zeros_like(data)
    for begin in scratch.host_offsets(runs):
        wanted[begin : begin + 1000] = data[begin : begin + 1000]
    return bool((scratch.bytes == wanted).all())


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
            module = driver.load_module(ptx.TEXT)
            self._cleanup.add(lambda: driver.unload_module(module))
            self._function = driver.find_function(module, ptx.FUNCTION)
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


class AwaitedKernel(CopyEngine):
    """The kernel alone, and waited for: to try it and to time it.

    Args:
        kernel: no list of which is in use.
    """

    def __init__(self, kernel: MoveKernel) -> None:
        self._kernel = kernel

    def enqueue(self, runs: Runs, direction: Direction, stream: Stream) -> None:
        """See CopyEngine."""
        number = self._kernel.take_list()
        if number is None:
            raise LaneError("the kernel's lists are all in use")
        self._kernel.enqueue(runs, direction, stream, number)
        driver.wait_for_stream(stream)
        self._kernel.give_back(number)


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
        """Let go of the kernel; nothing may be in flight."""
        if self.kernel is not None:
            self.kernel.close()

    def __repr__(self) -> str:
        return f"<Copier {type(self.engine).__name__}, {self.kernel!r}, {self.thresholds}>"
