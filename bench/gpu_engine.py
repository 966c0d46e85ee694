"""One rank in CUDA memory and its scheduler, through a real daemon: what moves, and how fast."""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
from gpu_device import Gpu
from harness import Daemon, engine_name, fresh_keys

from kvd.lane.devices.cuda import driver
from kvd.lane.devices.device import Direction
from kvd_client.cuda_memory import DeviceMemory
from kvd_client.scheduler import Scheduler
from kvd_client.worker import Worker
from kvd_proto.directory import LookupResult
from kvd_proto.layout import GroupSpec, RankLayout, TensorRef, TensorSpec
from kvd_proto.messages import Fingerprint

TENSORS, BLOCKS_PER_CHUNK = 2, 16
JOB_BYTES = 32 * 2**20
SECONDS = 60.0

Ints = npt.NDArray[np.int64]


class Move(NamedTuple):
    """Chunks to move: their blocks, slots and generations."""

    blocks: Ints
    slots: Ints
    generations: Ints


def make_layout(fragment: int, blocks: int) -> RankLayout:
    """Tensors of `blocks` pages of `fragment` bytes in one storage, one group."""
    size = blocks * fragment
    return RankLayout(
        num_blocks=blocks,
        blocks_per_chunk=BLOCKS_PER_CHUNK,
        hash_block_size=16,
        storages=(TENSORS * size,),
        tensors=tuple(
            TensorSpec(storage=0, offset=i * size, page_bytes=fragment, block_stride=fragment)
            for i in range(TENSORS)
        ),
        groups=(
            GroupSpec(
                refs=tuple(TensorRef(tensor=i, page_bytes=fragment) for i in range(TENSORS)),
                block_size=16,
            ),
        ),
    )


