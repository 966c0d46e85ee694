"""Slots that schedulers give to keys by themselves: lending, begun stores, races, the way back."""

from collections.abc import Sequence

import pytest

from kvd.cache.chunks import ChunkTable
from kvd.config.values import Quota
from kvd.errors import IntegrityError
from kvd.pool.filling import FillOrder
from kvd.pool.pool import LOOKS
from kvd_proto.directory import LookupResult, SlotState
from tests.cache.tables import PAGE, add, make_namespaces, make_table, names, removed, store

Ref = tuple[int, int]


def lend(table: ChunkTable, wanted: int, owner: int = 1, engines: int = 1) -> list[Ref]:
    """What one of so many engines is lent."""
    slots, generations = table.lending.lend(owner, wanted, engines, 0.0)
    return list(zip(slots, generations, strict=True))


def begin(
    table: ChunkTable,
    keys: list[bytes],
    refs: Sequence[Ref],
    owner: int = 1,
    blocks: Sequence[tuple[int, int]] = (),
) -> tuple[int, list[Ref]]:
    """Keys get these slots; how many chunks are READY now, and what is to be revoked."""
    slots, generations = [slot for slot, _ in refs], [generation for _, generation in refs]
    return table.stores.begin(keys, slots, generations, owner, 0.0, blocks, seconds=5.0)


def share(
    table: ChunkTable,
    refs: Sequence[Ref],
    rank: int = 0,
    owner: int = 1,
    blocks: tuple[int, int] = (0, 4),
    *,
    ok: bool = True,
) -> tuple[list[Ref], list[Ref]]:
    """A lane reports a rank's share of these slots."""
    n, (first, count) = len(refs), blocks
    slots, generations = [slot for slot, _ in refs], [generation for _, generation in refs]
    return table.stores.share_done(
        owner, rank, slots, generations, [first] * n, [count] * n, [0] * n, ok=ok
    )


def free(table: ChunkTable, refs: Sequence[Ref]) -> None:
    """The only lane has nothing under way in these slots."""
    for slot, generation in refs:
        assert table.slots.revoked("", [slot], [generation]) == 1


def test_a_loan_becomes_a_chunk() -> None:
    """A lent slot is in no index; with its key it is pending, and a hit with the last share."""
    table = make_table(8, ranks=2)
    refs = lend(table, 4)
    assert len(refs) == 4
    assert all(table.directory.is_lent(*ref) for ref in refs)
    assert table.slots.stats()["lent"] == 4
    assert begin(table, [b"a"], refs[:1]) == (0, [])
    assert table.directory.lookup(b"a") is LookupResult.HIT_PENDING
    assert share(table, refs[:1], 0) == ([], [])
    assert share(table, refs[:1], 1) == (refs[:1], [])
    assert table.directory.lookup(b"a") is LookupResult.HIT
    assert table.slots.stats()["lent"] == 3
    table.check_integrity()


def test_shares_wait_for_the_key() -> None:
    """What lanes reported before the broker heard of the key counts, with its blocks."""
    table = make_table(8, ranks=2)
    (ref,) = lend(table, 1)
    assert share(table, [ref], 0, blocks=(0, 4)) == ([], [])
    assert share(table, [ref], 1, blocks=(1, 3)) == ([], [])
    assert share(table, [ref], 1, blocks=(1, 3)) == ([], [])  # again
    table.check_integrity()
    assert begin(table, [b"a"], [ref]) == (1, [])
    assert table.directory.blocks(ref[0]) == (1, 3)
    assert table.counts.stored == table.counts.stale_reports == 1
    table.check_integrity()


def test_a_failed_share_ends_a_loan_and_the_store_that_comes_later_is_lost() -> None:
    """The slot is called back from the lanes and free then; the key has no chunk."""
    table = make_table(8)
    (ref,) = lend(table, 1)
    assert share(table, [ref], ok=False) == ([], [ref])
    assert begin(table, [b"a"], [ref]) == (0, [])
    assert table.counts.stores_lost == 1
    assert table.directory.lookup(b"a") is LookupResult.MISS
    free(table, [ref])
    assert table.slots.is_idle
    table.check_integrity()


