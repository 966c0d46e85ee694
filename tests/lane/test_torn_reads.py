"""Stores that are submitted before the broker has read their step, beside loads.

A slot on loan holds a chunk that loads may read until the broker gives the slot to another key.
"""

import mmap
from collections import deque
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvd.cache.namespaces import Namespaces
from kvd.config.settings import Settings
from kvd.lane.device import Direction
from kvd.lane.host_device import HostDevice
from kvd.lane.jobs import LaneJob
from kvd.lane.runner import Runner
from kvd.lane.workers import LaneWorker, WorkerTable
from kvd_proto.directory import SlotState
from kvd_proto.messages import JobStatus, Load, Store
from tests.cache.tables import add
from tests.lane.support import (
    FakeWorker,
    Memory,
    bound_worker,
    make_job,
)
from tests.layouts import flat_layout

PAGE, BLOCKS, CHUNKS = 1024, 4, 4  # bytes of a block, blocks of a chunk, chunks of the pool
KEYS = [b"key %d" % number for number in range(7)]
LAYOUT = flat_layout(PAGE, blocks=64, factor=BLOCKS)
POOL_BYTES = LAYOUT.slot_bytes * CHUNKS
STORING, LOADING = 7, 8  # engines


class SmallPieces(HostDevice):
    """A host device that copies a block at a time."""

    piece_bytes = bulk_bytes = MappingProxyType(dict.fromkeys(Direction, PAGE))


@dataclass(frozen=True)
class Slot:
    """A slot with a generation: where a store goes, or what a load reads."""

    number: int
    generation: int


