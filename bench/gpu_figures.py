"""What a part of the benchmark makes of its samples."""

from collections.abc import Mapping, Sequence
from typing import TypedDict

import numpy as np


class Skipped(Exception):
    """The part cannot be measured on this machine; the text says why."""


class Spread(TypedDict):
    """Samples in short.

    low, high: a quarter of the samples is lower, a quarter higher.
    margin: half the width of about a 95 % interval of the median: 1.58 * (high - low) / sqrt(n)
        (McGill, Tukey and Larsen, Variations of Box Plots, 1978).
    n: how many samples.
    """

    median: float
    low: float
    high: float
    margin: float
    n: int


def spread(samples: Sequence[float]) -> Spread:
    """The samples, one at least, in short."""
    low, median, high = (float(quartile) for quartile in np.percentile(samples, (25, 50, 75)))
    margin = 1.58 * (high - low) / len(samples) ** 0.5
    return Spread(median=median, low=low, high=high, margin=margin, n=len(samples))


class Samples:
    """Samples by the name of their figure."""

    def __init__(self) -> None:
        self._samples: dict[str, list[float]] = {}

    def keep(self, name: str, value: float) -> None:
        """Add one."""
        self._samples.setdefault(name, []).append(value)

    def spreads(self) -> Mapping[str, Spread]:
        """All figures, in the order of their first samples."""
        return {name: spread(values) for name, values in self._samples.items()}
