"""Ages at eviction: since a chunk was stored or last used, whoever needed its room."""

import numpy as np
import pytest

from kvd.cache.ages import AGE_BOUNDS, Ages
from kvd.cache.chunks import ChunkTable
from kvd.cache.namespaces import Namespaces

PAGE = 4096
BOOT = 1_000_000.0  # of a machine that has been up for long


def one_namespace(chunks: int) -> ChunkTable:
    """A table with room for so many chunks."""
    namespaces = Namespaces(chunks * PAGE, make_buffer=lambda _, size: bytearray(size))
    namespace = namespaces.open(
        bytes(16), (PAGE,), world_size=1, replicated=False, boot_id=bytes(16)
    )
    namespaces.attach_engine(namespace)
    return namespace.table


def store(table: ChunkTable, names: str, now: float) -> None:
    """Each letter is a key; they are READY at `now`."""
    decision = table.prepare_store([name.encode() for name in names], 1, now)
    count = len(decision.slots)
    assert count == len(names)
    table.share_done(1, 0, decision.slots, decision.generations, [0] * count, [1] * count, ok=True)


def ages(table: ChunkTable) -> dict[float, int]:
    """How many chunks were evicted, by the upper bound of their age."""
    counts = table.ages.at_eviction.counts
    return {bound: n for bound, n in zip((*AGE_BOUNDS, np.inf), counts, strict=True) if n}


def test_an_age_counts_from_the_last_use() -> None:
    """Of chunks stored together the one that was loaded meanwhile is younger when it goes."""
    table = one_namespace(4)
    store(table, "abcd", BOOT)
    table.prepare_load([b"a"], 1, BOOT + 100, 1.0)
    table.expire(BOOT + 110)
    store(table, "wxyz", BOOT + 120)
    assert ages(table) == {60: 1, 300: 3}
    assert table.ages.at_eviction.sum == pytest.approx(20 + 3 * 120, abs=1e-3)
    table.check_integrity()


def test_the_end_of_a_request_is_a_use() -> None:
    """What a request had is as young as its end; the time is that of the last tick."""
    table = one_namespace(2)
    store(table, "ab", BOOT)
    table.expire(BOOT + 50)
    table.finished([b"a", b"b"])
    store(table, "cd", BOOT + 54)
    assert ages(table) == {5: 2}


def test_a_chunk_that_is_stored_anew_is_as_young_as_it_was() -> None:
    """A whole chunk that takes the place of a part was last of use when the part was."""
    namespaces = Namespaces(2 * PAGE, make_buffer=lambda _, size: bytearray(size))
    table = namespaces.open(
        bytes(16), (PAGE,), world_size=1, replicated=False, boot_id=bytes(16), blocks_per_chunk=2
    ).table
    part = table.prepare_store([b"a"], 1, BOOT, blocks=[(1, 1)])
    table.share_done(1, 0, part.slots, part.generations, [1], [1], ok=True)
    whole = table.prepare_store([b"a"], 1, BOOT + 10)
    table.expire(BOOT + 40)
    table.finished([b"a"])
    table.share_done(1, 0, whole.slots, whole.generations, [0], [2], ok=True)
    table.prepare_store([b"b", b"c"], 1, BOOT + 50)
    assert table.ages.at_eviction.sum == pytest.approx(10, abs=1e-3)


def test_a_reset_is_no_eviction() -> None:
    """Chunks that are dropped on purpose say nothing about the pool's size."""
    table = one_namespace(2)
    store(table, "ab", BOOT)
    table.reset()
    store(table, "ab", BOOT + 9)
    assert ages(table) == {}
    table.check_integrity()


def test_a_clock_that_stands_still_gives_no_age_below_zero() -> None:
    """A time told twice, or an older one, does no harm."""
    times = Ages(2)
    times.tell(BOOT)
    times.tell(BOOT + 3)
    times.used([0, 1], times.now)
    times.tell(BOOT)
    assert times.of([0, 1]).tolist() == [0.0, 0.0]
    times.evicted([0])
    assert times.at_eviction.count == 1
