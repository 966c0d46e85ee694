"""What an eviction policy is, and the reuse threshold in front of one.

A policy knows the chunks of one namespace, from the moment that they get a slot, and
orders them. It knows neither pins nor what is being written: the caller says for each
candidate whether it may go. So a chunk's place does not depend on when its bytes arrive.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvd.errors import IntegrityError

KeyOf = Callable[[int], bytes]
MayEvict = Callable[[int], bool]


class Policy(ABC):
    """Which chunks go first.

    Args:
        num_slots: slots are numbered 0..num_slots - 1.
        key_of: the key of the chunk in a slot, asked only about slots inserted here.
    """

    name: str

    def __init__(self, num_slots: int, key_of: KeyOf) -> None:
        self.num_slots = num_slots
        self.key_of = key_of

    @abstractmethod
    def insert(self, slot: int) -> None:
        """A chunk has got a slot, for a request that is under way."""

    @abstractmethod
    def restore(self, slots: npt.NDArray[np.int64]) -> None:
        """Chunks of the daemon before, the one used longest ago first, into an empty policy."""

    @abstractmethod
    def refresh(self, slot: int) -> None:
        """A chunk is being used by a request that has not finished: no reference yet."""

    @abstractmethod
    def use(self, slot: int) -> None:
        """A request that used or stored the chunk has finished.

        One reference, but for the first call after `insert`: that request stored the chunk.
        """

    @abstractmethod
    def remove(self, slot: int) -> None:
        """A chunk goes for a reason that says nothing about its worth."""

    @abstractmethod
    def replace(self, slot: int, by: int) -> None:
        """The same chunk lies in another slot from now on, with more blocks."""

    @abstractmethod
    def victims(self, n: int, may_evict: MayEvict) -> list[int] | None:
        """Take out the `n` chunks to evict, first to go first; all of them or none.

        Returns:
            The slots, or None, and then nothing has changed, where fewer may go.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget everything, also what was evicted before."""

    @abstractmethod
    def order(self) -> list[int]:
        """All slots; for policies of one list, first to go first."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, slot: int) -> bool: ...

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise IntegrityError where an invariant does not hold."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self)} of {self.num_slots} slots>"


class ReuseFilter:
    """Lets a key pass at its n-th offer, so that prompts seen once take no room.

    Remembers the latest `capacity` keys that have not passed yet.
    """

    def __init__(self, threshold: int, capacity: int) -> None:
        self.threshold = threshold
        self.capacity = capacity
        self._offers: OrderedDict[bytes, int] = OrderedDict()

    def offer(self, key: bytes) -> bool:
        """Count an offer; True where the key has now been offered often enough."""
        offers = self._offers
        count = offers.pop(key, 0) + 1
        if count >= self.threshold:
            return True
        if len(offers) >= self.capacity:
            offers.popitem(last=False)
        offers[key] = count
        return False

    def clear(self) -> None:
        """Forget every offer."""
        self._offers.clear()

    def check_integrity(self) -> None:
        """Raise IntegrityError where the filter holds too much or a key that should pass."""
        if len(self._offers) > self.capacity:
            raise IntegrityError(f"{len(self._offers)} offers, {self.capacity} allowed")
        if any(not 0 < count < self.threshold for count in self._offers.values()):
            raise IntegrityError(f"an offer count outside 1..{self.threshold - 1}")

    def __repr__(self) -> str:
        return f"<ReuseFilter {len(self._offers)} keys below {self.threshold} offers>"
