"""What is made of samples: a median, its spread, and how far it can be trusted."""

from collections.abc import Sequence
from typing import TypedDict

import numpy as np


class Spread(TypedDict):
    """Samples in short.

    low, high: a quarter of the samples is lower, a quarter higher.
    margin: the median is known to about this much either way, as in 95 of 100 repetitions:
        1.58 * (high - low) / sqrt(n) (McGill, Tukey and Larsen, Variations of Box Plots, 1978).
    n: how many samples.
    """

    median: float
    low: float
    high: float
    margin: float
    n: int


def spread(samples: Sequence[float]) -> Spread:
    """The samples, of which there is one at least, in short."""
    low, median, high = (float(found) for found in np.percentile(samples, (25, 50, 75)))
    margin = 1.58 * (high - low) / len(samples) ** 0.5
    return Spread(median=median, low=low, high=high, margin=margin, n=len(samples))
