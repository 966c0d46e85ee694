"""Metric families made of a name, a sentence and samples."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

Report: TypeAlias = Mapping[str, Any]
Samples: TypeAlias = Iterable[tuple[Sequence[str], float]]


def gauge(name: str, text: str, samples: Samples, labels: Sequence[str] = ()) -> Metric:
    """A value that goes up and down."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for where, value in samples:
        family.add_metric(where, value)
    return family


def counter(name: str, text: str, samples: Samples, labels: Sequence[str] = ()) -> Metric:
    """A value that only grows, from the daemon's start on."""
    family = CounterMetricFamily(name, text, labels=labels)
    for where, value in samples:
        family.add_metric(where, value)
    return family


def one(value: float) -> Samples:
    """The only sample of a family without labels."""
    return [((), value)]


def histogram(
    name: str,
    text: str,
    samples: Iterable[tuple[Sequence[str], Report]],
    labels: Sequence[str] = (),
) -> Metric:
    """The report's counts are by range, Prometheus's are cumulative."""
    family = HistogramMetricFamily(name, text, labels=labels)
    for where, spread in samples:
        total, buckets = 0, []
        for bound, count in zip([*spread["bounds"], float("inf")], spread["counts"], strict=True):
            total += count
            buckets.append((str(bound) if bound < float("inf") else "+Inf", total))
        family.add_metric(where, buckets, spread["sum"])
    return family
