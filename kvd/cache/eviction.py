"""The base of eviction policies, and LRU. The default policy is in `kvd.cache.adaptive`.

A policy orders the chunks of one namespace from the moment they get a slot. It knows neither pins
nor unfinished writes: the caller's `may_evict` tells for each candidate whether it may be evicted.
So a chunk's position does not depend on when its bytes arrive.

Chunks are in ordered lists of slots, linked through arrays with 17 bytes for each slot. A slot is
in one list at most. Each slot has a stamp; stamps rise from a list's cold end to its hot end. New
stamps are greater than all before, so slots with new stamps are appended in constant time;
`SlotLists.insert_all` inserts slots by the stamps that they have. Arrays are zero-filled lazily, so
unused slots take no memory.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, repeat
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvd.cache.ghosts import GhostCause, Ghosts
from kvd.errors import IntegrityError
from kvd_proto.messages import Label

NOWHERE = 0
MAX_STEPS = 8192
"""`insert_all` walks over no more slots than this from each end of a list, some 0.5 ms."""


class SlotLists:
    """Doubly linked lists, numbered from 1 on, of the slots 0..num_slots - 1."""

    def __init__(self, num_slots: int, num_lists: int) -> None:
        # Node i + num_lists stands for slot i; node k - 1 is the head of list k. A list is a ring
        # through its head, so its ends need no special case.
        self._num_lists = num_lists
        num_nodes = num_slots + num_lists
        self._next = np.zeros(num_nodes, np.uint32).data
        self._prev = np.zeros(num_nodes, np.uint32).data
        self._list_of = np.zeros(num_slots, np.uint8).data
        self._stamps = np.zeros(num_slots, np.int64).data
        self._sizes = [0] * (num_lists + 1)
        for head in range(num_lists):
            self._next[head] = self._prev[head] = head

    def list_of(self, slot: int) -> int:
        """Return the number of the slot's list, or NOWHERE."""
        return self._list_of[slot]

    def stamp(self, slot: int) -> int:
        """Return the slot's last stamp."""
        return self._stamps[slot]

    def size(self, list_number: int) -> int:
        """Return the number of slots in a list."""
        return self._sizes[list_number]

    def __len__(self) -> int:
        return sum(self._sizes)

    def append_all(self, slots: Iterable[int], into: Iterable[int], stamp: int) -> None:
        """Append slots to the hot ends of lists.

        Args:
            slots: the hottest last.
            into: the list of each; may be longer.
            stamp: of the first slot, above all stamps so far; the others' count up from it.

        Raises:
            IntegrityError: a slot is in a list already.
        """
        next_of, prev_of, list_of, shift = self._next, self._prev, self._list_of, self._num_lists
        stamps, sizes = self._stamps, self._sizes
        for slot, list_number in zip(slots, into, strict=False):
            if list_of[slot]:
                raise IntegrityError(f"slot {slot} is in list {list_of[slot]} already")
            head, node = list_number - 1, slot + shift
            last = prev_of[head]
            next_of[last] = node
            prev_of[node] = last
            next_of[node] = head
            prev_of[head] = node
            list_of[slot] = list_number
            sizes[list_number] += 1
            stamps[slot] = stamp
            stamp += 1

    def move_all(self, slots: Iterable[int], into: Sequence[int], stamp: int) -> None:
        """Move each slot from its list i to the hot end of list into[i].

        The hottest slot comes last. Stamps count up from `stamp`, above all stamps so far.

        Raises:
            IntegrityError: a slot is in no list.
        """
        next_of, prev_of, list_of, shift = self._next, self._prev, self._list_of, self._num_lists
        stamps, sizes = self._stamps, self._sizes
        for slot in slots:
            source = list_of[slot]
            if not source:
                raise IntegrityError(f"slot {slot} is in no list")
            node = slot + shift
            after, previous = next_of[node], prev_of[node]
            next_of[previous] = after
            prev_of[after] = previous
            target = into[source]
            if target != source:
                list_of[slot] = target
                sizes[source] -= 1
                sizes[target] += 1
            head = target - 1
            last = prev_of[head]
            next_of[last] = node
            prev_of[node] = last
            next_of[node] = head
            prev_of[head] = node
            stamps[slot] = stamp
            stamp += 1

    def extend(
        self, list_number: int, slots: npt.NDArray[np.int64], stamps: npt.NDArray[np.int64]
    ) -> None:
        """Append many slots that are in no list, the coldest first, with these stamps."""
        head, nodes = list_number - 1, slots + self._num_lists
        chain = np.concatenate(([self._prev[head]], nodes, [head]))
        np.asarray(self._next)[chain[:-1]] = chain[1:]
        np.asarray(self._prev)[chain[1:]] = chain[:-1]
        np.asarray(self._list_of)[slots] = list_number
        np.asarray(self._stamps)[slots] = stamps
        self._sizes[list_number] += len(slots)

    def insert_all(self, list_number: int, slots: Sequence[int]) -> None:
        """Insert slots that are in no list by their stamps; the lowest stamp comes first.

        Each place is searched from the nearer end, starting where the slot before was inserted. A
        search stops after `MAX_STEPS` slots, and the slot is inserted there.
        """
        stamps, shift = self._stamps, self._num_lists
        first, last = self._next[list_number - 1], self._prev[list_number - 1]
        num_from_cold_end = len(slots)
        if first >= shift:
            ends = stamps[first - shift] + stamps[last - shift]
            num_from_cold_end = bisect_left(slots, ends, key=lambda slot: 2 * stamps[slot])
        self._merge(list_number, slots[:num_from_cold_end], self._next, self._prev, 1)
        self._merge(list_number, slots[num_from_cold_end:][::-1], self._prev, self._next, -1)

    def _merge(
        self,
        list_number: int,
        slots: Sequence[int],
        ahead: memoryview,
        behind: memoryview,
        sign: int,
    ) -> None:
        """Insert slots on one walk from an end; `sign` times the stamps rises along `ahead`."""
        stamps, shift = self._stamps, self._num_lists
        head = node = list_number - 1
        steps = MAX_STEPS
        for slot in slots:
            stamp, after = sign * stamps[slot], ahead[node]
            while steps and after != head and sign * stamps[after - shift] < stamp:
                after = ahead[after]
                steps -= 1
            previous, node = behind[after], slot + shift
            ahead[previous] = behind[after] = node
            behind[node], ahead[node] = previous, after
            self._list_of[slot] = list_number
        self._sizes[list_number] += len(slots)

    def remove(self, slot: int) -> int:
        """Remove a slot, which keeps its stamp, from its list, and return the list's number."""
        list_number = self._list_of[slot]
        if not list_number:
            raise IntegrityError(f"slot {slot} is in no list")
        node = slot + self._num_lists
        previous, after = self._prev[node], self._next[node]
        self._next[previous] = after
        self._prev[after] = previous
        self._list_of[slot] = NOWHERE
        self._sizes[list_number] -= 1
        return list_number

    def remove_all(self, slots: Iterable[int]) -> None:
        """Remove slots, each in a list, from their lists. They keep their stamps."""
        next_of, prev_of, list_of, shift = self._next, self._prev, self._list_of, self._num_lists
        sizes = self._sizes
        for slot in slots:
            node = slot + shift
            previous, after = prev_of[node], next_of[node]
            next_of[previous] = after
            prev_of[after] = previous
            sizes[list_of[slot]] -= 1
            list_of[slot] = NOWHERE

    def walk(self, list_number: int, before: int | None = None) -> Iterator[int]:
        """Yield the slots of a list, coldest first, or those hotter than `before`.

        The list must not change meanwhile.
        """
        next_of, shift, head = self._next, self._num_lists, list_number - 1
        node = next_of[head if before is None else before + shift]
        while node != head:
            yield node - shift
            node = next_of[node]

    def walk_back(self, list_number: int, after: int | None = None) -> Iterator[int]:
        """Yield the slots of a list, hottest first, or those colder than `after`.

        The list must not change meanwhile.
        """
        prev_of, shift, head = self._prev, self._num_lists, list_number - 1
        node = prev_of[head if after is None else after + shift]
        while node != head:
            yield node - shift
            node = prev_of[node]

    def walk_from(self, slot: int) -> Iterator[int]:
        """Yield this slot and the hotter ones of its list. The list must not change meanwhile."""
        next_of, shift = self._next, self._num_lists
        head, node = self._list_of[slot] - 1, slot + shift
        while node != head:
            yield node - shift
            node = next_of[node]

    def check_integrity(self) -> None:
        """Raise IntegrityError if links, marks or sizes are wrong."""
        marked = np.bincount(np.asarray(self._list_of), minlength=self._num_lists + 1)
        for list_number in range(1, self._num_lists + 1):
            slots = list(self.walk(list_number))
            if not len(slots) == self._sizes[list_number] == marked[list_number]:
                raise IntegrityError(
                    f"list {list_number} has {len(slots)} slots,"
                    f" {self._sizes[list_number]} counted, {marked[list_number]} marked"
                )
            previous = list_number - 1
            for slot in slots:
                if (
                    self._list_of[slot] != list_number
                    or self._prev[slot + self._num_lists] != previous
                ):
                    raise IntegrityError(f"slot {slot} is linked wrongly in list {list_number}")
                previous = slot + self._num_lists