@pytest.mark.parametrize("early", [0, 1, 2])
def test_of_two_stores_of_a_key_the_first_wins(early: int) -> None:
    """The other one's slot comes back when all its shares are in, however many came early."""
    table = make_table(8, ranks=2)
    (mine,), (theirs,) = lend(table, 1), lend(table, 1, owner=2)
    begin(table, [b"a"], [mine])
    for rank in range(early):
        assert share(table, [theirs], rank, owner=2) == ([], [])
    over = begin(table, [b"a"], [theirs], owner=2)[1]
    assert table.directory.find(b"a") == mine[0]
    table.check_integrity()
    for rank in range(early, 2):
        assert not over
        _, over = share(table, [theirs], rank, owner=2)
    assert over == [theirs]
    free(table, over)
    assert table.counts.stores_raced == 1
    assert [share(table, [mine], rank)[0] for rank in range(2)] == [[], [mine]]
    assert table.slots.is_idle
    table.check_integrity()


def test_a_lost_race_is_not_waited_for_forever() -> None:
    """A slot whose shares never come goes back at the deadline of its store."""
    table = make_table(8)
    store(table, [b"a"])
    (ref,) = lend(table, 1)
    assert begin(table, [b"a"], [ref]) == (0, [])
    assert table.slots.stats()["lent"] == 1
    assert table.expire(4.9) == []
    assert table.expire(5.0) == [ref]
    free(table, [ref])
    table.check_integrity()


def test_the_same_key_twice_in_a_step_loses_to_itself() -> None:
    """One slot gets the key, the other one has lost the race."""
    table = make_table(8)
    refs = lend(table, 2)
    begin(table, [b"a", b"a"], refs)
    assert table.directory.find(b"a") == refs[0][0]
    assert share(table, refs) == (refs[:1], refs[1:])
    table.check_integrity()


def test_a_fuller_store_takes_the_place_of_a_part() -> None:
    """And a store of a part, or of as much, loses against what is here."""
    table = make_table(8)
    refs = lend(table, 4)
    for ref, blocks in zip(refs, [(1, 1), (1, 1), (0, 4), (1, 2)], strict=True):
        begin(table, [b"a"], [ref], blocks=[blocks])
        share(table, [ref], blocks=blocks)
    assert table.directory.find(b"a") == refs[2][0]
    assert (table.counts.replaced, table.counts.stores_raced) == (1, 2)
    table.check_integrity()


def test_only_the_owners_loan_of_now_can_be_used() -> None:
    """Another engine, another generation, another slot, and a loan used before: all are lost."""
    table = make_table(8)
    (ref,) = lend(table, 1)
    slot, generation = ref
    begin(table, [b"a"], [ref], owner=2)
    for number, wrong in enumerate([(slot, generation + 1), (slot + 1, generation), (2**40, 1)]):
        begin(table, [b"%d" % number], [wrong])
    begin(table, [b"a"], [ref])
    begin(table, [b"b"], [ref])
    assert table.counts.stores_lost == 5
    assert table.directory.find(b"a") == slot
    assert share(table, [ref], owner=2) == ([], [])
    table.check_integrity()


def test_refills_come_below_half_and_share_what_is_free() -> None:
    """Two engines leave each other half of what is free; nothing is evicted for it."""
    table = make_table(64)
    assert len(lend(table, 8)) == 8
    assert lend(table, 16) == []
    assert len(lend(table, 17)) == 9
    assert len(lend(table, 100, owner=2, engines=2)) == (64 - 17) // 2
    table.check_integrity()


def test_eviction_lends_a_part_of_the_slots() -> None:
    """In a full table an engine gets a quarter of its share, and what was used last stays."""
    table = make_table(32)
    store(table, names(32))
    before = table.directory.changes.head
    slots, _ = table.lending.lend(1, 64, 1, 1.0)
    assert len(slots) == 8
    assert removed(table, before) == names(32)[:-9:-1]
    assert table.lending.lend(1, 64, 1, 1.0) == ([], [])
    assert len(table.lending.lend(2, 64, 4, 1.0)[0]) == 2
    tiny = make_table(1)
    store(tiny, [b"a"])
    tiny.lending.lend(1, 64, 8, 1.0)
    assert removed(tiny, 0) == [b"a"]
    table.check_integrity()


