"""What demo and self-test tell of tiers, from reports."""

from typing import Any
from unittest.mock import Mock

from kvd_client.scheduler import Scheduler
from kvd_tools.demo.command import MEANING
from kvd_tools.demo.engine import NO_FIGURES, figures, settled_figures
from kvd_tools.selftest import tier_line, tier_report
from tests.report.reports import changed, loaded_report

TIERS: list[dict[str, Any]] = loaded_report(60.0)["tiers"]


def test_the_demos_figures_are_those_of_all_tiers() -> None:
    """Chunks add up over tiers, a rate is of the time in which anything was on its way."""
    made = figures([tier["counters"] for tier in TIERS])
    assert made == {
        "tier_stored_chunks": 2 * 600,
        "tier_loaded_chunks": 2 * 300,
        "tier_in_GBps": 4.0,
        "tier_out_GBps": 2.0,
    }
    assert NO_FIGURES.keys() == made.keys() <= MEANING.keys()


def test_nothing_is_made_up_without_a_tier_or_a_transfer() -> None:
    """Without a tier every figure is null; without a transfer no rate is zero."""
    assert figures([]) == NO_FIGURES
    counts = TIERS[0]["counters"] | {"get_bytes": 0, "get_seconds": 0.0}
    assert figures([counts])["tier_out_GBps"] is None


def test_a_status_that_comes_late_is_asked_for_again() -> None:
    """The figures are those of the first status that names tiers, not of one that never came."""
    settled = [tier | {"queued_put_bytes": 0, "queued_get_bytes": 0} for tier in TIERS]
    scheduler = Mock(spec=Scheduler)
    scheduler.status.side_effect = [{}, {"tiers": settled}]
    assert settled_figures(scheduler)["tier_stored_chunks"] == 2 * 600


def test_the_self_test_tells_whether_a_tier_is_used() -> None:
    """A tier that serves and is not set aside is well; the figures are the daemon's."""
    well = tier_report(TIERS[0])
    assert (well["ok"], well["stored"], well["loaded"], well["corrupt"]) == (True, 600, 300, 0)
    assert tier_line(well) == (
        "tier disk: up, 5,120 chunks; since the start 600 stored, 300 loaded, 0 corrupt"
    )
    aside = changed(TIERS[0], "usable", to=False) | {"breaker": "open", "last_error": "EIO"}
    assert not tier_report(aside)["ok"]
    assert "breaker open" in tier_line(tier_report(aside))
    assert tier_line(tier_report(aside)).endswith("last error: EIO")
    assert not tier_report(changed(TIERS[0], "up", to=False))["ok"]
