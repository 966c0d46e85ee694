"""Decisions of one namespace's chunk table."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvd.cache.chunks import ChunkTable
from kvd.cache.directory import Refs
from kvd.cache.namespaces import Namespaces
from kvd.errors import IntegrityError
from kvd_proto.answers import LookupResult, StoreAnswer
from kvd_proto.directory import PROBE_LIMIT

PAGE = 4096
OK, PRESENT, PENDING = StoreAnswer.ACCEPTED, StoreAnswer.PRESENT, StoreAnswer.PENDING
FULL, NOT_YET = StoreAnswer.FULL, StoreAnswer.NOT_YET


def make(
    chunks: int, *, world_size: int = 1, replicated: bool = False, **config: Any
) -> ChunkTable:
    """The table of the only namespace in a pool of `chunks` chunks of four blocks."""
    arenas = 1 if replicated else world_size
    namespaces = Namespaces(
        chunks * arenas * PAGE, make_buffer=lambda _, size: bytearray(size), **config
    )
    namespace = namespaces.open(
        bytes(16),
        (PAGE,) * arenas,
        world_size=world_size,
        replicated=replicated,
        boot_id=bytes(16),
        blocks_per_chunk=4,
    )
    namespaces.attach_engine(namespace)
    return namespace.table


def names(count: int, first: int = 0) -> list[bytes]:
    """Keys with numbers."""
    return [b"key %d" % number for number in range(first, first + count)]


def store(table: ChunkTable, keys: list[bytes], ranks: tuple[int, ...] = (0,)) -> list[bytes]:
    """Store keys at once; what was evicted for them."""
    decision = table.prepare_store(keys, 1, 0.0)
    n = len(decision.slots)
    for rank in ranks:
        table.share_done(1, rank, decision.slots, decision.generations, [0] * n, [4] * n, ok=True)
    table.check_integrity()
    return decision.evicted


def test_all_slots_can_be_used() -> None:
    """A single namespace reaches exactly the published number of chunks."""
    table = make(1000)
    decision = table.prepare_store(names(1001), 1, 0.0)
    assert decision.answers.tolist() == [OK] * 1000 + [FULL]
    assert sorted(decision.slots) == list(range(1000))
    assert table.counters()["full"] == 1


def test_slots_come_in_runs() -> None:
    """Fresh slots are neighbours in the order of the keys, so that copies coalesce."""
    assert make(64).prepare_store(names(40), 1, 0.0).slots.tolist() == list(range(40))


def test_partial_acceptance_evicts_exactly_what_it_needs() -> None:
    """With some chunks pinned, as many keys as fit are accepted in order; the pins stay."""
    table = make(8)
    assert store(table, names(8)) == []
    lease = table.prepare_load(names(5), 1, 0.0, 10.0)
    decision = table.prepare_store(names(2, first=100), 1, 0.0)
    assert decision.answers.tolist() == [OK, OK]
    assert decision.evicted == [b"key 7", b"key 6"]  # a prompt's tail goes first
    decision = table.prepare_store(names(4, first=200), 1, 0.0)
    assert decision.answers.tolist() == [OK, FULL, FULL, FULL]
    assert decision.evicted == [b"key 5"]
    assert table.complete_load(lease.lease_id, 1)
    table.check_integrity()


def test_named_keys_are_not_evicted_for_their_own_request() -> None:
    """Chunks that a request finds present stay, even where nothing else can go."""
    table = make(4)
    store(table, names(4))
    decision = table.prepare_store(names(6), 1, 0.0)
    assert decision.answers.tolist() == [PRESENT] * 4 + [FULL] * 2
    assert decision.evicted == []


def test_duplicates() -> None:
    """Of equal keys in one request the first gets the slot; the others share its fate."""
    table = make(1)
    assert table.prepare_store([b"a", b"a"], 1, 0.0).answers.tolist() == [OK, PENDING]
    assert table.prepare_store([b"b", b"b"], 1, 0.0).answers.tolist() == [FULL, FULL]


def test_the_head_stays_longest() -> None:
    """When a request has finished its tail is evicted before its head, and others before both."""
    table = make(4)
    store(table, names(4))
    assert table.finished([b"key 1", b"key 3", b"unknown"]) == 2
    order = [store(table, names(1, first=10 + n))[0] for n in range(4)]
    assert order == [b"key 2", b"key 0", b"key 3", b"key 1"]


def edge(table: ChunkTable, key: bytes) -> int:
    """Blocks 2 and 3 of the chunk are stored, as at a window's edge; the slot."""
    decision = table.prepare_store([key], 1, 0.0, blocks=[(2, 2)])
    table.share_done(1, 0, decision.slots, decision.generations, [2], [2], ok=True)
    return int(decision.slots[0])


