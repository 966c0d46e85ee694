"""A small engine for tests: two groups, one a sliding window; content derived from the key."""

import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvd_client import (
    Fingerprint,
    GroupSpec,
    HostMemory,
    JobBlocks,
    JobResult,
    Load,
    LookupResult,
    RankLayout,
    Scheduler,
    Store,
    StoreAnswer,
    StoreTicket,
    TensorRef,
    Worker,
)
from kvd_proto.descriptions import Description
from tests.daemon.serving import Daemon
from tests.layouts import flat_layout
from tests.waiting import DEADLINE, PATIENCE, eventually

PAGE = 4096
BLOCKS = 64
FACTOR = 2
TENSORS = 2
POISON = 0xEE


def make_layout(*, blocks: int = BLOCKS, page: int = PAGE, replicated: bool = False) -> RankLayout:
    """Two tensors in two storages; group 0 uses both, group 1 the second only."""
    refs = (TensorRef(0, page), TensorRef(1, page))
    groups = (GroupSpec(refs, 16), GroupSpec(refs[1:], 16, "window", 64))
    return flat_layout(
        page, page, blocks=blocks, factor=FACTOR, groups=groups, replicated=replicated
    )


def content(
    key: bytes, rank: int, tensor: int, inside: int, page: int = PAGE
) -> npt.NDArray[np.uint8]:
    """The bytes of one page: different for every key, rank, tensor and block."""
    seed = zlib.crc32(key + bytes((rank, tensor, inside)))
    return np.random.default_rng(seed).integers(0, 256, page, dtype=np.uint8)


