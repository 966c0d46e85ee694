"""Loans of slots to schedulers, and leases by which loads pin chunks.

A slot on loan is FREE, or READY with a chunk that the policy would evict next; that chunk is found,
pinned and loaded as any other. The loan ends when the broker reads the step that gives the slot to
a key, when the chunk is used, or when the slot is needed elsewhere. Ending a loan needs no message
to its owner: nothing is written into a slot before it is WRITING, and a step that uses an ended
loan loses that store.

A lease pins READY chunks until it is given back or its deadline comes.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from kvd.errors import IntegrityError


class Loans:
    """The slots of one namespace that are on loan."""

    def __init__(self) -> None:
        self._by_owner: dict[int, dict[int, int]] = {}  # owner -> slot -> generation
        self._owners: dict[int, int] = {}  # slot -> owner
        self._last_used: dict[int, float] = {}  # owner -> when it last got a loan, or used one

    def lend(
        self, owner: int, slots: Sequence[int], generations: Sequence[int], now: float
    ) -> None:
        """Lend slots that are not on loan to `owner`."""
        if slots:
            self._by_owner.setdefault(owner, {}).update(zip(slots, generations, strict=True))
            self._owners.update(dict.fromkeys(slots, owner))
            self._last_used[owner] = now

    def count(self, owner: int) -> int:
        """Return the number of an owner's loans."""
        return len(self._by_owner.get(owner, ()))

    def of(self, owner: int) -> list[int]:
        """Return the slots on loan to an owner, in the order in which they were lent."""
        return list(self._by_owner.get(owner, ()))

    def use(self, owner: int, slot: int, generation: int, now: float) -> bool:
        """End a loan whose owner gives the slot to a key; False if there is no such loan."""
        if self._by_owner.get(owner, {}).get(slot) != generation:
            return False
        self.end(slot)
        if owner in self._last_used:
            self._last_used[owner] = now
        return True

    def end(self, slot: int) -> None:
        """End a slot's loan."""
        owner = self._owners.pop(slot)
        slots = self._by_owner[owner]
        del slots[slot]
        if not slots:
            del self._by_owner[owner], self._last_used[owner]

    def unused_since(self, since: float, but: int | None = None) -> list[int]:
        """Return the owners, except `but`, that have got and used no loan since `since`."""
        last_used = self._last_used.items()
        return [owner for owner, used_at in last_used if used_at <= since and owner != but]

    def __iter__(self) -> Iterator[int]:
        return iter(self._owners)

    def __len__(self) -> int:
        return len(self._owners)

    def __contains__(self, slot: object) -> bool:
        return slot in self._owners

    def entries(self) -> Iterable[tuple[int, int, int]]:
        """Yield owner, slot and generation of every loan."""
        for owner, slots in self._by_owner.items():
            for slot, generation in slots.items():
                yield owner, slot, generation

    def check_integrity(self) -> None:
        """Raise IntegrityError if a slot is lent twice, or an owner without loans is listed."""
        owners = {slot: owner for owner, slot, _ in self.entries()}
        if owners != self._owners or sum(map(len, self._by_owner.values())) != len(owners):
            raise IntegrityError(f"loans {self._by_owner}, by slot {self._owners}")
        if self._by_owner.keys() != self._last_used.keys() or not all(self._by_owner.values()):
            raise IntegrityError(
                f"owners of loans: {self._by_owner}, with times: {self._last_used}"
            )


class Lease(msgspec.Struct, frozen=True, gc=False):
    """A pin on slots, granted at `since`, until it is given back or `deadline`."""

    slots: tuple[int, ...]
    since: float
    deadline: float


class Leases:
    """The leases of one namespace, by owner and number.

    Methods that end leases return the slots that no lease pins any more.

    Attributes:
        pins: slot -> number of leases that pin it.
    """

    def __init__(self) -> None:
        self.pins: dict[int, int] = {}
        self._leases: dict[int, dict[int, Lease]] = {}  # owner -> number -> lease

    def count(self, owner: int) -> int:
        """Return the number of an owner's leases."""
        return len(self._leases.get(owner, ()))

    def __len__(self) -> int:
        return sum(map(len, self._leases.values()))

    def grant(
        self, owner: int, number: int, slots: Sequence[int], now: float, deadline: float
    ) -> list[int]:
        """Pin slots under `number`; a lease that the owner has under that number ends."""
        pins = self.pins
        for slot in slots:
            pins[slot] = pins.get(slot, 0) + 1
        unpinned = self.release(number, owner) or []
        self._leases.setdefault(owner, {})[number] = Lease(tuple(slots), now, deadline)
        return unpinned

    def count_until(self, until: float) -> int:
        """Return the number of leases that were granted at `until` or before."""
        by_owner = self._leases.values()
        return sum(lease.since <= until for leases in by_owner for lease in leases.values())

    def release(self, number: int, owner: int) -> list[int] | None:
        """End a lease; None if it has expired or is not this owner's."""
        if number not in self._leases.get(owner, ()):
            return None
        return self._end(owner, [number])

    def expire(self, now: float) -> tuple[int, list[int]]:
        """End the leases whose deadline has come; return their number, and the slots."""
        num_expired = 0
        unpinned: list[int] = []
        for owner, leases in list(self._leases.items()):
            expired = [number for number, lease in leases.items() if lease.deadline <= now]
            num_expired += len(expired)
            unpinned += self._end(owner, expired)
        return num_expired, unpinned

    def drop_owner(self, owner: int) -> list[int]:
        """End all leases of an owner."""
        return self._end(owner, list(self._leases.get(owner, ())))

    def _end(self, owner: int, numbers: Iterable[int]) -> list[int]:
        pins, unpinned = self.pins, []
        leases = self._leases.get(owner, {})
        for number in numbers:
            for slot in leases.pop(number).slots:
                num_pins = pins[slot] - 1
                if num_pins:
                    pins[slot] = num_pins
                else:
                    del pins[slot]
                    unpinned.append(slot)
        if not leases:
            self._leases.pop(owner, None)
        return unpinned

    def check_integrity(self) -> None:
        """Raise IntegrityError if pins are not those of the leases."""
        leases = (lease for by_number in self._leases.values() for lease in by_number.values())
        pins = Counter(slot for lease in leases for slot in lease.slots)
        if pins != self.pins:
            raise IntegrityError(f"pins {self.pins}, by the leases {dict(pins)}")
        if not all(self._leases.values()):
            raise IntegrityError("an owner without leases is listed")
