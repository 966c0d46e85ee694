"""Slots on loan: a scheduler has them ahead of need and gives them to keys by itself.

A loan is LENT in the directory, with a generation of its own and the engine as owner. It ends
when the scheduler says for which key it was used, or when it is taken back: nobody asks the
scheduler, who looks into the directory before it uses one.

A store that has lost a race for its key (another one was first, or the index has no room) keeps
its slot LENT although it is no loan any more: the job that writes there may write other chunks
too, and is not to fail for it. Such a slot goes back when all its shares are there.
"""

from collections.abc import Iterable, Iterator, Sequence

from kvd.errors import IntegrityError


class Loans:
    """The LENT slots of one namespace.

    Attributes:
        raced: slots of stores that have lost a race, and until when they are waited for.
    """

    def __init__(self) -> None:
        self._of: dict[int, dict[int, int]] = {}  # owner -> slot -> generation
        self._used: dict[int, float] = {}  # owner -> when it was last lent a slot, or used one
        self.raced: dict[int, float] = {}

    def lend(
        self, owner: int, slots: Sequence[int], generations: Sequence[int], now: float
    ) -> None:
        """These slots, which are in no other place, are lent to `owner`."""
        if slots:
            self._of.setdefault(owner, {}).update(zip(slots, generations, strict=True))
            self._used[owner] = now

    def of(self, owner: int) -> dict[int, int]:
        """An owner's loans, slot by slot with their generations; who uses one takes it out."""
        return self._of.get(owner, {})

    def used(self, owner: int, now: float) -> None:
        """An owner has taken some of its loans out of `of`."""
        if self._of[owner]:
            self._used[owner] = now
        else:
            del self._of[owner], self._used[owner]

    def remove(self, owner: int, slot: int) -> bool:
        """A slot is LENT no longer; whether it was a loan, not one that had lost a race."""
        if self.raced.pop(slot, None) is not None:
            return False
        del self._of[owner][slot]
        if not self._of[owner]:
            del self._of[owner], self._used[owner]
        return True

    def take(self, owner: int) -> list[int]:
        """End an owner's loans: the slots."""
        self._used.pop(owner, None)
        return list(self._of.pop(owner, ()))

    def take_all(self) -> list[int]:
        """End every loan, and forget lost races: the slots."""
        slots = list(self)
        self._of.clear()
        self._used.clear()
        self.raced.clear()
        return slots

    def idle_since(self, when: float, but: int | None = None) -> list[int]:
        """The owners, `but` this one, who have used none of their loans, and got none, since."""
        return [owner for owner, used in self._used.items() if used <= when and owner != but]

    def expire(self, now: float) -> list[int]:
        """Forget the lost races whose deadline has come: the slots."""
        late = [slot for slot, deadline in self.raced.items() if deadline <= now]
        for slot in late:
            del self.raced[slot]
        return late

    def slots(self) -> Iterator[int]:
        """Every slot that is on loan, without those of lost races."""
        for slots in self._of.values():
            yield from slots

    def __iter__(self) -> Iterator[int]:
        yield from self.slots()
        yield from self.raced

    def __len__(self) -> int:
        return len(self.raced) + sum(map(len, self._of.values()))

    def __contains__(self, slot: object) -> bool:
        return slot in self.raced or any(slot in slots for slots in self._of.values())

    def entries(self) -> Iterable[tuple[int, int, int]]:
        """Owner, slot and generation of every loan."""
        for owner, slots in self._of.items():
            for slot, generation in slots.items():
                yield owner, slot, generation

    def check_integrity(self) -> None:
        """Raise IntegrityError where a slot is lent twice, or an owner without loans is kept."""
        slots = list(self)
        if len(set(slots)) != len(slots):
            raise IntegrityError(f"a slot is on loan twice: {sorted(slots)}")
        if self._of.keys() != self._used.keys() or not all(self._of.values()):
            raise IntegrityError(f"owners of loans: {self._of}, with times: {self._used}")

    def __repr__(self) -> str:
        return f"<Loans {len(self) - len(self.raced)}, {len(self.raced)} lost races>"