def test_a_whole_chunk_takes_the_place_of_a_part() -> None:
    """It is accepted, loads of the part stay right until it is READY, and then find it."""
    table = make(3)
    old = edge(table, b"k")
    assert table.directory.lookup(b"k") is LookupResult.MISS
    assert table.directory.lookup(b"k", 2, 2) is LookupResult.HIT
    assert table.directory.lookup(b"k", 1, 2) is LookupResult.MISS
    assert table.prepare_load([b"k"], 1, 0.0, 9.0).lease_id == 0
    part = table.prepare_load([b"k"], 1, 0.0, 9.0, blocks=[(3, 1)])
    assert part.slots.tolist() == [old]

    whole = table.prepare_store([b"k", b"k"], 1, 0.0)
    assert whole.answers.tolist() == [OK, PENDING]
    assert table.prepare_store([b"k"], 2, 0.0).answers.tolist() == [PENDING]
    assert table.prepare_store([b"k"], 2, 0.0, blocks=[(2, 2)]).answers.tolist() == [PRESENT]
    assert table.directory.find(b"k") == old
    table.share_done(1, 0, whole.slots, whole.generations, [0], [4], ok=True)
    table.check_integrity()
    assert table.directory.find(b"k") == whole.slots[0]
    assert table.directory.lookup(b"k") is LookupResult.HIT
    assert table.directory.check(part.slots, part.generations, 2).all()
    assert table.counters()["replaced"] == 1
    stats = table.slots.stats()
    assert (stats["ready"], stats["writing"], stats["pinned"], stats["doomed"]) == (2, 0, 1, 1)
    table.complete_load(part.lease_id, 1)
    assert table.slots.stats()["ready"] == 1
    assert table.prepare_store([b"k"], 1, 0.0).answers.tolist() == [PRESENT]
    table.check_integrity()


def test_a_whole_chunk_that_is_given_up_leaves_the_part() -> None:
    """Whatever ends the store: what was there is found as before, and may be stored anew."""
    table = make(3)
    old = edge(table, b"k")
    ends: list[Callable[[], Refs]] = [
        lambda: table.complete_store([b"k"], 1, success=False)[1],
        lambda: table.drop_owner(1),
        lambda: table.expire(1000.0),
    ]
    for end in ends:
        whole = table.prepare_store([b"k"], 1, 0.0)
        assert table.complete_store([b"k"], 2, success=False)[0].ready == 1
        assert table.complete_store([b"k"], 1, success=True)[0].pending == 1
        assert end() == [(whole.slots[0], whole.generations[0])]
        assert table.directory.find(b"k") == old
        table.check_integrity()
        table.revoked(whole.slots, whole.generations)
    lesser = table.prepare_store([b"k"], 1, 0.0)  # fewer blocks arrive than were promised
    done = (lesser.slots, lesser.generations, [3], [1])
    assert len(table.share_done(1, 0, *done, ok=True).dropped) == 1
    assert table.directory.lookup(b"k", 2, 2) is LookupResult.HIT
    table.check_integrity()


def test_a_part_that_goes_leaves_the_whole_chunk_its_name() -> None:
    """A key has one owner also then: it is being written, and READY when its bytes are there."""
    table = make(3)
    edge(table, b"k")
    whole = table.prepare_store([b"k"], 1, 0.0)
    assert table.remove(0, 3) == (1, 0)
    assert table.directory.lookup(b"k") is LookupResult.HIT_PENDING
    assert table.prepare_store([b"k"], 2, 0.0).answers.tolist() == [PENDING]
    table.check_integrity()
    table.share_done(1, 0, whole.slots, whole.generations, [0], [4], ok=True)
    assert table.directory.lookup(b"k") is LookupResult.HIT
    assert table.slots.stats()["ready"] == 1
    table.check_integrity()


def test_a_part_that_is_being_replaced_is_not_evicted() -> None:
    """It goes by itself; what else is here makes room."""
    table = make(3)
    edge(table, b"k")
    store(table, [b"other"])
    table.prepare_store([b"k"], 1, 0.0)
    decision = table.prepare_store([b"new", b"newer"], 1, 0.0)
    assert decision.answers.tolist() == [OK, FULL]
    assert decision.evicted == [b"other"]
    table.check_integrity()


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_what_a_request_stored_is_not_hotter_than_what_it_loaded(policy: str) -> None:
    """Its tail goes first, also what was still on its way when the request had finished."""
    table = make(6, policy=policy)
    store(table, names(2))
    lease = table.prepare_load(names(2), 1, 1.0, 10.0).lease_id
    parts = [table.prepare_store(names(2, first=first), 1, 2.0) for first in (2, 4)]
    table.complete_load(lease, 1)
    assert table.finished([*names(2), *names(4, first=2)]) == 6
    for part in reversed(parts):
        done = (part.slots, part.generations, [0, 0], [4, 4])
        assert len(table.share_done(1, 0, *done, ok=True).ready) == 2
    order = [store(table, names(1, first=10 + n))[0] for n in range(6)]
    assert order == list(reversed(names(6)))
    table.check_integrity()


