"""Ages at eviction: since a chunk was stored or last used, whoever needed its room."""

import numpy as np
import pytest

from kvd.cache.chunks import ChunkTable
from kvd.metrics.counts import AGE_BOUNDS
from tests.cache.tables import make_table, names, pin, store

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
