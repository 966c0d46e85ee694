"""Least recently used: what was useful longest ago goes first."""

import numpy as np
import numpy.typing as npt

from kvd.state.policy import KeyOf, MayEvict, Policy
from kvd.state.slotlists import SlotLists

_ALL = 1


class LruPolicy(Policy):
    """One list, from the chunk used longest ago to the one used last."""

    name = "lru"

    def __init__(self, num_slots: int, key_of: KeyOf) -> None:
        super().__init__(num_slots, key_of)
        self._slots = SlotLists(num_slots, 1)

    def insert(self, slot: int) -> None:
        """A new chunk is the hottest."""
        self._slots.append(_ALL, slot)

    def restore(self, slots: npt.NDArray[np.int64]) -> None:
        """See Policy."""
        self._slots.extend(_ALL, slots)

    def refresh(self, slot: int) -> None:
        """The chunk is the hottest again."""
        self._slots.remove(slot)
        self._slots.append(_ALL, slot)

    def use(self, slot: int) -> None:
        """The chunk is the hottest again."""
        self.refresh(slot)

    def remove(self, slot: int) -> None:
        """Forget the chunk."""
        self._slots.remove(slot)

    def replace(self, slot: int, by: int) -> None:
        """See Policy."""
        self._slots.replace(slot, by)

    def victims(self, n: int, may_evict: MayEvict) -> list[int] | None:
        """The `n` coldest that may go, or None."""
        if n <= 0:
            return []
        chosen: list[int] = []
        for slot in self._slots.walk(_ALL):
            if may_evict(slot):
                chosen.append(slot)
                if len(chosen) == n:
                    self._slots.remove_all(chosen)
                    return chosen
        return None

    def clear(self) -> None:
        """Forget everything."""
        self._slots = SlotLists(self.num_slots, 1)

    def order(self) -> list[int]:
        """All slots, coldest first."""
        return list(self._slots.walk(_ALL))

    def __len__(self) -> int:
        return self._slots.size(_ALL)

    def __contains__(self, slot: int) -> bool:
        return bool(self._slots.where(slot))

    def check_integrity(self) -> None:
        """Raise IntegrityError where an invariant does not hold."""
        self._slots.check_integrity()