def test_a_namespace_that_holds_little_keeps_most_of_it() -> None:
    """For loans it evicts a part of what it holds, not of what the whole pool could hold."""
    chunks = 256
    quotas = {"model 1": Quota(floor_bytes=224 * PAGE)}
    namespaces = make_namespaces(chunks * PAGE, quotas=quotas)
    big, small = add(namespaces, 1, PAGE).table, add(namespaces, 0, PAGE).table
    store(big, names(chunks))
    store(small, names(chunks))
    held = small.held_bytes // PAGE
    assert 4 <= held <= 32
    before = small.directory.changes.head
    slots, _ = small.lending.lend(1, 64, 1, 1.0)
    assert len(slots) == len(removed(small, before)) == held // 4
    small.check_integrity()


def test_nothing_is_evicted_while_the_pool_is_filled() -> None:
    """Only slots whose memory is there are lent."""
    table = make_table(64, fill=FillOrder(64 * 4096, 2 * 4096))
    usable = 16 * 4096
    assert len(table.lending.lend(1, 64, 1, 0.0, usable)[0]) == 16
    assert table.lending.lend(1, 64, 1, 0.0, usable) == ([], [])
    assert not removed(table, 0)
    table.check_integrity()


def test_idle_loans_are_taken_back() -> None:
    """Who has used one since keeps the rest; who asks for it keeps its own."""
    table = make_table(64)
    mine, theirs = lend(table, 8), lend(table, 8, owner=2)
    table.stores.begin([b"a"], [mine[0][0]], [mine[0][1]], 1, 5.0)
    assert table.lending.call_in_spare(4.0, but=2) == []
    assert table.lending.call_in_spare(4.0) == theirs
    assert all(table.directory.state(slot) == SlotState.DRAINING for slot, _ in theirs)
    begin(table, [b"b"], theirs[:1], owner=2)
    assert table.counts.stores_lost == 1
    free(table, theirs)
    assert table.lending.call_in_spare(5.0) == mine[1:]
    table.check_integrity()


def test_a_reset_takes_loans_back() -> None:
    """Their generations would never be found; lost races go, too."""
    table = make_table(8)
    store(table, [b"x"])
    refs = lend(table, 3)
    begin(table, [b"x", b"y"], refs[:2])
    done, revoke = table.reset()
    assert done.dropped == 2
    assert sorted(revoke) == sorted(refs)
    begin(table, [b"z"], refs[2:])
    assert table.counts.stores_lost == 1
    free(table, revoke)
    (ref,) = lend(table, 1)
    begin(table, [b"z"], [ref])
    share(table, [ref])
    assert table.directory.lookup(b"z") is LookupResult.HIT
    table.check_integrity()


def test_an_owners_end_leaves_nothing() -> None:
    """What it was writing, its loans, its lost races and its leases all end."""
    table = make_table(8)
    store(table, [b"x"])
    refs = lend(table, 4)
    begin(table, [b"x", b"y"], refs[:2])
    slot = table.directory.find(b"x")
    table.loads.pin(1, [slot], [table.directory.generation(slot)], 1, 0.0, 9.0)
    writing, others = table.drop_owner(1)
    assert writing == refs[1:2]
    assert sorted(others) == sorted([refs[0], *refs[2:]])
    free(table, writing + others)
    assert table.slots.is_idle
    table.check_integrity()


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


def test_a_pin_keeps_what_is_still_there() -> None:
    """What was evicted, replaced, reset or never was comes too late, and is counted."""
    table = make_table(8)
    store(table, names(3))
    refs = [(slot, 1) for slot in map(table.directory.find, names(3))]
    table.slots.drop([refs[1][0]])
    given = [*refs, (refs[0][0], 2), (7, 1), (2**40, 1)]
    table.loads.pin(5, [s for s, _ in given], [g for _, g in given], 1, 0.0, 9.0)
    assert set(table.slots.leases.pins) == {refs[0][0], refs[2][0]}
    assert (table.counts.asked, table.counts.hits, table.counts.pins_late) == (6, 2, 4)
    table.reset()
    assert table.slots.stats()["doomed"] == 2
    table.loads.pin(6, [refs[0][0]], [1], 1, 0.0, 9.0)
    assert table.counts.pins_late == 5
    assert not table.loads.unpin(6, 1)
    assert not table.loads.unpin(5, 2)
    assert table.loads.unpin(5, 1)
    assert table.slots.stats()["doomed"] == 0
    table.check_integrity()


