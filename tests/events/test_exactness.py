"""KV events say exactly what is cached: a run of everything that is done to engines and daemon."""

import pytest

from tests.events.exactness import DONE, exactness

SEED = 2026


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_indexes_fed_with_published_bytes_equal_the_directory() -> None:
    """Whatever is done, all indexes and schedulers have the directory's keys, and no other."""
    rows = exactness(1, SEED)
    assert [row.done for row in rows] == list(DONE)
    for row in rows:
        assert not any(row.differences.values()), row
    assert all(row.chunks and row.events for row in rows)
