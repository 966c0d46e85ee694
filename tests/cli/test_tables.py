"""`kvd status` for people: what matters at a glance, whatever names engines give themselves."""

import pytest

from kvd.cli.tables import print_report
from tests.report.reports import empty_report, loaded_report


def test_a_report_of_a_loaded_daemon(capsys: pytest.CaptureFixture[str]) -> None:
    """Engines, models, lanes, hit rate and refusals appear."""
    report = loaded_report(60.0)
    report["counters"] |= {"lookup_tokens": 2000, "hit_tokens": 1500, "full": 17}
    print_report(report)
    text = capsys.readouterr().out
    for part in ("75 %", "17 full", "host", "ready", report["engines"][0]["name"]):
        assert part in text


def test_a_pool_that_is_being_pinned(capsys: pytest.CaptureFixture[str]) -> None:
    """The check that is not ok says how far it is and how long it takes."""
    report = empty_report()
    report["ready"] = False
    report["checks"][0] |= {"ok": False, "text": "pinned (40 %, about 1 min 15 s left)"}
    print_report(report)
    text = capsys.readouterr().out
    for part in ("not ready", "not ok", "(40 %, about 1 min 15 s left)"):
        assert part in text


def test_names_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets in names and errors are printed as they are."""
    report = loaded_report(1.0)
    report["engines"][0]["name"] = "[red]evil[/]"
    report["namespaces"][0]["model"] = "[/]"
    print_report(report)
    assert "[red]evil[/]" in capsys.readouterr().out
