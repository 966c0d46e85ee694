"""Chunks that come up from tiers, and those that are to go down."""

from typing import Any

import pytest

from kvd.cache import uses
from kvd.cache.chunks import ChunkTable
from kvd.cache.directory import Refs
from kvd.cache.ledger import Ledger
from kvd.cache.namespaces import LedgerSetup, Namespace, Namespaces
from kvd.cache.recovery import PoolTrailer
from kvd.cache.uses import DemotionQueue
from kvd_proto.directory import LookupResult
from tests.cache.tables import (
    PAGE,
    add,
    make_namespaces,
    make_table,
    names,
    store,
)

TIER = "tier 0 of process 7"
ONE = ("memory:,size=1MiB",)
TWO = (*ONE, "disk:/somewhere,size=1MiB")


def promote(table: ChunkTable, keys: list[bytes], now: float = 0.0, most: int = 99) -> Refs:
    """Let a tier fill these; the slots that it got."""
    return [(slot, each) for _, slot, each in table.promotions.begin(keys, TIER, now, 10.0, most)]


def drained(table: ChunkTable, refs: Refs, name: str = TIER) -> int:
    """Who writes there says that nothing is under way; how many slots are free now."""
    return table.slots.revoked(name, [slot for slot, _ in refs], [each for _, each in refs])


def waiting(queue: DemotionQueue | None) -> list[bytes]:
    """The keys that are to go down, which are in the queue no more."""
    assert queue is not None
    return [key for key, *_ in queue.take(99)]


def test_nothing_is_evicted_while_the_pool_is_filled() -> None:
    """Only what is free inside the part that can be used is taken."""
    table = make_table(4, tier=ONE)
    store(table, names(4))
    assert table.promotions.begin(names(2, 10), TIER, 0.0, 10.0, 2, 4 * PAGE) == []
    assert table.counts.evicted == 0


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
    table.promotions.done(*refs[0], 1, 2, 3)
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
