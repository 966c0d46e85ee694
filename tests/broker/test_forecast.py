"""Forecasts: a curve, anchored at what was measured."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.broker.forecast import MIN_REQUESTS, Forecast
from kvd.cache.miss_curve import MissCurve

POOL = 64
SIZES = (16, 32, 48, 64, 80, 96, 128, 192, math.inf)


class KnownCurve(MissCurve):
    """A curve of 1,000 requests of one key each, with these hits by size; the last has no limit."""

    def __init__(self, **percent: float) -> None:
        super().__init__(POOL)
        self._sizes = [0.0, *(float(name.removeprefix("at_")) for name in percent)]
        self._ratios = [0.0, *(value / 100 for value in percent.values())]
        self.requests = self.asked = 1000.0
        self.tokens_per_key = 16.0

    def hit_ratio(self, chunks: float) -> float:
        """By straight lines between the sizes."""
        return float(np.interp(chunks, self._sizes, self._ratios))

    def missed_depth(self, chunks: float) -> float:
        """The deeper the more memory there is, as where shallow keys are found first."""
        return min(chunks, 1e6)


def test_now_is_what_was_measured() -> None:
    """Less memory in proportion to the hits now, more of it to what is left up to the ceiling."""
    curve = KnownCurve(at_32=20, at_64=40, at_128=70, at_192=80)
    curve.note_lookups(16_000, 8_000, 0.0)
    forecast = Forecast(curve, POOL)
    assert forecast.is_known
    assert forecast.hit_ratio_now == forecast.hit_ratio(POOL) == 0.5
    assert forecast.hit_ratio(POOL / 2) == pytest.approx(0.25)
    assert forecast.hit_ratio(2 * POOL) == pytest.approx(0.5 + 0.3 * 3 / 4)
    assert forecast.hit_ratio(math.inf) == forecast.ceiling == pytest.approx(0.8)


@given(
    st.lists(st.floats(0, 100), min_size=4, max_size=4),
    st.floats(0, 1),
    st.integers(1, 32_000),
)
def test_more_memory_never_finds_less(percent: list[float], hit_ratio: float, tokens: int) -> None:
    """Whatever was measured: hits rise up to the ceiling, prefill seconds fall."""
    names = ("at_32", "at_64", "at_128", "at_192")
    curve = KnownCurve(**dict(zip(names, sorted(percent), strict=True)))
    curve.note_lookups(0, 0, 0.0)
    curve.note_lookups(tokens, int(tokens * hit_ratio), 1800.0)
    forecast = Forecast(curve, POOL)
    ratios = [forecast.hit_ratio(size) for size in SIZES]
    ends = [0.0, *ratios, forecast.ceiling, 1.0]
    assert all(smaller <= larger + 1e-9 for smaller, larger in pairwise(ends))
    seconds = forecast.prefill_seconds(SIZES, 0.001)
    assert all(larger <= smaller for smaller, larger in pairwise(seconds))


def test_too_little_is_no_forecast() -> None:
    """Few requests; and hits that the curve does not know, as of chunks from before a restart."""
    curve = KnownCurve(at_64=50)
    curve.requests = MIN_REQUESTS - 1
    assert not Forecast(curve, POOL).is_known
    restarted = KnownCurve(at_64=0)
    restarted.note_lookups(16_000, 8_000, 0.0)
    assert not Forecast(restarted, POOL).is_known
    assert Forecast(KnownCurve(at_64=0), POOL).is_known
