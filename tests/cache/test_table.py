"""Decisions of one namespace's chunk table that `test_machine` does not reach or does not name."""

import numpy as np
import pytest

from kvd.errors import IntegrityError
from kvd_proto.directory import PROBE_LIMIT, LookupResult, SlotState
from kvd_proto.messages import StoreAnswer
from tests.cache.tables import finish, make_table, names, store

OK, PENDING = StoreAnswer.ACCEPTED, StoreAnswer.PENDING
FULL, NOT_YET = StoreAnswer.FULL, StoreAnswer.NOT_YET


def test_slots_come_in_runs() -> None:
    """Fresh slots are neighbours in the order of the keys, so that copies coalesce."""
    decision = make_table(64).prepare_store(names(40), 1, 0.0)
    assert decision.slots.numpy().tolist() == list(range(40))


def test_partial_acceptance_evicts_exactly_what_it_needs() -> None:
    """With some chunks pinned, as many keys as fit are accepted in order; the pins stay."""
    table = make_table(8)
    assert store(table, names(8)).evicted == ()
    lease = table.prepare_load(names(5), 1, 0.0, 10.0)
    decision = table.prepare_store(names(2, first=100), 1, 0.0)
    assert decision.answers.numpy().tolist() == [OK, OK]
    assert decision.evicted == (b"key 7", b"key 6")  # a prompt's tail goes first
    decision = table.prepare_store(names(4, first=200), 1, 0.0)
    assert decision.answers.numpy().tolist() == [OK, FULL, FULL, FULL]
    assert decision.evicted == (b"key 5",)
    assert table.unpin(lease.lease, 1)
    table.check_integrity()


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_what_a_request_stored_is_not_hotter_than_what_it_loaded(policy: str) -> None:
    """Its tail goes first, also what was still on its way when the request had finished."""
    table = make_table(6, policy=policy)
    store(table, names(2))
    lease = table.prepare_load(names(2), 1, 1.0, 10.0).lease
    parts = [table.prepare_store(names(2, first=first), 1, 2.0) for first in (2, 4)]
    table.unpin(lease, 1)
    assert table.finished([*names(2), *names(4, first=2)]) == 6
    for part in reversed(parts):
        finish(table, part)
    order = [store(table, names(1, first=10 + n)).evicted[0] for n in range(6)]
    assert order == list(reversed(names(6)))
    table.check_integrity()


def test_no_number_of_a_lease_is_one_of_an_earlier_daemon() -> None:
    """A lease given back late ends none of the new daemon's, however many those are."""
    before, after = make_table(4), make_table(4)
    numbers: list[int] = []
    for table, now in ((before, 5.0), (after, 5.1)):
        store(table, [b"a"])
        numbers += [table.prepare_load([b"a"], 1, now, 1.0).lease for _ in range(100)]
    assert sorted(set(numbers)) == numbers
    assert not after.unpin(numbers[0], 1)


def test_a_ticket_that_is_never_used_runs_out() -> None:
    """A store that no lane reports in time is given up: its slots drain, its key is free again."""
    table = make_table(4)
    ticket = table.prepare_store([b"a"], 1, 0.0, seconds=5.0)
    assert not table.expire(4.9)
    assert [slot for slot, _ in table.expire(5.0)] == ticket.slots.numpy().tolist()
    assert table.counts.tickets_expired == 1
    assert table.slots.stats()["draining"] == 1
    assert table.prepare_store([b"a"], 2, 6.0).answers.numpy().tolist() == [StoreAnswer.ACCEPTED]


def test_a_reset_spares_what_is_being_read() -> None:
    """A lane goes on with a load of a chunk that was dropped, until the lease ends."""
    table = make_table(4)
    store(table, names(3))
    lease = table.prepare_load([b"key 1"], 1, 0.0, 10.0)
    refs = lease.slots.numpy(), lease.generations.numpy()
    assert table.reset()[0].deferred == 1
    assert table.directory.check(*refs, 2).all()
    assert table.unpin(lease.lease, 1)
    assert not table.directory.check(*refs, 2).any()


def test_a_part_of_a_chunk_gives_way_to_a_fuller_store() -> None:
    """Its key means the new slot at once; a load of the part that is under way goes on."""
    table = make_table(4)
    finish(table, table.prepare_store([b"a"], 1, 0.0, blocks=[(1, 1)]), first=1, count=1)
    assert not table.prepare_load([b"a"], 1, 0.0, 10.0).lease
    lease = table.prepare_load([b"a"], 1, 0.0, 10.0, blocks=[(1, 1)])
    whole = table.prepare_store([b"a"], 1, 0.0)
    assert table.directory.lookup(b"a") is LookupResult.HIT_PENDING
    assert table.directory.check(lease.slots.numpy(), lease.generations.numpy(), 2).all()
    finish(table, whole)
    assert table.directory.lookup(b"a") is LookupResult.HIT
    assert table.unpin(lease.lease, 1)
    assert table.slots.stats()["ready"] == table.counts.replaced == 1
    for blocks in ([(1, 1)], ()):
        again = table.prepare_store([b"a"], 1, 0.0, blocks=blocks)
        assert again.answers.numpy().tolist() == [StoreAnswer.PRESENT]
    table.check_integrity()


def test_reuse_threshold() -> None:
    """With a threshold of 3 a key gets its slot at the third offer."""
    table = make_table(4, reuse_threshold=3)
    answers = [table.prepare_store([b"k"], 1, 0.0).answers.numpy()[0] for _ in range(4)]
    assert answers == [NOT_YET, NOT_YET, OK, PENDING]
    assert table.prepare_store([b"x", b"x"], 1, 0.0).answers.numpy().tolist() == [NOT_YET] * 2
    table.check_integrity()


def test_a_key_without_a_place_in_the_index_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the index has no room near a key's home the store is refused and its slot kept."""
    monkeypatch.setattr("kvd_proto.directory.crc32", lambda _: 7)
    monkeypatch.setattr("kvd.cache.directory.crc32", lambda _: 7)
    table = make_table(PROBE_LIMIT + 8)
    decision = table.prepare_store(names(PROBE_LIMIT + 3), 1, 0.0)
    assert decision.answers.numpy().tolist() == [OK] * PROBE_LIMIT + [FULL] * 3
    assert len(decision.slots) == PROBE_LIMIT == np.count_nonzero(decision.generations.numpy())
    assert table.counts.index_full == 3
    table.check_integrity()


@pytest.mark.parametrize("damage", ["state", "pins", "tickets", "policy"])
def test_damage_is_noticed(damage: str) -> None:
    """The integrity check sees a state, pin, ticket or policy entry that does not belong."""
    table = make_table(4)
    store(table, [b"a"])
    slot = int(table.prepare_store([b"w"], 1, 0.0).slots.numpy()[0])
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