def test_a_lease_number_that_comes_again_ends_the_lease_of_before() -> None:
    """Nothing stays pinned that no lease of now pins."""
    table = make_table(8)
    store(table, names(2))
    a, b = (table.directory.find(key) for key in names(2))
    table.loads.pin(1, [a], [1], 1, 0.0, 9.0)
    table.loads.pin(1, [a, b], [1, 1], 1, 0.0, 9.0)
    assert table.slots.leases.pins == {a: 1, b: 1}
    table.loads.pin(1, [b], [1], 1, 0.0, 9.0)
    assert table.slots.leases.pins == {b: 1}
    table.loads.pin(1, [b], [1], 2, 0.0, 9.0)
    assert table.slots.leases.pins == {b: 2}
    table.check_integrity()


def test_loans_keep_nobody_from_a_fair_share() -> None:
    """A column that others are to have is left: nothing more of it is lent, nor used for others."""
    namespaces = make_namespaces(64 * 4096)
    old, new = add(namespaces, 0, 1024).table, add(namespaces, 1, 1024).table
    columns, width = old.space.geometry.columns, old.space.geometry.column_slots
    keys = names(columns * width)
    store(old, keys)
    old.loads.finished([key for key in keys if old.directory.find(key) % width])
    refs = lend(old, 64)
    assert len({slot // width for slot, _ in refs}) == columns  # one of each column, and others
    assert lend(new, 8, owner=2) == []
    (column,) = old.space.leaving
    revoke = old.lending.call_in_spare(-1.0)
    assert {slot // width for slot, _ in revoke} == {column}
    free(old, revoke)
    begin(old, names(len(refs), 1000), refs)
    assert lend(new, 8, owner=2) != []
    assert not old.space.leaving
    assert old.counts.yielded == width - len(revoke)
    namespaces.check_integrity()


def test_a_column_that_nobody_takes_stays() -> None:
    """What is free there is lent again when the pool was looked through a few times."""
    namespaces = make_namespaces(64 * 4096)
    old, new = add(namespaces, 0, 4096).table, add(namespaces, 1, 4096).table
    assert len(lend(old, 64)) == 64
    assert lend(new, 8, owner=2) == []
    (column,) = old.space.leaving
    free(old, old.lending.call_in_spare(-1.0))
    assert lend(old, 1000) == []
    namespaces.check_integrity()
    for _ in range(LOOKS + 1):
        namespaces.pool.trim()
    assert [slot // 2 for slot, _ in lend(old, 1000)] == [column, column]
    namespaces.check_integrity()


def test_a_namespace_with_loans_is_not_closed() -> None:
    """Loans are slots in use, for the table and for the pool."""
    namespaces = make_namespaces(64 * 4096)
    namespace = add(namespaces, 0, 4096)
    refs = lend(namespace.table, 4)
    namespaces.detach_engine(namespace)
    assert namespaces.closable() == []
    assert set(namespace.table.lent_slots()) == {slot for slot, _ in refs}
    free(namespace.table, namespace.table.lending.call_in(1))
    assert namespaces.closable() == [namespace]


@pytest.mark.parametrize("damage", ["state", "loan", "twice", "generation"])
def test_damage_is_noticed(damage: str) -> None:
    """The integrity check sees a loan that is none, one that is not noted, and one of two."""
    table = make_table(8)
    (slot, generation), _ = lend(table, 2)
    if damage == "state":
        table.directory.write_state(slot, SlotState.READY)
    elif damage == "loan":
        table.slots.loans.remove(1, slot)
    elif damage == "twice":
        table.slots.loans.lend(2, [slot], [generation], 0.0)
    else:
        table.slots.loans.of(1)[slot] += 1
    with pytest.raises(IntegrityError):
        table.check_integrity()
