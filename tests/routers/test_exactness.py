"""KV events say exactly what is cached: a run of everything that is done to engines and daemon."""

import pytest

from tests.routers.exactness import DONE, DONE_BELOW, exactness
from tests.vllm.support import TEST_SECONDS

SEED = 2026
BELOW = (
    "nothing",
    "reset by an engine",
    "an engine leaves, routers come late",
    "another engine comes",
    "kill -9 of the broker, warm restart",
    *DONE_BELOW,
)


@pytest.mark.slow
@pytest.mark.timeout(TEST_SECONDS)
def test_indexes_fed_with_published_bytes_equal_the_directory() -> None:
    """Whatever is done, all indexes and schedulers have the directory's keys, and no other."""
    rows = exactness(1, SEED, DONE)
    assert [row.done for row in rows] == list(DONE)
    for row in rows:
        assert not any(row.differences.values()), row
    assert all(row.chunks and row.events for row in rows)


@pytest.mark.slow
@pytest.mark.timeout(TEST_SECONDS)
def test_indexes_know_what_lies_in_tiers() -> None:
    """The same with a tier: its chunks are said as another medium's, and taken back with them."""
    rows = exactness(1, SEED, BELOW, tier=True)
    for row in rows:
        assert not any(row.differences.values()), row
    assert all(row.in_tiers for row in rows)
