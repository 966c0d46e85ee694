"""Histograms with fixed bounds: cheap to feed, cheap to add up."""

from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvd.errors import IntegrityError


@dataclass(slots=True)
class Histogram:
    """Counts of values of 0 and more.

    Attributes:
        bounds: ascending upper bounds; a value equal to one belongs to its range.
        counts: by range, one more than bounds: the last is of values above all; default zeros.
        sum: of the values counted.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        """Return how many values there were."""
        return sum(self.counts)

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: npt.NDArray[np.floating]) -> None:
        """Count many values at once."""
        places = np.searchsorted(self.bounds, values)
        found = np.bincount(places, minlength=len(self.counts)).tolist()
        self.counts = [have + more for have, more in zip(self.counts, found, strict=True)]
        self.sum += float(values.sum())

    def __add__(self, other: "Histogram") -> "Histogram":
        """The values of both.

        Raises:
            IntegrityError: the bounds differ.
        """
        if self.bounds != other.bounds:
            raise IntegrityError(f"bounds {self.bounds} and {other.bounds} cannot be added up")
        counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        return Histogram(self.bounds, counts, self.sum + other.sum)

    def since(self, before: "Histogram") -> "Histogram":
        """What has been counted since `before`, an earlier state of it."""
        gained = zip(self.counts, before.counts, strict=True)
        counts = [max(0, now - then) for now, then in gained]
        return Histogram(self.bounds, counts, self.sum - before.sum)

    def quantile(self, q: float) -> float | None:
        """The value below which a share `q` lies, by straight lines within ranges.

        None if it is empty. What lies above the last bound counts as the last bound.
        """
        if not self.count:
            return None
        below = np.cumsum([0, *self.counts[:-1]])
        return float(np.interp(q * self.count, below, [0.0, *self.bounds]))

    def __repr__(self) -> str:
        return f"<Histogram of {self.count} values, sum {self.sum:.6g}: {self.counts}>"
