"""When each chunk of a namespace was last of use.

Every use of a chunk (its store begun, pinned for a load, named by a request that has finished)
has a stamp, microseconds that always grow: a time and an order. A chunk's age at eviction says
whether the pool is large enough: those evicted within minutes would have been found by the
next turn of a conversation.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvd.metrics.counts import ChunkCounts
from kvd.pool.pool import Pool
from kvd_proto.arrays import FEW


class Uses:
    """The last uses of one namespace's chunks.

    Args:
        stamps: one for each slot.
        pool: whose stamps grow over all namespaces.
    """

    def __init__(self, stamps: npt.NDArray[np.uint64], pool: Pool) -> None:
        self._stamps = stamps
        self._marks = stamps.data  # for few of them
        self._pool = pool
        self._now = 0  # microseconds

    def set_time(self, now: float) -> None:
        """Set the time, `now`, in seconds of a clock that never goes back, also over restarts."""
        self._now = max(self._now, int(now * 1e6))

    @property
    def now(self) -> float:
        """The time that was set last, in seconds."""
        return self._now / 1e6

    def mark(self, slots: list[int]) -> None:
        """Note that these were of use now, the hottest first."""
        if slots:
            last = self._pool.tick(len(slots), self._now)
            if len(slots) <= FEW:
                for slot in slots:
                    self._marks[slot] = last
                    last -= 1
                return
            self._stamps[slots[::-1]] = np.arange(last - len(slots) + 1, last + 1, dtype=np.uint64)

    def count_evicted(self, slots: Sequence[int], counts: ChunkCounts) -> None:
        """Count chunks that were evicted from these slots, and how long they were of no use."""
        if slots:
            counts.eviction_age.observe_all(self.ages(slots))
            counts.evicted += len(slots)

    def ages(self, slots: Sequence[int]) -> npt.NDArray[np.float64]:
        """Seconds, to the millisecond, since each of these chunks was of use."""
        # Stamps of uses at the same moment are a microsecond apart.
        ages = np.maximum(self._now - self._stamps[slots].astype(np.float64), 0.0)
        rounded: npt.NDArray[np.float64] = np.round(ages / 1e6, 3)
        return rounded
