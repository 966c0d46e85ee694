"""Leases: each pins chunks for a load, until it is given back or its deadline comes."""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from kvd.errors import IntegrityError


class Lease(msgspec.Struct, frozen=True, gc=False):
    """A pin on slots from `since` on, until given back or `deadline`."""

    slots: tuple[int, ...]
    since: float
    deadline: float


class Leases:
    """Every lease of one namespace, by owner and number, and how many pins each slot has by them.

    What ends a lease returns the slots that no lease pins any more.
    """

    def __init__(self) -> None:
        self.pins: dict[int, int] = {}
        self._leases: dict[int, dict[int, Lease]] = {}  # owner -> number -> lease

    def held_by(self, owner: int) -> int:
        """How many leases an owner has."""
        return len(self._leases.get(owner, ()))

    def __len__(self) -> int:
        return sum(map(len, self._leases.values()))

    def hold(
        self, owner: int, number: int, slots: Sequence[int], now: float, deadline: float
    ) -> list[int]:
        """Pin the slots under this number; a lease that the owner has by that number ends."""
        pins = self.pins
        for slot in slots:
            pins[slot] = pins.get(slot, 0) + 1
        unpinned = self.release(number, owner) or []
        self._leases.setdefault(owner, {})[number] = Lease(tuple(slots), now, deadline)
        return unpinned

    def count_until(self, when: float) -> int:
        """How many of them were granted at `when` or before."""
        return sum(lease.since <= when for of in self._leases.values() for lease in of.values())

    def release(self, number: int, owner: int) -> list[int] | None:
        """Give a lease back. None where it has run out or is somebody else's."""
        if number not in self._leases.get(owner, ()):
            return None
        return self._end(owner, [number])

    def expire(self, now: float) -> tuple[int, list[int]]:
        """End the leases whose deadline has come: how many, and the slots."""
        count, unpinned = 0, list[int]()
        for owner, of in list(self._leases.items()):
            ended = [number for number, lease in of.items() if lease.deadline <= now]
            count += len(ended)
            unpinned += self._end(owner, ended)
        return count, unpinned

    def drop_owner(self, owner: int) -> list[int]:
        """End the leases of one owner."""
        return self._end(owner, list(self._leases.get(owner, ())))

    def _end(self, owner: int, numbers: Iterable[int]) -> list[int]:
        pins, unpinned = self.pins, []
        of = self._leases.get(owner, {})
        for number in numbers:
            for slot in of.pop(number).slots:
                left = pins[slot] - 1
                if left:
                    pins[slot] = left
                else:
                    del pins[slot]
                    unpinned.append(slot)
        if not of:
            self._leases.pop(owner, None)
        return unpinned

    def check_integrity(self) -> None:
        """Raise IntegrityError where pins are not what the leases add up to."""
        slots = (lease.slots for of in self._leases.values() for lease in of.values())
        pins = Counter(slot for each in slots for slot in each)
        if pins != self.pins:
            raise IntegrityError(f"pins {self.pins}, by the leases {dict(pins)}")
        if not all(self._leases.values()):
            raise IntegrityError("an owner without leases is kept")