KeyOf = Callable[[int], bytes]
MayEvict = Callable[[int], bool]

TICKS_PER_SECOND = 10_000
POSITION_BITS = 18
"""A stamp is a run's number (the ticks of its time, or more) and, in so many bits, a position."""


class EvictionPolicy(ABC):
    """Decides which chunks of a namespace are evicted first.

    Chunks are in lists ordered by their last use. A run is the chunks that one call inserted,
    refreshed or used. All times are seconds of a clock that never goes back, also over restarts.

    Args:
        num_slots: slots are numbered 0..num_slots - 1.
        key_of: returns the key of the chunk in a slot; called only for inserted slots.
        ghosts: of the namespace. A key has a ghost or a chunk here, never both.
    """

    lists: ClassVar[int]

    def __init__(self, num_slots: int, key_of: KeyOf, ghosts: Ghosts) -> None:
        self.num_slots = num_slots
        self.key_of = key_of
        self.ghosts = ghosts
        self._last_stamp = 0
        self.clear()

    def clear(self) -> None:
        """Remove all chunks. Ghosts and learned figures stay."""
        self._slots = SlotLists(self.num_slots, self.lists)
        self._reserved: dict[int, int] = {}  # slot -> the list that it was in

    @abstractmethod
    def insert_all(self, slots: Sequence[int], now: float) -> None:
        """Add chunks of an unfinished request that got slots; the hottest comes last."""

    @abstractmethod
    def restore(self, slots: npt.NDArray[np.int64], times: npt.NDArray[np.float64]) -> None:
        """Fill an empty policy with the previous daemon's chunks, the least recently used first.

        `times`: of each chunk's last use, in seconds.
        """

    @abstractmethod
    def refresh_all(self, slots: Sequence[int], now: float) -> None:
        """Make chunks that a load pins the newest, without counting a use; hottest last."""

    @abstractmethod
    def use_all(self, slots: Sequence[int], now: float, label: Label = Label.NONE) -> None:
        """Count a use of the chunks of a request that finished, the prompt's head last."""

    @abstractmethod
    def relabel_all(self, slots: Sequence[int], label: Label) -> None:
        """Change the label of a request that finished before; the prompt's head is last."""

    @abstractmethod
    def reserve(self, n: int, may_evict: MayEvict, now: float) -> list[int]:
        """Return up to `n` chunks to evict next, in order. They stay, but are no candidates."""

    @abstractmethod
    def learn(self) -> bool:
        """Do one bounded piece of learning; return whether more is due."""

    @abstractmethod
    def _leave_ghost(self, slot: int, list_number: int, now: float) -> None:
        """Add a ghost of a chunk of list `list_number` that is evicted."""

    def release(self, slots: Iterable[int]) -> None:
        """Make reserved chunks candidates again, at their old positions."""
        by_list: dict[int, list[int]] = {}
        for slot in sorted(slots, key=self._slots.stamp):
            by_list.setdefault(self._reserved.pop(slot), []).append(slot)
        for list_number, colder_first in by_list.items():
            self._slots.insert_all(list_number, colder_first)

    def is_reserved(self, slot: int) -> bool:
        """Whether the chunk is reserved: `reserve` returned it, and nothing else followed."""
        return slot in self._reserved

    @property
    def num_reserved(self) -> int:
        """The number of reserved chunks."""
        return len(self._reserved)

    def evict(self, slots: Iterable[int], now: float) -> None:
        """Remove chunks, reserved or not, and add a ghost of each."""
        for slot in slots:
            list_number = self._reserved.pop(slot, 0) or self._slots.remove(slot)
            self._leave_ghost(slot, list_number, now)

    def remove(self, slot: int) -> None:
        """Remove a chunk without a ghost, for a reason unrelated to its use."""
        if not self._reserved.pop(slot, 0):
            self._slots.remove(slot)

    def _unreserve(self, slots: Iterable[int]) -> None:
        """Release those of these chunks that are reserved."""
        if self._reserved:
            self.release([slot for slot in slots if slot in self._reserved])

    def _take_stamps(self, count: int, now: float) -> int:
        """Return the first of `count` stamps of a new run."""
        run = max((self._last_stamp >> POSITION_BITS) + 1, int(now * TICKS_PER_SECOND))
        first = run << POSITION_BITS
        self._last_stamp = first + count
        return first

    def _restore(
        self, list_number: int, slots: npt.NDArray[np.int64], times: npt.NDArray[np.float64]
    ) -> None:
        """`restore` into list `list_number`."""
        runs = (times * TICKS_PER_SECOND).astype(np.int64)
        stamps = (runs << POSITION_BITS) + np.arange(len(slots))
        self._slots.extend(list_number, slots, stamps)
        self._last_stamp = max(self._last_stamp, int(stamps.max(initial=0)))

    def _time(self, slot: int) -> float:
        """Return when the chunk was last inserted, refreshed or used, in seconds."""
        run: int = self._slots.stamp(slot) >> POSITION_BITS
        return run / TICKS_PER_SECOND

    def order(self) -> list[int]:
        """Return all slots, the least recently used first."""
        slots = [*self._reserved]
        for list_number in range(1, self.lists + 1):
            slots += self._slots.walk(list_number)
        return sorted(slots, key=self._slots.stamp)

    def __len__(self) -> int:
        return len(self._slots) + len(self._reserved)

    def __contains__(self, slot: int) -> bool:
        return bool(self._slots.list_of(slot)) or slot in self._reserved

    def check_integrity(self) -> None:
        """Raise IntegrityError if an invariant does not hold."""
        self._slots.check_integrity()
        self.ghosts.check_integrity()
        for slot, list_number in self._reserved.items():
            if self._slots.list_of(slot) or not 0 < list_number <= self.lists:
                raise IntegrityError(
                    f"slot {slot} is reserved from list {list_number}, and in a list"
                )
        for slot in self.order():
            if self.ghosts.find(self.key_of(slot)):
                raise IntegrityError(f"the chunk in slot {slot} has a ghost")


