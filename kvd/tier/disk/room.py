"""Where a put's slots come from: free ones, a new slab, or those of chunks that go.

Chunks go a few at a time and somewhat early, so that their records are erased by one call and not
by one for each put: at most 1/256 of a size's slots, and no more than 32.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence

from kvd.errors import TierError
from kvd.tier.disk.growth import Growth
from kvd.tier.disk.slabs import Slab
from kvd.tier.disk.space import Space, Taken

_MOST_AHEAD = 32
_AHEAD_PART = 256


class Room:
    """Takes slots for puts, and frees them.

    Args:
        space: all slots.
        lock: that is taken around each call of `space`.
        growth: makes slabs.
    """

    def __init__(self, space: Space, lock: threading.Lock, growth: Growth) -> None:
        self._space, self._lock, self._growth = space, lock, growth
        self._evicting = threading.Lock()

    def take(self, slot_bytes: int, count: int) -> list[Taken]:
        """Take slots, to be written; fewer where there are no more.

        Raises:
            TierError: the file system does not say how full it is; no slot is taken.
        """
        taken = self._take_free(slot_bytes, count)
        try:
            while len(taken) < count and self._growth.grow(slot_bytes):
                taken += self._take_free(slot_bytes, count - len(taken))
            if len(taken) < count:
                taken += self._evict(slot_bytes, count - len(taken))
            while len(taken) < count and self._growth.grow(slot_bytes, urgent=True):
                taken += self._take_free(slot_bytes, count - len(taken))
        except TierError:
            self.free(taken)
            raise
        return taken

    def _take_free(self, slot_bytes: int, count: int) -> list[Taken]:
        with self._lock:
            return self._space.take_free(slot_bytes, count)

    def _evict(self, slot_bytes: int, count: int) -> list[Taken]:
        with self._evicting:
            taken = self._take_free(slot_bytes, count)  # another thread was here
            lack = count - len(taken)
            if not lack:
                return taken
            with self._lock:
                ahead = min(_MOST_AHEAD, self._space.slots(slot_bytes) // _AHEAD_PART)
                victims = self._space.evict(slot_bytes, lack + ahead)
            self._erase(victims)  # or half of a chunk would lie under another one's record
            with self._lock:
                for slab, slot in victims[lack:]:
                    self._space.not_written(slab, slot)
        return taken + victims[:lack]

    def free(self, taken: Sequence[Taken | None]) -> None:
        """Erase the records of slots that were taken, which hold nothing, and free them."""
        slots = [each for each in taken if each is not None]
        if not slots:
            return
        self._erase(slots)
        with self._lock:
            for slab, slot in slots:
                self._space.not_written(slab, slot)

    @staticmethod
    def _erase(taken: Sequence[Taken]) -> None:
        """Write that slots are empty. Where that fails, the write of the next chunk will, too."""
        for slab, slot, count in _neighbours(taken):
            with contextlib.suppress(OSError):
                slab.erase_records(slot, count)


def _neighbours(taken: Sequence[Taken]) -> Iterator[tuple[Slab, int, int]]:
    """Slab, first slot and count of slots that follow each other."""
    ordered = sorted(taken, key=lambda each: (each[0].number, each[1]))
    at = 0
    while at < len(ordered):
        slab, slot = ordered[at]
        end = at + 1
        while end < len(ordered) and ordered[end] == (slab, slot + end - at):
            end += 1
        yield slab, slot, end - at
        at = end
