"""Differences of reports."""

import pytest

from kvd.metrics.history import History, Span, quantile
from tests.report.reports import BOUNDS, changed, histogram, loaded_report


def test_rates_are_growth_per_second() -> None:
    """Bytes per second come from two reports of one boot."""
    span = Span(loaded_report(10.0), loaded_report(5.0))
    assert span.rise("counters", "store_bytes") == 5 * 4 * 10**8
    assert span.rate("counters", "load_bytes") == 2 * 10**9
    assert span.share("hit_tokens", "lookup_tokens") == 0.75
    assert span.lane("host").rate("counters", "load_bytes") == 10**9
    assert span.engine("qwen-0").rise("counters", "lookup_chunks") == 500


def test_one_report_tells_no_rate() -> None:
    """Before the second report there is no rate, and nothing has risen."""
    span = Span(loaded_report(10.0))
    assert span.rate("counters", "load_bytes") is None
    assert span.share("hit_tokens", "lookup_tokens") is None
    assert span.rise("counters", "store_bytes") == 0


def test_what_appears_starts_from_zero_and_what_goes_is_no_fall() -> None:
    """An outcome counted for the first time has risen; a namespace that is gone takes nothing."""
    before, now = loaded_report(5.0), loaded_report(10.0)
    now["counters"]["jobs"]["load_failed"] = 3
    assert Span(now, before).rise("counters", "jobs", "load_failed") == 3
    assert Span(changed(now, "counters", "stored", to=1), before).rise("counters", "stored") == 0
    now["lanes"].append(changed(now["lanes"][0], "device", to="cuda:new"))
    gained = Span(now, before).lane("cuda:new").histogram("counters", "stages", "load_copied")
    assert gained is not None
    assert sum(gained["counts"]) == 1000


def test_a_new_boot_starts_anew() -> None:
    """A report with another boot id forgets those before it."""
    history = History()
    assert not history.add(loaded_report(100.0))
    assert not history.add(loaded_report(101.0))
    assert history.add(changed(loaded_report(1.0), "boot_id", to="aa" * 16))
    assert history.span().rate("counters", "load_bytes") is None


def test_old_reports_go() -> None:
    """The span reaches back as far as is kept."""
    history = History(keep=60.0)
    for second in range(100):
        history.add(loaded_report(float(second)))
    assert history.span().seconds == 60.0
    assert history.rates("counters", "load_bytes") == [2 * 10**9] * 60


@pytest.mark.parametrize(
    ("counts", "q", "value"),
    [
        ((10,), 0.5, 0.5e-5),
        ((0, 10), 0.5, 5.5e-5),
        ((50, 50), 0.99, 0.982e-4),
        ((0, 0, 0, 0, 0, 0, 7), 0.5, 1.0),
    ],
)
def test_quantiles_are_estimated_within_buckets(
    counts: tuple[int, ...], q: float, value: float
) -> None:
    """The share of a bucket gives a straight line between its bounds."""
    assert quantile(histogram(BOUNDS, *counts), q) == pytest.approx(value, rel=1e-3)


def test_an_empty_histogram_has_no_quantile() -> None:
    """No value was counted: nothing is said."""
    assert quantile(histogram(BOUNDS), 0.5) is None
    assert quantile(None, 0.5) is None