def test_ready_only_with_every_rank() -> None:
    """A chunk hits when the last rank's share is there, in whatever order they come."""
    table = make(4, world_size=3)
    slots = table.prepare_store([b"k"], 1, 0.0).slots
    for rank in (2, 0):
        assert table.share_done(1, rank, slots, [1], [0], [4], ok=True).ready == []
        assert table.directory.lookup(b"k") is LookupResult.HIT_PENDING
        assert table.prepare_load([b"k"], 1, 0.0, 1.0).lease_id == 0
    assert table.share_done(1, 1, slots, [1], [0], [4], ok=True).ready == [(slots[0], 1)]
    assert table.directory.lookup(b"k") is LookupResult.HIT


def test_replicated_shares_rotate() -> None:
    """Where ranks hold the same bytes, the slot says which one writes; others do not count."""
    table = make(8, world_size=4, replicated=True)
    decision = table.prepare_store(names(8), 1, 0.0)
    ready = [
        table.share_done(1, rank, decision.slots, decision.generations, [0] * 8, [1] * 8, ok=True)
        for rank in range(4)
    ]
    assert [[slot for slot, _ in each.ready] for each in ready] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert table.counters()["stale_reports"] == 4 * 8 - 8
    assert table.slots.stats()["ready"] == 8


def test_coverage_is_what_all_ranks_hold() -> None:
    """A lease tells which blocks are there on every rank; no common block, no chunk."""
    table = make(4, world_size=2)
    slots = table.prepare_store([b"a", b"b"], 1, 0.0).slots
    table.share_done(1, 0, slots, [1, 1], [1, 0], [3, 2], ok=True)
    outcome = table.share_done(1, 1, slots, [1, 1], [0, 2], [3, 2], ok=True)
    assert outcome.ready == [(slots[0], 1)]
    assert outcome.dropped == [(slots[1], 1)]
    assert table.prepare_load([b"a"], 1, 0.0, 1.0).lease_id == 0
    load = table.prepare_load([b"a", b"b"], 1, 0.0, 1.0, blocks=[(1, 2), (1, 2)])
    assert load.found.tolist() == [1, 0]
    assert table.directory.blocks(slots[0]) == (1, 2)


def test_given_up_slots_wait_for_the_lanes() -> None:
    """A store that is given up can start anew at once, in another slot; the old one drains."""
    table = make(2)
    first = table.prepare_store([b"k"], 1, 0.0)
    summary, refs = table.complete_store([b"k"], 1, success=False)
    assert (summary.dropped, refs) == (1, [(first.slots[0], 1)])
    again = table.prepare_store([b"k", b"x"], 1, 0.0)
    assert again.answers.tolist() == [OK, FULL]
    assert again.slots[0] != first.slots[0]
    assert table.share_done(1, 0, first.slots, [1], [0], [1], ok=True).ready == []
    assert table.revoked(first.slots, first.generations) == 1
    last = table.prepare_store([b"x"], 1, 0.0)
    assert (last.slots.tolist(), last.generations.tolist()) == (first.slots.tolist(), [2])
    table.check_integrity()


def test_deadlines() -> None:
    """Leases and tickets end when their time has come, not a moment before."""
    table = make(4)
    store(table, [b"a"])
    table.prepare_store([b"b"], 1, 0.0, seconds=20.0)
    lease = table.prepare_load([b"a"], 1, 0.0, 10.0)
    assert table.expire(9.9) == []
    assert table.slots.stats()["pinned"] == 1
    assert table.expire(10.0) == []
    assert table.slots.stats()["pinned"] == 0
    assert not table.complete_load(lease.lease_id, 1)
    assert table.expire(19.9) == []
    assert len(table.expire(20.0)) == 1
    assert table.counters()["tickets_expired"] == 1
    table.check_integrity()


