"""Differences of reports."""

from kvd.metrics.reading import History, Span
from tests.report.reports import changed, loaded_report


def test_rates_are_growth_per_second() -> None:
    """Bytes per second come from two reports of one boot."""
    span = Span(loaded_report(10.0), loaded_report(5.0))
    assert span.rise("counters", "store_bytes") == 5 * 4 * 10**8
    assert span.rate("counters", "load_bytes") == 2 * 10**9
    assert span.share("hit_tokens", "lookup_tokens") == 0.75
    assert [lane.rate("counters", "load_bytes") for lane in span.parts("lanes")] == [10**9] * 2
    assert span.parts("engines")[2].rise("counters", "lookup_chunks") == 500


def test_what_appears_starts_from_zero_and_what_goes_is_no_fall() -> None:
    """An outcome counted for the first time has risen; a namespace that is gone takes nothing."""
    before, now = loaded_report(5.0), loaded_report(10.0)
    now["counters"]["jobs"]["load_failed"] = 3
    assert Span(now, before).rise("counters", "jobs", "load_failed") == 3
    assert Span(changed(now, "counters", "stored", to=1), before).rise("counters", "stored") == 0
    now["lanes"].append(changed(now["lanes"][0], "device", to="cuda:new"))
    old, *_, new = Span(now, before).parts("lanes")
    assert old.histogram("counters", "stages", "load_copied").count == 500
    assert new.histogram("counters", "stages", "load_copied").count == 1000
    assert new.histogram("counters", "stages", "other").quantile(0.5) is None


def test_a_new_boot_starts_anew() -> None:
    """A report with another boot id forgets those before it."""
    history = History()
    assert not history.add(loaded_report(100.0))
    assert not history.add(loaded_report(101.0))
    assert history.add(changed(loaded_report(1.0), "boot_id", to="aa" * 16))
    assert history.span().rate("counters", "load_bytes") is None
