"""KV events say exactly what is cached: a short run of `make events-exact`, with a tier."""

import pytest

from tests.engine_answers import TEST_SECONDS
from tests.routers.exactness import DONE, DONE_BELOW, exactness

LEFT_TO_NIGHTS = (
    "kvd clear",
    "reset by an engine",
    "kill -9 of the lane",
    "an engine stands still, its ring overruns",
)


@pytest.mark.timeout(TEST_SECONDS)
def test_indexes_fed_with_published_bytes_equal_the_directory() -> None:
    """Whatever is done, all indexes and schedulers have the directory's keys, and no other."""
    done = [name for name in DONE | DONE_BELOW if name not in LEFT_TO_NIGHTS]
    for row in exactness(1, 2026, done, tier=True):
        assert not any(row.differences.values()), row
        assert row.chunks, row
        assert row.events, row
        assert row.in_tiers, row
