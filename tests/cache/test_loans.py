"""Slots on loan: what schedulers are lent, what they give to keys, and what ends a loan."""

from collections.abc import Sequence

import pytest

from kvd.cache.chunks import ChunkTable
from kvd.cache.directory import Refs
from kvd.cache.ghosts import GhostCause
from kvd.config.values import Quota
from kvd.errors import IntegrityError
from kvd.pool.geometry import FillOrder
from kvd_proto.directory import LookupResult, SlotState
from tests.cache import tables
from tests.cache.tables import (
    PAGE,
    add,
    make_namespaces,
    make_table,
    names,
    store,
)

HIT, MISS = LookupResult.HIT, LookupResult.MISS


def lend(table: ChunkTable, need: int, owner: int = 1, engines: int = 1, now: float = 0.0) -> Refs:
    """What one of so many engines is lent."""
    slots, generations = table.lending.lend(owner, need, engines, now)
    return list(zip(slots, generations, strict=True))


def begin(
    table: ChunkTable,
    keys: list[bytes],
    refs: Refs,
    owner: int = 1,
    blocks: Sequence[tuple[int, int]] = (),
    now: float = 0.0,
) -> None:
    """A step of an engine gives keys these slots."""
    slots, generations = [slot for slot, _ in refs], [generation for _, generation in refs]
    table.stores.begin(keys, slots, generations, owner, now, blocks, seconds=5.0)


def share(
    table: ChunkTable, refs: Refs, rank: int = 0, owner: int = 1, blocks: tuple[int, int] = (0, 4)
) -> tuple[Refs, Refs]:
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
