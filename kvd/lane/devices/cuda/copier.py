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
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvd.lane.devices.cuda import driver
from kvd.lane.devices.cuda.driver import Addresses, BatchCopy, Stream, Undo
from kvd.lane.devices.device import Direction

KERNEL = Path(__file__).with_name("kernel.ptx")
RUN_BYTES = 24
RUNS_PER_LIST = 4096
RUN_LISTS = 64
_BLOCKS = 16
_THREADS = 256  # 8 warps, so that 128 runs are on their way


@dataclass(frozen=True, slots=True)
class Runs:
    """Byte ranges by address: uint64[n] each.

    kernel_shift: what is added to the host side's address for a kernel to find it.
    """

    host: Addresses
    device: Addresses
    nbytes: Addresses
    kernel_shift: Addresses

    def select(self, which: npt.NDArray[np.bool_]) -> "Runs":
        """Some of them."""
        return Runs(
            self.host[which], self.device[which], self.nbytes[which], self.kernel_shift[which]
        )

    def __len__(self) -> int:
        return len(self.nbytes)


class MoveKernel:
    """The kernel for short runs, with its lists of runs in pinned memory.

    A list must stay as it is until the kernel has ended; so each launch has one of its own.

    Args:
        undo: unloads it; none may be in flight then.

    Raises:
        CudaError: it cannot be loaded here.
    """

    def __init__(self, undo: Undo) -> None:
        self._memory = mmap.mmap(-1, RUN_LISTS * RUNS_PER_LIST * RUN_BYTES)
        words = np.frombuffer(self._memory, np.uint64)
        address = words.ctypes.data
        driver.register_host(address, len(self._memory))
        undo.add(driver.unregister_host, address)
        self._kernel_address = driver.device_address(address)
        self._function = driver.load_kernel(KERNEL.read_bytes(), "kvd_move", undo)
        self._lists = words.reshape(RUN_LISTS, 3 * RUNS_PER_LIST)
        self._free = list(range(RUN_LISTS))

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
        mine = self._lists[number, : 3 * len(runs)].reshape(3, len(runs))
        store = direction is Direction.STORE
        mine[0], mine[1] = (runs.device, host) if store else (host, runs.device)
        mine[2] = runs.nbytes
        driver.launch(
            self._function,
            blocks=min(_BLOCKS, len(runs)),
            threads=_THREADS,
            values=(self._kernel_address + number * RUNS_PER_LIST * RUN_BYTES, len(runs)),
            types=(ctypes.c_uint64, ctypes.c_uint32),
            stream=stream,
        )


@dataclass(repr=False)
class Copier:
    """Moves runs, each the way that is faster for its length.

    batch: None where runs are enqueued one by one.
    below: runs shorter than this many bytes go by the kernel.
    """

    batch: BatchCopy | None
    kernel: MoveKernel | None = None
    below: Mapping[Direction, int] = field(default_factory=dict)

    def by_engine(self, runs: Runs, direction: Direction, stream: Stream) -> None:
        """Enqueue all runs for the copy engine.

        Raises:
            CudaError: some may have been enqueued.
        """
        store = direction is Direction.STORE
        targets, sources = (runs.host, runs.device) if store else (runs.device, runs.host)
        if self.batch is not None:
            self.batch.enqueue(targets, sources, runs.nbytes, stream, source_in_any_order=not store)
            return
        columns = (targets.tolist(), sources.tolist(), runs.nbytes.tolist())
        for target, source, nbytes in zip(*columns, strict=True):
            driver.copy(target, source, nbytes, stream)

    def enqueue(self, runs: Runs, direction: Direction, stream: Stream, lists: list[int]) -> None:
        """Enqueue all runs, the short ones by the kernel where it has a list for them.

        The list's number is added to `lists`, to be given back when the runs have ended.

        Raises:
            CudaError: some may have been enqueued.
        """
        short = runs.nbytes < self.below.get(direction, 0)
        if self.kernel is not None and short.any():
            number = self.kernel.take_list()
            if number is not None:
                lists.append(number)
                # What does not fit the list goes the other way.
                short &= np.cumsum(short) <= RUNS_PER_LIST
                self.kernel.enqueue(runs.select(short), direction, stream, number)
                runs = runs.select(~short)
        if len(runs):
            self.by_engine(runs, direction, stream)

    def give_back(self, lists: list[int]) -> None:
        """The runs for which `enqueue` took these lists have ended."""
        if self.kernel is not None:
            for number in lists:
                self.kernel.give_back(number)

    def __repr__(self) -> str:
        way = "in batches" if self.batch else "one by one"
        below = ", ".join(f"{way} below {n} bytes" for way, n in self.below.items())
        return f"copies are enqueued {way}, by the kernel: {below or 'none'}"
