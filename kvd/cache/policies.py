"""Eviction policies, by the name that the configuration uses: LRU and ARC.

A policy knows the chunks of one namespace, from the moment that they get a slot, and
orders them. It knows neither pins nor what is being written: the caller says for each
candidate whether it may go. So a chunk's place does not depend on when its bytes arrive.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice

import numpy as np
import numpy.typing as npt

from kvd.cache.slotlists import SlotLists
from kvd.errors import IntegrityError

KeyOf = Callable[[int], bytes]
MayEvict = Callable[[int], bool]


class LruPolicy:
    """Which chunks go first: of one list those used longest ago.

    Other policies have more lists, and order them otherwise.

    Args:
        num_slots: slots are numbered 0..num_slots - 1.
        key_of: the key of the chunk in a slot, asked only about slots inserted here.
    """

    lists = 1

    def __init__(self, num_slots: int, key_of: KeyOf) -> None:
        self.num_slots = num_slots
        self.key_of = key_of
        self.clear()

    def clear(self) -> None:
        """Forget everything, also what was evicted before."""
        self._slots = SlotLists(self.num_slots, self.lists)

    def insert(self, slot: int) -> None:
        """Add a chunk that has got a slot, for a request that is under way."""
        self._slots.append(1, slot)

    def insert_all(self, slots: Iterable[int]) -> None:
        """`insert` each of these."""
        self._slots.append_all(1, slots)

    def restore(self, slots: npt.NDArray[np.int64]) -> None:
        """Fill an empty policy with chunks of the previous daemon, used longest ago first."""
        self._slots.extend(1, slots)

    def refresh(self, slot: int) -> None:
        """A chunk is being used by a request that has not finished: no reference yet."""
        self._slots.renew_all((slot,))

    def refresh_all(self, slots: Iterable[int]) -> None:
        """`refresh` each of these."""
        self._slots.renew_all(slots)

    def use(self, slot: int) -> None:
        """A request that used or stored the chunk has finished.

        One reference, but for the first call after `insert`: that request stored the chunk.
        """
        self.refresh(slot)

    def use_all(self, slots: Iterable[int]) -> None:
        """`use` each of these."""
        self._slots.renew_all(slots)

    def remove(self, slot: int) -> None:
        """Remove a chunk that goes for a reason that says nothing about its worth."""
        self._slots.remove(slot)

    def victims(self, n: int, may_evict: MayEvict) -> list[int]:
        """Remove up to `n` chunks, those that go first; who goes first comes first."""
        chosen = list(islice(self._candidates(may_evict), max(0, n)))
        self._evict(chosen)
        return chosen

    def _candidates(self, may_evict: MayEvict) -> Iterator[int]:
        """Every chunk that may go, first to go first."""
        return filter(may_evict, self._slots.walk(1))

    def _evict(self, slots: list[int]) -> None:
        self._slots.remove_all(slots)

    def order(self) -> list[int]:
        """All slots, list by list, coldest first in each."""
        return list(chain.from_iterable(self._slots.walk(i + 1) for i in range(self.lists)))

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, slot: int) -> bool:
        return bool(self._slots.where(slot))

    def check_integrity(self) -> None:
        """Raise IntegrityError where an invariant does not hold."""
        self._slots.check_integrity()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self)} of {self.num_slots} slots>"


_T1, _T2 = 1, 2


class ArcPolicy(LruPolicy):
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

    lists = 2

    def clear(self) -> None:
        """Forget everything, ghosts and target too."""
        super().clear()
        self._b1: OrderedDict[bytes, None] = OrderedDict()
        self._b2: OrderedDict[bytes, None] = OrderedDict()
        self._target = 0.0  # size that T1 should have
        self._unfinished: set[int] = set()  # no request that has them has finished

    def insert(self, slot: int) -> None:
        """Add a new chunk to T1, or, where its ghost is known, to T2."""
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

    def insert_all(self, slots: Iterable[int]) -> None:
        """`insert` each of these."""
        for slot in slots:
            self.insert(slot)

    def use(self, slot: int) -> None:
        """Move a chunk that is used again to the hot end of T2."""
        if slot in self._unfinished:
            self._unfinished.remove(slot)
            self.refresh(slot)
            return
        self._slots.remove(slot)
        self._slots.append(_T2, slot)
        self._trim()

    def use_all(self, slots: Iterable[int]) -> None:
        """`use` each of these."""
        for slot in slots:
            self.use(slot)

    def remove(self, slot: int) -> None:
        """Remove a chunk; it leaves no ghost."""
        super().remove(slot)
        self._unfinished.discard(slot)

    def _candidates(self, may_evict: MayEvict) -> Iterator[int]:
        """The chunks that bring T1 towards its target, coldest of each list first."""
        cold1 = filter(may_evict, self._slots.walk(_T1))
        cold2 = filter(may_evict, self._slots.walk(_T2))
        size1, where = self._slots.size(_T1), self._slots.where
        while True:
            slot = next(cold1, None) if size1 > self._target else None
            if slot is None:
                slot = next(cold2, None)
            if slot is None:
                slot = next(cold1, None)
            if slot is None:
                return
            size1 -= where(slot) == _T1
            yield slot

    def _evict(self, slots: list[int]) -> None:
        key_of, b1, b2, where = self.key_of, self._b1, self._b2, self._slots.where
        for slot in slots:
            (b1 if where(slot) == _T1 else b2)[key_of(slot)] = None
        super()._evict(slots)
        self._unfinished.difference_update(slots)
        self._trim()

    def _trim(self) -> None:
        """Hold |T1| + |B1| at num_slots, and everything together at twice that."""
        sizes, capacity = self._slots.size, self.num_slots
        while self._b1 and sizes(_T1) + len(self._b1) > capacity:
            self._b1.popitem(last=False)
        while self._b2 and len(self._slots) + len(self._b1) + len(self._b2) > 2 * capacity:
            self._b2.popitem(last=False)

    def check_integrity(self) -> None:
        """See LruPolicy; the ghosts are bounded and no key is in two lists."""
        super().check_integrity()
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


POLICIES: dict[str, type[LruPolicy]] = {"lru": LruPolicy, "arc": ArcPolicy}
