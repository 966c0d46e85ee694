"""Slots that the daemon has lent to a scheduler, and how many it would like to have.

A slot on loan holds nothing, or a chunk that would be evicted next and is found until the slot is
given to another key. Whether a loan still holds only the directory says: the daemon takes loans
back without a message.
"""

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable
from typing import TypeAlias

LEAST_WANTED = 64
DECAY = 1 / 32  # of the peak, with each step that stores
Loan: TypeAlias = tuple[int, int]
"""A slot and its generation."""
IsLent: TypeAlias = Callable[[int, int], bool]
"""Whether a slot is on loan with this generation."""


class Loans:
    """The loans of one scheduler. Not for several threads at a time."""

    def __init__(self) -> None:
        self._at_hand: OrderedDict[int, int] = OrderedDict()  # slot -> generation, lent first first
        self._pinned: dict[int, int] = {}  # passed over by `take` since the latest answer
        self._asked = 0  # since the latest answer
        self._peak = 0.0

    @property
    def wanted(self) -> int:
        """How many loans to have at hand: twice what was asked for of late between two answers."""
        return max(LEAST_WANTED, 2 * round(self._peak))

    def add(self, loans: Iterable[Loan]) -> None:
        """The daemon has answered: slots and generations that are lent now, maybe none.

        What was asked for before counts together: it had to do with the same loans.
        """
        self.end_step()
        self._asked = 0
        at_hand = self._at_hand
        at_hand.update(self._pinned)
        self._pinned.clear()
        for slot, generation in loans:
            if at_hand.get(slot, -1) < generation:  # answers may be taken in out of order
                at_hand.pop(slot, None)
                at_hand[slot] = generation

    def take(self, is_lent: IsLent, pinned: Container[int] = ()) -> Loan | None:
        """Return a loan that holds, which is used up now; None where there is none.

        A slot whose chunk is `pinned` is passed over until the daemon's next answer: the daemon
        ends its loan when it reads the pin, or refuses the pin.
        """
        self._asked += 1
        at_hand = self._at_hand
        while at_hand:
            loan = at_hand.popitem(last=False)
            if loan[0] in pinned:
                self._pinned[loan[0]] = loan[1]
            elif is_lent(*loan):
                return loan
        return None

    def defer(self, slots: Iterable[int]) -> None:
        """Take the loans of these slots last: their chunks are used now."""
        if at_hand := self._at_hand:
            for slot in slots:
                if slot in at_hand:
                    at_hand.move_to_end(slot)

    def count(self, is_lent: IsLent) -> int:
        """How many hold, with those of pinned chunks; the others are forgotten."""
        for loans in (self._at_hand, self._pinned):
            for slot, generation in list(loans.items()):
                if not is_lent(slot, generation):
                    del loans[slot]
        return len(self._at_hand) + len(self._pinned)

    def end_step(self) -> None:
        """Learn how many are needed; steps that have asked for none say nothing."""
        if self._asked:
            self._peak = max(float(self._asked), self._peak * (1 - DECAY))

    def clear(self) -> None:
        """Forget all loans: they were those of another session."""
        self._at_hand.clear()
        self._pinned.clear()

    def __len__(self) -> int:
        """How many `take` may still return, with those that do not hold any more."""
        return len(self._at_hand)

    def __repr__(self) -> str:
        return f"<Loans {len(self)} at hand, {self.wanted} wanted>"
