"""Slots on loan: a scheduler has them ahead of need and gives them to keys by itself.

A slot on loan is FREE, or READY with a chunk that the policy would evict next; that chunk is found,
pinned and loaded as any other. The loan ends when the broker reads the step that gives the slot to
a key, when the chunk is used, or when the slot is needed elsewhere. To end a loan takes no message
and no time: nothing is written into a slot before it is WRITING. A step that uses a loan which has
ended loses that store.
"""

from collections.abc import Iterable, Iterator, Sequence

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
