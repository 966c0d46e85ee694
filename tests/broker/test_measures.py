"""What the broker measures: recent maxima, progress, events, lookups."""

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.broker.broker import lookup_counts
from kvd.metrics.counts import LookupCounts
from kvd.metrics.declare import Progress, RecentMax
from kvd_proto.messages import Lookups

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
    found = progress.seconds_left(total)
    assert found == (left if left is None else pytest.approx(left, rel=0.1))


def said(*totals: int, tokens: bool = True) -> Lookups:
    """What a session says, in the order of `LookupCounts`; the rest is 0."""
    names = [each.name for each in fields(LookupCounts)]
    given = dict.fromkeys(names, 0) | dict(zip(names, totals, strict=False))
    chunks, asked, hit = given.pop("lookup_chunks"), given.pop("lookup_tokens"), "hit_tokens"
    found = given.pop(hit)
    return Lookups(
        chunks=chunks,
        tokens=asked if tokens else None,
        hit_tokens=found if tokens else None,
        **given,
    )


NUM_TOTALS = len(fields(LookupCounts))


@given(st.lists(st.tuples(*[st.integers(0, 1000)] * NUM_TOTALS), max_size=20), st.data())
def test_lookups_count_once_however_often_they_are_said(
    steps: list[tuple[int, ...]], data: st.DataObject
) -> None:
    """Totals said twice, late or out of order add up to the greatest that was said."""
    grown = [0] * NUM_TOTALS
    reports = []
    for step in steps:
        grown = [have + more for have, more in zip(grown, step, strict=True)]
        reports.append(said(*grown))
    known, total = LookupCounts(), LookupCounts()
    for report in data.draw(st.permutations(reports * 2)):
        total.add(known.catch_up(lookup_counts(report)))
    assert total == LookupCounts(*grown)


def test_totals_stay_within_a_message() -> None:
    """However much sessions claim, the report can still be sent."""
    total = LookupCounts()
    for _ in range(3):
        total.add(LookupCounts().catch_up(lookup_counts(said(MOST, MOST, MOST, MOST))))
    assert total == LookupCounts(MOST, MOST, MOST, MOST)
