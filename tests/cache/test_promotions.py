"""Chunks that come up from tiers, and those that are to go down."""

from typing import Any

import pytest

from kvd.cache import uses
from kvd.cache.chunks import ChunkTable
from kvd.cache.directory import ChunkRefs
from kvd.cache.ledger import Ledger
from kvd.cache.namespaces import LedgerSetup, Namespace, Namespaces
from kvd.cache.recovery import PoolTrailer
from kvd.cache.uses import DemotionQueue
from kvd_proto.directory import TIER_OWNER, LookupResult, SlotState
from tests.cache.tables import (
    PAGE,
    add,
    begin,
    make_namespaces,
    make_table,
    names,
    pin,
    store,
)

TIER = "tier 0 of process 7"
ONE = ("memory:,size=1MiB",)
TWO = (*ONE, "disk:/somewhere,size=1MiB")


def promote(table: ChunkTable, keys: list[bytes], now: float = 0.0, most: int = 99) -> ChunkRefs:
    """Let a tier fill these; the slots that it got."""
    return [(slot, each) for _, slot, each in table.promotions.begin(keys, TIER, now, 10.0, most)]


def drained(table: ChunkTable, refs: ChunkRefs, name: str = TIER) -> int:
    """Who writes there says that nothing is under way; how many slots are free now."""
    return table.slots.revoked(name, [slot for slot, _ in refs], [each for _, each in refs])


def waiting(queue: DemotionQueue | None) -> list[bytes]:
    """The keys that are to go down, which are in the queue no more."""
    assert queue is not None
    return [key for key, *_ in queue.take(99)]


def test_a_chunk_comes_up() -> None:
    """It is pending while a tier fills it, and READY in all shares with the blocks that it has."""
    table = make_table(4, ranks=2, tier=ONE)
    before = table.directory.changes.head
    ((slot, generation),) = promote(table, [b"k"])
    assert table.directory.lookup(b"k") is LookupResult.HIT_PENDING
    assert table.directory.owner(slot) == TIER_OWNER
    table.check_integrity()
    assert table.promotions.complete(slot, generation, 1, 3, 0)
    assert table.directory.lookup(b"k", 1, 3) is LookupResult.HIT
    assert table.directory.lookup(b"k", 0, 4) is LookupResult.MISS
    assert table.directory.ranks_done(slot) == 0b11
    assert table.directory.changes.head == before + 1
    assert (table.counts.promoted, table.counts.stored) == (1, 0)
    assert not table.promotions.complete(slot, generation, 1, 3, 0)
    table.check_integrity()


def test_no_more_come_up_than_asked_for() -> None:
    """A prompt's head first; free slots are taken before chunks are evicted."""
    table = make_table(6, tier=ONE)
    store(table, names(4))
    assert len(promote(table, names(5, 10), most=2)) == 2
    assert table.counts.evicted == 0
    assert [table.directory.find(key) >= 0 for key in names(5, 10)] == [True] * 2 + [False] * 3
    assert len(promote(table, names(5, 20), most=3)) == 3
    assert table.counts.evicted == 3
    table.check_integrity()


def test_nothing_is_evicted_while_the_pool_is_filled() -> None:
    """Only what is free inside the part that can be used is taken."""
    table = make_table(4, tier=ONE)
    store(table, names(4))
    assert table.promotions.begin(names(2, 10), TIER, 0.0, 10.0, 2, 4 * PAGE) == []
    assert table.counts.evicted == 0


def test_blocks_that_no_chunk_has_do_not_come_up() -> None:
    """The slot is given up."""
    table = make_table(4, tier=ONE)
    for blocks in ((0, 0), (0, 5), (4, 1), (-1, 2)):
        ((slot, generation),) = promote(table, [b"k"])
        assert not table.promotions.complete(slot, generation, *blocks, 0)
        assert table.directory.state(slot) == SlotState.DRAINING
        assert drained(table, [(slot, generation)]) == 1
    table.check_integrity()


def test_a_tier_that_is_late_gives_its_slots_up() -> None:
    """At the deadline; no lane is asked, for none writes there."""
    table = make_table(4, tier=ONE)
    refs = promote(table, names(2))
    begun = begin(table, [b"store"], seconds=10.0)
    assert table.expire(10.0) == [(begun.slots[0], begun.generations[0])]
    assert (table.counts.tickets_expired, table.counts.not_promoted) == (1, 2)
    assert (table.counts.dropped, table.slots.stats()["draining"]) == (1, 3)
    assert drained(table, refs) == 2


def test_a_reset_gives_up_what_comes_up() -> None:
    """Those slots are not among the ones that lanes are asked about, nor counted as dropped."""
    table = make_table(4, tier=ONE)
    refs = promote(table, names(2))
    begun = begin(table, [b"store"])
    tiers = table.directory.tiers
    assert tiers is not None
    tiers.hold(b"k", 0, 0, 4, 0)
    done, revoke = table.reset()
    assert done.dropped == 1
    assert (begun.slots[0], begun.generations[0]) in revoke
    assert not {slot for slot, _ in refs} & {slot for slot, _ in revoke}
    assert not table.promotions.complete(*refs[0], 0, 4, 0)
    assert tiers.find(b"k") is None
    assert drained(table, refs) == 2
    while not table.is_swept:
        table.sweep()
    table.check_integrity()


