"""Ordered lists of slots, linked through arrays: eight bytes and a mark for each slot.

A slot is in at most one of the lists. Cold end first: `append` puts a slot at the
hot end, iteration starts at the cold end. All operations but iteration take
constant time. Memory is zero-filled lazily, so unused slots cost nothing.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from kvd.errors import IntegrityError

NOWHERE = 0


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
        self._sizes = [0] * (lists + 1)
        for head in range(lists):
            self._next[head] = self._prev[head] = head

    def where(self, slot: int) -> int:
        """The number of the list that holds the slot, or NOWHERE."""
        return self._where[slot]

    def size(self, which: int) -> int:
        """How many slots a list holds."""
        return self._sizes[which]

    def __len__(self) -> int:
        return sum(self._sizes)

    def append(self, which: int, slot: int) -> None:
        """Put a slot that is in no list, or IntegrityError, at the hot end of one."""
        if self._where[slot]:
            raise IntegrityError(f"slot {slot} is in list {self._where[slot]} already")
        head, place = which - 1, slot + self._lists
        last = self._prev[head]
        self._next[last] = place
        self._prev[place] = last
        self._next[place] = head
        self._prev[head] = place
        self._where[slot] = which
        self._sizes[which] += 1

    def append_all(self, which: int, slots: Iterable[int]) -> None:
        """`append` each of these, the hottest last."""
        following, before, where, shift = self._next, self._prev, self._where, self._lists
        head, count = which - 1, 0
        last = before[head]
        for slot in slots:
            if where[slot]:
                raise IntegrityError(f"slot {slot} is in list {where[slot]} already")
            place = slot + shift
            following[last] = place
            before[place] = last
            following[place] = head
            before[head] = last = place
            where[slot] = which
            count += 1
        self._sizes[which] += count

    def renew_all(self, slots: Iterable[int]) -> None:
        """Move each of these to the hot end of its list, or IntegrityError, the hottest last."""
        following, before, where, shift = self._next, self._prev, self._where, self._lists
        for slot in slots:
            if not where[slot]:
                raise IntegrityError(f"slot {slot} is in no list")
            head, place = where[slot] - 1, slot + shift
            after, previous = following[place], before[place]
            following[previous] = after
            before[after] = previous
            last = before[head]
            following[last] = place
            before[place] = last
            following[place] = head
            before[head] = place

    def extend(self, which: int, slots: npt.NDArray[np.int64]) -> None:
        """`append` for many slots that are in no list, coldest first."""
        head, places = which - 1, slots + self._lists
        chain = np.concatenate(([self._prev[head]], places, [head]))
        np.asarray(self._next)[chain[:-1]] = chain[1:]
        np.asarray(self._prev)[chain[1:]] = chain[:-1]
        np.asarray(self._where)[slots] = which
        self._sizes[which] += len(slots)

    def remove(self, slot: int) -> int:
        """Take a slot out of its list, or IntegrityError; the list's number."""
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
        """`remove` each of these."""
        following, before, where, shift = self._next, self._prev, self._where, self._lists
        sizes = self._sizes
        for slot in slots:
            which = where[slot]
            if not which:
                raise IntegrityError(f"slot {slot} is in no list")
            place = slot + shift
            previous, after = before[place], following[place]
            following[previous] = after
            before[after] = previous
            where[slot] = NOWHERE
            sizes[which] -= 1

    def walk(self, which: int) -> Iterator[int]:
        """The slots of a list, coldest first. Do not change the list meanwhile."""
        following, shift, head = self._next, self._lists, which - 1
        place = following[head]
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

    def __repr__(self) -> str:
        return f"<SlotLists {self._sizes[1:]} of {len(self._where)} slots>"
