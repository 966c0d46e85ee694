"""How fast a tier's gets are, by the last ones."""

import pytest

from kvd.broker.tiers.tier import RATE_BYTES, UNKNOWN_BYTES_PER_SECOND, GetSpeed


def test_bytes_that_come_in_the_same_moment_count_together() -> None:
    """Answers of several batches are taken in one turn, with one time: no rate is made of none."""
    speed = GetSpeed()
    speed.begin(10.0)
    for _ in range(3):
        speed.observe(RATE_BYTES, 12.0, 10.0)
    assert speed.bytes_per_second == RATE_BYTES / 2
    speed.observe(RATE_BYTES, 13.0, None)
    assert speed.bytes_per_second == pytest.approx((RATE_BYTES / 2 + 3 * RATE_BYTES) // 2)


def test_many_bytes_have_longer_before_any_were_measured() -> None:
    """The first batches of a tier nobody measured may take as long as their bytes are many."""
    speed = GetSpeed()
    assert speed.seconds(0) == 0
    assert speed.seconds(2 * int(UNKNOWN_BYTES_PER_SECOND)) == pytest.approx(2)
