"""The filter that keeps prompts out that are seen once: a key is stored at its n-th offer."""

from collections import OrderedDict


class ReuseFilter:
    """Lets a key pass at its n-th offer.

    Remembers the latest `capacity` keys that have not been stored yet.

    Args:
        threshold: offers that a key needs; 1: every key passes.
        capacity: how many keys are remembered, 1 or more.
    """

    def __init__(self, threshold: int, capacity: int) -> None:
        self.threshold = threshold
        self.capacity = capacity
        self._offers: OrderedDict[bytes, int] = OrderedDict()

    def offer(self, key: bytes) -> bool:
        """Count an offer; True where the key has now been offered often enough."""
        count = self._offers.pop(key, 0) + 1
        if count >= self.threshold:
            return True
        self._remember(key, count)
        return False

    def give_back(self, key: bytes) -> None:
        """A key has passed and was not stored, for want of room: it passes at its next offer."""
        if self.threshold > 1:
            self._remember(key, self.threshold - 1)

    def _remember(self, key: bytes, count: int) -> None:
        if len(self._offers) >= self.capacity:
            self._offers.popitem(last=False)
        self._offers[key] = count

    def __len__(self) -> int:
        return len(self._offers)

    def __repr__(self) -> str:
        return f"<ReuseFilter {len(self)} keys below {self.threshold} offers>"
