"""What a table of chunks decides that `test_machine` does not reach."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvd.cache import uses
from kvd.cache.chunks import ChunkTable
from kvd.cache.ghosts import GhostCause
from kvd.cache.namespaces import LedgerSetup
from kvd.cache.recovery import PoolTrailer
from kvd.config.values import Quota
from kvd.errors import IntegrityError
from kvd.metrics.counts import AGE_BOUNDS
from kvd_proto.directory import PROBE_LIMIT, SlotState
from tests.cache.tables import (
    PAGE,
    add,
    begin,
    finish,
    make_namespaces,
    make_table,
    names,
    pin,
    store,
)


def test_a_ticket_that_is_never_used_runs_out() -> None:
    """A store that no lane reports in time is given up: its slots drain, its key is free again."""
    table = make_table(4)
    begun = begin(table, [b"a"], seconds=5.0)
    assert not table.expire(4.9)
    assert [slot for slot, _ in table.expire(5.0)] == begun.slots
    assert table.counts.tickets_expired == 1
    assert table.slots.stats()["draining"] == 1
    assert begin(table, [b"a"], 6.0, owner=2).keys == [b"a"]


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


BOOT = 1_000_000.0  # of a machine that has been up for long


def ages(table: ChunkTable) -> dict[float, int]:
    """How many chunks were evicted, by the upper bound of their age."""
    counts = table.counts.eviction_age.counts
    return {bound: n for bound, n in zip((*AGE_BOUNDS, np.inf), counts, strict=True) if n}


def test_an_age_counts_from_the_last_use() -> None:
    """Of chunks stored together the one that was loaded meanwhile is younger when it goes."""
    table = make_table(4)
    store(table, names(4), BOOT)
    pin(table, names(1), BOOT + 100, 1.0)
    table.expire(BOOT + 110)
    store(table, names(4, first=10), BOOT + 120)
    assert ages(table) == {60: 1, 300: 3}
    assert table.counts.eviction_age.sum == pytest.approx(20 + 3 * 120, abs=1e-3)
    table.check_integrity()


def test_a_ghost_says_why_a_key_was_not_stored() -> None:
    """A key is remembered as refused, or as above a quota, until it is stored."""
    namespaces = make_namespaces(16 * PAGE, quotas={"model 0": Quota(cap_bytes=8 * PAGE)})
    table = add(namespaces, 0, PAGE, blocks_per_chunk=4).table
    store(table, names(8))
    for quotas, cause in ((None, GhostCause.QUOTA), ({}, GhostCause.REFUSED)):
        if quotas is not None:
            namespaces.pool.set_quotas(quotas)
        table.stores.remember_unstored([b"new"], 1.0)
        ghost = table.ghosts.find(b"new")
        assert ghost is not None
        assert ghost.cause is cause
    assert begin(table, [b"new"]).keys == [b"new"]
    assert table.ghosts.find(b"new") is None


DAMAGE: dict[str, Callable[[ChunkTable, int, int], object]] = {
    "state": lambda table, slot, _: table.directory.write_state(slot, SlotState.WRITING),
    "pin": lambda table, slot, _: table.slots.leases.pins.update({slot: 1}),
    "ticket": lambda table, _, __: table.slots.tickets.clear(),
    "policy": lambda table, slot, _: table.slots.policy.remove(slot),
    "loan that is not noted": lambda table, slot, _: table.slots.loans.end(slot),
    "loan that is none": lambda table, slot, _: table.directory.end_loans([slot]),
    "loan to two": lambda table, slot, loan: table.slots.loans.lend(2, [slot], [loan], 0.0),
    "loan's generation": lambda table, slot, _: table.directory.lend([slot]),
    "loan that may be evicted": lambda table, slot, _: table.slots.policy.release([slot]),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damage_is_noticed(damage: Callable[[ChunkTable, int, int], object]) -> None:
    """The integrity check finds whatever contradicts the rest."""
    table = make_table(4)
    store(table, names(3))
    begin(table, [b"being written"])
    (slot,), (loan,) = table.lending.lend(1, 1, 1, 0.0)
    table.check_integrity()
    damage(table, slot, loan)
    with pytest.raises(IntegrityError):
        table.check_integrity()


TIER = "tier 0 of process 7"
ONE = ("memory:,size=1MiB",)


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
    queue = table.ready_queue
    assert queue is not None
    assert (len(queue), queue.take_missed()) == (4, 2)
    table.remove(0, 99, 0.0)
    assert queue.take(1) == []
    assert (len(queue), queue.take_missed()) == (2, 2)


def test_a_kill_during_a_reset_brings_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger says the new salt when it has no chunk of before; readers know of none either."""
    setup = LedgerSetup(lambda _, size: bytearray(size), "pool", PoolTrailer.create("pool"), 2**32)
    namespaces = make_namespaces(4 * PAGE, ledger_setup=setup, tier=ONE)
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


class Writer:
    """Notes what is written, and the state that each slot had in the directory then."""

    max_bytes = 8

    def __init__(self) -> None:
        self.is_full = False
        self.table: ChunkTable | None = None
        self.written: list[tuple[int, int, bytes, SlotState]] = []

    def write(self, slot: int, generation: int, description: bytes) -> bool:
        """Keep it, unless there is no room."""
        if self.table is not None and not self.is_full:
            state = SlotState(self.table.directory.state(slot))
            self.written.append((slot, generation, description, state))
        return not self.is_full


@pytest.fixture
def writer() -> Writer:
    """What keeps the descriptions of a table of four chunks."""
    made = Writer()
    namespaces = make_namespaces(4 * PAGE, make_descriptions=lambda _name, _size: made)
    made.table = add(namespaces, 0, PAGE, description_record_bytes=64).table
    return made


def test_a_description_is_kept_before_its_chunk_is_ready(writer: Writer) -> None:
    """The slot is being written; one without a description has none.

    A store that is lost or comes second writes nothing: its slot may be another chunk's.
    """
    table = writer.table
    assert table is not None
    begun = begin(table, names(3), descriptions=[b"first", b"", b"third"])
    refs = list(zip(begun.slots, begun.generations, strict=True))
    expected = [(*refs[0], b"first", SlotState.WRITING), (*refs[2], b"third", SlotState.WRITING)]
    assert writer.written == expected
    assert table.counts.descriptions == 2
    slots, generations = table.lending.lend(1, 1, 1, 0.0)
    table.stores.begin(names(1), slots, generations, 1, 0.0, descriptions=[b"second"])
    table.stores.begin([b"lost"], [0], [10**6], 1, 0.0, descriptions=[b"lost"])
    assert (table.counts.stores_raced, table.counts.stores_lost) == (1, 1)
    assert writer.written == expected


def test_what_is_too_long_is_counted_and_stored_without(writer: Writer) -> None:
    """As is what finds no room; the chunks are READY all the same."""
    table = writer.table
    assert table is not None
    longest, longer = bytes(8), bytes(9)
    finish(table, begin(table, names(2), descriptions=[longest, longer]))
    writer.is_full = True
    finish(table, begin(table, names(1, first=2), descriptions=[longest]))
    counts = table.counts
    assert (counts.descriptions, counts.descriptions_too_long) == (1, 1)
    assert (counts.descriptions_no_room, counts.stored) == (1, 3)
