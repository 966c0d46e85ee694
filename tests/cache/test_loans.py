"""Slots on loan: what schedulers are lent, what they give to keys, and what ends a loan."""

from collections.abc import Sequence

import pytest

from kvd.cache.chunks import ChunkTable
from kvd.cache.directory import ChunkRefs
from kvd.cache.eviction import SlotLists
from kvd.cache.ghosts import GhostCause
from kvd.config.values import Quota
from kvd.errors import IntegrityError
from kvd.pool.geometry import FillOrder
from kvd_proto.directory import LookupResult, SlotState
from kvd_proto.messages import LABEL_ONLY, Label
from tests.cache import tables
from tests.cache.tables import (
    PAGE,
    add,
    loans_of,
    make_namespaces,
    make_table,
    names,
    pin,
    store,
)

HIT, MISS = LookupResult.HIT, LookupResult.MISS


def lend(
    table: ChunkTable, need: int, owner: int = 1, engines: int = 1, now: float = 0.0
) -> ChunkRefs:
    """What one of so many engines is lent."""
    slots, generations = table.lending.lend(owner, need, engines, now)
    return list(zip(slots, generations, strict=True))


def begin(
    table: ChunkTable,
    keys: list[bytes],
    refs: ChunkRefs,
    owner: int = 1,
    blocks: Sequence[tuple[int, int]] = (),
    now: float = 0.0,
) -> None:
    """A step of an engine gives keys these slots."""
    slots, generations = [slot for slot, _ in refs], [generation for _, generation in refs]
    table.stores.begin(keys, slots, generations, owner, now, blocks, seconds=5.0)


def share(
    table: ChunkTable,
    refs: ChunkRefs,
    rank: int = 0,
    owner: int = 1,
    blocks: tuple[int, int] = (0, 4),
) -> tuple[ChunkRefs, ChunkRefs]:
    """A lane reports a rank's share of these slots: what is READY now, what was given up."""
    n, (first, count) = len(refs), blocks
    slots, generations = [slot for slot, _ in refs], [generation for _, generation in refs]
    return table.stores.share_done(
        owner, rank, slots, generations, [first] * n, [count] * n, [0] * n, ok=True
    )


def full_table(chunks: int, policy: str = "lru") -> ChunkTable:
    """A table of a pool that is full of READY chunks, `names(chunks)`."""
    table = make_table(chunks, policy=policy)
    store(table, names(chunks))
    return table


@pytest.mark.parametrize("label", [Label.DONE, LABEL_ONLY | Label.DONE])
def test_a_chunk_on_loan_that_a_request_used_stays(label: int) -> None:
    """The end of a request ends the loans of its chunks, and so does a label that comes later."""
    table = full_table(4)
    refs = lend(table, 2)
    table.finish_request([b"key 3"], 1, label, 1.0)
    begin(table, [b"a"], refs[:1])
    assert table.counts.stores_lost == 1
    assert table.directory.lookup_many([b"a", b"key 3"]) == [MISS, HIT]
    assert loans_of(table) == refs[1:]
    table.check_integrity()