def test_chunks_that_were_asked_for_are_to_go_down() -> None:
    """When they are pinned, or with the second request that used them; once."""
    table = make_table(8, tier=ONE)
    table.queue_demotions(ready=False, asked=True)
    store(table, names(3))
    table.loads.refresh(names(3), 0.0)
    assert waiting(table.on_asked) == []
    pin(table, names(1))
    table.loads.refresh(names(2), 0.0)
    assert waiting(table.on_asked) == names(2)
    pin(table, names(2), number=2)
    table.loads.refresh(names(2), 0.0)
    assert waiting(table.on_asked) == []
    assert table.on_ready is None


def test_a_slot_forgets_what_its_chunk_before_was_asked_for() -> None:
    """The next one is new."""
    table = make_table(1, tier=ONE)
    table.queue_demotions(ready=False, asked=True)
    store(table, [b"old"])
    pin(table, [b"old"])
    table.loads.unpin(1, 1)
    store(table, [b"new"])
    assert waiting(table.on_asked) == []
    table.loads.refresh([b"new"], 0.0)
    assert waiting(table.on_asked) == []
    table.loads.refresh([b"new"], 0.0)
    assert waiting(table.on_asked) == [b"new"]


def test_what_came_up_goes_down_only_to_tiers_that_lack_it() -> None:
    """With one tier that holds it to none; with two to the other."""
    for setting, expected in ((ONE, []), (TWO, [b"k"])):
        table = make_table(4, tier=setting)
        table.queue_demotions(ready=False, asked=True)
        tiers = table.directory.tiers
        assert tiers is not None
        tiers.hold(b"k", 0, 0, 4, 0)
        ((slot, generation),) = promote(table, [b"k"])
        table.promotions.complete(slot, generation, 0, 4, 0)
        assert waiting(table.on_asked) == expected
        pin(table, [b"k"])
        assert waiting(table.on_asked) == []


def test_a_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its oldest go, and are counted; `take` looks at a bounded number."""
    monkeypatch.setattr(uses, "MAX_QUEUED", 4)
    table = make_table(16, tier=ONE)
    table.queue_demotions(ready=True, asked=False)
    store(table, names(6))
    queue = table.on_ready
    assert queue is not None
    assert (len(queue), queue.take_missed()) == (4, 2)
    table.remove(0, 99, 0.0)
    assert queue.take(1) == []
    assert (len(queue), queue.take_missed()) == (2, 2)


class Daemons:
    """Daemons that go on with each other's ledgers."""

    def __init__(self) -> None:
        self.buffers: dict[str, bytearray] = {}
        self.trailer = PoolTrailer.create("pool")
        self.number = 0

    def _make(self, name: str, size: int) -> bytearray:
        self.buffers[name] = bytearray(size)
        return self.buffers[name]

    def start(self) -> tuple[Namespaces, Namespace | None]:
        """The next daemon's namespaces, and the one that was there."""
        self.number += 1
        ledger_setup = LedgerSetup(self._make, "pool", self.trailer, self.number << 32)
        namespaces = make_namespaces(4 * PAGE, ledger_setup=ledger_setup, tier=ONE)
        ledgers = [Ledger(buffer, self.trailer) for buffer in self.buffers.values()]
        known = [namespaces.reopen(ledger) for ledger in ledgers]
        return namespaces, known[0] if known else None


def test_a_kill_during_a_reset_brings_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger says the new salt when it has no chunk of before; readers know of none either."""
    daemons = Daemons()
    namespaces, _ = daemons.start()
    namespace = add(namespaces, 0, PAGE)
    store(namespace.table, names(2))
    ledger, tiers = namespace.directory.ledger, namespace.directory.tiers
    assert ledger is not None
    assert tiers is not None
    tiers.hold(b"below", 0, 0, 1, 0)
    seen = []

    def looking(name: str) -> None:
        whole = getattr(ledger, name)

        def look(value: Any) -> None:
            seen.append((namespaces.is_outdated(ledger), len(ledger), tiers.find(b"below")))
            whole(value)

        monkeypatch.setattr(ledger, name, look)

    looking("forget")
    looking("write_salt")
    namespaces.reset(namespace)
    assert seen == [(True, 2, None), (True, 0, None)]
    assert not namespaces.is_outdated(ledger)


def test_what_came_up_is_kept_for_the_next_daemon() -> None:
    """As what was stored is; a chunk that was still to come up is not."""
    daemons = Daemons()
    namespaces, _ = daemons.start()
    table = add(namespaces, 0, PAGE, blocks_per_chunk=4).table
    refs = promote(table, names(2))
    table.promotions.complete(*refs[0], 1, 2, 3)
    _, again = daemons.start()
    assert again is not None
    assert again.directory.lookup_many(names(2)) == [LookupResult.MISS] * 2  # it lacks blocks
    assert again.directory.lookup(names(1)[0], 1, 2) is LookupResult.HIT
    assert again.directory.find(names(1, 1)[0]) == -1
    again.table.check_integrity()


def test_what_the_daemon_before_has_left_goes_down() -> None:
    """At once where all is to go down; else its first use is taken for the second request."""
    daemons = Daemons()
    namespaces, _ = daemons.start()
    store(add(namespaces, 0, PAGE).table, names(2))
    _, again = daemons.start()
    assert again is not None
    again.table.queue_demotions(ready=True, asked=True)
    assert waiting(again.table.on_ready) == names(2)
    again.table.loads.refresh(names(1), 0.0)
    assert waiting(again.table.on_asked) == names(1)
