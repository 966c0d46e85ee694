"""A daemon killed between any two writes to its ledgers: what the next one makes of them."""

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvd.cache.chunks import ChunkTable
from kvd.cache.ledger import Ledger
from kvd.cache.namespaces import Keeping, Namespaces
from kvd_proto.directory import SlotState
from tests.cache.tables import add, make_namespaces, store

SIZE = 64 * 1024
KEYS = [bytes([65 + i]) * (i + 1) for i in range(9)]
NAMES = [bytes([number]) * 16 for number in range(2)]
SHAPES = [((4096, 4096), 2, False), ((12288,), 3, True)]
CUTS = (8, 60)  # bytes of a record that were written when the kill came
Chunks = dict[bytes, tuple[int, int]]

keys_strategy = st.lists(st.sampled_from(KEYS), min_size=1, max_size=9, unique=True)
space_strategy = st.sampled_from([0, 1])


class Watched:
    """Memory whose every write is followed, and where it is longer than a word cut, by a look."""

    def __init__(self, memory: memoryview, look: Any) -> None:
        self._memory = memory
        self._look = look

    def __setitem__(self, where: int | slice, value: Any) -> None:
        if isinstance(where, slice):
            for cut in CUTS:
                self._memory[where.start : where.start + cut] = value[:cut]
                self._look()
        self._memory[where] = value
        self._look()

    def release(self) -> None:
        """As memory's."""
        self._memory.release()


def held(table: ChunkTable) -> Chunks:
    """READY chunks: slot and generation by key."""
    directory = table.directory
    return {
        directory.key(slot): (slot, directory.generation(slot))
        for slot in directory.slots_in(SlotState.READY)
        if directory.find(directory.key(slot)) == slot  # a doomed one is nobody's any more
    }


