"""Two namespaces in one pool, above a tier, driven at random beside a plain-dict model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvd.cache.chunks import GHOSTS_PER_SLOT
from kvd.cache.directory import ChunkRefs
from kvd.cache.ghosts import GhostCause
from kvd.cache.namespaces import Namespace, Namespaces
from kvd.config.values import Quota
from kvd_proto.directory import TIER_OWNER, LookupResult
from kvd_proto.messages import LABEL_ONLY
from kvd_proto.tier_table import TierEntry
from tests.cache.tables import Follower, add, make_namespaces, records, removed
from tests.exploring import explored

KEYS = [bytes([65 + i]) * (i + 1) for i in range(11)]
OWNERS = (1, 2)
SHAPES = [((4096, 4096), 2, False), ((12288,), 3, True)]  # bytes of a slot, ranks, replicated
TICKET = 20.0
PROCESSES = ("tier 0 before", "tier 0 now")
BLOCKS = 8  # of a chunk
PARTS = [(0, BLOCKS), (0, BLOCKS), (2, 6), (5, 3), (0, 4)]
KIB = 1024
QUOTAS: tuple[dict[str, Quota], ...] = (
    {},
    {"model 0": Quota(floor_bytes=24 * KIB, cap_bytes=40 * KIB)},
    {"model 0": Quota(cap_bytes=20 * KIB), "model 1": Quota(floor_bytes=24 * KIB)},
    {"model 0": Quota(floor_bytes=32 * KIB), "model 1": Quota(24 * KIB, 24 * KIB)},
)

Keys: TypeAlias = list[bytes]
Ref: TypeAlias = tuple[int, int]
"""Slot and generation."""
Part: TypeAlias = tuple[int, int]
"""First block and count of blocks."""

KEY_LIST = st.lists(st.sampled_from(KEYS), max_size=10)
SPACE, OWNER, PART = (st.sampled_from(every) for every in ((0, 1), OWNERS, PARTS))


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
    tier: str = ""  # the process that fills it

    @property
    def ref(self) -> Ref:
        """Where it lies."""
        return self.slot, self.generation


@dataclass
class Loan:
    """A slot on loan of the model, and the generation that it has once it is given to a key."""

    generation: int
    owner: int


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
        self.draining: dict[Ref, str] = {}  # and the tier that may write there
        self.held: dict[bytes, tuple[int, int]] = {}  # by the tier, with these blocks
        self.marks: dict[Ref, int] = {}  # 1: stored by a request that ended; 2: asked
        self.on_ready: list[Ref] = []
        self.on_asked: list[Ref] = []
        self.leases: dict[tuple[int, int], Lease] = {}  # by owner and number
        self.doomed: set[int] = set()
        self.loans: dict[int, Loan] = {}
        self.loans_used: dict[int, float] = {}
        self.ended: list[Ref] = []  # loans that were taken back
        self.ghosts: dict[bytes, GhostCause] = {}
        self.ghosts_of_step: set[bytes] = set()  # those before it, and those that it made
        self.forgets_ghosts = False
        self.was_reset: set[bytes] = set()  # when their chunks leave only a sweep knows
        self.seen: list[Ref] = []  # slots and generations that were READY once
        self.room = 0
        self.follower = Follower(self.table.directory)

    def use(self, keys: Keys) -> None:
        """These are here and were used, the first of them last."""
        for key in reversed(keys):
            if key in self.order:
                self.order.remove(key)
            self.order.append(key)

    def pinned(self) -> set[int]:
        """Slots under any lease."""
        return {slot for lease in self.leases.values() for slot in lease.slots}

    def in_use(self) -> set[int]:
        """Slots that have no chunk that can be found, and are not free."""
        return {*self.loans, *self.doomed, *(slot for slot, _ in self.draining)}

    def expected(self, slot: int) -> set[int]:
        """The ranks that have to write a slot."""
        return {slot % self.world_size} if self.replicated else set(range(self.world_size))

    def give_up(self, keys: Keys, refs: ChunkRefs) -> None:
        """These WRITING chunks are DRAINING now, and exactly the stores were reported."""
        gone = [self.chunks.pop(key) for key in keys]
        assert sorted(refs) == sorted(chunk.ref for chunk in gone if not chunk.tier)
        self.draining.update({chunk.ref: chunk.tier for chunk in gone})

    def evict(self, keys: Keys) -> None:
        """These leave for others."""
        for key in keys:
            assert self.may_go(key)
            del self.chunks[key]
            self.remember(key, GhostCause.EVICTED)

    def remember(self, key: bytes, cause: GhostCause) -> None:
        """This one is a ghost; where a step may have had too many, the oldest are forgotten."""
        self.ghosts[key] = cause
        self.ghosts_of_step.add(key)
        if len(self.ghosts_of_step) > GHOSTS_PER_SLOT * self.table.directory.num_slots:
            self.forgets_ghosts = True

    def loan_refs(self, owner: int | None = None) -> list[Ref]:
        """Loans, of one owner or all, with the generations that the slots will have."""
        loans = sorted(self.loans.items())
        return [(slot, loan.generation) for slot, loan in loans if owner in {loan.owner, None}]

    def end_loans(self, slots: list[int]) -> None:
        """These are on loan no longer, those of them that were."""
        for slot in slots:
            if (loan := self.loans.pop(slot, None)) is not None:
                self.ended.append((slot, loan.generation))

    def chunk_in(self, slot: int) -> bytes:
        """The key of the READY chunk in a slot; empty where there is none."""
        return next((k for k, chunk in self.chunks.items() if chunk.slot == slot), b"")

    def check_changes(self) -> None:
        """What the records say, what the changes add up to and what lookups find are the same."""
        directory = self.table.directory
        if self.follower.view is not directory:  # of another daemon
            self.follower = Follower(directory)
        self.follower.catch_up()
        ready = {
            key: (chunk.slot, chunk.generation, min(chunk.blocks), len(chunk.blocks), 0)
            for key, chunk in self.chunks.items()
            if chunk.ready
        }
        assert self.follower.said == records(directory) == ready

    def loans_of(self, owner: int) -> list[int]:
        """The slots that an owner may give to keys."""
        return [slot for slot, _ in self.loan_refs(owner)]

    def writing(self) -> list[bytes]:
        """Keys that engines are storing."""
        return sorted(k for k, chunk in self.chunks.items() if not chunk.ready and not chunk.tier)

    def coming(self) -> list[bytes]:
        """Keys that come up from a tier."""
        return sorted(k for k, chunk in self.chunks.items() if not chunk.ready and chunk.tier)

    def ready(self, chunk: Chunk) -> None:
        """All shares of a chunk are there, and its key is known."""
        chunk.ready = True
        self.seen.append(chunk.ref)
        self.on_ready.append(chunk.ref)
        if self.marks.get(chunk.ref) == 2:
            self.on_asked.append(chunk.ref)

    def ask(self, ref: Ref) -> None:
        """A READY chunk was asked for."""
        if self.marks.get(ref) != 2:
            self.marks[ref] = 2
            self.on_asked.append(ref)

    def end_leases(self, numbers: list[Ref]) -> None:
        """Leases end; doomed chunks that nobody pins any more go."""
        for number in numbers:
            del self.leases[number]
        self.doomed &= self.pinned()

    def protected_bytes(self, namespaces: Namespaces) -> int:
        """What it holds of its floor."""
        group = namespaces.pool.quotas.of(self.table.space)
        return min(group.floor, group.num_extents) if group is not None else 0

    def forget_yielded(self) -> None:
        """Columns went to another namespace, or for a cap: chunks and loans there end."""
        directory, space = self.table.directory, self.table.space

        def is_gone(slot: int) -> bool:
            return slot // space.geometry.column_slots not in space

        gone = [key for key, chunk in self.chunks.items() if directory.find(key) != chunk.slot]
        ended = [slot for slot in self.loans if directory.loan_of(slot) == 0]
        assert all(is_gone(self.chunks[key].slot) for key in gone)
        assert all(map(is_gone, ended))
        self.end_loans(ended)
        self.evict(gone)

    def may_go(self, key: bytes) -> bool:
        """READY and not pinned."""
        return (
            key in self.chunks
            and self.chunks[key].ready
            and self.chunks[key].slot not in self.pinned()
        )

    def candidates(self) -> list[bytes]:
        """What may go and is not on loan, used longest ago first."""
        return [k for k in self.order if self.may_go(k) and self.chunks[k].slot not in self.loans]


class TableMachine(RuleBasedStateMachine):
    """Every rule does the same to the tables and to the model and compares the answers."""

    policy = "lru"
    quotas: Mapping[str, Quota] = QUOTAS[0]
    tiers: tuple[str, ...] = ("memory:,size=1MiB",)

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
        return make_namespaces(64 * KIB, policy=self.policy, quotas=self.quotas, tier=self.tiers)

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
        namespace.table.queue_demotions(ready=True, asked=True)
        return namespace

    @rule(space=SPACE, attach=st.booleans())
    def engines(self, space: int, attach: bool) -> None:
        """An engine comes or goes."""
        namespace = self.models[space].namespace
        if attach:
            self.namespaces.attach_engine(namespace)
        elif namespace.engines:
            self.namespaces.detach_engine(namespace)

    @rule(
        space=SPACE, owner=OWNER, need=st.sampled_from([0, 1, 3, 8, 40]), engines=st.integers(1, 3)
    )
    def lend(self, space: int, owner: int, need: int, engines: int) -> None:
        """An engine needs so many loans more."""
        model, other = self.models[space], self.models[1 - space]
        protected = other.protected_bytes(self.namespaces)
        candidates = [model.chunks[key].slot for key in model.candidates()]
        before = model.table.directory.changes.head
        slots, generations = model.table.lending.lend(owner, need, engines, self.now)
        assert model.table.directory.changes.head == before
        other.forget_yielded()
        assert other.protected_bytes(self.namespaces) >= protected
        chunks = [slot for slot in slots if slot in candidates]
        if self.policy == "lru":
            assert chunks == candidates[: len(chunks)]
        assert slots[len(slots) - len(chunks) :] == chunks
        assert len(slots) <= need
        if len(slots) < need:
            assert len(chunks) == len(candidates)
            # Of the last column taken from others some may be left.
            space_ = model.table.space
            assert space_.free_slots < space_.geometry.column_slots
        taken = model.in_use()
        taken |= {chunk.slot for chunk in model.chunks.values()} - set(candidates)
        assert not taken & set(slots)
        for slot, generation in zip(slots, generations, strict=True):
            model.loans[slot] = Loan(generation, owner)
        if slots:
            model.loans_used[owner] = self.now

    @rule(space=SPACE, keys=KEY_LIST, owner=OWNER, blocks=PART, data=st.data())
    def begin_with_any(
        self, space: int, keys: Keys, owner: int, blocks: Part, data: st.DataObject
    ) -> None:
        """Keys get slots, some of which are no loans, or another's, or not of this generation."""
        model = self.models[space]
        refs = model.loan_refs()
        refs += [*model.ended[-12:], *model.draining, (1000, 1)]
        refs += [chunk.ref for chunk in model.chunks.values()]
        refs += [(slot, generation - 1) for slot, generation in refs]
        drawn = data.draw(st.lists(st.sampled_from(sorted(refs)), max_size=len(keys)))
        self.give(model, keys, drawn, owner, blocks)

    @rule(space=SPACE, keys=KEY_LIST, owner=OWNER, blocks=PART, dropped=KEY_LIST)
    def step(self, space: int, keys: Keys, owner: int, blocks: Part, dropped: Keys) -> None:
        """An engine drops stores, begins others and asks for more loans."""
        model = self.models[space]
        if not model.loans_of(owner):
            self.lend(space=space, owner=owner, need=8, engines=1)
        gone = [k for k in model.writing() if k in dropped and model.chunks[k].owner == owner]
        model.give_up(gone, model.table.stores.drop(dropped, owner))
        self.give(model, keys, model.loan_refs(owner), owner, blocks)
        self.lend(space=space, owner=owner, need=8, engines=1)

    @rule(
        space=SPACE,
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4),
        blocks=st.tuples(st.sampled_from(PARTS), st.sampled_from(PARTS)),
    )
    def race(self, space: int, keys: Keys, blocks: tuple[tuple[int, int], tuple[int, int]]) -> None:
        """Two engines store the same chunks."""
        model = self.models[space]
        for owner in OWNERS:
            self.lend(space=space, owner=owner, need=4, engines=2)
        for owner, offered in zip(OWNERS, blocks, strict=True):
            self.give(model, keys, model.loan_refs(owner), owner, offered)

    def give(self, model: Model, keys: Keys, refs: list[Ref], owner: int, blocks: Part) -> None:
        """The first keys get these slots; what comes of it."""
        keys, refs = keys[: len(refs)], refs[: len(keys)]
        whole = blocks == (0, BLOCKS)
        counts = model.table.counts
        lost, raced, evicted = counts.stores_lost, counts.stores_raced, counts.evicted
        model.table.stores.begin(
            keys,
            [slot for slot, _ in refs],
            [generation for _, generation in refs],
            owner,
            self.now,
            () if whole else [blocks] * len(keys),
            seconds=TICKET,
        )
        begun = []
        for key, (slot, generation) in zip(keys, refs, strict=True):
            if model.loans.get(slot) != Loan(generation, owner):
                lost += 1
                continue
            del model.loans[slot]
            model.loans_used[owner] = self.now
            here, goes = model.chunks.get(key), model.chunk_in(slot)
            if here is not None and not (here.ready and here.blocks < part(*blocks)):
                raced += 1
                continue
            if here is not None and goes != key:  # a fuller store takes its place
                model.end_loans([here.slot])
                if here.slot in model.pinned():
                    model.doomed.add(here.slot)
                del model.chunks[key]
            if goes:
                model.evict([goes])
                evicted += 1
            model.chunks[key] = Chunk(slot, generation, owner, self.now + TICKET, used=self.now)
            model.ghosts.pop(key, None)
            begun.append(key)
        model.use(begun)
        assert (counts.stores_lost, counts.stores_raced) == (lost, raced)
        assert counts.evicted == evicted

    @rule(space=SPACE, owner=st.sampled_from([*OWNERS, *OWNERS, None]))
    def end_loans(self, space: int, owner: int | None) -> None:
        """The loans of an engine end, or all of them, as the daemon drains."""
        model = self.models[space]
        if owner is None:
            model.table.lending.end_all_loans()
        else:
            model.table.lending.end_loans(owner)
        model.end_loans([slot for slot, _ in model.loan_refs(owner)])

    @rule(space=SPACE, seconds=st.sampled_from([0.0, 5.0]), but=st.integers(0, 2))
    def end_unused_loans(self, space: int, seconds: float, but: int) -> None:
        """The loans of engines that used none for a while end."""
        model, since = self.models[space], self.now - seconds
        model.table.lending.end_unused_loans(since, but or None)
        for owner in OWNERS:
            if owner != but and model.loans_used.get(owner, 0.0) <= since:
                model.end_loans(model.loans_of(owner))

    @rule(
        space=SPACE,
        owner=OWNER,
        number=st.integers(1, 3),
        seconds=st.sampled_from([1.0, 5.0, 10.0]),
        data=st.data(),
    )
    def pin(self, space: int, owner: int, number: int, seconds: float, data: st.DataObject) -> None:
        """Chunks are pinned as they were seen, under a number that may be in use."""
        model = self.models[space]
        refs = [*model.seen[-12:], (1000, 1)]
        refs += [chunk.ref for chunk in model.chunks.values()]
        refs += model.loan_refs()
        named = data.draw(st.lists(st.sampled_from(sorted(refs)), max_size=6))
        self.hold(model, owner, number, seconds, named)

    @rule(space=SPACE, owner=OWNER, most=st.integers(1, 4))
    def pin_what_is_lent(self, space: int, owner: int, most: int) -> None:
        """Chunks on loan, to whichever engine, are loaded."""
        model = self.models[space]
        named = [chunk.ref for chunk in model.chunks.values() if chunk.slot in model.loans][:most]
        self.hold(model, owner, 1, 5.0, named)

    def hold(self, model: Model, owner: int, number: int, seconds: float, named: list[Ref]) -> None:
        """An engine pins these slots with these generations."""
        directory = model.table.directory
        keys = {chunk.ref: key for key, chunk in model.chunks.items() if chunk.ready}
        pinned = [
            ref
            for ref in named
            if ref in keys
            or (ref[0] in model.doomed and directory.generation(ref[0]) == ref[1] > directory.floor)
        ]
        slots, generations = [slot for slot, _ in named], [generation for _, generation in named]
        model.table.loads.pin(number, slots, generations, owner, self.now, seconds)
        if not pinned:
            return
        lease = Lease(owner, self.now + seconds, [slot for slot, _ in pinned])
        model.leases[owner, number] = lease
        for ref in pinned:
            model.ask(ref)
        model.end_loans([slot for slot, _ in pinned])
        model.end_leases([])
        here = [keys[ref] for ref in pinned if ref in keys]
        model.use(here)
        for key in here:
            model.chunks[key].used = self.now

    def report(self, model: Model, keys: Keys, rank: int, first: int, count: int) -> None:
        """A lane reports one rank's share of WRITING chunks of one owner; count 0: it failed."""
        chunks = [model.chunks[key] for key in keys]
        now_ready, dropped = model.table.stores.share_done(
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
            model.ready(chunk)
            ready.append(chunk.ref)
        assert now_ready == ready
        model.give_up(failed, dropped)

    @rule(
        space=SPACE,
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

    @rule(space=SPACE, data=st.data(), what=st.sampled_from(["slot", "gen", "own"]))
    def stale_share(self, space: int, data: st.DataObject, what: str) -> None:
        """A report about a slot that has moved on, or was never this owner's, changes nothing."""
        model = self.models[space]
        refs = [(c.slot, c.generation, c.owner) for c in model.chunks.values()]
        refs += [(*ref, 1) for ref in model.draining]
        refs += [(slot, loan.generation, loan.owner) for slot, loan in model.loans.items()]
        if refs:
            slot, generation, owner = data.draw(st.sampled_from(sorted(refs)))
            outcome = model.table.stores.share_done(
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

    @rule(space=SPACE)
    def finish(self, space: int) -> None:
        """Every share that is missing arrives."""
        self.report_missing(self.models[space], 0, BLOCKS)

    def report_missing(self, model: Model, first: int, count: int) -> None:
        """All ranks report these blocks of every chunk that is being written."""
        for key in model.writing():
            for rank in range(model.world_size):
                if key in model.chunks and not model.chunks[key].ready:
                    self.report(model, [key], rank, first, count)

    @rule(space=SPACE, keys=KEY_LIST, owner=OWNER, blocks=PART)
    def store(self, space: int, keys: Keys, owner: int, blocks: Part) -> None:
        """Chunks are stored at once, some in part, and nothing is left draining."""
        model = self.models[space]
        while keys:
            self.lend(space=space, owner=owner, need=len(keys), engines=1)
            refs = model.loan_refs(owner)
            if not refs:
                break
            self.give(model, keys, refs, owner, blocks)
            keys = keys[len(refs) :]
        self.report_missing(model, *blocks)
        self.drain(space)

    @rule(space=SPACE, owner=OWNER)
    def store_whole(self, space: int, owner: int) -> None:
        """What is here in part is offered whole."""
        model = self.models[space]
        keys = [k for k, c in model.chunks.items() if c.ready and c.blocks != part(0, BLOCKS)]
        if keys:
            self.store(space=space, keys=sorted(keys), owner=owner, blocks=(0, BLOCKS))

    @rule(space=SPACE, process=st.sampled_from(("", *PROCESSES)))
    def drain(self, space: int, process: str = "") -> None:
        """Lanes, or a tier's process, have nothing under way in slots that were given up.

        An answer about an older generation, or about a slot of others, changes nothing.
        """
        model = self.models[space]
        refs = [ref for ref, name in model.draining.items() if name or not process]
        refs += [chunk.ref for chunk in model.chunks.values()]
        refs += [(slot, generation - 1) for slot, generation in refs]
        drained = [ref for ref, name in model.draining.items() if name == process]
        slots, generations = [slot for slot, _ in refs], [generation for _, generation in refs]
        assert model.table.slots.writes_ended(process, slots, generations) == len(drained)
        for ref in drained:
            del model.draining[ref]

    @rule(space=SPACE, data=st.data(), owner=OWNER)
    def unpin(self, space: int, data: st.DataObject, owner: int) -> None:
        """A lease is given back, perhaps by somebody who does not hold it."""
        model = self.models[space]
        _, number = data.draw(st.sampled_from([(0, 0), *sorted(model.leases)]))
        mine = (owner, number) in model.leases
        assert model.table.loads.unpin(number, owner) == mine
        if mine:
            model.end_leases([(owner, number)])

    @rule(space=SPACE, keys=KEY_LIST)
    def finished(self, space: int, keys: Keys) -> None:
        """A request has finished that used chunks, some of which may not be here yet or any more.

        What is named twice counts where it is named first.
        """
        model = self.models[space]
        here = [key for key in dict.fromkeys(keys) if key in model.chunks]
        assert model.table.loads.refresh(keys, self.now) == len(here)
        model.use(here)
        model.end_loans([model.chunks[key].slot for key in here])
        for key in here:
            chunk = model.chunks[key]
            chunk.used = self.now
            if chunk.ready and model.marks.get(chunk.ref) == 1:
                model.ask(chunk.ref)
            else:
                model.marks[chunk.ref] = min(2, model.marks.get(chunk.ref, 0) + 1)

    @rule(space=SPACE, keys=KEY_LIST, label=st.integers(0, 0x7F))
    def labelled(self, space: int, keys: Keys, label: int) -> None:
        """A request that finished before gets a label, perhaps one that nobody knows."""
        model = self.models[space]
        model.table.finish_request(keys, len(keys), LABEL_ONLY | label, self.now)
        model.end_loans([model.chunks[key].slot for key in keys if key in model.chunks])

    @rule(
        space=SPACE, keys=KEY_LIST, tier=st.sampled_from(PROCESSES), most=st.sampled_from([1, 3, 9])
    )
    def promote(self, space: int, keys: Keys, tier: str, most: int) -> None:
        """Chunks are to come up, some of which may be here."""
        model, other = self.models[space], self.models[1 - space]
        protected = other.protected_bytes(self.namespaces)
        missing = [key for key in dict.fromkeys(keys) if key not in model.chunks][:most]
        candidates = model.candidates()
        before = model.table.directory.changes.head
        begun = model.table.promotions.begin(keys, tier, self.now, TICKET, most)
        evicted = removed(model.table, before)
        other.forget_yielded()
        assert other.protected_bytes(self.namespaces) >= protected
        assert set(evicted) <= set(candidates)
        if self.policy == "lru":
            assert evicted == candidates[: len(evicted)]
        model.evict(evicted)
        assert [key for key, _, _ in begun] == missing[: len(begun)]
        if len(begun) < len(missing):
            assert not model.table.space.free_slots
            assert not model.candidates()
        taken = model.in_use() | {chunk.slot for chunk in model.chunks.values()}
        for key, slot, generation in begun:
            assert slot not in taken
            taken.add(slot)
            chunk = Chunk(slot, generation, TIER_OWNER, self.now + TICKET, used=self.now, tier=tier)
            model.chunks[key] = chunk
            model.ghosts.pop(key, None)
            assert model.table.directory.owner(slot) == TIER_OWNER
        model.use([key for key, _, _ in begun])

    @rule(space=SPACE, data=st.data(), blocks=st.sampled_from([*PARTS, *PARTS, (0, 0), (4, 9)]))
    def promoted(self, space: int, data: st.DataObject, blocks: Part) -> None:
        """A tier has filled a slot, or one that was given up, or says what cannot be."""
        model = self.models[space]
        refs = [model.chunks[key].ref for key in model.coming()]
        refs += [(slot, generation - 1) for slot, generation in refs]
        refs += [ref for ref, tier in model.draining.items() if tier]
        refs += [chunk.ref for chunk in model.chunks.values() if chunk.ready]
        if not refs:
            return
        ref = data.draw(st.sampled_from(sorted(refs)))
        (key,) = [k for k in model.coming() if model.chunks[k].ref == ref] or [b""]
        possible = 0 < blocks[1] <= BLOCKS - blocks[0]
        assert model.table.promotions.complete(*ref, *blocks, 0) == bool(key and possible)
        if key and not possible:
            model.give_up([key], [])
        elif key:
            self.came_up(model, key, part(*blocks))

    @staticmethod
    def came_up(model: Model, key: bytes, blocks: set[int]) -> None:
        """A chunk that a tier has filled is READY; it is to go down where no tier has it."""
        chunk = model.chunks[key]
        chunk.blocks, chunk.tier = blocks, ""
        model.marks[chunk.ref] = 2
        model.ready(chunk)
        if key in model.held:
            del model.on_ready[-1], model.on_asked[-1]

    @rule(space=SPACE, keys=KEY_LIST)
    def come_up(self, space: int, keys: Keys) -> None:
        """Chunks come up at once."""
        self.promote(space=space, keys=keys, tier=PROCESSES[1], most=9)
        model = self.models[space]
        for key in model.coming():
            assert model.table.promotions.complete(*model.chunks[key].ref, 0, BLOCKS, 0)
            self.came_up(model, key, part(0, BLOCKS))

    @rule(space=SPACE, data=st.data())
    def not_promoted(self, space: int, data: st.DataObject) -> None:
        """Some do not come up; what is said of others changes nothing."""
        model = self.models[space]
        keys = {model.chunks[key].ref: key for key in model.coming()}
        refs = [*keys, *((slot, generation - 1) for slot, generation in keys)]
        refs += [ref for ref, tier in model.draining.items() if tier]
        refs += [chunk.ref for chunk in model.chunks.values() if not chunk.tier]
        if refs:
            named = data.draw(st.lists(st.sampled_from(sorted(refs)), unique=True))
            given_up = [ref for ref in named if ref in keys]
            assert model.table.promotions.give_up(named) == given_up
            model.give_up([keys[ref] for ref in given_up], [])

    @rule(tier=st.sampled_from(PROCESSES))
    def tier_lost(self, tier: str) -> None:
        """A tier's process dies."""
        for space, model in enumerate(self.models):
            self.drain(space=space)  # those that nobody has been told to wait for go with any
            theirs = [key for key in model.coming() if model.chunks[key].tier == tier]
            refs = [model.chunks[key].ref for key in theirs]
            assert model.table.promotions.give_up(refs) == refs
            model.give_up(theirs, [])
            model.table.slots.writer_lost(tier)
            model.draining = {ref: name for ref, name in model.draining.items() if name != tier}

    @rule(space=SPACE, key=st.sampled_from(KEYS), holds=st.booleans())
    @precondition(lambda self: self.tiers)
    def tier_holds(self, space: int, key: bytes, holds: bool) -> None:
        """A tier says that it keeps a chunk, or not any more."""
        model = self.models[space]
        tiers = model.table.directory.tiers
        assert tiers is not None
        if holds:
            assert tiers.hold(key, 0, 0, BLOCKS, 0)
            model.held[key] = 0, BLOCKS
        else:
            assert tiers.release(key, 0) == (model.held.pop(key, None) is not None)

    @rule(space=SPACE, n=st.sampled_from([1, 2, 8]), asked=st.booleans())
    def go_down(self, space: int, n: int, asked: bool) -> None:
        """The broker asks what is to go down next."""
        model = self.models[space]
        table = model.table
        queue, expected = (
            (table.asked_queue, model.on_asked) if asked else (table.ready_queue, model.on_ready)
        )
        assert queue is not None
        assert len(queue) == len(expected)
        keys = {chunk.ref: key for key, chunk in model.chunks.items() if chunk.ready}
        rows: list[tuple[bytes, int, int, int, int, int]] = []
        missed = 0
        for _ in range(min(2 * n, len(expected))):
            if len(rows) < n:
                ref = expected.pop(0)
                if ref in keys:
                    blocks = model.chunks[keys[ref]].blocks
                    rows.append((keys[ref], *ref, min(blocks), len(blocks), 0))
                else:
                    missed += 1
        assert queue.take(n) == rows
        assert queue.take_missed() == missed

    @rule(seconds=st.sampled_from([0.5, 5.0, 12.0]))
    def time_passes(self, seconds: float) -> None:
        """Deadlines come."""
        self.now += seconds
        for model in self.models:
            refs = model.table.expire(self.now)
            unfinished = model.writing() + model.coming()
            late = [key for key in unfinished if model.chunks[key].deadline <= self.now]
            model.give_up(late, refs)
            ended = [n for n, lease in model.leases.items() if lease.deadline <= self.now]
            model.end_leases(ended)

    @rule(space=SPACE, owner=OWNER)
    def drop_owner(self, space: int, owner: int) -> None:
        """An engine dies."""
        model = self.models[space]
        refs = model.table.drop_owner(owner)
        model.end_loans(model.loans_of(owner))
        theirs = [key for key in model.writing() if model.chunks[key].owner == owner]
        model.give_up(theirs, refs)
        model.end_leases([n for n, lease in model.leases.items() if lease.owner == owner])

    @rule(space=SPACE)
    @precondition(lambda self: any(len(model.chunks) > 3 for model in self.models))
    def reset(self, space: int) -> None:
        """A namespace is emptied."""
        model = self.models[space]
        salt = model.namespace.salt
        outcome, revoke, _ = self.namespaces.reset(model.namespace)
        assert model.namespace.salt not in {b"", salt}
        model.held.clear()
        pinned = model.pinned()
        ready = {chunk.slot for chunk in model.chunks.values() if chunk.ready}
        assert outcome.deferred == len(ready & pinned)
        writing = len(model.writing())
        assert outcome.dropped == len(ready) + writing - outcome.deferred
        model.was_reset |= {key for key, chunk in model.chunks.items() if chunk.ready}
        model.give_up(model.writing() + model.coming(), revoke)
        model.end_loans(list(model.loans))
        model.doomed |= ready & pinned
        model.chunks.clear()

    @rule(space=SPACE, count=st.integers(1, 6))
    def sweep(self, space: int, count: int) -> None:
        """Some of what a reset has left is freed; nobody sees a difference."""
        with patch("kvd.cache.chunks.PIECE_SLOTS", count):
            self.models[space].table.sweep()

    @rule(
        space=SPACE,
        first=st.integers(0, 9),
        count=st.sampled_from([1, 4, 99]),
        unused_for=st.sampled_from([0.0, 5.0, 12.0]),
    )
    def remove(self, space: int, first: int, count: int, unused_for: float) -> None:
        """An operator drops the chunks of some slots that are of no use."""
        model = self.models[space]
        pinned = model.pinned()
        removable = [
            key
            for key, chunk in model.chunks.items()
            if chunk.ready
            and first <= chunk.slot < first + count
            and chunk.slot not in pinned
            and self.now - chunk.used >= unused_for
        ]
        assert model.table.remove(first, count, unused_for) == len(removable)
        for key in removable:
            model.end_loans([model.chunks.pop(key).slot])
            model.remember(key, GhostCause.REMOVED)

    @rule(number=st.integers(0, len(QUOTAS) - 1))
    @precondition(lambda self: self.quotas)
    def set_quotas(self, number: int) -> None:
        """The operator sets other quotas."""
        self.namespaces.pool.set_quotas(QUOTAS[number])
        self.trim()
        for model in self.models:
            group = self.namespaces.pool.quotas.of(model.table.space)
            model.room = group.num_left if group is not None else 0

    @rule()
    @precondition(lambda self: self.quotas)
    def trim(self) -> None:
        """What had to stay above a cap goes when it may, and nothing more than needed."""
        self.namespaces.pool.trim()
        for model in self.models:
            model.forget_yielded()
            space = model.table.space
            group = self.namespaces.pool.quotas.of(space)
            if group is not None and group.num_left < 0:
                assert space.busy_columns() >= set(space.claimed)

    @invariant()
    def is_within_caps(self) -> None:
        """No model holds more than its cap, but for what is in use since the cap was lowered."""
        for model in self.models:
            group = self.namespaces.pool.quotas.of(model.table.space)
            room = group.num_left if group is not None else 0
            assert room >= min(0, model.room)
            model.room = room

    @invariant()
    def agrees(self) -> None:
        """Tables and model say the same, and every invariant of the state holds."""
        self.namespaces.check_integrity()
        for model in self.models:
            table = model.table
            model.check_changes()
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
                "lent": len(model.loans),
                "writing": len(model.writing()) + len(model.coming()),
                "draining": len(model.draining),
                "pinned": len(model.pinned()),
                "doomed": len(model.doomed),
            }
            busy = *model.writing(), *model.coming(), *model.in_use(), *model.pinned()
            assert table.slots.is_idle == (not busy)
            if (tiers := table.directory.tiers) is not None:
                expected = {key: TierEntry(1, *blocks, 0) for key, blocks in model.held.items()}
                assert dict(tiers.held_chunks(0, tiers.places)) == expected
            for slot, loan in model.loans.items():
                assert table.directory.is_lent(slot, loan.generation)
            self.check_ghosts(model)

    @staticmethod
    def check_ghosts(model: Model) -> None:
        """Ghosts say why chunks left; what a reset dropped has one once its slot was swept."""
        ghosts = model.table.ghosts
        causes = {key: ghost.cause for key in KEYS if (ghost := ghosts.find(key)) is not None}
        for key in model.was_reset & causes.keys():
            if causes[key] is GhostCause.RESET:
                model.remember(key, causes[key])
        if model.forgets_ghosts:
            assert causes.items() <= model.ghosts.items()
        else:
            assert causes == model.ghosts
        model.ghosts, model.ghosts_of_step, model.forgets_ghosts = causes, set(causes), False
        if not model.table.slots.forgotten:
            model.was_reset.clear()


class QuotaTableMachine(TableMachine):
    """The same with floors and caps, which may change."""

    quotas = QUOTAS[1]
    tiers = ()  # whose table takes most of the time


class AdaptiveTableMachine(TableMachine):
    """The same with the other policy."""

    policy = "adaptive"
    tiers = ()


@pytest.mark.hypothesis
@pytest.mark.parametrize("machine", [TableMachine, AdaptiveTableMachine, QuotaTableMachine])
def test_tables(machine: type[TableMachine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two namespaces in one pool behave as the model says after every step."""
    monkeypatch.setattr("kvd.cache.namespaces.tier_table_capacity", lambda _: 64)
    run_state_machine_as_test(machine, settings=explored(20, 60))