@dataclass
class Engine:
    """A scheduler and its workers in this process, each with memory of its own."""

    runtime_dir: Path
    name: str = "engine"
    world_size: int = 2
    model: str = "model"
    layout: RankLayout = field(default_factory=make_layout)
    ranks: Sequence[int] | None = None
    deadline: float = DEADLINE
    steps: bool = False
    events: bool = False
    counts_tokens: bool = False

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(
            self.runtime_dir,
            self.name,
            deadline=self.deadline,
            counts_tokens=self.counts_tokens,
            steps=self.steps,
            events=self.events,
        )
        self.workers: dict[int, Worker] = {}
        self.memory: dict[int, list[HostMemory]] = {}
        self.job = 0
        for rank in range(self.world_size) if self.ranks is None else self.ranks:
            self.add(rank)

    def add(self, rank: int) -> None:
        """Register one rank."""
        worker = self.workers[rank] = Worker(
            self.runtime_dir, self.name, rank, self.world_size, deadline=self.deadline
        )
        self.memory[rank] = [HostMemory.allocate(size) for size in self.layout.storages]
        worker.register(self.memory[rank], self.layout, Fingerprint(model=self.model))

    def wait_attached(self, to: Daemon | None = None) -> Self:
        """Until every rank is attached; `to` this daemon, where another one served before."""
        if to is not None:
            pid = to.status()["pid"]
            wait_served_by(self.scheduler, pid)
            for worker in self.workers.values():
                wait_served_by(worker, pid)
        assert self.scheduler.wait_attached(PATIENCE), self.scheduler
        for worker in self.workers.values():
            assert worker.wait_attached(PATIENCE), worker
        return self

    def page(self, rank: int, tensor: int, block: int) -> npt.NDArray[np.uint8]:
        """One page of a rank's memory."""
        size = self.layout.tensors[tensor].page_bytes
        array: npt.NDArray[np.uint8] = self.memory[rank][tensor].array[
            block * size : (block + 1) * size
        ]
        return array

    def blocks_of(self, keys: Sequence[bytes], first_block: int) -> list[int]:
        """Blocks for these keys."""
        return list(range(first_block, first_block + len(keys) * self.layout.blocks_per_chunk))

    def fill(self, keys: Sequence[bytes], first_block: int, group: int = 0) -> list[int]:
        """Compute: write the keys' content into blocks from `first_block` on; the block ids."""
        blocks = self.blocks_of(keys, first_block)
        for page, expected in self._pages(keys, blocks, group):
            page[:] = expected
        return blocks

    def poison(self, blocks: Sequence[int]) -> None:
        """Overwrite blocks in every tensor and rank."""
        for rank in self.workers:
            for tensor in range(TENSORS):
                for block in blocks:
                    self.page(rank, tensor, block)[:] = POISON

    def wrong_bytes(self, keys: Sequence[bytes], blocks: Sequence[int], group: int = 0) -> int:
        """Bytes of blocks that are not the keys' content."""
        pages = self._pages(keys, blocks, group)
        return sum(int((page != expected).sum()) for page, expected in pages)

    def _pages(
        self, keys: Sequence[bytes], blocks: Sequence[int], group: int
    ) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
        """Every page of these blocks in each rank, and what it is to hold."""
        factor = self.layout.blocks_per_chunk
        for at, block in enumerate(blocks):
            key, inside = keys[at // factor], at % factor
            for rank in self.workers:
                owner = 0 if self.layout.replicated else rank
                for ref in self.layout.groups[group].refs:
                    expected = content(key, owner, ref.tensor, inside, ref.page_bytes)
                    yield self.page(rank, ref.tensor, block), expected

    def submit(
        self,
        kind: str,
        ranks: Sequence[int],
        blocks: Sequence[int],
        slots: npt.NDArray[np.uint32],
        generations: npt.NDArray[np.uint64],
        group: int = 0,
        index: int = 0,
    ) -> dict[int, int]:
        """A job for each rank; job id by rank."""
        sizes, indices = [0, 0], [0, 0]
        sizes[group], indices[group] = len(blocks), index
        arrays = JobBlocks.of(blocks, sizes, indices, slots, generations)
        jobs = {}
        for rank in ranks:
            self.job += 1
            self.workers[rank].submit(Store if kind == "store" else Load, self.job, arrays)
            jobs[rank] = self.job
        return jobs

    def results(self, jobs: dict[int, int]) -> dict[int, JobResult]:
        """Wait for the jobs; each rank's result."""
        results = {}
        for rank, job in jobs.items():
            assert not self.workers[rank].wait([job], PATIENCE)
            by_id = {result.job_id: result for result in self.workers[rank].get_finished()}
            results[rank] = by_id[job]
        return results

    def moves(
        self,
        kind: str,
        blocks: Sequence[int],
        slots: npt.NDArray[np.uint32],
        generations: npt.NDArray[np.uint64],
        group: int = 0,
        index: int = 0,
    ) -> bool:
        """Whether a job of every rank succeeds."""
        jobs = self.submit(kind, list(self.workers), blocks, slots, generations, group, index)
        return all(result.success for result in self.results(jobs).values())

    def begin(
        self, keys: Sequence[bytes], blocks: Sequence[tuple[int, int]] | None = None
    ) -> StoreTicket:
        """A ticket for these keys, with slots for all of them on loan before."""
        lend(self.scheduler, len(keys))
        return self.scheduler.prepare_store(keys, blocks)

    def store(
        self,
        keys: Sequence[bytes],
        first_block: int = 1,
        group: int = 0,
        *,
        must: bool = True,
        describe: Callable[[bytes], bytes | None] | None = None,
    ) -> list[bytes]:
        """Fill, store by every rank, end the step, complete; the keys accepted.

        Each rank `must` succeed. Where the pool has to evict for them, slots come by and by. More
        keys than there are blocks are stored one part after another.
        """
        accepted: list[bytes] = []
        rest, room = list(keys), self._room(first_block)
        while rest:
            batch, rest = rest[:room], rest[room:]
            described = None if describe is None else [describe(key) for key in batch]
            ticket = self.scheduler.prepare_store(batch, descriptions=described)
            if ticket.keys:
                blocks = self.fill(ticket.keys, first_block, group)
                jobs = self.submit(
                    "store", list(self.workers), blocks, ticket.slots, ticket.generations, group
                )
                self.scheduler.end_step()  # lanes wait until the broker has read it
                results = self.results(jobs)
                assert not must or all(result.success for result in results.values()), results
                self.scheduler.complete_store(ticket)
                accepted += ticket.keys
            refused = list(itertools.compress(batch, map(StoreAnswer.FULL.__eq__, ticket.answers)))
            if refused and not must:
                break
            if refused:
                lend(self.scheduler, 1)
            rest = refused + rest
        return accepted

    def _room(self, first_block: int) -> int:
        return (self.layout.num_blocks - first_block) // self.layout.blocks_per_chunk

    def stored(self, name: str, count: int) -> list[bytes]:
        """Store so many chunks of `keys_of` and wait until they are READY; their keys."""
        keys = keys_of(name, count)
        self.store(keys)
        wait_hit(self, keys)
        return keys

    def load(self, keys: Sequence[bytes], first_block: int = 33, group: int = 0) -> tuple[int, int]:
        """Poison, load by every rank; (chunks found, wrong bytes among the successful loads)."""
        room = self._room(first_block)
        if len(keys) > room:
            first = self.load(keys[:room], first_block, group)
            rest = self.load(keys[room:], first_block, group)
            return first[0] + rest[0], first[1] + rest[1]
        ticket = self.scheduler.prepare_load(keys)
        blocks = self.blocks_of(ticket.keys, first_block)
        self.poison(blocks)
        if not ticket.keys:
            return 0, 0
        jobs = self.submit(
            "load", list(self.workers), blocks, ticket.slots, ticket.generations, group
        )
        results = self.results(jobs)
        self.scheduler.complete_load(ticket)
        if not all(result.success for result in results.values()):
            return 0, 0
        return len(ticket.keys), self.wrong_bytes(ticket.keys, blocks, group)

    def close(self) -> None:
        """End the sessions, keep nothing."""
        for worker in self.workers.values():
            worker.close()
        self.scheduler.close()
        for memories in self.memory.values():
            for memory in memories:
                memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def engine_of(daemon: Daemon, name: str = "engine", **settings: Any) -> Engine:
    """An engine of one rank that is attached."""
    return Engine(daemon.runtime_dir, name, 1, **settings).wait_attached()


def lend(scheduler: Scheduler, slots: int) -> None:
    """Wait until so many slots are at hand, which the daemon must lend sooner or later."""
    eventually(lambda: scheduler.reserve(slots, PATIENCE), lambda lent: lent >= slots)


def wait_served_by(client: Scheduler | Worker, pid: int) -> None:
    """Until its session is one with the daemon that is this process."""
    eventually(lambda: client._connection, lambda session: session and session.pid == pid)


def keys_of(name: str, count: int) -> list[bytes]:
    """`count` keys that share nothing with another name's."""
    return [f"{name}-{index:04d}".encode().ljust(32, b".") + bytes(4) for index in range(count)]


def described(key: bytes) -> Description:
    """What an engine says of a chunk with this key of `keys_of`, other things than of any other."""
    tokens = b"".join(bytes([byte, 0, 0, 0]) for byte in key[:16]) * FACTOR
    return Description(
        parent=key[::-1],
        hashes=tuple(key[:32] + bytes([block]) for block in range(FACTOR)),
        tokens=tokens,
        block_size=16,
        kind="full_attention",
        lora="adapter",
        extra=(("salt", ("image", 3)), None),
    )


def read_descriptions(scheduler: Scheduler, keys: Sequence[bytes]) -> list[Description | None]:
    """What a scheduler reads of chunks; None of those that are not there."""
    attachment = scheduler._attachments.current
    assert attachment is not None
    assert attachment.descriptions is not None
    entries = [attachment.directory.entry(key) for key in keys]
    return [entry and attachment.descriptions.read(entry[0], entry[1]) for entry in entries]


def wait_hit(engine: Engine, keys: list[bytes]) -> None:
    """Until every lane's report has been counted."""
    eventually(lambda: engine.scheduler.lookup_many(keys), {LookupResult.HIT}.issuperset)
