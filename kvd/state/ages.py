"""How long chunks were of no use when they were evicted.

A chunk's age is the time since it became READY or was last used: pinned for a
load, or touched. It says whether the pool is large enough: chunks evicted within
minutes would have been found by the next turn of a conversation.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvd.histogram import Histogram

AGE_BOUNDS = (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 12 * 3600, 86400, 3 * 86400, 7 * 86400)
"""Upper bounds in seconds."""


class Ages:
    """When each slot's chunk was last of use, 4 bytes a slot, and the ages at eviction.

    Time is what `tell` said last; the broker says it several times a second.
    """

    def __init__(self, num_slots: int) -> None:
        self.at_eviction = Histogram(AGE_BOUNDS)
        self._used = np.zeros(num_slots, np.float32)
        self._start: float | None = None
        self._now = 0.0  # since the start: small numbers are exact enough in 32 bits

    def tell(self, now: float) -> None:
        """It is `now`, in seconds of any clock that does not go back."""
        if self._start is None:
            self._start = now
        self._now = max(self._now, now - self._start)

    def used(self, slots: Sequence[int]) -> None:
        """These chunks are READY since now, or were used."""
        if slots:
            self._used[slots] = self._now

    def of(self, slots: Sequence[int]) -> npt.NDArray[np.float32]:
        """Seconds since each of these chunks was of use."""
        ages: npt.NDArray[np.float32] = np.float32(self._now) - self._used[slots]
        return np.maximum(ages, np.float32(0), out=ages)

    def evicted(self, slots: Sequence[int]) -> None:
        """These chunks go to make room."""
        if slots:
            self.at_eviction.observe_all(self.of(slots))

    def __repr__(self) -> str:
        return f"<Ages of {len(self._used)} slots, {self.at_eviction.count} evicted>"
