"""Figures: histograms, differences of reports, names and advice in words."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.broker.forecast import advice
from kvd.metrics.declare import Histogram
from kvd.metrics.reading import NAME_LENGTH, Span, shorten
from kvd.metrics.schema import ForecastStatus
from tests.report.reports import LONG_NAMES, STEEP, forecast, loaded_report

BOUNDS = (0.001, 0.5, 1.0, 60.0)
VALUES = st.lists(st.one_of(st.floats(0, 1e6), st.sampled_from([0.0, *BOUNDS])), max_size=50)


def of(values: list[float]) -> Histogram:
    """A histogram that has seen `values` one by one."""
    histogram = Histogram(BOUNDS)
    for value in values:
        histogram.observe(value)
    return histogram


@given(VALUES)
def test_many_at_once_count_as_one_by_one(values: list[float]) -> None:
    """`observe_all` does what `observe` does for each, and every value counts once."""
    one_by_one, at_once = of(values), Histogram(BOUNDS)
    at_once.observe_all(np.array(values, np.float64))
    assert at_once.counts == one_by_one.counts
    assert at_once.sum == pytest.approx(one_by_one.sum)
    assert at_once.count == len(values)


@given(VALUES, VALUES)
def test_a_sum_has_seen_what_both_have(left: list[float], right: list[float]) -> None:
    """Adding two is counting the values of both; neither changes."""
    first, second = of(left), of(right)
    both = first + second
    assert both.counts == of(left + right).counts
    assert both.sum == pytest.approx(sum(left) + sum(right))
    assert (first.counts, second.counts) == (of(left).counts, of(right).counts)


@pytest.mark.parametrize(
    ("counts", "q", "value"),
    [
        ([10, 0, 0, 0, 0], 0.5, 0.0005),
        ([50, 50, 0, 0, 0], 0.99, 0.49002),
        ([0, 0, 0, 0, 7], 0.5, 60.0),
        ([0, 0, 0, 0, 0], 0.5, None),
    ],
)
def test_quantiles_are_estimated_within_ranges(
    counts: list[int], q: float, value: float | None
) -> None:
    """A straight line between a range's bounds; nothing of an empty histogram."""
    assert Histogram(BOUNDS, counts).quantile(q) == pytest.approx(value)


def test_rates_are_growth_per_second() -> None:
    """Bytes per second come from two reports of one boot."""
    span = Span(loaded_report(10.0), loaded_report(5.0))
    assert span.rise("counters", "store_bytes") == 5 * 4 * 10**8
    assert span.rate("counters", "load_bytes") == 2 * 10**9
    assert span.share("hit_tokens", "lookup_tokens") == 0.75
    assert [lane.rate("counters", "load_bytes") for lane in span.parts("lanes")] == [10**9] * 2
    assert span.parts("engines")[2].rise("counters", "lookup_chunks") == 500


@pytest.mark.parametrize(("name", "short"), LONG_NAMES.items())
def test_long_names_lose_their_middle(name: str, short: str) -> None:
    """Beginning and end stay; of a snapshot's path model and revision."""
    assert shorten(name) == short
    assert len(short) <= NAME_LENGTH


NEITHER = (0.6, 0.609, 0.61, 0.611, 0.612, 0.613, 0.614, 0.615)
HALF = (0.609, 0.61, 0.61, 0.611, 0.612, 0.613, 0.614, 0.615)
TIER = (0.1, 0.11, 0.12, 0.13, 0.14, 0.15, 0.2, 0.6)


@pytest.mark.parametrize(
    ("found", "rate", "says"),
    [
        (STEEP, 20.0, "Buy memory: +64 GiB would save 410 prefill seconds an hour and find 48.5 %"),
        (STEEP, None, "Buy memory: +64 GiB would find 48.5 % of the prompt tokens instead of 28 %"),
        (NEITHER, 20.0, "Buy neither memory nor a tier: 61 % of the prompt tokens are found, 61.5"),
        (HALF, 20.0, "Buy neither: half of the pool would also find 61 % of the prompt tokens."),
        (TIER, 20.0, "Add a tier, or enlarge it: without limit 60 % of the prompt tokens would be"),
    ],
)
def test_one_sentence_says_what_to_buy(
    found: tuple[float, ...], rate: float | None, says: str
) -> None:
    """Memory, a tier or neither; without a prefill rate no seconds are made up."""
    told = forecast(*found)
    if rate is None:
        for line in told["sizes"]:
            line["prefill_seconds_per_hour"] = None
    assert advice(msgspec.convert(told, ForecastStatus)).startswith(says)
