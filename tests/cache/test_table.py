"""Decisions of one namespace's chunk table that `test_machine` does not reach or does not name."""

from array import array

import pytest

from kvd.cache.chunks import ChunkTable
from kvd.errors import IntegrityError
from kvd_proto.directory import PROBE_LIMIT, READ_HEADS, SlotState
from tests.cache.tables import begin, finish, make_table, names, pin, ref_of, store


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_what_a_request_stored_is_not_hotter_than_what_it_loaded(policy: str) -> None:
    """Its tail goes first, also what was still on its way when the request had finished."""
    table = make_table(6, policy=policy)
    store(table, names(2))
    pin(table, names(2), 1.0)
    parts = [begin(table, names(2, first=first), 2.0) for first in (2, 4)]
    table.loads.unpin(1, 1)
    assert table.loads.refresh([*names(2), *names(4, first=2)], 2.0) == 6
    for part in reversed(parts):
        finish(table, part)
    order = [store(table, names(1, first=10 + n)).evicted[0] for n in range(6)]
    assert order == list(reversed(names(6)))
    table.check_integrity()


def test_a_ticket_that_is_never_used_runs_out() -> None:
    """A store that no lane reports in time is given up: its slots drain, its key is free again."""
    table = make_table(4)
    begun = begin(table, [b"a"], seconds=5.0)
    assert not table.expire(4.9)
    assert [slot for slot, _ in table.expire(5.0)] == begun.slots
    assert table.counts.tickets_expired == 1
    assert table.slots.stats()["draining"] == 1
    assert begin(table, [b"a"], 6.0, owner=2).keys == [b"a"]


def is_ready(table: ChunkTable, slot: int, generation: int) -> bool:
    """Whether a lane finds the chunk there."""
    ((found, _, state, *_),) = READ_HEADS(table.directory.heads(array("I", [slot])))
    return (found, state) == (generation, SlotState.READY)


def test_a_reset_spares_what_is_being_read() -> None:
    """A lane goes on with a load of a chunk that was dropped, until the lease ends."""
    table = make_table(4)
    store(table, names(3))
    ((slot, generation),) = pin(table, [b"key 1"])
    assert table.reset()[0].deferred == 1
    assert is_ready(table, slot, generation)
    assert table.loads.unpin(1, 1)
    assert not is_ready(table, slot, generation)


def test_a_key_without_a_place_in_the_index_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the index has no room near a key's home the store is lost, and its slot is free."""
    monkeypatch.setattr("kvd_proto.directory.crc32", lambda _: 7)
    monkeypatch.setattr("kvd.cache.directory.crc32", lambda _: 7)
    table = make_table(PROBE_LIMIT + 8)
    begun = begin(table, names(PROBE_LIMIT + 3))
    assert table.space.free_slots >= 3
    table.check_integrity()
    finish(table, begun)
    assert table.counts.index_full == table.counts.stores_raced == 3
    assert table.counts.stored == PROBE_LIMIT
    table.check_integrity()


def test_a_pin_keeps_what_is_still_there() -> None:
    """What was evicted, replaced, reset or never was comes too late, and is counted."""
    table = make_table(8)
    store(table, names(3))
    refs = [ref_of(table, key) for key in names(3)]
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


@pytest.mark.parametrize("damage", ["state", "pins", "tickets", "policy"])
def test_damage_is_noticed(damage: str) -> None:
    """The integrity check sees a state, pin, ticket or policy entry that does not belong."""
    table = make_table(4)
    store(table, [b"a"])
    (slot,) = begin(table, [b"w"]).slots
    ready = table.directory.find(b"a")
    if damage == "state":
        table.directory.write_state(ready, SlotState.WRITING)
    elif damage == "pins":
        table.slots.leases.pins[ready] = 1
    elif damage == "tickets":
        del table.slots.tickets[slot]
    else:
        table.slots.policy.remove(ready)
    with pytest.raises(IntegrityError):
        table.check_integrity()
