"""What every eviction policy does; `policies` has them by name.

A policy knows the chunks of one namespace, from the moment that they get a slot, and orders
them. It knows neither pins nor writes under way: `may_evict` says for each candidate whether it
may go. So a chunk's place does not depend on when its bytes arrive.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvd.cache.ghosts import Ghosts
from kvd.cache.slotlists import SlotLists
from kvd.errors import IntegrityError
from kvd_proto.labels import Label

KeyOf = Callable[[int], bytes]
MayEvict = Callable[[int], bool]

TICKS_PER_SECOND = 10_000
POSITION_BITS = 18
"""A stamp is a run's number, at least the ticks of its time, and here a position in the run."""


class EvictionPolicy(ABC):
    """Which chunks of a namespace go first.

    Chunks stand in lists ordered by their last use. A run is the chunks that one call has
    inserted, refreshed or used. All times are seconds of a clock that never goes back, also over
    restarts.

    Args:
        num_slots: slots are numbered 0..num_slots - 1.
        key_of: the key of the chunk in a slot, asked only about slots inserted here.
        ghosts: what is remembered of chunks that are not in memory. No key is there and here.
    """

    lists: ClassVar[int]

    def __init__(self, num_slots: int, key_of: KeyOf, ghosts: Ghosts) -> None:
        self.num_slots = num_slots
        self.key_of = key_of
        self.ghosts = ghosts
        self._last_stamp = 0
        self.clear()

    def clear(self) -> None:
        """Remove all chunks. Ghosts and what was learned stay."""
        self._slots = SlotLists(self.num_slots, self.lists)
        self._reserved: dict[int, int] = {}  # slot -> the list that it was in

    @abstractmethod
    def insert_all(self, slots: Sequence[int], now: float) -> None:
        """Add chunks that have got a slot, for a request that is under way; hottest last."""

    @abstractmethod
    def restore(self, slots: npt.NDArray[np.int64], times: npt.NDArray[np.float64]) -> None:
        """Fill an empty policy with the previous daemon's chunks, used longest ago first.

        `times` has the second of each one's last use.
        """

    @abstractmethod
    def refresh_all(self, slots: Sequence[int], now: float) -> None:
        """These are pinned for a load: newest, no use counted yet; hottest last."""

    @abstractmethod
    def use_all(self, slots: Sequence[int], now: float, label: Label = Label.NONE) -> None:
        """One request has finished: these are its chunks, the prompt's head last."""

    @abstractmethod
    def relabel_all(self, slots: Sequence[int], label: Label) -> None:
        """The label of a request has come after its end: its chunks, the prompt's head last."""

    @abstractmethod
    def reserve(self, n: int, may_evict: MayEvict, now: float) -> list[int]:
        """Up to `n` chunks that go next, first to go first. They stay, and are no candidates."""

    @abstractmethod
    def learn(self) -> bool:
        """Do one bounded piece of learning; whether more is due."""

    @abstractmethod
    def _leave_ghost(self, slot: int, which: int, now: float) -> None:
        """Remember a chunk that was in this list and is evicted."""

    def release(self, slots: Iterable[int]) -> None:
        """Reserved chunks are candidates again, at their old places."""
        returned: dict[int, list[int]] = {}
        for slot in sorted(slots, key=self._slots.stamp):
            returned.setdefault(self._reserved.pop(slot), []).append(slot)
        for which, colder_first in returned.items():
            self._slots.insert_all(which, colder_first)

    def is_reserved(self, slot: int) -> bool:
        """Whether `reserve` has returned the chunk, and nothing has happened to it since."""
        return slot in self._reserved

    @property
    def num_reserved(self) -> int:
        """How many chunks are reserved."""
        return len(self._reserved)

    def evict(self, slots: Iterable[int], now: float) -> None:
        """Remove chunks, reserved or not. Each leaves a ghost."""
        for slot in slots:
            which = self._reserved.pop(slot, 0) or self._slots.remove(slot)
            self._leave_ghost(slot, which, now)

    def remove(self, slot: int) -> None:
        """Remove a chunk for a reason that says nothing about its worth. It leaves no ghost."""
        if not self._reserved.pop(slot, 0):
            self._slots.remove(slot)

    def _unreserve(self, slots: Iterable[int]) -> None:
        """Release those of these that are reserved."""
        if self._reserved:
            self.release([slot for slot in slots if slot in self._reserved])

    def _take_stamps(self, count: int, now: float) -> int:
        """The first of `count` stamps of a new run."""
        run = max((self._last_stamp >> POSITION_BITS) + 1, int(now * TICKS_PER_SECOND))
        first = run << POSITION_BITS
        self._last_stamp = first + count
        return first

    def _restore(
        self, which: int, slots: npt.NDArray[np.int64], times: npt.NDArray[np.float64]
    ) -> None:
        """`restore` into this list."""
        runs = (times * TICKS_PER_SECOND).astype(np.int64)
        stamps = (runs << POSITION_BITS) + np.arange(len(slots))
        self._slots.extend(which, slots, stamps)
        self._last_stamp = max(self._last_stamp, int(stamps.max(initial=0)))

    def _time(self, slot: int) -> float:
        """When the chunk was inserted, refreshed or used last, s."""
        run: int = self._slots.stamp(slot) >> POSITION_BITS
        return run / TICKS_PER_SECOND

    def order(self) -> list[int]:
        """All slots, used longest ago first."""
        slots = [*self._reserved]
        for which in range(1, self.lists + 1):
            slots += self._slots.walk(which)
        return sorted(slots, key=self._slots.stamp)

    def __len__(self) -> int:
        return len(self._slots) + len(self._reserved)

    def __contains__(self, slot: int) -> bool:
        return bool(self._slots.where(slot)) or slot in self._reserved

    def check_integrity(self) -> None:
        """Raise IntegrityError where an invariant does not hold."""
        self._slots.check_integrity()
        self.ghosts.check_integrity()
        for slot, which in self._reserved.items():
            if self._slots.where(slot) or not 0 < which <= self.lists:
                raise IntegrityError(f"slot {slot} is reserved and in a list: {self!r}")
        for slot in self.order():
            if self.ghosts.find(self.key_of(slot)):
                raise IntegrityError(f"the chunk in slot {slot} has a ghost: {self!r}")

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {len(self)} of {self.num_slots} slots,"
            f" {self.num_reserved} reserved>"
        )