@pytest.mark.parametrize("is_part", [False, True])
def test_many_keys_of_a_step_search_the_eviction_order_once(
    is_part: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots that lost their race return in one call; parts on loan that are replaced in none."""
    calls = list[int]()
    insert_all = SlotLists.insert_all

    def counted(lists: SlotLists, which: int, slots: Sequence[int]) -> None:
        calls.append(len(slots))
        insert_all(lists, which, slots)

    monkeypatch.setattr(SlotLists, "insert_all", counted)
    table = full_table(8)
    refs = lend(table, 3)
    blocks = [(1, 1)] * 3 if is_part else []
    begin(table, names(3, first=10), refs, blocks=blocks)
    share(table, refs, blocks=(1, 1) if is_part else (0, 4))
    theirs = lend(table, 8, owner=2)
    chosen = [ref for ref in theirs if ref not in refs and ref[0] not in dict(refs)][:3]
    begin(table, names(3, first=10), chosen, owner=2)
    assert calls == ([] if is_part else [3])
    assert (table.counts.replaced, table.counts.stores_raced) == ((3, 0) if is_part else (0, 3))
    table.check_integrity()


def test_a_slot_that_lost_its_race_is_free_where_its_chunk_is_replaced() -> None:
    """In the same step a key races for a slot, and the slot's chunk is stored more fully."""
    table = make_table(4)
    store(table, [b"a"])
    (ref,) = lend(table, 1)
    begin(table, [b"part"], [ref], blocks=[(1, 1)])
    share(table, [ref], blocks=(1, 1))
    pin(table, [b"a"])
    refs = lend(table, 4)
    refs.sort(key=lambda lent: lent[0] != ref[0])  # the part's slot first
    begin(table, [b"a", b"part"], refs[:2])
    assert (table.counts.replaced, table.counts.stores_raced) == (1, 1)
    assert table.directory.state(ref[0]) == SlotState.FREE
    table.check_integrity()


def test_the_same_key_twice_in_a_step_loses_to_itself() -> None:
    """One slot gets the key, the other one is free again."""
    table = make_table(8)
    refs = lend(table, 2)
    begin(table, [b"a", b"a"], refs)
    assert table.directory.find(b"a") == refs[0][0]
    assert table.directory.state(refs[1][0]) == SlotState.FREE
    assert share(table, refs) == (refs[:1], [])
    table.check_integrity()


def test_only_the_owners_loan_of_now_can_be_used() -> None:
    """Another engine, another generation, another slot, and a loan used before: all are lost."""
    table = make_table(8)
    (ref,) = lend(table, 1)
    slot, generation = ref
    begin(table, [b"a"], [ref], owner=2)
    for number, wrong in enumerate(
        [(slot, generation + 1), (slot, generation + 2**32), (slot + 1, generation), (2**40, 1)]
    ):
        begin(table, [b"%d" % number], [wrong])
    begin(table, [b"a"], [ref])
    begin(table, [b"b"], [ref])
    assert table.counts.stores_lost == 6
    assert table.directory.find(b"a") == slot
    assert share(table, [ref], owner=2) == ([], [])
    table.check_integrity()


def test_only_free_slots_are_lent_while_the_pool_is_filled() -> None:
    """Those whose memory is there."""
    table = make_table(64, fill=FillOrder(64 * PAGE, 2 * PAGE))
    usable = 16 * PAGE
    begun = tables.begin(table, names(16), usable=usable)
    assert len(begun.slots) == 16
    share(table, list(zip(begun.slots, begun.generations, strict=True)))
    assert table.lending.lend(1, 64, 1, 0.0, usable) == ([], [])
    assert len(table.lending.lend(1, 64, 1, 0.0)[0]) == 64
    table.check_integrity()


def test_loans_that_were_not_used_for_a_while_end() -> None:
    """Not those of an engine that has used one since, or was lent one, or is spared."""
    table = make_table(64)
    mine, theirs = lend(table, 8), lend(table, 8, owner=2)
    begin(table, [b"a"], mine[:1], now=5.0)
    table.lending.end_unused_loans(4.0, but=2)
    assert len(table.slots.loans) == 15
    table.lending.end_unused_loans(4.0)
    assert loans_of(table) == mine[1:]
    begin(table, [b"b"], theirs[:1], owner=2)
    assert table.counts.stores_lost == 1
    lend(table, 20, now=6.0)
    table.lending.end_unused_loans(5.0)
    assert len(table.slots.loans) == 27
    table.lending.end_unused_loans(6.0)
    assert table.slots.loans.count(1) == 0
    table.check_integrity()


def test_a_reset_ends_all_loans() -> None:
    """With their generations no chunk would be found; what was lent is not found either."""
    table = make_table(8)
    store(table, names(6))
    refs = lend(table, 6)
    begin(table, [b"y"], refs[:1])
    done, to_revoke = table.reset()
    assert (done.dropped, to_revoke) == (7, refs[:1])
    assert not table.slots.loans
    begin(table, [b"z"], refs[1:2])
    assert table.counts.stores_lost == 1
    assert table.directory.lookup_many(names(6)) == [MISS] * 6
    table.check_integrity()
    (ref,) = lend(table, 1)
    begin(table, [b"z"], [ref])
    share(table, [ref])
    assert table.directory.lookup(b"z") is HIT
    table.check_integrity()


def test_an_owners_end_leaves_nothing() -> None:
    """What it was writing, its loans and its leases all end."""
    table = make_table(8)
    store(table, [b"x"])
    refs = lend(table, 4)
    begin(table, [b"x", b"y"], refs[:2])
    pin(table, [b"x"])
    assert table.drop_owner(1) == refs[1:2]
    assert table.slots.revoked("", *zip(*refs[1:2], strict=True)) == 1
    assert table.slots.is_idle
    table.check_integrity()


def test_a_chunk_on_loan_that_an_operator_drops_is_free() -> None:
    """A sweep of what was not of use ends the loan before the chunk goes."""
    table = full_table(4)
    refs = lend(table, 2)
    assert table.remove(0, 4, 0.0) == 4
    begin(table, [b"a"], refs[:1])
    assert table.counts.stores_lost == 1
    table.check_integrity()


def test_a_ghost_says_why_a_chunk_left() -> None:
    """Evicted, yielded to another namespace, reset, removed, refused, or above a quota."""
    quotas = {"model 0": Quota(cap_bytes=8 * PAGE)}
    namespaces = make_namespaces(16 * PAGE, quotas=quotas)
    namespace = add(namespaces, 0, PAGE, blocks_per_chunk=4)
    table = namespace.table

    def causes(keys: list[bytes]) -> list[GhostCause | None]:
        ghosts = map(table.ghosts.find, keys)
        return [ghost.cause if ghost is not None else None for ghost in ghosts]

    store(table, names(8))
    store(table, names(1, first=10))
    table.stores.remember_unstored([b"key 0", b"new"], 1.0)
    assert causes([b"key 7", b"key 0", b"new"]) == [GhostCause.EVICTED, None, GhostCause.QUOTA]
    namespaces.pool.set_quotas({})
    table.stores.remember_unstored([b"new"], 1.0)
    assert causes([b"new"]) == [GhostCause.REFUSED]
    begun = tables.begin(table, [b"key 7", b"new"])
    assert begun.keys == [b"key 7", b"new"]
    assert causes(begun.keys) == [None, None]
    table.remove(table.directory.find(b"key 1"), 1, 0.0)
    assert causes([b"key 1"]) == [GhostCause.REMOVED]
    table.yield_slots([table.directory.find(b"key 2")])
    assert causes([b"key 2"]) == [GhostCause.EVICTED]
    slot = table.directory.find(b"key 3")
    table.reset()
    tables.begin(table, [b"key 4"])
    table.yield_slots([slot])  # before a sweep comes to it
    while not table.is_swept:
        table.sweep()
    assert causes(names(6, first=3)) == [
        *(GhostCause.RESET, None, GhostCause.RESET, GhostCause.RESET),
        *(None, None),  # being written, and never stored
    ]
    namespaces.check_integrity()


def test_only_the_owners_stores_are_dropped() -> None:
    """A key of another engine, one that is READY and one that is not there stay as they are."""
    table = make_table(8)
    store(table, [b"ready"])
    (mine,), (theirs,) = lend(table, 1), lend(table, 1, owner=2)
    begin(table, [b"mine"], [mine])
    begin(table, [b"theirs"], [theirs], owner=2)
    assert table.stores.drop([b"ready", b"theirs", b"none", b"mine", b"mine"], 1) == [mine]
    assert table.directory.lookup_many([b"ready", b"mine", b"theirs"]) == [1, 0, 2]
    table.check_integrity()


def test_another_namespace_takes_columns_with_loans_at_once() -> None:
    """Nothing is written into a slot on loan, so nobody has to be asked."""
    namespaces = make_namespaces(64 * PAGE)
    old, new = add(namespaces, 0, PAGE).table, add(namespaces, 1, PAGE).table
    store(old, names(32))
    refs = lend(old, 64)
    assert len(refs) == 64
    assert len(lend(new, 8, owner=2)) == 8
    ended = [ref for ref in refs if not old.directory.is_lent(*ref)]
    assert len(ended) == 8
    begin(old, names(64, first=100), refs)
    assert old.counts.stores_lost == 8
    namespaces.check_integrity()
    held = [slot for slot, _ in ended if old.directory.state(slot) == SlotState.READY]
    assert old.counts.yielded == 32 - old.counts.evicted
    assert not held


def test_a_namespace_with_loans_is_not_closed() -> None:
    """Its scheduler may be about to use them."""
    namespaces = make_namespaces(64 * PAGE)
    namespace = add(namespaces, 0, PAGE)
    lend(namespace.table, 4)
    namespaces.detach_engine(namespace)
    assert namespaces.closable() == []
    namespace.table.lending.end_all_loans()
    assert namespaces.closable() == [namespace]


@pytest.mark.parametrize("damage", ["state", "loan", "record", "twice", "generation", "policy"])
def test_damage_is_noticed(damage: str) -> None:
    """The integrity check sees a loan that is none, one that is not noted, and one of two."""
    table = full_table(8)
    (slot, generation), _ = lend(table, 2)
    if damage == "state":
        table.directory.write_state(slot, SlotState.FREE)
    elif damage == "loan":
        table.slots.loans.end(slot)
    elif damage == "record":
        table.directory.end_loans([slot])
    elif damage == "twice":
        table.slots.loans.lend(2, [slot], [generation], 0.0)
    elif damage == "generation":
        table.directory.lend([slot])
    else:
        table.slots.policy.release([slot])
    with pytest.raises(IntegrityError):
        table.check_integrity()
