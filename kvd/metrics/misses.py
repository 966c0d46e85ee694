"""Why chunks are missed: the reasons, and the counts of a report in a line for people."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from kvd.metrics.histogram import Histogram
from kvd.metrics.words import duration, number, percent

MOST_TOLD = 3


class MissReason(StrEnum):
    """Why a key was missed when a request asked for it."""

    NEVER_SEEN = "never_seen"
    EVICTED = "evicted"
    BEING_STORED = "being_stored"
    READY = "ready"
    REFUSED = "refused"
    QUOTA = "quota"
    RESET = "reset"
    REMOVED = "removed"
    OTHER_LAYOUT = "other_layout"


def misses_in_words(counters: Mapping[str, Any]) -> str:
    """`1,200: 60 % never seen, 30 % evicted (median 12 min before), 10 % being stored`.

    The most frequent reasons, of `counters` in the report; empty where nothing was missed.
    """
    missed = counters["missed"]
    total = sum(missed.values())
    if not total:
        return ""
    age = Histogram(**counters["missed_age"]).quantile(0.5)
    told = []
    for reason, count in sorted(missed.items(), key=lambda item: -item[1])[:MOST_TOLD]:
        if count:
            median = f" (median {duration(age)} before)" if reason == MissReason.EVICTED else ""
            told.append(f"{percent(count / total)} {reason.replace('_', ' ')}{median}")
    return f"{number(total)}: {', '.join(told)}"
