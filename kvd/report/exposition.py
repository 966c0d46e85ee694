"""What a scrape gets: the report's metrics, and HTTP's own, which need no broker.

Every family is declared with its field in `kvd.metrics`. Totals of the daemon and those of its
parts have names of their own, so that a sum never counts twice and a total never falls when a
part leaves. Labels are few: never keys, never process ids.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from prometheus_client import Counter, Gauge, disable_created_metrics
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder

from kvd.metrics.declare import Row
from kvd.metrics.schema import ROWS

disable_created_metrics()  # type: ignore[no-untyped-call]  # as the library has it
REQUESTS = Counter(
    "kvd_http_requests_total",
    "Answers over HTTP since its process began, by path and status.",
    ["path", "code"],
    registry=None,
)
WATCHERS = Gauge(
    "kvd_http_watchers", "Open event streams: pages that are being watched.", registry=None
)


SHARED_METRICS = {
    "store_answered_chunks_total": "Chunks that engines asked to store, by answer: accepted, there"
    " already (present), being written (pending), or refused.",
    "load_answered_chunks_total": "Chunks that engines asked to load, by whether they were found.",
    "descriptions_dropped_total": "Descriptions of stored chunks that are not kept, so that routers"
    " learn neither token ids nor parent of these chunks.",
    "bytes_total": "Bytes of chunks that a tier kept (put) and gave back (get).",
    "kvd_tier_queued_bytes": "Bytes of chunks on their way down to a tier (put) and up (get).",
    "busy_seconds_total": "Time in which puts or gets of a tier were under way, one or several.",
    "evicted_chunks_total": "Chunks evicted to make room for others.",
    "removed_chunks_total": "Stored chunks dropped because an engine reset them or an operator"
    " cleared them.",
    "copied_bytes_total": "Bytes copied between engines and pool.",
    "copy_seconds_total": "Time in which bytes were being copied.",
    "lane_dropped_messages_total": "Messages that the lane could not read, and replies that nobody"
    " took.",
}
"""What metrics mean that several counters make."""
METRICS: dict[str, list[Row]] = defaultdict(list)
"""Rows of the report by the metric that they make."""
for _row in ROWS:
    if _row.metric:
        METRICS[_row.metric].append(_row)


def families(report: Mapping[str, Any]) -> Iterator[Metric]:
    """Yield every family that is computed from the report."""
    for name, rows in METRICS.items():
        first = rows[0]
        samples: dict[tuple[str, ...], Any] = {}
        for row in rows:
            for labels, value in row.samples(report):
                samples[labels] = samples[labels] + value if labels in samples else value
        text = SHARED_METRICS.get(first.shown.metric, first.shown.text)
        yield _family(name, text, first, samples)


def _family(name: str, text: str, row: Row, samples: Mapping[tuple[str, ...], Any]) -> Metric:
    if row.shown.kind == "histogram":
        histogram = HistogramMetricFamily(name, text, labels=row.names)
        for labels, value in samples.items():
            bounds = [*map(str, value["bounds"]), "+Inf"]
            buckets = list(zip(bounds, accumulate(value["counts"]), strict=True))
            histogram.add_metric(labels, buckets, value["sum"])
        return histogram
    kind = CounterMetricFamily if row.shown.kind == "counter" else GaugeMetricFamily
    family = kind(name, text, labels=row.names)
    for labels, value in samples.items():
        if row.shown.kind == "info":
            family.add_metric((*labels, value), 1)
        else:
            family.add_metric(labels, value)
    return family


@dataclass(frozen=True, slots=True)
class Exposition:
    """One scrape's answer, in the shape of a registry.

    report: None where the broker has not answered; silent_seconds: for how long it has not.
    """

    report: Mapping[str, Any] | None
    silent_seconds: float

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        text = "1 if the broker answered in time; else all that it would tell is missing here."
        yield GaugeMetricFamily("kvd_up", text, self.report is not None)
        text = "Time for which the broker has owed an answer; 0 if it owes none."
        yield GaugeMetricFamily("kvd_broker_silent_seconds", text, self.silent_seconds)
        if self.report is not None:
            yield from families(self.report)
        yield from REQUESTS.collect()
        yield from WATCHERS.collect()
        text = "CPU time of the process that answers here."
        yield CounterMetricFamily("kvd_http_cpu_seconds_total", text, time.process_time())

    def encode(self, accept: str) -> tuple[bytes, str]:
        """Return the text in the format that the client prefers, and its content type."""
        encoder, kind = choose_encoder(accept)
        return encoder(self), kind
