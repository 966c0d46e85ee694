"""Two namespaces in one pool, driven at random beside a plain-dict model."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvd.cache.directory import Refs
from kvd.cache.namespaces import Namespace, Namespaces
from kvd.config.values import Quota
from kvd_proto.directory import LookupResult
from kvd_proto.messages import StoreAnswer
from tests.cache.tables import add, make_namespaces

KEYS = [bytes([65 + i]) * (i + 1) for i in range(11)]
OWNERS = (1, 2)
SPACES = (0, 1)
SHAPES = [((4096, 4096), 2, False), ((12288,), 3, True)]  # bytes of a slot, ranks, replicated
TICKET = 20.0
BLOCKS = 8  # of a chunk
PARTS = [(0, BLOCKS), (0, BLOCKS), (2, 6), (5, 3), (0, 4)]
KIB = 1024
QUOTAS: tuple[dict[str, Quota], ...] = (
    {},
    {"model 0": Quota(floor_bytes=24 * KIB, cap_bytes=40 * KIB)},
    {"model 0": Quota(cap_bytes=20 * KIB), "model 1": Quota(floor_bytes=24 * KIB)},
    {"model 0": Quota(floor_bytes=32 * KIB), "model 1": Quota(24 * KIB, 24 * KIB)},
)

keys_strategy = st.lists(st.sampled_from(KEYS), max_size=10)


@dataclass
class Chunk:
    """A WRITING or READY chunk of the model."""

    slot: int
    generation: int
    owner: int
    deadline: float
    ranks: set[int] = field(default_factory=set)
    blocks: set[int] = field(default_factory=lambda: set(range(BLOCKS)))
    ready: bool = False
    used: float = 0.0


@dataclass
class Lease:
    """A lease of the model: pinned slots, with repetitions."""

    owner: int
    deadline: float
    slots: list[int]


def part(first: int, count: int) -> set[int]:
    """Some blocks of a chunk."""
    return set(range(first, first + count))


class Model:
    """One namespace as plain dicts; `chunks` are those that the index has."""

    def __init__(self, namespace: Namespace, world_size: int, *, replicated: bool) -> None:
        self.namespace = namespace
        self.table = namespace.table
        self.world_size = world_size
        self.replicated = replicated
        self.chunks: dict[bytes, Chunk] = {}
        self.order: list[bytes] = []  # used longest ago first; may name keys that are gone
        self.draining: dict[int, int] = {}
        self.leases: dict[int, Lease] = {}
        self.doomed: set[int] = set()
        self.room = 0

    def use(self, keys: list[bytes]) -> None:
        """These are here and were used, the first of them last."""
        for key in reversed(keys):
            if key in self.order:
                self.order.remove(key)
            self.order.append(key)

    def pinned(self) -> set[int]:
        """Slots under any lease."""
        return {slot for lease in self.leases.values() for slot in lease.slots}

    def expected(self, slot: int) -> set[int]:
        """The ranks that have to write a slot."""
        return {slot % self.world_size} if self.replicated else set(range(self.world_size))

    def give_up(self, keys: list[bytes], refs: Refs) -> None:
        """These WRITING chunks are DRAINING now, and exactly they were reported."""
        gone = [self.chunks.pop(key) for key in keys]
        assert sorted(refs) == sorted((chunk.slot, chunk.generation) for chunk in gone)
        self.draining.update(refs)

    def writing(self) -> list[bytes]:
        """Keys that are being written."""
        return sorted(key for key, chunk in self.chunks.items() if not chunk.ready)

    def end_leases(self, numbers: list[int]) -> None:
        """Leases end; doomed chunks that nobody pins any more go."""
        for number in numbers:
            del self.leases[number]
        self.doomed &= self.pinned()

    def protected_bytes(self, namespaces: Namespaces) -> int:
        """What it holds of its floor."""
        group = namespaces.pool.quotas.of(self.table.space)
        return min(group.floor, group.held) if group is not None else 0

    def forget_yielded(self) -> None:
        """Chunks that went for another namespace, or for a cap: only such as may go."""
        for key in [k for k, c in self.chunks.items() if self.table.directory.find(k) != c.slot]:
            assert self.chunks[key].ready
            assert self.chunks[key].slot not in self.pinned()
            del self.chunks[key]

    def evictable(self, key: bytes) -> bool:
        """READY and not pinned."""
        return (
            key in self.chunks
            and self.chunks[key].ready
            and self.chunks[key].slot not in self.pinned()
        )


class TableMachine(RuleBasedStateMachine):
    """Every rule does the same to the tables and to the model and compares the answers."""

    policy = "lru"
    quotas: Mapping[str, Quota] = QUOTAS[0]

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.namespaces = self.begin()
        self.models = [
            Model(self.open(number), world_size, replicated=replicated)
            for number, (_, world_size, replicated) in enumerate(SHAPES)
        ]

    def begin(self) -> Namespaces:
        """A pool, which is empty."""
        return make_namespaces(64 * KIB, policy=self.policy, quotas=self.quotas)

    def open(self, number: int) -> Namespace:
        """One of the two namespaces, which no engine uses yet."""
        sizes, world_size, replicated = SHAPES[number]
        namespace = add(
            self.namespaces,
            number,
            *sizes,
            world_size=world_size,
            replicated=replicated,
            blocks_per_chunk=BLOCKS,
        )
        self.namespaces.detach_engine(namespace)
        return namespace

    @rule(space=st.sampled_from(SPACES), attach=st.booleans())
    def engines(self, space: int, attach: bool) -> None:
        """An engine comes or goes."""
        namespace = self.models[space].namespace
        if attach:
            self.namespaces.attach_engine(namespace)
        elif namespace.engines:
            self.namespaces.detach_engine(namespace)

    @rule(
        space=st.sampled_from(SPACES),
        keys=keys_strategy,
        owner=st.sampled_from(OWNERS),
        blocks=st.sampled_from(PARTS),
    )
    def prepare_store(
        self, space: int, keys: list[bytes], owner: int, blocks: tuple[int, int]
    ) -> None:
        """Slots are asked for, to write these blocks of each chunk."""
        model, other = self.models[space], self.models[1 - space]
        protected = other.protected_bytes(self.namespaces)
        asked = [*keys, b"", b"x" * 49]
        whole = blocks == (0, BLOCKS)
        decision = model.table.prepare_store(
            asked, owner, self.now, blocks=() if whole else [blocks] * len(asked), seconds=TICKET
        )
        answers = [StoreAnswer(a) for a in decision.answers.numpy()]
        assert answers[-2:] == [StoreAnswer.BAD_KEY] * 2
        other.forget_yielded()
        assert other.protected_bytes(self.namespaces) >= protected
        evictable = [k for k in model.order if model.evictable(k) and k not in keys]
        if self.policy == "lru":
            assert list(decision.evicted) == evictable[: len(decision.evicted)]
        assert len(set(decision.evicted)) == len(decision.evicted)
        for key in decision.evicted:
            assert model.evictable(key)
            assert key not in keys
            del model.chunks[key]
        new: list[bytes] = []
        full = False
        for key, answer in zip(keys, answers, strict=False):
            here = model.chunks.get(key)
            if here is not None and not here.ready:
                assert answer == StoreAnswer.PENDING
            elif here is not None and not here.blocks < part(*blocks):
                assert answer == StoreAnswer.PRESENT
            elif key in new:
                assert answer == StoreAnswer.PENDING
            elif answer == StoreAnswer.ACCEPTED:
                assert not full  # accepted in order
                new.append(key)
            else:
                capped = self.namespaces.pool.is_capped(model.table.space)
                assert answer == (StoreAnswer.QUOTA if capped else StoreAnswer.FULL)
                full = True
        assert len(new) == len(decision.slots) >= len(decision.evicted)
        lesser = [model.chunks[key].slot for key in new if key in model.chunks]
        model.doomed |= set(lesser) & model.pinned()
        slots, generations = decision.slots.numpy().tolist(), decision.generations.numpy().tolist()
        for key, slot, generation in zip(new, slots, generations, strict=True):
            model.chunks[key] = Chunk(slot, generation, owner, self.now + TICKET, used=self.now)
        model.use(new)
        if decision.evicted or full:
            assert model.table.space.free_slots <= len(lesser)
        if full:
            assert not any(model.evictable(key) for key in model.chunks if key not in keys)

    def report(self, model: Model, keys: list[bytes], rank: int, first: int, count: int) -> None:
        """A lane reports one rank's share of WRITING chunks of one owner; count 0: it failed."""
        chunks = [model.chunks[key] for key in keys]
        now_ready, dropped = model.table.share_done(
            chunks[0].owner,
            rank,
            np.array([chunk.slot for chunk in chunks], "u4"),
            np.array([chunk.generation for chunk in chunks], "u8"),
            [first] * len(keys),
            [max(1, count)] * len(keys),
            [0] * len(keys),
            ok=count > 0,
        )
        ready, failed = [], []
        for key, chunk in zip(keys, chunks, strict=True):
            if rank not in model.expected(chunk.slot) or rank in chunk.ranks:
                continue
            chunk.blocks &= set(range(first, first + count))
            if not chunk.blocks:
                failed.append(key)
                continue
            chunk.ranks.add(rank)
            if chunk.ranks != model.expected(chunk.slot):
                continue
            chunk.ready = True
            ready.append((chunk.slot, chunk.generation))
        assert now_ready == ready
        model.give_up(failed, dropped)

    @rule(
        space=st.sampled_from(SPACES),
        data=st.data(),
        rank=st.integers(0, 2),
        first=st.integers(0, 7),
        count=st.integers(0, 8),
    )
    def share_done(
        self, space: int, data: st.DataObject, rank: int, first: int, count: int
    ) -> None:
        """A lane reports some shares, also twice or of a rank whose turn it is not."""
        model, count = self.models[space], min(count, BLOCKS - first)
        if model.writing():
            keys = data.draw(st.lists(st.sampled_from(model.writing()), unique=True, min_size=1))
            keys = [k for k in keys if model.chunks[k].owner == model.chunks[keys[0]].owner]
            self.report(model, keys, rank % model.world_size, first, count)

    @rule(
        space=st.sampled_from(SPACES), data=st.data(), what=st.sampled_from(["slot", "gen", "own"])
    )
    def stale_share(self, space: int, data: st.DataObject, what: str) -> None:
        """A report about a slot that has moved on, or was never this owner's, changes nothing."""
        model = self.models[space]
        refs = [(c.slot, c.generation, c.owner) for c in model.chunks.values()]
        refs += [(slot, generation, 1) for slot, generation in model.draining.items()]
        if refs:
            slot, generation, owner = data.draw(st.sampled_from(sorted(refs)))
            outcome = model.table.share_done(
                owner + 10 * (what == "own"),
                0,
                [slot + 1000 * (what == "slot")],
                [generation - (what == "gen")],
                [0],
                [8],
                [0],
                ok=data.draw(st.booleans()),
            )
            assert outcome == ([], [])

    @rule(space=st.sampled_from(SPACES))
    def finish(self, space: int) -> None:
        """Every share that is missing arrives."""
        self.report_missing(self.models[space], 0, BLOCKS)

    def report_missing(self, model: Model, first: int, count: int) -> None:
        """All ranks report these blocks of every chunk that is being written."""
        for key in model.writing():
            for rank in range(model.world_size):
                if key in model.chunks and not model.chunks[key].ready:
                    self.report(model, [key], rank, first, count)

    @rule(
        space=st.sampled_from(SPACES),
        keys=keys_strategy,
        owner=st.sampled_from(OWNERS),
        blocks=st.sampled_from(PARTS),
    )
    def store(self, space: int, keys: list[bytes], owner: int, blocks: tuple[int, int]) -> None:
        """Chunks are stored at once, some in part, and nothing is left draining."""
        self.prepare_store(space=space, keys=keys, owner=owner, blocks=blocks)
        self.report_missing(self.models[space], *blocks)
        self.drain(space)

    @rule(space=st.sampled_from(SPACES), owner=st.sampled_from(OWNERS))
    def store_whole(self, space: int, owner: int) -> None:
        """What is here in part is offered whole."""
        model = self.models[space]
        keys = [k for k, c in model.chunks.items() if c.ready and c.blocks != part(0, BLOCKS)]
        if keys:
            self.prepare_store(space=space, keys=sorted(keys), owner=owner, blocks=(0, BLOCKS))

    @rule(space=st.sampled_from(SPACES))
    def drain(self, space: int) -> None:
        """Lanes have nothing under way in the slots that were given up."""
        model = self.models[space]
        slots = list(model.draining)
        assert model.table.slots.revoked("", slots, list(model.draining.values())) == len(slots)
        model.draining.clear()

    @rule(
        space=st.sampled_from(SPACES),
        keys=keys_strategy,
        owner=st.sampled_from(OWNERS),
        success=st.booleans(),
    )
    def complete_store(self, space: int, keys: list[bytes], owner: int, success: bool) -> None:
        """An engine says that it is done with stores."""
        model = self.models[space]
        summary, refs = model.table.complete_store(keys, owner, success=success)
        here = {key: model.chunks[key] for key in keys if key in model.chunks}
        failed = [k for k, c in here.items() if not (c.ready or success or c.owner != owner)]
        assert summary.ready == sum(key in here and here[key].ready for key in keys)
        assert summary.dropped == sum(key not in here or key in failed for key in keys)
        assert summary.ready + summary.pending + summary.dropped == len(keys)
        model.give_up(failed, refs)

    @rule(
        space=st.sampled_from(SPACES),
        keys=keys_strategy,
        owner=st.sampled_from(OWNERS),
        seconds=st.sampled_from([1.0, 5.0, 10.0]),
        blocks=st.sampled_from(PARTS),
    )
    def prepare_load(
        self, space: int, keys: list[bytes], owner: int, seconds: float, blocks: tuple[int, int]
    ) -> None:
        """Chunks are pinned, those that hold the blocks that are needed."""
        model = self.models[space]
        whole = blocks == (0, BLOCKS)
        decision = model.table.prepare_load(
            keys, owner, self.now, seconds, blocks=() if whole else [blocks] * len(keys)
        )
        found = [
            key
            for key in keys
            if key in model.chunks
            and model.chunks[key].ready
            and part(*blocks) <= model.chunks[key].blocks
        ]
        chunks = [model.chunks[key] for key in found]
        for chunk in chunks:
            chunk.used = self.now
        model.use(found)
        assert decision.found.numpy().tolist() == [key in found for key in keys]
        assert decision.slots.numpy().tolist() == [chunk.slot for chunk in chunks]
        assert decision.generations.numpy().tolist() == [chunk.generation for chunk in chunks]
        for chunk in chunks:
            assert part(*model.table.directory.blocks(chunk.slot)) == chunk.blocks
        assert bool(decision.lease) == bool(found)
        if found:
            assert decision.lease not in model.leases
            slots = [chunk.slot for chunk in chunks]
            model.leases[decision.lease] = Lease(owner, self.now + seconds, slots)

    @rule(space=st.sampled_from(SPACES), data=st.data(), owner=st.sampled_from(OWNERS))
    def complete_load(self, space: int, data: st.DataObject, owner: int) -> None:
        """A lease is given back, perhaps by somebody who does not hold it."""
        model = self.models[space]
        number = data.draw(st.sampled_from([0, *sorted(model.leases)]))
        mine = number in model.leases and model.leases[number].owner == owner
        assert model.table.unpin(number, owner) == mine
        if mine:
            model.end_leases([number])

    @rule(space=st.sampled_from(SPACES), keys=keys_strategy)
    def finished(self, space: int, keys: list[bytes]) -> None:
        """A request has finished that used chunks, some of which may not be here yet or any more.

        What is named twice counts where it is named first.
        """
        model = self.models[space]
        here = [key for key in dict.fromkeys(keys) if key in model.chunks]
        assert model.table.finished(keys) == len(here)
        model.use(here)
        for key in here:
            model.chunks[key].used = self.now

    @rule(seconds=st.sampled_from([0.5, 5.0, 12.0]))
    def time_passes(self, seconds: float) -> None:
        """Deadlines come."""
        self.now += seconds
        for model in self.models:
            refs = model.table.expire(self.now)
            late = [key for key in model.writing() if model.chunks[key].deadline <= self.now]
            model.give_up(late, refs)
            ended = [n for n, lease in model.leases.items() if lease.deadline <= self.now]
            model.end_leases(ended)

    @rule(space=st.sampled_from(SPACES), owner=st.sampled_from(OWNERS))
    def drop_owner(self, space: int, owner: int) -> None:
        """An engine dies."""
        model = self.models[space]
        refs, _ = model.table.drop_owner(owner)
        theirs = [key for key in model.writing() if model.chunks[key].owner == owner]
        model.give_up(theirs, refs)
        model.end_leases([n for n, lease in model.leases.items() if lease.owner == owner])

    @rule(space=st.sampled_from(SPACES))
    @precondition(lambda self: any(len(model.chunks) > 3 for model in self.models))
    def reset(self, space: int) -> None:
        """A namespace is emptied."""
        model = self.models[space]
        outcome, revoke = model.table.reset()
        pinned = model.pinned()
        ready = {chunk.slot for chunk in model.chunks.values() if chunk.ready}
        assert outcome.deferred == len(ready & pinned)
        assert outcome.dropped == len(ready) + len(model.writing()) - outcome.deferred
        model.give_up(model.writing(), revoke)
        model.doomed |= ready & pinned
        model.chunks.clear()

    @rule(space=st.sampled_from(SPACES), count=st.integers(1, 6))
    def sweep(self, space: int, count: int) -> None:
        """Some of what a reset has left is freed; nobody sees a difference."""
        self.models[space].table.slots.sweep(count)

    @rule(
        space=st.sampled_from(SPACES),
        first=st.integers(0, 9),
        count=st.sampled_from([1, 4, 99]),
        unused_for=st.sampled_from([0.0, 5.0, 12.0]),
    )
    def remove(self, space: int, first: int, count: int, unused_for: float) -> None:
        """An operator drops the chunks of some slots that are of no use."""
        model = self.models[space]
        pinned = model.pinned()
        there = [
            key
            for key, chunk in model.chunks.items()
            if chunk.ready
            and first <= chunk.slot < first + count
            and chunk.slot not in pinned
            and self.now - chunk.used >= unused_for
        ]
        assert model.table.remove(first, count, unused_for) == len(there)
        for key in there:
            del model.chunks[key]

    @rule(space=st.sampled_from(SPACES), data=st.data())
    def stale_revocation(self, space: int, data: st.DataObject) -> None:
        """A lane answers about an older generation, or about a slot that is not draining."""
        model = self.models[space]
        refs = [(slot, generation - 1) for slot, generation in model.draining.items()]
        refs += [(chunk.slot, chunk.generation) for chunk in model.chunks.values()]
        if refs:
            slot, generation = data.draw(st.sampled_from(sorted(refs)))
            assert model.table.slots.revoked("", [slot], [generation]) == 0

    @rule(number=st.integers(0, len(QUOTAS) - 1))
    @precondition(lambda self: self.quotas)
    def set_quotas(self, number: int) -> None:
        """The operator sets other quotas."""
        self.namespaces.pool.set_quotas(QUOTAS[number])
        self.trim()
        for model in self.models:
            group = self.namespaces.pool.quotas.of(model.table.space)
            model.room = group.room if group is not None else 0

    @rule()
    @precondition(lambda self: self.quotas)
    def trim(self) -> None:
        """What had to stay above a cap goes when it may, and nothing more than needed."""
        self.namespaces.pool.trim()
        for model in self.models:
            model.forget_yielded()
            space = model.table.space
            group = self.namespaces.pool.quotas.of(space)
            if group is not None and group.room < 0:
                busy = {slot // space.geometry.column_slots for slot in model.table.busy_slots()}
                assert busy >= set(space.claimed)

    @invariant()
    def is_within_caps(self) -> None:
        """No model holds more than its cap, but for what is in use since the cap was lowered."""
        for model in self.models:
            group = self.namespaces.pool.quotas.of(model.table.space)
            room = group.room if group is not None else 0
            assert room >= min(0, model.room)
            model.room = room

    @invariant()
    def agrees(self) -> None:
        """Tables and model say the same, and every invariant of the state holds."""
        self.namespaces.check_integrity()
        for model in self.models:
            table = model.table
            for key in KEYS:
                chunk = model.chunks.get(key)
                assert table.directory.find(key) == (chunk.slot if chunk else -1)
                for blocks in PARTS[1:]:
                    hint = table.directory.lookup(key, *blocks)
                    if chunk is not None and not chunk.ready:
                        assert hint is LookupResult.HIT_PENDING
                    else:
                        hit = chunk is not None and part(*blocks) <= chunk.blocks
                        assert hint is (LookupResult.HIT if hit else LookupResult.MISS)
                assert table.directory.lookup(key) is table.directory.lookup(key, 0, BLOCKS)
            model.order = [key for key in model.order if key in model.chunks]
            if self.policy == "lru":
                order = [model.chunks[key].slot for key in model.order]
                assert table.slots.policy.order() == order
            ready = sum(chunk.ready for chunk in model.chunks.values())
            assert table.slots.stats() == {
                "ready": ready + len(model.doomed),
                "lent": 0,
                "writing": len(model.writing()),
                "draining": len(model.draining),
                "pinned": len(model.pinned()),
                "doomed": len(model.doomed),
            }
            assert table.slots.is_idle == (
                not model.writing() and not model.draining and not model.pinned()
            )


class QuotaTableMachine(TableMachine):
    """The same with floors and caps, which may change."""

    quotas = QUOTAS[1]


class ArcTableMachine(TableMachine):
    """The same with the other policy."""

    policy = "arc"


def test_tables_with_lru() -> None:
    """Under LRU, two namespaces in one pool behave as the model says after every step."""
    run_state_machine_as_test(TableMachine, settings=settings(stateful_step_count=60))


def test_tables_with_arc() -> None:
    """Under ARC, two namespaces in one pool behave as the model says after every step."""
    run_state_machine_as_test(ArcTableMachine, settings=settings(stateful_step_count=60))


def test_tables_with_quotas() -> None:
    """After every step no cap is passed, and no floor was touched by another model."""
    run_state_machine_as_test(QuotaTableMachine, settings=settings(stateful_step_count=60))
