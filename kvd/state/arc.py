"""ARC: adapts between recency and frequency by what it regrets to have evicted.

Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache" (FAST
2003). T1 holds chunks used once, T2 those used again; the ghost lists B1 and B2
remember the keys of what was evicted from each. A key that comes back while its
ghost is in B1 says that T1 is too small; in B2, that T2 is. Three things differ
from the paper, because stores come in batches, victims may be pinned, and a use is
a request, not a block: the target moves after the chunk's room was made, a list that
has nothing to give up lets the other one give instead, and the end of the request
that stored a chunk only renews its place.
"""

from collections import OrderedDict
from itertools import chain

import numpy as np
import numpy.typing as npt

from kvd.errors import IntegrityError
from kvd.state.policy import KeyOf, MayEvict, Policy
from kvd.state.slotlists import SlotLists

_T1, _T2 = 1, 2


class ArcPolicy(Policy):
    """Two lists of chunks, two of ghosts, and the size that T1 should have."""

    name = "arc"

    def __init__(self, num_slots: int, key_of: KeyOf) -> None:
        super().__init__(num_slots, key_of)
        self.clear()

    def clear(self) -> None:
        """Forget everything, ghosts and target too."""
        self._slots = SlotLists(self.num_slots, 2)
        self._b1: OrderedDict[bytes, None] = OrderedDict()
        self._b2: OrderedDict[bytes, None] = OrderedDict()
        self._target = 0.0
        self._unfinished: set[int] = set()  # no request that has them has finished

    def insert(self, slot: int) -> None:
        """A new chunk: into T1, or, where its ghost is known, into T2."""
        key = self.key_of(slot)
        self._unfinished.add(slot)
        b1, b2 = self._b1, self._b2
        if key in b1:
            self._target = min(self.num_slots, self._target + max(1.0, len(b2) / len(b1)))
            del b1[key]
            self._slots.append(_T2, slot)
        elif key in b2:
            self._target = max(0.0, self._target - max(1.0, len(b1) / len(b2)))
            del b2[key]
            self._slots.append(_T2, slot)
        else:
            self._slots.append(_T1, slot)
        self._trim()

    def restore(self, slots: npt.NDArray[np.int64]) -> None:
        """See Policy; into T1, for what was used again is not kept."""
        self._slots.extend(_T1, slots)

    def refresh(self, slot: int) -> None:
        """The hottest of its list."""
        self._slots.append(self._slots.remove(slot), slot)

    def use(self, slot: int) -> None:
        """Used again: the hottest of T2."""
        if slot in self._unfinished:
            self._unfinished.remove(slot)
            self.refresh(slot)
            return
        self._slots.remove(slot)
        self._slots.append(_T2, slot)
        self._trim()

    def remove(self, slot: int) -> None:
        """Forget the chunk; it leaves no ghost."""
        self._slots.remove(slot)
        self._unfinished.discard(slot)

    def replace(self, slot: int, by: int) -> None:
        """See Policy."""
        self._slots.replace(slot, by)
        if slot in self._unfinished:
            self._unfinished.remove(slot)
            self._unfinished.add(by)

    def victims(self, n: int, may_evict: MayEvict) -> list[int] | None:
        """The `n` that bring T1 towards its target, coldest of each list first, or None."""
        if n <= 0:
            return []
        cold1 = filter(may_evict, self._slots.walk(_T1))
        cold2 = filter(may_evict, self._slots.walk(_T2))
        size1, where = self._slots.size(_T1), self._slots.where
        chosen: list[int] = []
        while len(chosen) < n:
            slot = next(cold1, None) if size1 > self._target else None
            if slot is None:
                slot = next(cold2, None)
            if slot is None:
                slot = next(cold1, None)
            if slot is None:
                return None
            size1 -= where(slot) == _T1
            chosen.append(slot)
        key_of, b1, b2 = self.key_of, self._b1, self._b2
        for slot in chosen:
            (b1 if where(slot) == _T1 else b2)[key_of(slot)] = None
        self._slots.remove_all(chosen)
        self._unfinished.difference_update(chosen)
        self._trim()
        return chosen

    def order(self) -> list[int]:
        """All slots: T1 and then T2, coldest first in each."""
        return list(chain(self._slots.walk(_T1), self._slots.walk(_T2)))

    def _trim(self) -> None:
        """Hold |T1| + |B1| at num_slots, and everything together at twice that."""
        sizes, capacity = self._slots.size, self.num_slots
        while self._b1 and sizes(_T1) + len(self._b1) > capacity:
            self._b1.popitem(last=False)
        while self._b2 and len(self) + len(self._b1) + len(self._b2) > 2 * capacity:
            self._b2.popitem(last=False)

    def __len__(self) -> int:
        return self._slots.size(_T1) + self._slots.size(_T2)

    def __contains__(self, slot: int) -> bool:
        return bool(self._slots.where(slot))

    def check_integrity(self) -> None:
        """Raise IntegrityError where an invariant does not hold."""
        self._slots.check_integrity()
        capacity, held = self.num_slots, {self.key_of(slot) for slot in self.order()}
        ghosts = [*self._b1, *self._b2]
        if not all(slot in self for slot in self._unfinished):
            raise IntegrityError(f"unfinished chunks that are in no list: {self!r}")
        if len(set(ghosts)) < len(ghosts) or held & set(ghosts):
            raise IntegrityError(f"a key is in two lists: {self!r}")
        if self._b1 and self._slots.size(_T1) + len(self._b1) > capacity:
            raise IntegrityError(f"T1 and B1 hold more than {capacity}: {self!r}")
        if len(held) + len(ghosts) > 2 * capacity:
            raise IntegrityError(f"more than {2 * capacity} keys remembered: {self!r}")
        if not 0 <= self._target <= capacity:
            raise IntegrityError(f"target {self._target} outside 0..{capacity}")

    def __repr__(self) -> str:
        return (
            f"<ArcPolicy T1 {self._slots.size(_T1)} T2 {self._slots.size(_T2)} B1 {len(self._b1)}"
            f" B2 {len(self._b2)} target {self._target:.1f} of {self.num_slots} slots>"
        )