class LruPolicy(EvictionPolicy):
    """Evicts the least recently used chunks first."""

    lists = 1
    _SAME_LIST = (0, 1)

    def insert_all(self, slots: Sequence[int], now: float) -> None:
        """See EvictionPolicy."""
        for slot in slots:
            self.ghosts.take(self.key_of(slot))
        self._slots.append_all(slots, repeat(1), self._take_stamps(len(slots), now))

    def restore(self, slots: npt.NDArray[np.int64], times: npt.NDArray[np.float64]) -> None:
        """See EvictionPolicy."""
        self._restore(1, slots, times)

    def refresh_all(self, slots: Sequence[int], now: float) -> None:
        """See EvictionPolicy."""
        self._unreserve(slots)
        self._slots.move_all(slots, self._SAME_LIST, self._take_stamps(len(slots), now))

    def use_all(self, slots: Sequence[int], now: float, label: Label = Label.NONE) -> None:
        """See EvictionPolicy. Labels have no effect."""
        del label
        self.refresh_all(slots, now)

    def relabel_all(self, slots: Sequence[int], label: Label) -> None:
        """See EvictionPolicy. Labels have no effect."""

    def reserve(self, n: int, may_evict: MayEvict, now: float) -> list[int]:
        """See EvictionPolicy."""
        del now  # the order of the list suffices
        slots = list(islice(filter(may_evict, self._slots.walk(1)), max(0, n)))
        self._slots.remove_all(slots)
        self._reserved.update(dict.fromkeys(slots, 1))
        return slots

    def learn(self) -> bool:
        """See EvictionPolicy. LRU learns nothing."""
        return False

    def _leave_ghost(self, slot: int, list_number: int, now: float) -> None:
        del list_number
        self.ghosts.add(self.key_of(slot), GhostCause.EVICTED, now, used=self._time(slot))
