"""Ordered lists of slots, linked through arrays: 17 bytes for each slot.

A slot is in at most one of the lists. Each slot has a stamp, and stamps rise from a list's cold
end to its hot end. New stamps are the greatest, so slots with new ones are appended in constant
time; `insert_all` puts slots back by the stamps that they have. Memory is zero-filled lazily, so
unused slots cost nothing.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvd.errors import IntegrityError

NOWHERE = 0
MAX_STEPS = 8192
"""`insert_all` passes no more slots than this from each end of a list, some 0.5 ms."""


class SlotLists:
    """Lists numbered from 1 on over the slots 0..num_slots - 1."""

    def __init__(self, num_slots: int, lists: int) -> None:
        # Place i + lists stands for slot i; place k - 1 is the head of list k. A ring
        # through its head is a list, so no end needs a special case.
        self._lists = lists
        places = num_slots + lists
        self._next = np.zeros(places, np.uint32).data
        self._prev = np.zeros(places, np.uint32).data
        self._where = np.zeros(num_slots, np.uint8).data
        self._stamps = np.zeros(num_slots, np.int64).data
        self._sizes = [0] * (lists + 1)
        for head in range(lists):
            self._next[head] = self._prev[head] = head

    def where(self, slot: int) -> int:
        """The number of the list that holds the slot, or NOWHERE."""
        return self._where[slot]

    def stamp(self, slot: int) -> int:
        """The stamp that the slot was given last."""
        return self._stamps[slot]

    def size(self, which: int) -> int:
        """How many slots a list holds."""
        return self._sizes[which]

    def __len__(self) -> int:
        return sum(self._sizes)

    def append_all(self, slots: Iterable[int], into: Iterable[int], stamp: int) -> None:
        """Put each slot, which is in no list, or IntegrityError, at the hot end of its list.

        Args:
            slots: the hottest last.
            into: the list of each; there may be more.
            stamp: of the first, above all stamps so far; those of the others count up from it.
        """
        following, before, where, shift = self._next, self._prev, self._where, self._lists
        stamps, sizes = self._stamps, self._sizes
        for slot, which in zip(slots, into, strict=False):
            if where[slot]:
                raise IntegrityError(f"slot {slot} is in list {where[slot]} already")
            head, place = which - 1, slot + shift
            last = before[head]
            following[last] = place
            before[place] = last
            following[place] = head
            before[head] = place
            where[slot] = which
            sizes[which] += 1
            stamps[slot] = stamp
            stamp += 1

    def move_all(self, slots: Iterable[int], into: Sequence[int], stamp: int) -> None:
        """Move each of these from list i, or IntegrityError, to the hot end of list into[i].

        The hottest comes last. Their stamps count up from `stamp`, above all stamps so far.
        """
        following, before, where, shift = self._next, self._prev, self._where, self._lists
        stamps, sizes = self._stamps, self._sizes
        for slot in slots:
            source = where[slot]
            if not source:
                raise IntegrityError(f"slot {slot} is in no list")
            place = slot + shift
            after, previous = following[place], before[place]
            following[previous] = after
            before[after] = previous
            target = into[source]
            if target != source:
                where[slot] = target
                sizes[source] -= 1
                sizes[target] += 1
            head = target - 1
            last = before[head]
            following[last] = place
            before[place] = last
            following[place] = head
            before[head] = place
            stamps[slot] = stamp
            stamp += 1

    def extend(
        self, which: int, slots: npt.NDArray[np.int64], stamps: npt.NDArray[np.int64]
    ) -> None:
        """Append many slots that are in no list, coldest first, with these stamps."""
        head, places = which - 1, slots + self._lists
        chain = np.concatenate(([self._prev[head]], places, [head]))
        np.asarray(self._next)[chain[:-1]] = chain[1:]
        np.asarray(self._prev)[chain[1:]] = chain[:-1]
        np.asarray(self._where)[slots] = which
        np.asarray(self._stamps)[slots] = stamps
        self._sizes[which] += len(slots)

    def insert_all(self, which: int, slots: Sequence[int]) -> None:
        """Put slots that are in no list into one by the stamps that they have, lowest first.

        Each is searched from the end whose stamp is nearer, the next one from where the last one
        was put. What belongs farther from an end than `MAX_STEPS` is put where that search stops.
        """
        stamps, shift = self._stamps, self._lists
        first, last = self._next[which - 1], self._prev[which - 1]
        colder = len(slots)
        if first >= shift:
            ends = stamps[first - shift] + stamps[last - shift]
            colder = bisect_left(slots, ends, key=lambda slot: 2 * stamps[slot])
        self._merge(which, slots[:colder], self._next, self._prev, 1)
        self._merge(which, slots[colder:][::-1], self._prev, self._next, -1)

    def _merge(
        self,
        which: int,
        slots: Sequence[int],
        ahead: memoryview,
        behind: memoryview,
        sign: int,
    ) -> None:
        """Put slots in on one walk from an end: `sign` times their stamps rise along `ahead`."""
        stamps, shift = self._stamps, self._lists
        head = place = which - 1
        steps = MAX_STEPS
        for slot in slots:
            stamp, after = sign * stamps[slot], ahead[place]
            while steps and after != head and sign * stamps[after - shift] < stamp:
                after = ahead[after]
                steps -= 1
            previous, place = behind[after], slot + shift
            ahead[previous] = behind[after] = place
            behind[place], ahead[place] = previous, after
            self._where[slot] = which
        self._sizes[which] += len(slots)

    def remove(self, slot: int) -> int:
        """Take a slot out of its list, or IntegrityError; the list's number. It keeps its stamp."""
        which = self._where[slot]
        if not which:
            raise IntegrityError(f"slot {slot} is in no list")
        place = slot + self._lists
        before, after = self._prev[place], self._next[place]
        self._next[before] = after
        self._prev[after] = before
        self._where[slot] = NOWHERE
        self._sizes[which] -= 1
        return which

    def remove_all(self, slots: Iterable[int]) -> None:
        """Take slots of lists out of them. They keep their stamps."""
        following, before, where, shift = self._next, self._prev, self._where, self._lists
        sizes = self._sizes
        for slot in slots:
            place = slot + shift
            previous, after = before[place], following[place]
            following[previous] = after
            before[after] = previous
            sizes[where[slot]] -= 1
            where[slot] = NOWHERE

    def walk(self, which: int, before: int | None = None) -> Iterator[int]:
        """The slots of a list, coldest first, or those hotter than `before`.

        Do not change the list meanwhile.
        """
        following, shift, head = self._next, self._lists, which - 1
        place = following[head if before is None else before + shift]
        while place != head:
            yield place - shift
            place = following[place]

    def walk_back(self, which: int, after: int | None = None) -> Iterator[int]:
        """The slots of a list, hottest first, or those colder than `after`.

        Do not change the list meanwhile.
        """
        before, shift, head = self._prev, self._lists, which - 1
        place = before[head if after is None else after + shift]
        while place != head:
            yield place - shift
            place = before[place]

    def walk_from(self, slot: int) -> Iterator[int]:
        """This slot, and those that follow it in its list. Do not change the list meanwhile."""
        following, shift = self._next, self._lists
        head, place = self._where[slot] - 1, slot + shift
        while place != head:
            yield place - shift
            place = following[place]

    def check_integrity(self) -> None:
        """Raise IntegrityError where links, marks or sizes are wrong."""
        marked = np.bincount(np.asarray(self._where), minlength=self._lists + 1)
        for which in range(1, self._lists + 1):
            slots = list(self.walk(which))
            if not len(slots) == self._sizes[which] == marked[which]:
                raise IntegrityError(
                    f"list {which} has {len(slots)} slots, {self._sizes[which]} counted,"
                    f" {marked[which]} marked"
                )
            before = which - 1
            for slot in slots:
                if self._where[slot] != which or self._prev[slot + self._lists] != before:
                    raise IntegrityError(f"slot {slot} is linked wrongly in list {which}")
                before = slot + self._lists
