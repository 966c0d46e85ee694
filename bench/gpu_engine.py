"""One rank in CUDA memory and its scheduler, through a real daemon: what moves, and how fast."""

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from gpu_device import Gpu, Piece
from harness import SECONDS, Engine, Ints, Served, fresh_keys, layout

from kvd.lane.cuda import driver
from kvd.lane.device import Direction
from kvd_client import JobBlocks
from kvd_client.memory import DeviceMemory
from kvd_client.tickets import LoadTicket, StoreTicket
from kvd_proto.expand import Expander

TENSORS, BLOCKS_PER_CHUNK = 2, 16
JOB_BYTES = 32 * 2**20


def chunks_for(fragment: int, nbytes: int) -> int:
    """How many chunks come nearest to `nbytes` from below; at least one."""
    return max(1, nbytes // (fragment * TENSORS * BLOCKS_PER_CHUNK))


def pool_bytes(fragment: int, nbytes: int) -> int:
    """A pool for what is stored while as much is loaded, and as much again."""
    return 3 * chunks_for(fragment, nbytes) * fragment * TENSORS * BLOCKS_PER_CHUNK


class GpuEngine(Engine):
    """Moves `chunks` chunks at a time, in jobs of about 32 MiB; blocks in random order.

    Args:
        gpu: where its KV memory is.
        daemon: with a pool of `pool_bytes`.
        fragment: bytes of a page: what lies in one place on both sides.
        nbytes: to move at a time, about.
    """

    def __init__(self, gpu: Gpu, daemon: Served, fragment: int, nbytes: int) -> None:
        self._gpu = gpu
        self._fragment = fragment
        self.chunks = chunks_for(fragment, nbytes)
        self.nbytes = self.chunks * fragment * TENSORS * BLOCKS_PER_CHUNK
        half = self.chunks * BLOCKS_PER_CHUNK
        shape = layout(TENSORS, fragment, 2 * half + 1, BLOCKS_PER_CHUNK)  # block 0 is null
        rng = np.random.default_rng(fragment)
        self._blocks = {
            Direction.STORE: 1 + rng.permutation(half),
            Direction.LOAD: 1 + half + rng.permutation(half),
        }
        self.device_bytes = shape.storages[0]
        self._address = driver.allocate(self.device_bytes)
        # The period divides no page, so that all pages differ.
        pattern = rng.integers(0, 256, 2**22 - 3, np.uint8)
        for begin in range(0, self.device_bytes, len(pattern)):
            gpu.write(self._address + begin, pattern[: self.device_bytes - begin])
        memory = DeviceMemory.at(self._address, self.device_bytes)
        super().__init__(daemon.runtime_dir, shape, memory)
        daemon.wait_usable(SECONDS)

    def move(
        self, load: list[bytes] | None = None, *, store: bool = False
    ) -> tuple[list[bytes], float]:
        """Load these chunks into other blocks, store everything under new keys, or both at once.

        Returns:
            The new keys, and GB/s from the first submission to the last end that is seen.
        """
        fresh = fresh_keys(self.chunks) if store else []
        tickets: list[StoreTicket | LoadTicket] = []
        tickets += [self.find(load)] if load else []
        tickets += [self.offer(fresh)] if store else []
        started = time.perf_counter()
        self.finish(*(self._submit(t, part) for part in self._jobs() for t in tickets))
        gbps = len(tickets) * self.nbytes / (time.perf_counter() - started) / 1e9
        if isinstance(tickets[0], LoadTicket):
            self.scheduler.complete_load(tickets[0])
        self.stored(fresh)
        return fresh, gbps

    def load_one(self, key: bytes) -> float:
        """Microseconds from submission to seen finished of a job that loads one chunk."""
        with self.find([key]) as ticket:
            started = time.perf_counter()
            self.finish(self._submit(ticket, slice(0, 1)))
            return (time.perf_counter() - started) * 1e6

    def pieces(self, direction: Direction) -> list[Piece]:
        """What `move` copies, a job each, if chunks lie one after another in the host memory."""
        expander, pieces = Expander(self.layout), []
        for part in self._jobs():
            slots = np.arange(part.start, part.stop)
            blocks = self._blocks_of(direction, part)
            job = JobBlocks.of(blocks, [len(blocks)], [0], slots, slots)
            _, *columns = expander.expand(job).columns
            offsets, host, sizes = (column.astype(np.uint64) for column in columns)
            pieces.append((offsets + np.uint64(self._address), host, sizes))
        return pieces

    def check(self) -> None:
        """Fail unless what was loaded is what was stored.

        Raises:
            RuntimeError: it is not.
        """
        size = self.device_bytes // TENSORS
        for tensor in range(TENSORS):
            data = self._gpu.read(self._address + tensor * size, size)
            pages = data.reshape(self.layout.num_blocks, self._fragment)
            stored, loaded = (self._blocks[way] for way in (Direction.STORE, Direction.LOAD))
            if not np.array_equal(pages[stored], pages[loaded]):
                raise RuntimeError(f"{self._fragment} bytes: loaded is not what was stored")

    def _jobs(self) -> Iterator[slice]:
        """The chunks of each job."""
        step = max(1, self.chunks * JOB_BYTES // self.nbytes)
        for begin in range(0, self.chunks, step):
            yield slice(begin, min(begin + step, self.chunks))

    def _blocks_of(self, direction: Direction, chunks: slice) -> Ints:
        begin, end = chunks.start * BLOCKS_PER_CHUNK, chunks.stop * BLOCKS_PER_CHUNK
        return self._blocks[direction][begin:end]

    def _submit(self, ticket: StoreTicket | LoadTicket, chunks: slice) -> int:
        direction = Direction.STORE if isinstance(ticket, StoreTicket) else Direction.LOAD
        stream = int(self._gpu.streams[direction])  # type: ignore[call-overload]  # a number
        slots, generations = ticket.slots[chunks], ticket.generations[chunks]
        part = replace(ticket, slots=slots, generations=generations)
        blocks = self._blocks_of(direction, chunks)
        return self.submit(part, blocks, self.worker.timeline.signal_on(stream))

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        driver.free(self._address)
