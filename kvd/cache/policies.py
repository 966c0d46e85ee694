"""Eviction policies, by the name that the configuration uses; the plain one: LRU."""

from collections.abc import Sequence
from itertools import islice, repeat

import numpy as np
import numpy.typing as npt

from kvd.cache.adaptive import AdaptivePolicy
from kvd.cache.eviction import EvictionPolicy, MayEvict
from kvd.cache.ghosts import GhostCause
from kvd_proto.labels import Label


class LruPolicy(EvictionPolicy):
    """Of one list those used longest ago go first."""

    lists = 1
    _SAME_LIST = (0, 1)

    def insert_all(self, slots: Sequence[int], now: float) -> None:
        """See EvictionPolicy."""
        for slot in slots:
            self.ghosts.take(self.key_of(slot))
        self._slots.append_all(slots, repeat(1), self._take_stamps(len(slots), now))

    def restore(self, slots: npt.NDArray[np.int64], times: npt.NDArray[np.float64]) -> None:
        """See EvictionPolicy."""
        self._restore(1, slots, times)

    def refresh_all(self, slots: Sequence[int], now: float) -> None:
        """See EvictionPolicy."""
        self._unreserve(slots)
        self._slots.move_all(slots, self._SAME_LIST, self._take_stamps(len(slots), now))

    def use_all(self, slots: Sequence[int], now: float, label: Label = Label.NONE) -> None:
        """See EvictionPolicy. The label makes no difference."""
        del label
        self.refresh_all(slots, now)

    def relabel_all(self, slots: Sequence[int], label: Label) -> None:
        """Do nothing: labels make no difference."""

    def reserve(self, n: int, may_evict: MayEvict, now: float) -> list[int]:
        """See EvictionPolicy."""
        del now  # the order of uses says it all
        slots = list(islice(filter(may_evict, self._slots.walk(1)), max(0, n)))
        self._slots.remove_all(slots)
        self._reserved.update(dict.fromkeys(slots, 1))
        return slots

    def learn(self) -> bool:
        """Nothing is ever due."""
        return False

    def _leave_ghost(self, slot: int, which: int, now: float) -> None:
        del which
        self.ghosts.add(self.key_of(slot), GhostCause.EVICTED, now, used=self._time(slot))


POLICIES: dict[str, type[EvictionPolicy]] = {"adaptive": AdaptivePolicy, "lru": LruPolicy}
