"""The adaptive policy: evicts the chunks that bring the fewest hits per second of being kept.

**Classes.** A touch is a finished request that has the chunk. A chunk's class is its number of
touches (1, 2, 3 or more) and the label of the last one. For each class c the policy counts touches,
n, and next uses by age, u_j: bin j begins e_j = 2^(j/3) - 1 seconds after the touch. Next uses
include those of evicted chunks, whose ghosts have class and last touch.

**Gain.** From these counts follows the most hits a second that keeping a chunk of class c and age a
can still bring::

    S_0 = 1;  S_j+1 = max(0.001, S_j - u_j / n)                 share still unused at e_j
    gain(a) = max over x >= a of  sum_{j=a..x} u_j / n
                                / sum_{j=a..x} (S_j + S_j+1) / 2 * (e_j+1 - e_j)

**Victims.** Each class has a list in LRU order. The next victim is in the oldest or newest run of a
list, whichever run has the smallest gain; within a run the deepest chunk goes first. Evicting from
the newest run keeps a part of a working set that is larger than the pool. A class of fewer than 200
touches has a gain of at least 0.3 / (age + 60), and only its oldest run is considered: so a policy
that has not learned yet is LRU.

Chunks of unfinished requests are in separate lists, one for each class, whose oldest runs alone are
considered. Untouched chunks, with those of the previous daemon, are class 0: their gain is the best
of the classes touched once, since their label is not known yet.

**LRU as the floor.** While `LruFloor` says so the policy is LRU: for the first 300 requests, and
for some time after LRU would have found more. LRU keeps the chunks that were touched last, so the
times of last touches tell which chunks LRU would have found, without a second cache.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import log2
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvd.cache.eviction import (
    POSITION_BITS,
    TICKS_PER_SECOND,
    EvictionPolicy,
    KeyOf,
    LruPolicy,
    MayEvict,
)
from kvd.cache.ghosts import GhostCause, Ghosts
from kvd.errors import IntegrityError
from kvd_proto.messages import Label

NUM_INTERVALS = 256  # for a full pool; there are at most twice as many


class LruContents:
    """How many chunks LRU would hold, by interval of their last touch. Times never go back."""

    def __init__(self) -> None:
        self._begins: list[float] = []  # of intervals, oldest first; each ends at the next begin
        self._counts: list[int] = []  # chunks, by interval
        self._total = 0

    def touch(self, last: float | None, count: int, now: float) -> int:
        """Touch `count` chunks, last touched at `last` or never; how many LRU would find."""
        interval = -1 if last is None else bisect_right(self._begins, last) - 1
        hits = min(count, self._counts[interval]) if interval >= 0 else 0
        if hits:
            self._counts[interval] -= hits
        if not self._begins or (
            now > self._begins[-1] and self._counts[-1] * NUM_INTERVALS > self._total
        ):
            if len(self._begins) == 2 * NUM_INTERVALS:
                self._merge()
            self._begins.append(now)
            self._counts.append(0)
        self._counts[-1] += count
        self._total += count - hits
        return hits

    def shrink(self, num_chunks: int) -> None:
        """Evict all but the `num_chunks` chunks that were touched last."""
        num_empty = 0
        while self._total > num_chunks:
            evicted = min(self._counts[num_empty], self._total - num_chunks)
            self._counts[num_empty] -= evicted
            self._total -= evicted
            num_empty += not self._counts[num_empty]
        del self._begins[:num_empty], self._counts[:num_empty]

    def _merge(self) -> None:
        """Merge pairs of intervals; most have few chunks left that were not touched since."""
        self._begins = self._begins[::2]
        self._counts = [sum(self._counts[i : i + 2]) for i in range(0, len(self._counts), 2)]

    def __len__(self) -> int:
        return self._total

    def check_integrity(self) -> None:
        """Raise IntegrityError if counts contradict each other, or times go back."""
        if sum(self._counts) != self._total or min(self._counts, default=0) < 0:
            raise IntegrityError(f"{self._total} chunks in intervals of {self._counts}")
        if self._begins != sorted(self._begins) or len(self._begins) != len(self._counts):
            raise IntegrityError(f"intervals begin at {self._begins}")


class LruFloor:
    """Switches to LRU while LRU would find more than the learned policy.

    Args:
        first: number of requests at the beginning for which LRU decides.

    Attributes:
        lru_decides: whether LRU decides now.
    """

    window = 500
    """In requests: older ones weigh less than 1 / e."""
    allowance = 3
    """LRU takes over when the policy lags behind it by the chunks of so many requests."""
    min_lru_requests, max_lru_requests = 250, 32_000
    """LRU then decides for so many requests; four times as many each time, until the learned policy
    has stayed in charge for four windows."""

    def __init__(self, first: int) -> None:
        self.lru_decides = first > 0
        self._lru = LruContents()
        self._lru_until = first  # LRU decides until this number of requests
        self._learned_since = 0  # the learned policy decides from this number of requests on
        self._lru_requests = self.min_lru_requests
        self._requests = 0
        self._window_requests = 0.0
        self._touched = self._lead = 0.0  # chunks in the window; hits in the pool less LRU's

    def touch(self, last: float | None, count: int, now: float, *, in_pool: bool) -> None:
        """Count a request's touch of `count` chunks, all of them last touched at `last`, or never.

        Args:
            last: seconds.
            count: of chunks.
            now: seconds.
            in_pool: these chunks were in the pool.
        """
        lru_hits = self._lru.touch(last, count, now)
        self._touched += count
        self._lead += (count if in_pool else 0) - lru_hits

    def end_request(self, num_chunks: int) -> None:
        """End a request, whose touches were all counted; the pool has `num_chunks`."""
        self._lru.shrink(num_chunks)
        self._requests += 1
        if self.lru_decides:
            if self._requests >= self._lru_until:
                self.lru_decides, self._learned_since = False, self._requests
                self._window_requests = self._touched = self._lead = 0.0
            return
        self._window_requests += 1
        # lead < -allowance * (touched / requests), without a division
        loss = -self._lead * self._window_requests
        if loss > self.allowance * self._touched:
            self.lru_decides, self._lru_until = True, self._requests + self._lru_requests
            self._lru_requests = min(4 * self._lru_requests, self.max_lru_requests)
        elif self._requests - self._learned_since > 4 * self.window and self._lead >= 0:
            self._lru_requests = self.min_lru_requests
        decay = 1 - 1 / self.window
        self._window_requests *= decay
        self._touched *= decay
        self._lead *= decay

    def check_integrity(self) -> None:
        """Raise IntegrityError if an invariant does not hold."""
        self._lru.check_integrity()
        if self._touched < 0 or abs(self._lead) > self._touched + 1e-6:
            raise IntegrityError(f"leads by {self._lead} of {self._touched} chunks")


BINS = 48
BINS_PER_OCTAVE = 3
_LABELS = len(Label)
_CLASSES = 1 + 3 * _LABELS
_UNDER_WAY = _CLASSES
"""List c has the chunks of class c, list _UNDER_WAY + c those of them with unfinished requests."""
_LISTS = 2 * _CLASSES - 1
_WIDTH = 1 + BINS
"""Counts of one class: touches, then next uses by age. The counts of class 0 are not used."""

_EDGES = 2 ** (np.arange(BINS + 1) / BINS_PER_OCTAVE) - 1
_BIN_SECONDS = np.diff(_EDGES)
_FROM_AGE = ~np.tri(BINS, BINS, -1, dtype=bool)  # [age, x]: x >= age

_End = tuple[float, int, int, bool, int]
"""A run at an end of a list: gain, stamp, list, whether it is the hot end, a slot of the run."""
_Skipped = dict[tuple[int, bool], int | None]
"""List, whether it is the hot end -> the last slot from there that may not be evicted, or None."""


def _class(seen: int, label: int) -> int:
    return 1 + (seen - 1) * _LABELS + label


_SEEN_AND_LABEL = ((0, Label.NONE), *((seen, label) for seen in (1, 2, 3) for label in Label))

# By list; 0 is none:
_CLASS_OF = (0, *range(1, _CLASSES), *range(_CLASSES))
_INTO_UNDER_WAY = tuple(_UNDER_WAY + chunk_class for chunk_class in _CLASS_OF)
_INTO_USED = tuple(
    tuple(_class(min(3, _SEEN_AND_LABEL[kind][0] + 1), label) for kind in _CLASS_OF)
    for label in Label
)


def age_bin(age: float) -> int:
    """Return the bin of an age in seconds."""
    return min(BINS - 1, int(BINS_PER_OCTAVE * log2(1 + max(0.0, age))))


def gains(touches: float, next_uses: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the gain by age bin: the most hits a second that a chunk of this age can still bring.

    The formula is in the module's docstring.

    Args:
        touches: of the class, above 0.
        next_uses: of the class: [BINS], how many touches had their next use at that age.
    """
    hits_until = np.concatenate(([0.0], np.cumsum(next_uses / touches)))
    unused = np.maximum(0.001, 1 - hits_until)
    kept_seconds = (unused[:-1] + unused[1:]) / 2 * _BIN_SECONDS
    seconds_until = np.concatenate(([0.0], np.cumsum(kept_seconds)))
    hits_between = hits_until[None, 1:] - hits_until[:-1, None]  # [age, x]
    seconds_between = seconds_until[None, 1:] - seconds_until[:-1, None]
    rates = np.divide(hits_between, seconds_between, where=_FROM_AGE, out=np.zeros((BINS, BINS)))
    best: npt.NDArray[np.float64] = rates.max(axis=1)
    return best


