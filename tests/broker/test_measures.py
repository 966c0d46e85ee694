"""What the broker measures, and what it forecasts from that."""

import math
from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.broker.broker import lookup_counts
from kvd.broker.forecast import MIN_REQUESTS, Forecast
from kvd.cache.miss_curve import MissCurve
from kvd.metrics.counts import LookupCounts
from kvd.metrics.declare import Progress, RecentMax
from kvd_proto.messages import KvEvents, Lookups, Ping, Status, StatusReport
from tests.broker.brokers import join, make_broker, replies

MOST = 2**63 - 1


@given(st.lists(st.tuples(st.integers(0, 10), st.integers(0, 20)), min_size=1, max_size=60))
def test_the_recent_maximum_is_that_of_the_last_minute(steps: list[tuple[int, int]]) -> None:
    """However values rise and fall, those of the last 60 s count and no others."""
    recent, now, seen = RecentMax(), 0, []
    for value, later in steps:
        now += later
        recent.observe(value, now)
        seen.append((now, value))
        assert recent.get(now) == max(value for when, value in seen if when > now - 60)
    assert recent.get(now + 60) == 0.0


@pytest.mark.parametrize(
    ("samples", "total", "left"),
    [
        ([], 100, None),
        ([(0, 0)], 100, None),
        ([(0, 0), (2, 20)], 100, 8.0),
        ([(0, 0), (2, 20), (4, 100)], 100, 0.0),
        ([(0, 0), (1, 50), (2, 10)], 100, None),  # it began anew
        ([(0, 0), (1, 50), (2, 10), (3, 20)], 100, 8.0),
        ([(second, 7) for second in range(30)], 100, None),
        ([(s, s + 9 * max(0, s - 100)) for s in range(121)], 400, 10.0),  # a slow beginning
    ],
)
def test_seconds_left_follow_the_rate_of_the_last_seconds(
    samples: list[tuple[int, int]], total: int, left: float | None
) -> None:
    """Unknown without a rate; then what is left by the rate; zero at the end."""
    progress = Progress()
    for now, done in samples:
        progress.record(float(now), done)
    assert progress.seconds_left(total) == (left if left is None else pytest.approx(left, rel=0.1))


def reported(*totals: int) -> Lookups:
    """What a session reports, in the order of `LookupCounts`; the rest is 0."""
    names = [field.name for field in fields(LookupCounts)]
    counts = dict.fromkeys(names, 0) | dict(zip(names, totals, strict=False))
    chunks, tokens = counts.pop("lookup_chunks"), counts.pop("lookup_tokens")
    return Lookups(chunks=chunks, tokens=tokens, **counts)


NUM_TOTALS = len(fields(LookupCounts))


@given(st.lists(st.tuples(*[st.integers(0, 1000)] * NUM_TOTALS), max_size=20), st.data())
def test_lookups_count_once_however_often_they_are_reported(
    steps: list[tuple[int, ...]], data: st.DataObject
) -> None:
    """Totals said twice, late or out of order add up to the greatest that was said."""
    grown = [0] * NUM_TOTALS
    reports = []
    for step in steps:
        grown = [total + new for total, new in zip(grown, step, strict=True)]
        reports.append(reported(*grown))
    known, total = LookupCounts(), LookupCounts()
    for report in data.draw(st.permutations(reports * 2)):
        total.add(known.catch_up(lookup_counts(report)))
    assert total == LookupCounts(*grown)


def test_totals_stay_within_a_message() -> None:
    """However much sessions claim, the report can still be sent."""
    total = LookupCounts()
    for _ in range(3):
        total.add(LookupCounts().catch_up(lookup_counts(reported(MOST, MOST, MOST, MOST))))
    assert total == LookupCounts(MOST, MOST, MOST, MOST)


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


def test_too_little_is_no_forecast() -> None:
    """Few requests; and hits that the curve does not know, as of chunks from before a restart."""
    curve = KnownCurve(at_64=0)
    assert Forecast(curve, POOL).is_known
    curve.note_lookups(16_000, 8_000, 0.0)
    assert not Forecast(curve, POOL).is_known
    young = KnownCurve(at_64=50)
    young.requests = MIN_REQUESTS - 1
    assert not Forecast(young, POOL).is_known


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


def published(total: int, snapshots: int = 1, overruns: int = 0, lag_us: int = 0) -> KvEvents:
    """The figures that a Ping carries."""
    return KvEvents(published=total, snapshots=snapshots, overruns=overruns, lag_us=lag_us)


def test_the_report_says_which_engine_published_how_much() -> None:
    """By what their schedulers report; the sums include engines that have left."""
    broker = make_broker()
    schedulers = [join(broker, "scheduler", name) for name in ("a", "b")]
    sessions = [*schedulers, join(broker, "worker", "a")]
    figures = [published(70, lag_us=1500), published(30, 2, 1), published(900)]
    for session, totals in zip(sessions, figures, strict=True):
        broker.request(session, 5, Ping(kv_events=totals), 1.0)
    broker.lost(schedulers[1])
    (reply,) = replies(broker.request(schedulers[0], 6, Status(), 3.0))
    assert isinstance(reply.message, StatusReport)
    status = reply.message.status
    (engine,) = status["engines"]
    assert engine["published"] == {
        "kv_events": 70,
        "kv_event_snapshots": 1,
        "kv_event_overruns": 0,
        "lag_max_seconds": 0.0015,
    }
    sums = [status["counters"][f"kv_event{what}"] for what in ("s", "_snapshots", "_overruns")]
    assert sums == [100, 3, 1]
