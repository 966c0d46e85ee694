"""Leases: each pins chunks for a load, until it is given back or its deadline comes."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvd.errors import IntegrityError


@dataclass(frozen=True, slots=True)
class Lease:
    """A pin on slots from `since` on, until given back or `deadline`."""

    owner: int
    slots: tuple[int, ...]
    since: float
    deadline: float


class Leases:
    """Every lease of one namespace, and how many pins each slot has by them.

    What ends a lease returns the slots that no lease pins any more.
    """

    def __init__(self) -> None:
        self.pins: dict[int, int] = {}
        self._leases: dict[int, Lease] = {}
        self._last = 0

    def held_by(self, owner: int) -> int:
        """How many leases an owner has."""
        return sum(lease.owner == owner for lease in self._leases.values())

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, owner: int, slots: Sequence[int], now: float, deadline: float) -> int:
        """Pin the slots; the lease's number, which grows.

        It is no earlier one's of another daemon or namespace, either: who gives back a lease
        of before does not end one of now. Nanoseconds of the clock see to that.
        """
        self._last = max(self._last + 1, int(now * 1e9))
        pins = self.pins
        for slot in slots:
            pins[slot] = pins.get(slot, 0) + 1
        self._leases[self._last] = Lease(owner, tuple(slots), now, deadline)
        return self._last

    def count_until(self, when: float) -> int:
        """How many of them were granted at `when` or before."""
        return sum(lease.since <= when for lease in self._leases.values())

    def release(self, lease_id: int, owner: int) -> list[int] | None:
        """Give a lease back. None where it has run out or is somebody else's."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.owner != owner:
            return None
        return self._end([lease_id])

    def expire(self, now: float) -> tuple[int, list[int]]:
        """End the leases whose deadline has come: how many, and the slots."""
        ended = [number for number, lease in self._leases.items() if lease.deadline <= now]
        return len(ended), self._end(ended)

    def drop_owner(self, owner: int) -> list[int]:
        """End the leases of one owner."""
        return self._end([n for n, lease in self._leases.items() if lease.owner == owner])

    def _end(self, numbers: Iterable[int]) -> list[int]:
        pins, unpinned = self.pins, []
        for number in numbers:
            lease = self._leases.pop(number)
            for slot in lease.slots:
                left = pins[slot] - 1
                if left:
                    pins[slot] = left
                else:
                    del pins[slot]
                    unpinned.append(slot)
        return unpinned

    def check_integrity(self) -> None:
        """Raise IntegrityError where pins are not what the leases add up to."""
        pins = Counter(slot for lease in self._leases.values() for slot in lease.slots)
        if pins != self.pins:
            raise IntegrityError(f"pins {self.pins}, by the leases {dict(pins)}")

    def __repr__(self) -> str:
        return f"<Leases {len(self._leases)}, {len(self.pins)} slots pinned>"
