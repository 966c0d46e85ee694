"""Figures: what histograms count and tell, and where the report finds what it declares."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.metrics.counts import ASK_OUTCOMES, GET_OUTCOMES, PUT_OUTCOMES
from kvd.metrics.declare import Histogram
from kvd.outcomes import Outcome

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
        ([0, 10, 0, 0, 0], 0.5, 0.2505),
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


def test_every_outcome_is_counted() -> None:
    """Each outcome of a tier's batch has a counter of its name, and no counter has another name."""
    counted = {*PUT_OUTCOMES, *GET_OUTCOMES, *ASK_OUTCOMES}
    assert counted == {outcome.name.lower() for outcome in Outcome}