def test_a_lease_belongs_to_its_owner() -> None:
    """Nobody else can give a lease back, and it can be given back once."""
    table = make(4)
    store(table, [b"a"])
    lease = table.prepare_load([b"a", b"a"], 1, 0.0, 1.0).lease_id
    assert not table.complete_load(lease, 2)
    assert table.complete_load(lease, 1)
    assert not table.complete_load(lease, 1)


def test_no_number_of_a_lease_is_one_of_an_earlier_daemon() -> None:
    """Who gives back a lease of before ends none of now, which many may be granted at once."""
    before, after = make(4), make(4)
    numbers: list[int] = []
    for table, now in ((before, 5.0), (after, 5.1)):
        store(table, [b"a"])
        numbers += [table.prepare_load([b"a"], 1, now, 1.0).lease_id for _ in range(100)]
    assert sorted(set(numbers)) == numbers
    assert not after.complete_load(numbers[0], 1)


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_the_coldest_chunk_stays_while_it_is_leased(policy: str) -> None:
    """What is pinned is not evicted, however long ago it was used; unpinned it goes first."""
    table = make(4, policy=policy)
    keys = names(4)
    store(table, keys)
    lease = table.prepare_load(keys[:1], 1, 0.0, 10.0)
    table.finished(keys[1:])
    assert table.prepare_store([b"new 1"], 1, 0.0).evicted != keys[:1]
    assert table.directory.lookup(keys[0]) is LookupResult.HIT
    table.complete_load(lease.lease_id, 1)
    assert table.prepare_store([b"new 2"], 1, 0.0).evicted == keys[:1]


def test_many_short_leases_leave_nothing_behind() -> None:
    """Deadlines of leases that were given back are swept."""
    table = make(4)
    store(table, [b"a"])
    for _ in range(1000):
        table.complete_load(table.prepare_load([b"a"], 1, 0.0, 60.0).lease_id, 1)
    assert len(table.slots.leases._deadlines) < 100


def test_reset_spares_what_is_being_read() -> None:
    """A reset drops chunks at once; a pinned one misses from now on and goes with its lease."""
    table = make(4)
    store(table, names(3))
    lease = table.prepare_load([b"key 1"], 1, 0.0, 10.0)
    table.prepare_store([b"w"], 1, 0.0)
    outcome = table.reset()
    assert (outcome.dropped, outcome.deferred, len(outcome.revoke)) == (3, 1, 1)
    assert table.directory.lookup_many(names(3)) == [LookupResult.MISS] * 3
    good = table.directory.check(lease.slots, lease.generations, 2)
    assert good.all()  # the load that is under way is still valid
    assert table.slots.stats()["doomed"] == 1
    assert table.complete_load(lease.lease_id, 1)
    assert not table.directory.check(lease.slots, lease.generations, 2).any()
    table.check_integrity()


def test_reuse_threshold() -> None:
    """With a threshold of 3 a key gets its slot at the third offer."""
    table = make(4, reuse_threshold=3)
    answers = [table.prepare_store([b"k"], 1, 0.0).answers[0] for _ in range(4)]
    assert answers == [NOT_YET, NOT_YET, OK, PENDING]
    assert table.prepare_store([b"x", b"x"], 1, 0.0).answers.tolist() == [NOT_YET, NOT_YET]
    table.check_integrity()


def test_a_key_without_a_place_in_the_index_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the index has no room near a key's home the store is refused and its slot kept."""
    monkeypatch.setattr("kvd_proto.directory.crc32", lambda _: 7)
    monkeypatch.setattr("kvd.cache.directory.crc32", lambda _: 7)
    table = make(PROBE_LIMIT + 8)
    decision = table.prepare_store(names(PROBE_LIMIT + 3), 1, 0.0)
    assert decision.answers.tolist() == [OK] * PROBE_LIMIT + [FULL] * 3
    assert len(decision.slots) == PROBE_LIMIT == np.count_nonzero(decision.generations)
    assert table.counters()["index_full"] == 3
    table.check_integrity()


@pytest.mark.parametrize("damage", ["state", "pins", "tickets", "policy"])
def test_damage_is_noticed(damage: str) -> None:
    """The integrity check sees a state, pin, ticket or policy entry that does not belong."""
    table = make(4)
    store(table, [b"a"])
    slot = int(table.prepare_store([b"w"], 1, 0.0).slots[0])
    ready = table.directory.find(b"a")
    if damage == "state":
        table.directory.write_state(ready, table.directory.record(slot).state)
    elif damage == "pins":
        table.slots.leases.pins[ready] = 1
    elif damage == "tickets":
        table.slots.tickets.close(1, slot)
    else:
        table.slots.policy.remove(ready)
    with pytest.raises(IntegrityError):
        table.check_integrity()
