"""When chunks were last of use, and how long ago that was when they were evicted.

Every use has a stamp, microseconds that always grow: so they are both a time and an
order. They lie in the ledger, where there is one, so that the next daemon knows them.

A chunk's age is the time since it got its slot or was last used: pinned for a load, or
named by a request that has finished. It says whether the pool is large enough: chunks
evicted within minutes would have been found by the next turn of a conversation.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvd.metrics.histogram import Histogram


class Ages:
    """When each slot's chunk was last of use, and the ages at eviction.

    Time is what `set_time` was given last; the broker calls it several times a second.

    Args:
        num_slots: slots are numbered 0..num_slots - 1.
        at_eviction: counts ages at eviction, in seconds.
        stamps: where stamps go, one for each slot; memory of its own where it is None.
    """

    def __init__(
        self,
        num_slots: int,
        at_eviction: Histogram,
        stamps: npt.NDArray[np.uint64] | None = None,
    ) -> None:
        self._at_eviction = at_eviction
        self._stamps = np.zeros(num_slots, np.uint64) if stamps is None else stamps
        self.now = 0

    def set_time(self, now: float) -> None:
        """Set the time, `now`, in seconds of a clock that never goes back, also over restarts."""
        self.now = max(self.now, int(now * 1e6))

    def used(self, slots: Sequence[int], last: int) -> None:
        """These chunks got their slots, or were used, the last of them first: at stamp `last`.

        The others get the stamps right before it.
        """
        self._stamps[slots[::-1]] = np.arange(last - len(slots) + 1, last + 1, dtype=np.uint64)

    def of(self, slots: Sequence[int]) -> npt.NDArray[np.float64]:
        """Seconds, to the millisecond, since each of these chunks was of use."""
        ages: npt.NDArray[np.float64] = self.now - self._stamps[slots].astype(np.float64)
        # Stamps of uses at the same moment are a microsecond apart.
        rounded: npt.NDArray[np.float64] = np.round(np.maximum(ages, 0.0) / 1e6, 3)
        return rounded

    def evicted(self, slots: Sequence[int]) -> None:
        """These chunks go to make room."""
        if slots:
            self._at_eviction.observe_all(self.of(slots))

    def __repr__(self) -> str:
        return f"<Ages of {len(self._stamps)} slots, {self._at_eviction.count} evicted>"
