"""The page's cards on memory: what more of it would bring, and why chunks are missed."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvd.broker.forecast import advice
from kvd.metrics.reading import NOTHING
from kvd.metrics.schema import ForecastStatus
from tests.http.conftest import CONTRAST, NAMELESS, SPLIT, Show
from tests.http.serving import Asked
from tests.report.reports import LONG_NAMES, STEEP, forecast, loaded_report

pytestmark = pytest.mark.slow

PICTURE = os.environ.get("KVD_FORECAST_PICTURE")  # where to keep a picture of the card
TOTAL = "document.getElementById('misses-total').textContent"
CELLS = """[...document.querySelectorAll('#{} tbody tr')].map((row) =>
  [...row.cells].map((cell) => cell.innerText.replace(/\\s+/g, ' ').trim()))"""
CUT_OFF = """[...document.querySelectorAll("#forecast *, #misses *")].filter((node) =>
  node.checkVisibility() && !node.closest(".unseen") && node.scrollWidth > node.clientWidth + 1
  && getComputedStyle(node).display !== "inline").map((node) => node.outerHTML.slice(0, 80))"""


def made_up(*of_namespaces: dict[str, Any] | None, seconds: float = 60.0) -> dict[str, Any]:
    """A report whose namespaces have these forecasts, with the advice that follows."""
    report = loaded_report(seconds)
    for namespace, made in zip(report["namespaces"], (*of_namespaces, None, None), strict=False):
        namespace["forecast"] = made
        namespace["advice"] = made and advice(msgspec.convert(made, ForecastStatus))
    report["counters"]["detached_tokens"] = 3200
    return report


def test_the_card_says_what_more_memory_would_bring(show: Show) -> None:
    """For each model hits and prefill time for each size of the pool, and the advice.

    Where no rate is known no seconds are made up, and before requests have finished no figure.
    """
    page = show(made_up())
    assert page.text("#forecast").startswith("What would more memory bring Nothing is known yet")
    assert "%" not in page.text("#forecast")
    other = forecast(*STEEP[::-1])
    for line in other["sizes"]:
        line["prefill_seconds_per_hour"] = None
    page = show(made_up(forecast(*STEEP), other))
    assert page.text("#forecast-advice").startswith("Buy memory: +64 GiB would save 410 prefill")
    table = page.ask(CELLS.format("forecast-table"))
    assert table[0] == ["\N{MINUS SIGN}50 % 32 GiB", "18 %", "1,640"]
    assert table[2] == ["now 64 GiB", "28 %", "1,440"]
    assert table[-1] == ["without limit", "58 %", "840"]
    assert "By 12,031 requests: 38 % of the prompts' chunks" in page.text("#forecast-note")
    bars = "[...document.querySelectorAll('#forecast .fill')].map((r) => r.getAttribute('width'))"
    assert page.ask(bars)[2] == "28.0"
    page.page.select_option("#forecast-model", label="qwen-2.5-7b")
    assert page.ask(CELLS.format("forecast-table"))[0][1:] == ["58 %", NOTHING]
    assert page.complaints == []


def test_misses_are_shown_by_reason(show: Show, broker: tuple[Asked, int]) -> None:
    """Shares of the missed tokens by reason, of the last minute and since the start."""
    before = made_up(seconds=30.0)
    before["counters"]["detached_tokens"] = 0
    page = show(before)
    broker[0].status = broker[0].status | made_up() | {"boot_id": broker[0].status["boot_id"]}
    page.until(f"{TOTAL} === '99,200 tokens'")
    assert page.ask(CELLS.format("misses-table")) == [
        ["never seen asked for the first time", "56.3 %", "58.1 %"],
        ["evicted was here, had to make room", "18.8 %", "19.4 %"],
        ["being stored or on its way up from a tier", "11.3 %", "11.6 %"],
        ["refused no slot was at hand to store it", "7.5 %", "7.74 %"],
        ["no daemon none served the engine", "6.25 %", "3.23 %"],
    ]
    note = "Half of the evicted ones had left within the last 5 min 30 s when they were asked for."
    assert page.text("#misses-note") == note


def test_misses_that_no_engine_reports_are_not_shown_as_none(show: Show) -> None:
    """Where lookups missed the card says so; where none did, that nothing was missed."""
    report = loaded_report(60.0)
    counters = report["counters"]
    counters["missed"] = dict.fromkeys(counters["missed"], 0)
    for namespace in report["namespaces"]:
        namespace["missed_tokens"] = {}
    unreported = "Keys were not found, and no engine has reported why (report_missed)."
    assert show(report).text("#misses-note") == unreported
    counters["hit_tokens"] = counters["lookup_tokens"]
    assert show(report).text("#misses-note") == "Nothing was missed yet."


def test_the_cards_fit_and_can_be_read(
    show: Show, broker: tuple[Asked, int], tmp_path: Path
) -> None:
    """At every width nothing is cut off or split, texts have contrast and parts have names."""
    now = made_up(forecast(*STEEP), forecast(*STEEP))
    now["namespaces"][0]["model"] = max(LONG_NAMES, key=len)
    page = show(made_up(forecast(*STEEP), forecast(*STEEP), seconds=30.0))
    broker[0].status = now | {"boot_id": broker[0].status["boot_id"]}
    page.until(f"{TOTAL} === '99,200 tokens'")
    for width in (390, 1100, 1440, 1280):
        page.resize(width)
        assert page.ask(CUT_OFF) == []
        assert page.ask(SPLIT)[1] == []
        assert page.ask(CONTRAST) == []
        assert page.ask(NAMELESS) == []
    clip = page.ask(
        "(() => { const [a, b] = ['forecast', 'misses'].map((id) =>"
        " document.getElementById(id).getBoundingClientRect());"
        " const [x, y] = [Math.min(a.x, b.x) - 8, Math.min(a.y, b.y) + scrollY - 8];"
        " return {x, y, width: Math.max(a.right, b.right) + 8 - x,"
        " height: Math.max(a.bottom, b.bottom) + scrollY + 8 - y}; })()"
    )
    page.page.screenshot(path=PICTURE or tmp_path / "card.png", full_page=True, clip=clip)
