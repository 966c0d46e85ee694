"""Promises with a deadline: leases pin chunks for loads, tickets let an owner write slots."""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
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

    What ends a lease returns the slots that nobody pins any more.
    """

    def __init__(self) -> None:
        self.pins: dict[int, int] = {}
        self._leases: dict[int, Lease] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._last = 0
        self._held: Counter[int] = Counter()

    def held_by(self, owner: int) -> int:
        """How many leases an owner has."""
        return self._held[owner]

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
        self._held[owner] += 1
        self._leases[self._last] = Lease(owner, tuple(slots), now, deadline)
        heapq.heappush(self._deadlines, (deadline, self._last))
        return self._last

    def count_until(self, when: float) -> int:
        """How many of them were granted at `when` or before."""
        return sum(lease.since <= when for lease in self._leases.values())

    def release(self, lease_id: int, owner: int) -> list[int] | None:
        """Give a lease back. None where it has run out or is somebody else's."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.owner != owner:
            return None
        return self._end(lease_id)

    def expire(self, now: float) -> tuple[int, list[int]]:
        """End the leases whose deadline has come: how many, and the slots."""
        ended, slots = 0, []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, lease_id = heapq.heappop(self._deadlines)
            if lease_id in self._leases:
                slots += self._end(lease_id)
                ended += 1
        return ended, slots

    def drop_owner(self, owner: int) -> list[int]:
        """End the leases of one owner."""
        theirs = [number for number, lease in self._leases.items() if lease.owner == owner]
        return [slot for number in theirs for slot in self._end(number)]

    def _end(self, lease_id: int) -> list[int]:
        pins, unpinned = self.pins, []
        lease = self._leases.pop(lease_id)
        self._held[lease.owner] -= 1
        if not self._held[lease.owner]:
            del self._held[lease.owner]
        for slot in lease.slots:
            left = pins[slot] - 1
            if left:
                pins[slot] = left
            else:
                del pins[slot]
                unpinned.append(slot)
        # Leases given back in time leave their deadline behind; sweep when most are such.
        if len(self._deadlines) > 2 * len(self._leases) + 64:
            self._deadlines = [(lease.deadline, n) for n, lease in self._leases.items()]
            heapq.heapify(self._deadlines)
        return unpinned

    def check_integrity(self) -> None:
        """Pins are what the leases add up to, and every lease has its deadline.

        Raises:
            IntegrityError: otherwise.
        """
        pins = Counter(slot for lease in self._leases.values() for slot in lease.slots)
        if pins != self.pins:
            raise IntegrityError(f"pins {self.pins}, by the leases {dict(pins)}")
        if Counter(lease.owner for lease in self._leases.values()) != self._held:
            raise IntegrityError(f"owners hold {self._held} by count")
        deadlines = {(lease.deadline, number) for number, lease in self._leases.items()}
        if not deadlines <= set(self._deadlines):
            raise IntegrityError("a lease without a deadline")

    def __repr__(self) -> str:
        return f"<Leases {len(self._leases)}, {len(self.pins)} slots pinned>"


class Tickets:
    """Who may write which slot until when. A slot has a ticket while it is WRITING."""

    def __init__(self) -> None:
        self._by_owner: dict[int, dict[int, float]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_owner.values()))

    def __iter__(self) -> Iterator[int]:
        for slots in self._by_owner.values():
            yield from slots

    def issue(self, owner: int, slots: Iterable[int], deadline: float) -> None:
        """The owner may write these slots until the deadline."""
        self._by_owner.setdefault(owner, {}).update(dict.fromkeys(slots, deadline))

    def close(self, owner: int, slot: int) -> None:
        """The slot is no longer WRITING."""
        theirs = self._by_owner[owner]
        del theirs[slot]
        if not theirs:
            del self._by_owner[owner]

    def of(self, owner: int) -> list[int]:
        """The slots that an owner may write."""
        return list(self._by_owner.get(owner, ()))

    def expired(self, now: float) -> list[int]:
        """The slots whose deadline has come."""
        return [
            slot
            for slots in self._by_owner.values()
            for slot, deadline in slots.items()
            if deadline <= now
        ]

    def check_integrity(self) -> None:
        """Raise IntegrityError where a slot has two tickets."""
        if len(set(self)) != len(self):
            raise IntegrityError("a slot has two tickets")

    def __repr__(self) -> str:
        return f"<Tickets {len(self)} for {len(self._by_owner)} owners>"