class TornReadsMachine(RuleBasedStateMachine):
    """A scheduler's stores, a broker that reads its steps late, and loads of another engine.

    Chunk table, runner and host device are the daemon's own. The bytes of a chunk say under which
    generation they were stored.
    """

    @initialize()
    def make(self) -> None:
        """A small pool, all of whose slots hold chunks, some on loan."""
        self.memories: list[Memory] = []
        namespaces = Namespaces(
            POOL_BYTES,
            Settings(policy="lru"),
            boot_id=bytes(16),
            make_buffer=self._shared,
            make_descriptions=lambda _name, _record_bytes: None,
        )
        self.table = add(namespaces, 0, LAYOUT.slot_bytes, blocks_per_chunk=BLOCKS).table
        self.pool = Memory(POOL_BYTES)
        self.device = SmallPieces(self.pool.fd, POOL_BYTES)
        self.runner = Runner(self.device, clock=lambda: self.now)
        self.workers = WorkerTable(self.device)
        self.now = 0
        self.sources: dict[int, FakeWorker] = {}
        self.bound = {owner: self._worker(owner) for owner in (STORING, LOADING)}
        self.free = {owner: list(range(0, LAYOUT.num_blocks, BLOCKS)) for owner in self.bound}
        self.numbers = 0
        self.jobs: dict[int, tuple[int, Slot]] = {}  # number -> first block, slot
        self.steps: deque[tuple[bytes, Slot]] = deque()  # not read by the broker
        self.at_hand: deque[Slot] = deque()
        self._lend()
        for key in KEYS[:CHUNKS]:
            self.store(key)
            self.read_step()
            self.turn(BLOCKS + 1)
        assert all(map(self._entry, KEYS[:CHUNKS]))
        assert self.at_hand

    def _shared(self, _: str, size: int) -> mmap.mmap:
        memory = Memory(size)
        self.memories.append(memory)
        return mmap.mmap(memory.fd, size)

    def _worker(self, owner: int) -> LaneWorker:
        source = self.sources[owner] = FakeWorker(LAYOUT, session=owner)
        fds, directory = source.fds, self.memories[0].fd
        return bound_worker(self.workers, LAYOUT, fds, directory, owner=owner, num_slots=CHUNKS)

    def _lend(self) -> None:
        slots, generations = self.table.lending.lend(STORING, CHUNKS - 1, 1, self.now / 1e9)
        self.at_hand.extend(map(Slot, slots, generations))

    def _submit(self, kind: type[Store] | type[Load], owner: int, slot: Slot) -> None:
        first = self.free[owner].pop()
        blocks = list(range(first, first + BLOCKS))
        storage = self.sources[owner].storages[0].bytes
        storage[first * PAGE : (first + BLOCKS) * PAGE] = (
            slot.generation % 251 if kind is Store else 0xFF
        )
        self.numbers += 1
        self.jobs[self.numbers] = first, slot
        job = make_job(kind, self.numbers, blocks, [slot.number], generation=slot.generation)
        self.runner.submit(self.bound[owner], job, request_id=1)

    def _entry(self, key: bytes) -> Slot | None:
        """The chunk of a key that is READY."""
        entry = self.table.directory.entry(key)
        if entry is None or entry[2] != SlotState.READY:
            return None
        return Slot(entry[0], entry[1])

    @precondition(lambda self: self.at_hand and self.free[STORING])
    @rule(key=st.sampled_from(KEYS))
    def store(self, key: bytes) -> None:
        """The scheduler gives a slot on loan to a key; its worker submits the job at once."""
        slot = self.at_hand.popleft()
        if self.table.directory.is_lent(slot.number, slot.generation):
            self.steps.append((key, slot))
            self._submit(Store, STORING, slot)

    @precondition(lambda self: self.steps)
    @rule()
    def read_step(self) -> None:
        """The broker reads the oldest step, and lends more."""
        key, slot = self.steps.popleft()
        self.table.stores.begin([key], [slot.number], [slot.generation], STORING, self.now / 1e9)
        self._lend()

    @precondition(lambda self: self.free[LOADING])
    @rule(key=st.sampled_from(KEYS))
    def load(self, key: bytes) -> None:
        """Another engine loads a chunk that is READY, before the broker has read its pin."""
        slot = self._entry(key)
        if slot is not None:
            self._submit(Load, LOADING, slot)

    @rule(key=st.sampled_from(KEYS))
    def pin(self, key: bytes) -> None:
        """The broker reads a pin, whose lease is short."""
        slot = self._entry(key)
        if slot is not None:
            self.table.loads.pin(
                self.numbers, [slot.number], [slot.generation], LOADING, self.now / 1e9, 0.01
            )

    @rule(turns=st.integers(1, 6))
    def turn(self, turns: int) -> None:
        """The lane moves some pieces, and reports what has ended."""
        for _ in range(turns):
            self.runner.run_once()
        for job in self.runner.take_ended():
            self._ended(job)

    @rule()
    def expire(self) -> None:
        """Leases end."""
        self.now += 20_000_000
        self._revoked(self.table.expire(self.now / 1e9))

    def _ended(self, job: LaneJob) -> None:
        first, slot = self.jobs.pop(job.request.job)
        ok = job.outcome[0] is JobStatus.OK
        if job.direction is Direction.LOAD:
            loaded = self.sources[LOADING].pages(range(first, first + BLOCKS))
            assert not ok or np.unique(loaded).tolist() == [slot.generation % 251]
            self.free[LOADING].append(first)
            return
        self.free[STORING].append(first)
        if job.reportable_indices(ok=ok):
            share = [slot.number], [slot.generation], [0], [BLOCKS], [0]
            _, given_up = self.table.stores.share_done(STORING, 0, *share, ok=ok)
            self._revoked(given_up)

    def _revoked(self, slots: list[tuple[int, int]]) -> None:
        """No lane writes there: the jobs of these slots have ended."""
        self.table.slots.wait_for((), slots)

    @invariant()
    def chunks_are_whole(self) -> None:
        """The tables agree, and READY chunks hold the bytes that were stored as theirs."""
        self.table.check_integrity()
        self.runner.check_integrity()
        size = LAYOUT.slot_bytes
        for number in self.table.directory.slots_in(SlotState.READY):
            stored = self.pool.bytes[number * size : (number + 1) * size]
            generation = self.table.directory.generation(number)
            assert np.unique(stored).tolist() == [generation % 251]

    def teardown(self) -> None:
        """Every job ends once the broker has read its step."""
        if not hasattr(self, "free"):
            return
        try:
            while self.steps:
                self.read_step()
            while self.jobs:
                self.turn(4)
                self.chunks_are_whole()
        finally:
            for memory in (*self.memories, self.pool):
                memory.close()
            for source in self.sources.values():
                source.close()
        self.device.close()


TestTornReads = TornReadsMachine.TestCase
TestTornReads.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