def chunks_for(fragment: int, nbytes: int) -> int:
    """How many chunks come nearest to `nbytes` from below; at least one."""
    return max(1, nbytes // (fragment * TENSORS * BLOCKS_PER_CHUNK))


def pool_bytes(fragment: int, nbytes: int) -> int:
    """A pool for what is stored while as much is loaded, and as much again."""
    return 3 * chunks_for(fragment, nbytes) * fragment * TENSORS * BLOCKS_PER_CHUNK


class Engine:
    """Moves `chunks` chunks at a time, in jobs of about 32 MiB; blocks in random order.

    Args:
        gpu: where its KV memory is.
        daemon: with a pool of `pool_bytes`.
        fragment: bytes of a page: what lies in one place on both sides.
        nbytes: to move at a time, about.
    """

    def __init__(self, gpu: Gpu, daemon: Daemon, fragment: int, nbytes: int) -> None:
        self._gpu = gpu
        self._fragment = fragment
        self._job = 0
        self.chunks = chunks_for(fragment, nbytes)
        self.nbytes = self.chunks * fragment * TENSORS * BLOCKS_PER_CHUNK
        half = self.chunks * BLOCKS_PER_CHUNK
        self._num_blocks = 2 * half + 1  # block 0 is the engine's null block
        layout = make_layout(fragment, self._num_blocks)
        rng = np.random.default_rng(fragment)
        self._from = 1 + rng.permutation(half)
        self._to = 1 + half + rng.permutation(half)
        self._size = self.device_bytes = layout.storages[0]
        self._address = driver.allocate(self._size)
        # The period divides no page, so that all pages differ.
        pattern = rng.integers(0, 256, 2**22 - 3, np.uint8)
        for begin in range(0, self._size, len(pattern)):
            gpu.write(self._address + begin, pattern[: self._size - begin])
        memory = DeviceMemory.at(self._address, self._size)
        name = engine_name()
        self.worker = Worker(daemon.runtime_dir, name, 0, 1)
        self.scheduler = Scheduler(daemon.runtime_dir, name)
        self.worker.register([memory], layout, Fingerprint(model="bench-gpu"), required=True)
        memory.close()
        if not self.worker.wait_attached(SECONDS) or not self.scheduler.wait_attached(SECONDS):
            raise RuntimeError("the engine does not become complete")
        daemon.wait_usable(SECONDS)

    def store(self) -> tuple[list[bytes], float]:
        """Store everything under new keys: the keys, GB/s."""
        keys = fresh_keys(self.chunks)
        gbps = self._run({Direction.STORE: self._stores(keys)})
        self._complete(keys)
        return keys, gbps

    def load(self, keys: list[bytes]) -> float:
        """Load these chunks into other blocks: GB/s."""
        ticket = self.scheduler.prepare_load(keys)
        gbps = self._run({Direction.LOAD: Move(self._to, ticket.slots, ticket.generations)})
        self.scheduler.complete_load(ticket)
        return gbps

    def both(self, keys: list[bytes]) -> tuple[list[bytes], float]:
        """Load these chunks while others are stored: their keys, GB/s of both together."""
        ticket = self.scheduler.prepare_load(keys)
        fresh = fresh_keys(self.chunks)
        gbps = self._run(
            {
                Direction.LOAD: Move(self._to, ticket.slots, ticket.generations),
                Direction.STORE: self._stores(fresh),
            }
        )
        self.scheduler.complete_load(ticket)
        self._complete(fresh)
        return fresh, gbps

    def one_chunk(self, direction: Direction, keys: list[bytes]) -> list[float]:
        """Microseconds from submission to seen finished of one job for each key."""
        took = []
        for key in keys:
            if direction is Direction.STORE:
                move, ticket = self._stores([key]), None
            else:
                ticket = self.scheduler.prepare_load([key])
                move = Move(self._to, ticket.slots, ticket.generations)
            started = time.perf_counter()
            self._finish([self._submit(direction, move, 0, 1)])
            took.append((time.perf_counter() - started) * 1e6)
            if ticket is None:
                self._complete([key])
            else:
                self.scheduler.complete_load(ticket)
        return took

    def check(self) -> None:
        """Fail unless what was loaded is what was stored.

        Raises:
            RuntimeError: it is not.
        """
        size = self._size // TENSORS
        for tensor in range(TENSORS):
            data = self._gpu.read(self._address + tensor * size, size)
            pages = data.reshape(self._num_blocks, self._fragment)
            if not np.array_equal(pages[self._from], pages[self._to]):
                raise RuntimeError(f"{self._fragment} bytes: loaded is not what was stored")

    def close(self) -> None:
        """End both sessions and free the memory."""
        self.scheduler.close()
        self.worker.close()
        driver.free(self._address)

    def _stores(self, keys: list[bytes]) -> Move:
        ticket = self.scheduler.prepare_store(keys)
        if len(ticket) != len(keys):
            raise RuntimeError(f"{ticket!r}: all keys are needed")
        return Move(self._from, ticket.slots, ticket.generations)

    def _complete(self, keys: list[bytes]) -> None:
        self.scheduler.complete_store(keys)
        end = time.monotonic() + SECONDS
        while set(self.scheduler.lookup_many(keys)) != {LookupResult.HIT}:
            if time.monotonic() > end:
                raise RuntimeError("what was stored is not found")
            self.scheduler.status()

    def _run(self, moves: Mapping[Direction, Move]) -> float:
        """Do all of it; GB/s from the first submission to the last end that is seen."""
        for move in moves.values():
            if len(move.slots) != self.chunks:
                raise RuntimeError(f"{len(move.slots)} of {self.chunks} chunks are there")
        step = max(1, self.chunks * JOB_BYTES // self.nbytes)
        started = time.perf_counter()
        self._finish(
            [
                self._submit(direction, move, begin, min(begin + step, self.chunks))
                for begin in range(0, self.chunks, step)
                for direction, move in moves.items()
            ]
        )
        return len(moves) * self.nbytes / (time.perf_counter() - started) / 1e9

    def _submit(self, direction: Direction, move: Move, begin: int, end: int) -> int:
        store = direction is Direction.STORE
        submit = self.worker.submit_store if store else self.worker.submit_load
        stream = int(self._gpu.streams[direction])  # type: ignore[call-overload]  # a number
        blocks = move.blocks[begin * BLOCKS_PER_CHUNK : end * BLOCKS_PER_CHUNK]
        self._job += 1
        submit(
            self._job,
            blocks,
            [len(blocks)],
            [0],
            move.slots[begin:end],
            move.generations[begin:end],
            after=self.worker.timeline.signal_on(stream),
        )
        return self._job

    def _finish(self, jobs: list[int]) -> None:
        self.worker.wait(jobs, SECONDS)
        results = {result.job_id: result for result in self.worker.get_finished()}
        for job in jobs:
            if job not in results or not results[job].success:
                raise RuntimeError(f"job {job} failed: {results.get(job)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