class Reopening(RuleBasedStateMachine):
    """Two namespaces in one pool; after every write to a ledger the daemon might be killed."""

    policy = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.buffers: dict[str, bytearray] = {}
        self.epoch = 0
        self.now = 0.0
        self.looks = 0
        self.namespaces = self.start(self.buffers)
        self.open()

    def start(self, buffers: dict[str, bytearray]) -> Namespaces:
        """A daemon's namespaces with what these ledgers hold."""
        self.epoch += 1

        def make(name: str, size: int) -> bytearray:
            buffers[name] = bytearray(size)
            return buffers[name]

        keeping = Keeping(make, "pool", self.epoch << 32)
        namespaces = make_namespaces(SIZE, keeping=keeping, policy=self.policy)
        for buffer in buffers.values():
            ledger = Ledger(buffer)
            if len(ledger):
                namespaces.reopen(ledger)
        return namespaces

    def open(self) -> None:
        """Both namespaces with an engine each, and their ledgers watched."""
        for number, (sizes, world, replicated) in enumerate(SHAPES):
            namespace = add(
                self.namespaces, number, *sizes, world_size=world, replicated=replicated
            )
            ledger: Any = namespace.directory.ledger
            ledger._words = Watched(ledger._words, self.look)
            ledger._records = Watched(ledger._records, self.look)

    def table(self, space: int) -> ChunkTable:
        """The chunks of a namespace."""
        namespace = self.namespaces.get(NAMES[space])
        assert namespace is not None
        return namespace.table

    def all_held(self) -> list[Chunks]:
        """READY chunks of both namespaces."""
        return [held(self.table(space)) for space in (0, 1)]

    def look(self) -> None:
        """Between two writes: what is kept is complete and nobody else's to write."""
        self.looks += 1
        copies = {name: bytearray(buffer) for name, buffer in self.buffers.items()}
        following = self.start(copies)
        following.check_integrity()
        for space, name in enumerate(NAMES):
            namespace = following.get(name)
            if namespace is None:
                continue
            directory = self.table(space).directory
            for key, (slot, generation) in held(namespace.table).items():
                assert (directory.key(slot), directory.generation(slot)) == (key, generation)
                whole = directory.ranks_done(slot) & self.table(space).space.geometry.writers(slot)
                assert whole == self.table(space).space.geometry.writers(slot)
                assert directory.state(slot) in {SlotState.READY, SlotState.WRITING}
                assert directory.blocks(slot) == namespace.table.directory.blocks(slot)

    @rule(space=space_strategy, keys=keys_strategy)
    def prepare(self, space: int, keys: list[bytes]) -> None:
        """Slots are given, and others evicted for them."""
        self.table(space).prepare_store(keys, 1, self.now)

    @rule(space=space_strategy, keys=keys_strategy)
    def store(self, space: int, keys: list[bytes]) -> None:
        """Chunks are stored from the first share to the last."""
        store(self.table(space), keys, self.now)

    @rule(
        space=space_strategy,
        data=st.data(),
        ranks=st.sampled_from([[0], [1], [2], [0, 1, 2], [0, 1, 2]]),
        ok=st.sampled_from([True, True, False]),
    )
    def report(self, space: int, data: st.DataObject, ranks: list[int], ok: bool) -> None:
        """Some or all shares of some chunks are there, or failed."""
        table = self.table(space)
        writing = table.directory.slots_in(SlotState.WRITING)
        if not writing:
            return
        slots = np.array(data.draw(st.lists(st.sampled_from(writing), unique=True)), "u4")
        generations = table.directory.generations(slots)
        count = data.draw(st.integers(1, 4))
        for rank in ranks:
            n = len(slots)
            table.share_done(1, rank, slots, generations, [1] * n, [count] * n, [0] * n, ok=ok)

    @rule(space=space_strategy)
    def drain(self, space: int) -> None:
        """Lanes let go of what was given up."""
        table = self.table(space)
        slots = table.directory.slots_in(SlotState.DRAINING)
        table.slots.revoked("", slots, [table.directory.generation(slot) for slot in slots])

    @rule(space=space_strategy, keys=keys_strategy)
    def load(self, space: int, keys: list[bytes]) -> None:
        """Chunks are pinned for a while."""
        self.table(space).prepare_load(keys, 1, self.now, 10.0)

    @rule(space=space_strategy, keys=keys_strategy)
    def finished(self, space: int, keys: list[bytes]) -> None:
        """A request that used chunks has finished."""
        self.table(space).finished(keys)

    @rule(space=space_strategy)
    def reset(self, space: int) -> None:
        """An engine drops everything."""
        self.table(space).reset()

    @rule(space=space_strategy, first=st.integers(0, 6))
    def remove(self, space: int, first: int) -> None:
        """An operator drops some."""
        self.table(space).remove(first, 3, 0.0)

    @rule(seconds=st.sampled_from([5.0, 70.0]))
    def time_passes(self, seconds: float) -> None:
        """Leases and stores run out."""
        self.now += seconds
        for space in (0, 1):
            self.table(space).expire(self.now)

    @rule()
    def kill(self) -> None:
        """The next daemon has exactly what was READY, where and as it was, in the same order."""
        orders = [
            [slot for slot in self.table(space).slots.policy.order() if slot in set(pair_slots)]
            for space in (0, 1)
            for pair_slots in [[slot for slot, _ in held(self.table(space)).values()]]
        ]
        before = self.all_held()
        self.namespaces = self.start(self.buffers)
        self.open()
        assert self.all_held() == before
        if self.policy == "lru":
            assert [self.table(space).slots.policy.order() for space in (0, 1)] == orders

    @invariant()
    def sound(self) -> None:
        """Everything agrees."""
        self.namespaces.check_integrity()


class ArcReopening(Reopening):
    """The same under ARC."""

    policy = "arc"


def test_every_moment_is_a_good_one_to_be_killed() -> None:
    """Under LRU, whatever was written last, the ledgers hold whole chunks in their own slots."""
    run_state_machine_as_test(Reopening, settings=settings(stateful_step_count=40, max_examples=25))


def test_every_moment_is_a_good_one_under_arc() -> None:
    """The same under ARC, which orders otherwise."""
    run_state_machine_as_test(
        ArcReopening, settings=settings(stateful_step_count=40, max_examples=10)
    )
