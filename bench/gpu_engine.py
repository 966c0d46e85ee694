"""One rank in CUDA memory and its scheduler, through a real daemon: what moves, and how fast."""

import time
from dataclasses import replace

import numpy as np
from gpu_device import Gpu
from harness import SECONDS, Engine, Ints, Served, fresh_keys, layout

from kvd.lane.devices.cuda import driver
from kvd.lane.devices.device import Direction
from kvd_client.cuda_memory import DeviceMemory
from kvd_client.tickets import LoadTicket, StoreTicket

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
        self._from = 1 + rng.permutation(half)
        self._to = 1 + half + rng.permutation(half)
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
        step = max(1, self.chunks * JOB_BYTES // self.nbytes)
        started = time.perf_counter()
        self.finish(
            *(
                self._submit(ticket, begin, min(begin + step, self.chunks))
                for begin in range(0, self.chunks, step)
                for ticket in tickets
            )
        )
        gbps = len(tickets) * self.nbytes / (time.perf_counter() - started) / 1e9
        if isinstance(tickets[0], LoadTicket):
            self.scheduler.complete_load(tickets[0])
        self.stored(fresh)
        return fresh, gbps

    def one_chunk(self, keys: list[bytes], *, store: bool) -> list[float]:
        """Microseconds from submission to seen finished of one job for each key."""
        took = []
        for key in keys:
            with self.offer([key]) if store else self.find([key]) as ticket:
                started = time.perf_counter()
                self.finish(self._submit(ticket, 0, 1))
                took.append((time.perf_counter() - started) * 1e6)
            self.stored([key] if store else [])
        return took

    def check(self) -> None:
        """Fail unless what was loaded is what was stored.

        Raises:
            RuntimeError: it is not.
        """
        size = self.device_bytes // TENSORS
        for tensor in range(TENSORS):
            data = self._gpu.read(self._address + tensor * size, size)
            pages = data.reshape(self.layout.num_blocks, self._fragment)
            if not np.array_equal(pages[self._from], pages[self._to]):
                raise RuntimeError(f"{self._fragment} bytes: loaded is not what was stored")

    def _submit(self, ticket: StoreTicket | LoadTicket, begin: int, end: int) -> int:
        direction, blocks = Direction.LOAD, self._to
        if isinstance(ticket, StoreTicket):
            direction, blocks = Direction.STORE, self._from
        stream = int(self._gpu.streams[direction])  # type: ignore[call-overload]  # a number
        part = slice(begin, end)
        ticket = replace(ticket, slots=ticket.slots[part], generations=ticket.generations[part])
        chosen: Ints = blocks[begin * BLOCKS_PER_CHUNK : end * BLOCKS_PER_CHUNK]
        return self.submit(ticket, chosen, self.worker.timeline.signal_on(stream))

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        driver.free(self._address)
