"""Who holds slots: schedulers, with loans to give to keys, and loads, with leases that pin chunks.

A slot on loan is FREE, or READY with a chunk that the policy would evict next; that chunk is found,
pinned and loaded as any other. The loan ends when the broker reads the step that gives the slot to
a key, when the chunk is used, or when the slot is needed elsewhere. To end a loan takes no message
and no time: nothing is written into a slot before it is WRITING. A step that uses a loan which has
ended loses that store.

A lease pins READY chunks until it is given back or its deadline comes.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from kvd.errors import IntegrityError


class Loans:
    """The slots of one namespace that are on loan."""

    def __init__(self) -> None:
        self._of: dict[int, dict[int, int]] = {}  # owner -> slot -> generation
        self._owners: dict[int, int] = {}  # slot -> owner
        self._used: dict[int, float] = {}  # owner -> when it was last lent a slot, or used one

    def lend(
        self, owner: int, slots: Sequence[int], generations: Sequence[int], now: float
    ) -> None:
        """Lend slots that are not on loan to `owner`."""
        if slots:
            self._of.setdefault(owner, {}).update(zip(slots, generations, strict=True))
            self._owners.update(dict.fromkeys(slots, owner))
            self._used[owner] = now

    def count(self, owner: int) -> int:
        """How many loans an owner has."""
        return len(self._of.get(owner, ()))

    def of(self, owner: int) -> list[int]:
        """The slots that are on loan to an owner, lent first first."""
        return list(self._of.get(owner, ()))

    def use(self, owner: int, slot: int, generation: int, now: float) -> bool:
        """End a loan because its owner gives the slot to a key; False where it is none."""
        if self._of.get(owner, {}).get(slot) != generation:
            return False
        self.end(slot)
        if owner in self._used:
            self._used[owner] = now
        return True

    def end(self, slot: int) -> None:
        """End a slot's loan."""
        owner = self._owners.pop(slot)
        slots = self._of[owner]
        del slots[slot]
        if not slots:
            del self._of[owner], self._used[owner]

    def unused_since(self, when: float, but: int | None = None) -> list[int]:
        """The owners, except `but`, that have used no loan since `when` and were lent none."""
        return [owner for owner, used in self._used.items() if used <= when and owner != but]

    def __iter__(self) -> Iterator[int]:
        return iter(self._owners)

    def __len__(self) -> int:
        return len(self._owners)

    def __contains__(self, slot: object) -> bool:
        return slot in self._owners

    def entries(self) -> Iterable[tuple[int, int, int]]:
        """Owner, slot and generation of every loan."""
        for owner, slots in self._of.items():
            for slot, generation in slots.items():
                yield owner, slot, generation

    def check_integrity(self) -> None:
        """Raise IntegrityError where a slot is lent twice, or an owner without loans is kept."""
        owners = {slot: owner for owner, slot, _ in self.entries()}
        if owners != self._owners or sum(map(len, self._of.values())) != len(owners):
            raise IntegrityError(f"loans {self._of}, by slot {self._owners}")
        if self._of.keys() != self._used.keys() or not all(self._of.values()):
            raise IntegrityError(f"owners of loans: {self._of}, with times: {self._used}")


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
