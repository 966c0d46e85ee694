"""One lane under test: a small engine of one rank in a temporary namespace of its own.

What is known about its state is written down as it happens (`stored`, `loaded`,
`wrong`), so that the steps can prove what they did.
"""

import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvd_client.chunk_blocks import ChunkBlocks
from kvd_client.jobs import JobResult
from kvd_client.scheduler import Scheduler
from kvd_client.tickets import LoadTicket, StoreTicket
from kvd_client.worker import Worker
from kvd_proto.answers import LookupResult, StoreAnswer
from kvd_proto.layout import GroupSpec, RankLayout, TensorRef, TensorSpec
from kvd_proto.messages import Fingerprint
from kvd_tools.errors import StepFailed
from kvd_tools.selftest.blocks import Blocks, Bytes, make_blocks

CHUNKS = 16
BLOCKS_PER_CHUNK = 4
MAX_CHUNK_BYTES = 2**20
MIN_CHUNK_BYTES = 4096
POISON = 0xA5
ANSWER_SECONDS = 5.0
PATIENCE_SECONDS = 5.0  # until what was asked for can be seen
_LOOK_SECONDS = 0.005


def chunk_bytes_for(pool_bytes: int) -> int:
    """A thousandth of the pool, so that it takes next to nothing away, within bounds."""
    return min(max(pool_bytes // 1024 // 4096 * 4096, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)


class Bench:
    """What the steps of one lane share.

    Args:
        runtime_dir: the daemon's.
        device: the lane's, "host" or a CUDA device's name.
        observer: a scheduler's session without an engine, to ask for the daemon's status.
        pool_bytes: the size of the daemon's pool.
        timeout: seconds that the lane may take for anything.
    """

    def __init__(
        self,
        runtime_dir: Path,
        device: str,
        observer: Scheduler,
        pool_bytes: int,
        timeout: float,
    ) -> None:
        self.device = device
        self.timeout = timeout
        self.chunk_bytes = chunk_bytes_for(pool_bytes)
        self.engine = f"selftest-{os.getpid()}-{device}"
        seed = int.from_bytes(os.urandom(8))
        self.keys: Sequence[bytes] = [os.urandom(32) for _ in range(CHUNKS)]
        blocks = CHUNKS * BLOCKS_PER_CHUNK
        self.source = list(range(1, 1 + blocks))  # block 0 is never listed in a job
        self.destination = list(range(1 + blocks, 1 + 2 * blocks))
        random.Random(seed).shuffle(self.destination)  # so that no pattern helps
        generator = np.random.default_rng(seed)  # new bytes each time: an older run's are no proof
        block_bytes = self.chunk_bytes // BLOCKS_PER_CHUNK
        self.content: list[Bytes] = [
            generator.integers(0, 256, block_bytes, dtype=np.uint8) for _ in range(blocks)
        ]
        self.layout = RankLayout(
            num_blocks=1 + 2 * blocks,
            blocks_per_chunk=BLOCKS_PER_CHUNK,
            hash_block_size=16,
            storages=((1 + 2 * blocks) * block_bytes,),
            tensors=(
                TensorSpec(storage=0, offset=0, page_bytes=block_bytes, block_stride=block_bytes),
            ),
            groups=(GroupSpec(refs=(TensorRef(0, block_bytes),), block_size=16),),
        )
        self.blocks: Blocks | None = None
        self.namespace_id = ""
        self.stored: tuple[bytes, ...] = ()
        self.loaded: LoadTicket | None = None
        self.wrong: int | None = None
        # Jobs, each with the seconds from its submission to its end.
        self.samples: dict[str, list[tuple[JobResult, float]]] = {"store": [], "load": []}
        self._observer = observer
        self._job = 0
        self.scheduler = Scheduler(runtime_dir, self.engine, deadline=ANSWER_SECONDS)
        self.worker = Worker(
            runtime_dir, self.engine, 0, 1, deadline=ANSWER_SECONDS, job_timeout=timeout
        )

    # --------------------------------------------------------------- memory

    @property
    def memory(self) -> Blocks:
        """The blocks.

        Raises:
            StepFailed: they were never allocated.
        """
        if self.blocks is None:
            raise StepFailed("there is no memory to work with")
        return self.blocks

    def allocate(self) -> None:
        """Make the blocks on the device."""
        self.blocks = make_blocks(
            self.device, self.layout.num_blocks, self.chunk_bytes // BLOCKS_PER_CHUNK
        )

    def write(self, blocks: Sequence[int], content: Sequence[Bytes]) -> None:
        """Put these bytes into these blocks."""
        for block, data in zip(blocks, content, strict=True):
            self.memory.write(block, data)

    def poison(self, blocks: Sequence[int]) -> None:
        """Overwrite blocks with bytes that nobody stores."""
        data = np.full(self.memory.size, POISON, np.uint8)
        self.write(blocks, [data] * len(blocks))

    def unpoisoned(self, blocks: Sequence[int]) -> list[int]:
        """Return for each of the blocks how many of its bytes are not poison."""
        return [int((self.memory.read(block) != POISON).sum()) for block in blocks]

    def differences(self, blocks: Sequence[int]) -> int:
        """Bytes of blocks that are not what was stored, block for block."""
        return sum(
            int((self.memory.read(block) != data).sum())
            for block, data in zip(blocks, self.content, strict=False)
        )

    @property
    def used_source(self) -> list[int]:
        """The source blocks of the chunks that were stored."""
        return self.source[: len(self.stored) * BLOCKS_PER_CHUNK]

    @property
    def used_destination(self) -> list[int]:
        """The destination blocks of the chunks that were stored."""
        return self.destination[: len(self.stored) * BLOCKS_PER_CHUNK]

    # --------------------------------------------------------------- engine

    def register(self) -> None:
        """Become an engine with a temporary namespace that nobody else has."""
        self.worker.register(
            [self.memory.memory],
            self.layout,
            Fingerprint(model="kvd selftest", label=self.keys[0].hex()),
            temporary=True,
            required=True,
            timeout=self.timeout,
        )
        self.scheduler.wait_attached(self.timeout)
        self.worker.wait_attached(self.timeout)
        self.namespace_id = self.scheduler.namespace.hex()

    def store(self) -> None:
        """Store the source blocks as chunks; as many as the daemon takes."""
        ticket = self.scheduler.prepare_store(self.keys)
        if not ticket.served:
            raise StepFailed(self.why_refused())
        if not ticket.keys:
            raise StepFailed(self._why_not_one(ticket.answers))
        count = len(ticket.keys) * BLOCKS_PER_CHUNK
        result = self._move("store", ticket, self.source[:count])
        self.scheduler.complete_store(ticket, success=result.success)
        _check(result)
        self.stored = ticket.keys

    def load(self) -> None:
        """Load the stored chunks into the destination blocks."""
        with self.scheduler.prepare_load(self.stored) as ticket:
            if len(ticket) != len(self.stored):
                raise StepFailed(f"{len(ticket)} of {len(self.stored)} stored chunks are there")
            _check(self._move("load", ticket, self.used_destination))
        self.loaded = ticket

    def wait_until(self, what: Callable[[], bool]) -> bool:
        """Ask again and again, for some seconds; whether it came true."""
        end = time.monotonic() + PATIENCE_SECONDS
        while not (true := what()) and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
        return true

    def count(self, *answers: LookupResult) -> int:
        """Return for how many of the keys a lookup gives one of these answers."""
        return sum(answer in answers for answer in self.scheduler.lookup_many(self.keys))

    def ready(self) -> bool:
        """Whether every stored chunk can be loaded."""
        return self.count(LookupResult.HIT) == len(self.stored)

    def status(self) -> dict[str, Any]:
        """The daemon's state.

        Raises:
            StepFailed: it does not answer.
        """
        report = self._observer.status()
        if not report:
            raise StepFailed("the daemon does not answer any more")
        return report

    def own_namespace(self) -> dict[str, Any] | None:
        """The temporary namespace as the daemon reports it, while it is there."""
        namespaces = self.status()["namespaces"]
        return next((space for space in namespaces if space["id"] == self.namespace_id), None)

    def why_refused(self) -> str:
        """Return why the daemon takes no store now, in its own words."""
        report = self.status()
        draining = "is draining and " if report["draining"] else ""
        return f"the daemon {draining}refuses stores: {_not_ready(report) or 'no reason given'}"

    def _why_not_one(self, answers: Sequence[StoreAnswer]) -> str:
        if set(answers) != {StoreAnswer.FULL}:
            return f"the daemon takes no chunk: {', '.join(sorted({a.name for a in answers}))}"
        report = self.status()
        if not report["ready"]:
            return f"there is no room yet: {_not_ready(report)}"
        return (
            "the pool is full, and everything in it is pinned or being written, so that not even"
            " a thousandth of it may go; try again when engines are less busy"
        )

    def leave(self) -> None:
        """End the engine: the daemon drops its namespace and lets go of the memory."""
        self.worker.close()
        self.scheduler.close()

    def close(self) -> None:
        """Leave, and give the memory back."""
        self.leave()
        if self.blocks is not None:
            self.blocks.close()
            self.blocks = None

    def _move(
        self, kind: str, ticket: StoreTicket | LoadTicket, blocks: Sequence[int]
    ) -> JobResult:
        self._job += 1
        groups = [ChunkBlocks(ticket.keys, blocks)]
        started = time.perf_counter()
        if isinstance(ticket, StoreTicket):
            self.worker.store(self._job, ticket, groups)
        else:
            self.worker.load(self._job, ticket, groups)
        unfinished = self.worker.wait([self._job], self.timeout)
        latency = time.perf_counter() - started
        if unfinished:
            raise StepFailed(f"the job has not ended within {self.timeout:g} s")
        (result,) = self.worker.get_finished()
        if result.success:
            self.samples[kind].append((result, latency))
        return result

    def __repr__(self) -> str:
        return f"<Bench {self.device}: {len(self.stored)} of {len(self.keys)} chunks stored>"


def _check(result: JobResult) -> None:
    if not result.success:
        raise StepFailed(f"the job ended as {result.status}: {result.text}")


def _not_ready(report: dict[str, Any]) -> str:
    """Return the checks that are not ok."""
    return "; ".join(
        f"{check['name']}: {check['text']}" for check in report["checks"] if not check["ok"]
    )