class AdaptivePolicy(EvictionPolicy):
    """Evicts the chunks of smallest gain first; the module's docstring explains the gain."""

    lists = _LISTS
    min_touches: ClassVar[int] = 200
    """A class with fewer has a gain that falls with age; only its oldest run is considered."""
    requests_per_lesson: ClassVar[int] = 100
    """Gains are recomputed after so many finished requests."""
    requests_per_decay: ClassVar[int] = 1000
    """Counts are multiplied by 0.9 after so many finished requests."""
    first_requests: ClassVar[int] = 300
    """LRU decides until so many requests have finished."""

    def __init__(self, num_slots: int, key_of: KeyOf, ghosts: Ghosts) -> None:
        super().__init__(num_slots, key_of, ghosts)
        self._used = np.zeros(8 * num_slots, np.uint8).data.cast("d")  # last touch, s, by slot
        self._is_new = bytearray(num_slots)  # by slot: not touched since the chunk was inserted
        self._floor = LruFloor(self.first_requests)
        self._now = 0.0
        self._requests = 0
        self._table = np.zeros((_CLASSES, _WIDTH))
        self._counts = memoryview(self._table.reshape(-1).view(np.uint8).data).cast("d")
        self._gain_table = np.zeros((_CLASSES, BINS))
        self._gains = memoryview(self._gain_table.reshape(-1).view(np.uint8).data).cast("d")
        self._has_min_touches = [False] * _CLASSES
        self._due: list[int] = []  # classes whose gains are to be computed

    def clear(self) -> None:
        """See EvictionPolicy."""
        super().clear()
        self._run_starts: dict[int, int] = {}  # list -> where its newest run starts, as a hint

    def insert_all(self, slots: Sequence[int], now: float) -> None:
        """See EvictionPolicy. A chunk with a ghost gets the ghost's class."""
        self._now = now
        take, key_of, into = self.ghosts.take, self.key_of, [_UNDER_WAY] * len(slots)
        for position, slot in enumerate(slots):
            ghost = take(key_of(slot))
            self._is_new[slot] = 1
            if ghost is not None and ghost.seen:
                into[position] = _UNDER_WAY + _class(ghost.seen, ghost.label)
                self._used[slot] = ghost.used
        self._slots.append_all(slots, into, self._take_stamps(len(slots), now))

    def restore(self, slots: npt.NDArray[np.int64], times: npt.NDArray[np.float64]) -> None:
        """See EvictionPolicy."""
        self._restore(_UNDER_WAY, slots, times)

    def refresh_all(self, slots: Sequence[int], now: float) -> None:
        """See EvictionPolicy."""
        self._now = now
        self._unreserve(slots)
        self._slots.move_all(slots, _INTO_UNDER_WAY, self._take_stamps(len(slots), now))

    def use_all(self, slots: Sequence[int], now: float, label: Label = Label.NONE) -> None:
        """See EvictionPolicy."""
        self._now = now
        self._unreserve(slots)
        used, is_new, counts, into = self._used, self._is_new, self._counts, _INTO_USED[label]
        same_history = Counter(
            zip(
                map(self._slots.list_of, slots),
                map(used.__getitem__, slots),
                map(is_new.__getitem__, slots),
                strict=True,
            )
        )
        for slot in slots:
            used[slot] = now
            is_new[slot] = 0
        for (list_number, last, new), count in same_history.items():
            chunk_class = _CLASS_OF[list_number]
            counts[into[list_number] * _WIDTH] += count
            counts[chunk_class * _WIDTH + 1 + age_bin(now - last)] += count
            touched_before = chunk_class > 0
            self._floor.touch(
                last if touched_before else None, count, now, in_pool=touched_before and not new
            )
        self._slots.move_all(slots, into, self._take_stamps(len(slots), now))
        self._floor.end_request(len(self))
        self._requests += 1
        if self._requests % self.requests_per_decay == 0:
            self._table *= 0.9
        if self._requests % self.requests_per_lesson == 0:
            self._due = list(range(1, _CLASSES))

    def relabel_all(self, slots: Sequence[int], label: Label) -> None:
        """See EvictionPolicy. Chunks used or pinned since then keep their label."""
        lists, counts, moved = self._slots, self._counts, dict[int, list[int]]()
        run = lists.stamp(slots[0]) >> POSITION_BITS if slots else 0
        for slot in slots:
            list_number = self._reserved.get(slot) or lists.list_of(slot)
            if list_number >= _UNDER_WAY or lists.stamp(slot) >> POSITION_BITS != run:
                continue
            target = _class(_SEEN_AND_LABEL[list_number][0], label)
            if target == list_number:
                continue
            counts[list_number * _WIDTH] = max(0.0, counts[list_number * _WIDTH] - 1)
            counts[target * _WIDTH] += 1
            if slot in self._reserved:
                self._reserved[slot] = target
            else:
                lists.remove(slot)
                moved.setdefault(target, []).append(slot)
        for target, deepest_first in moved.items():
            lists.insert_all(target, deepest_first)

    def reserve(self, n: int, may_evict: MayEvict, now: float) -> list[int]:
        """See EvictionPolicy."""
        self._now = now
        lists = self._slots
        to_evict: list[int] = []
        skipped = _Skipped()
        ends = [
            end
            for list_number in range(1, _LISTS + 1)
            if lists.size(list_number)
            for hot in (False, True)
            if (end := self._end(list_number, hot, may_evict, skipped)) is not None
        ]
        heapify(ends)
        while ends and len(to_evict) < n:
            end = heappop(ends)
            if lists.list_of(end[4]) == end[2]:  # not yet reserved from the list's other end
                victims = self._victims(
                    end, ends[0] if ends else None, n - len(to_evict), may_evict
                )
                if not victims:  # the run's start is hotter than its chunks that may be evicted
                    self._run_starts.pop(end[2], None)
                lists.remove_all(victims)
                self._reserved.update(dict.fromkeys(victims, end[2]))
                to_evict += victims
            following = self._end(end[2], end[3], may_evict, skipped)
            if following is not None:
                heappush(ends, following)
        return to_evict

    def _end(
        self, list_number: int, hot: bool, may_evict: MayEvict, skipped: _Skipped
    ) -> _End | None:
        """Return the first run from one end of a list with a chunk that may be evicted, or None."""
        chunk_class = _CLASS_OF[list_number]
        if hot and (list_number >= _UNDER_WAY or not self._is_learned(chunk_class)):
            return None
        walk = self._slots.walk_back if hot else self._slots.walk
        last = skipped.get((list_number, hot))
        for slot in walk(list_number, last):
            if may_evict(slot):
                skipped[list_number, hot] = last
                stamp = self._slots.stamp(slot)
                run = stamp >> POSITION_BITS
                gain = self._gain(chunk_class, self._now - run / TICKS_PER_SECOND)
                return gain, run << POSITION_BITS if hot else stamp, list_number, hot, slot
            last = slot
        return None

    def _gain(self, chunk_class: int, age: float) -> float:
        age = max(0.0, age)
        gain = 0.0 if self.lru_decides else self._gains[chunk_class * BINS + age_bin(age)]
        return gain if self._is_learned(chunk_class) else max(gain, 0.3 / (age + 60))

    def _is_learned(self, chunk_class: int) -> bool:
        return self._has_min_touches[chunk_class] and not self.lru_decides

    def _victims(self, end: _End, limit: _End | None, n: int, may_evict: MayEvict) -> list[int]:
        """Return up to `n` chunks of a run, deepest first, that are evicted before run `limit`."""
        lists, (gain, _, list_number, hot, slot) = self._slots, end
        run = lists.stamp(slot) >> POSITION_BITS
        victims: list[int] = []
        # Of two runs of the same gain, chunks are evicted in the order of their stamps.
        last_stamp = limit[1] if limit is not None and limit[0] == gain and not hot else None
        for chunk in lists.walk_from(self._run_start(list_number, slot) if hot else slot):
            stamp = lists.stamp(chunk)
            if len(victims) == n or stamp >> POSITION_BITS != run:
                if hot:
                    self._run_starts[list_number] = chunk
                break
            if last_stamp is not None and stamp > last_stamp:
                break
            if may_evict(chunk):
                victims.append(chunk)
        return victims

    def _run_start(self, list_number: int, slot: int) -> int:
        """Return the deepest chunk of the run of `slot`."""
        lists, run = self._slots, self._slots.stamp(slot) >> POSITION_BITS
        start = self._run_starts.get(list_number, slot)
        if lists.list_of(start) != list_number or lists.stamp(start) >> POSITION_BITS != run:
            start = slot
        for chunk in lists.walk_back(list_number, start):
            if lists.stamp(chunk) >> POSITION_BITS != run:
                break
            start = chunk
        return start

    def learn(self) -> bool:
        """Compute the gains of one class, in some 0.1 ms; return whether more are due."""
        if self._due:
            chunk_class = self._due.pop()
            touches, next_uses = self._table[chunk_class, 0], self._table[chunk_class, 1:]
            if touches > 0:
                self._gain_table[chunk_class] = gains(touches, next_uses)
            self._has_min_touches[chunk_class] = bool(touches >= self.min_touches)
            if chunk_class <= _LABELS:  # touched once
                once = self._gain_table[1 : 1 + _LABELS][self._has_min_touches[1 : 1 + _LABELS]]
                self._gain_table[0] = once.max(axis=0, initial=0.0)
        return bool(self._due)

    def _leave_ghost(self, slot: int, list_number: int, now: float) -> None:
        seen, label = _SEEN_AND_LABEL[_CLASS_OF[list_number]]
        self.ghosts.add(
            self.key_of(slot),
            GhostCause.EVICTED,
            now,
            used=self._used[slot] if seen else self._time(slot),
            seen=seen,
            label=label,
        )

    @property
    def lru_decides(self) -> bool:
        """See `LruFloor`."""
        return self._floor.lru_decides

    @property
    def nbytes_learned(self) -> int:
        """Bytes of the counts and gains."""
        return self._table.nbytes + self._gain_table.nbytes

    def check_integrity(self) -> None:
        """See EvictionPolicy; counts and gains must be finite and not negative."""
        super().check_integrity()
        self._floor.check_integrity()
        for table in (self._table, self._gain_table):
            if not (np.isfinite(table).all() and (table >= 0).all()):
                raise IntegrityError(f"counts or gains are {table}")


POLICIES: dict[str, type[EvictionPolicy]] = {"adaptive": AdaptivePolicy, "lru": LruPolicy}
"""By the name in the configuration."""
