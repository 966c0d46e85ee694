"""The kernel for short runs, and the lists of runs that it reads."""

import ctypes
import mmap
from pathlib import Path

import numpy as np

from kvd.lane.devices.cuda import driver
from kvd.lane.devices.cuda.driver import Stream, Undo
from kvd.lane.devices.cuda.moves import DEVICE, HOST, NBYTES, Runs
from kvd.lane.devices.device import Direction

KERNEL = Path(__file__).with_name("kernel.ptx")
RING_RUNS = 32768  # of each direction; four pieces of 32 MiB in runs of 4 KiB
BLOCKS = 16
_THREADS = 256  # 8 warps a block, so 128 runs on their way at a time
_COLUMNS = 3
_WORD = 8


class Ring:
    """Room for lists, given back in the order in which it was taken.

    One thread takes and one gives back, without a lock.
    """

    def __init__(self, words: int) -> None:
        self._words = words
        self._taken = self._given = 0

    def take(self, words: int) -> tuple[int, int] | None:
        """Where so many words lie side by side, and what to give back; None: not now."""
        at = self._taken % self._words
        skipped = 0 if at + words <= self._words else self._words - at
        taken = skipped + words
        if self._taken + taken - self._given > self._words:
            return None
        self._taken += taken
        return (at + skipped) % self._words, taken

    def give_back(self, words: int) -> None:
        """What was taken first is read no more."""
        self._given += words


class MoveKernel:
    """The kernel, with lists in pinned memory.

    A list must stay as it is until its kernel has ended.

    Args:
        blocks: of a launch, at most.
        undo: unloads it; none may be in flight then.

    Raises:
        CudaError: it cannot be loaded here.
    """

    def __init__(self, blocks: int, undo: Undo) -> None:
        words = RING_RUNS * _COLUMNS
        self._memory = mmap.mmap(-1, len(Direction) * words * _WORD)
        lists = np.frombuffer(self._memory, np.uint64)
        address = lists.ctypes.data
        driver.register_host(address, len(self._memory))
        undo.add(driver.unregister_host, address)
        begin = driver.device_address(address)
        self._lists = dict(zip(Direction, lists.reshape(len(Direction), words), strict=True))
        self._begins = {way: begin + i * words * _WORD for i, way in enumerate(Direction)}
        self._rings = {way: Ring(words) for way in Direction}
        self._blocks = blocks
        self._function = driver.load_kernel(KERNEL.read_bytes(), "kvd_move", undo)

    def enqueue(self, runs: Runs, direction: Direction, stream: Stream, taken: list[int]) -> bool:
        """Enqueue runs, if there is room for a list of them; whether there was.

        What of it must be given back when they have ended is added to `taken`.

        Raises:
            CudaError: nothing was enqueued.
        """
        words = _COLUMNS * len(runs)
        room = self._rings[direction].take(words)
        if room is None:
            return False
        at, used = room
        taken.append(used)
        mine = self._lists[direction][at : at + words].reshape(_COLUMNS, len(runs))
        store = direction is Direction.STORE
        # As the kernel reads them: sources, targets, lengths.
        np.take(runs.table, (DEVICE, HOST, NBYTES) if store else (HOST, DEVICE, NBYTES), 0, mine)
        driver.launch(
            self._function,
            blocks=min(self._blocks, len(runs)),
            threads=_THREADS,
            values=(self._begins[direction] + at * _WORD, len(runs)),
            types=(ctypes.c_uint64, ctypes.c_uint32),
            stream=stream,
        )
        return True

    def at_once(self, runs: Runs, direction: Direction, stream: Stream) -> None:
        """Enqueue runs and wait for them; nothing else is in flight.

        Raises:
            CudaError: some may have been enqueued.
        """
        taken: list[int] = []
        try:
            self.enqueue(runs, direction, stream, taken)
            driver.wait_for_stream(stream)
        finally:
            self.give_back(direction, taken)

    def give_back(self, direction: Direction, taken: list[int]) -> None:
        """The runs for which `enqueue` took this have ended, and all before them."""
        if taken:
            self._rings[direction].give_back(sum(taken))
