"""What more memory would bring and why chunks were missed, in words."""

from typing import Any

import msgspec
import pytest

from kvd.broker.forecast import advice
from kvd.cli.tables import misses_text
from kvd.metrics.schema import ForecastStatus
from tests.report.reports import STEEP, forecast, loaded_report

FLAT = (0.6, 0.609, 0.61, 0.611, 0.612, 0.613, 0.614, 0.615)
EARLY_FLAT = (0.609, 0.61, 0.61, 0.611, 0.612, 0.613, 0.614, 0.615)
LATE = (0.1, 0.11, 0.12, 0.13, 0.14, 0.15, 0.2, 0.6)
FAR = (0.1, 0.11, 0.12, 0.12, 0.12, 0.125, 0.13, 0.6)


ADVICE: list[tuple[dict[str, Any], str]] = [
    (
        forecast(*STEEP),
        (
            "Buy memory: +64 GiB would save 410 prefill seconds an hour and find 48.5 % of the"
            " prompt tokens instead of 28 %."
        ),
    ),
    (
        forecast(*FLAT),
        (
            "Buy neither memory nor a tier: 61 % of the prompt tokens are found, 61.5 % would be"
            " without limit."
        ),
    ),
    (
        forecast(*EARLY_FLAT),
        "Buy neither: half of the pool would also find 61 % of the prompt tokens.",
    ),
    (
        forecast(*LATE),
        (
            "Add a tier, or enlarge it: without limit 60 % of the prompt tokens would be found"
            " instead of 12 %, with three times the memory 20 %."
        ),
    ),
    (
        forecast(*FAR),
        (
            "Add a tier, or enlarge it: without limit 60 % of the prompt tokens would be found"
            " instead of 12 %, with three times the memory 13 %."
        ),
    ),
]


@pytest.mark.parametrize(
    ("told", "says"),
    ADVICE,
    ids=["memory", "neither", "less", "tier", "only a tier"],
)
def test_one_sentence_says_what_to_buy(told: dict[str, Any], says: str) -> None:
    """Memory, a tier or neither; each with the figures that say so."""
    assert advice(msgspec.convert(told, ForecastStatus)) == says


def test_without_a_prefill_rate_the_advice_names_hits_alone() -> None:
    """An engine that has not told its prefill rate: no seconds are made up."""
    told = forecast(*STEEP)
    for line in told["sizes"]:
        line["prefill_seconds_per_hour"] = None
    assert advice(msgspec.convert(told, ForecastStatus)) == (
        "Buy memory: +64 GiB would find 48.5 % of the prompt tokens instead of 28 %."
    )


def test_misses_are_told_with_their_most_frequent_reasons() -> None:
    """Their number, the three most frequent reasons, and when the evicted ones had left."""
    assert misses_text(loaded_report(60.0)["counters"]) == (
        "3,000: 60 % never seen, 20 % evicted (median 5 min 30 s before), 12 % being stored"
    )
    assert misses_text(loaded_report(0.0)["counters"]) == ""
