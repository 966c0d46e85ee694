"""When the chunks of a namespace were used, and which of them tiers are to keep.

A chunk is used when its store begins, when a load pins it, and when a request that has it finishes.
Each use has a stamp: microseconds that always grow, so both a time and an order. A chunk's age at
eviction tells whether the pool is large enough: a conversation's next turn would have found chunks
that were evicted within minutes.

Two queues feed the tiers: of chunks that became READY, and of chunks that were asked for. A chunk
is asked for when a load pins it, or when a second request that has it finishes (the first one
stored it). The broker takes chunks from a queue when a tier has room. A queue pins no chunk: a
chunk that is evicted before its turn is skipped and counted.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvd.cache.directory import DirectoryWriter
from kvd.cache.slots import Slots
from kvd.metrics.counts import ChunkCounts
from kvd.pool.pool import Pool
from kvd_proto.directory import SlotState
from kvd_proto.jobs import FEW
from kvd_proto.messages import Label

MAX_QUEUED = 65_536

_NO_USE, _ONE_USE, _ASKED = range(3)
"""Marks of a slot, which only grow: no finished request has its chunk, one has, or it is asked for
(a load pinned it, or two have).
"""


class DemotionQueue:
    """Chunks of one namespace to demote, first in, first out. `directory` is the namespace's."""

    def __init__(self, directory: DirectoryWriter) -> None:
        self._directory = directory
        self._missed = 0
        self._refs: deque[tuple[int, int]] = deque()

    def add(self, slots: list[int]) -> None:
        """Append READY chunks; if the queue is full, the oldest are dropped and counted."""
        refs = self._refs
        refs.extend(zip(slots, map(self._directory.generation, slots), strict=True))
        while len(refs) > MAX_QUEUED:
            refs.popleft()
            self._missed += 1

    def take(self, n: int) -> list[tuple[bytes, int, int, int, int, int]]:
        """Remove and return up to `n` chunks that are still READY; looks at 2 n at most.

        Returns:
            Key, slot, generation, first block, count of blocks and group of each.
        """
        refs, read = self._refs, self._directory.chunk
        chunks: list[tuple[bytes, int, int, int, int, int]] = []
        for _ in range(min(2 * n, len(refs))):
            if len(chunks) == n:
                break
            chunk = read(*refs.popleft())
            if chunk is None:
                self._missed += 1
            else:
                chunks.append(chunk)
        return chunks

    def take_missed(self) -> int:
        """Return how many chunks were dropped or left memory before their turn since last time."""
        missed, self._missed = self._missed, 0
        return missed

    def __len__(self) -> int:
        """Return the number of queued chunks, with those that have left memory."""
        return len(self._refs)


class DemotionQueues:
    """The queues of one namespace, and for each of its chunks whether it was asked for.

    Args:
        directory: of the namespace.
        ready: a tier keeps all chunks.
        asked: a tier keeps those that were asked for.

    Attributes:
        ready_queue: chunks to demote to tiers with `keep=all`: all that became READY, but promoted
            ones only if some tier lacks them. None without `ready`.
        asked_queue: chunks to demote to tiers with `keep=asked`: READY ones that a load pinned,
            that two finished requests had, or that were promoted and some tier lacks. None without
            `asked`.
    """

    def __init__(self, directory: DirectoryWriter, *, ready: bool, asked: bool) -> None:
        self._directory = directory
        self.ready_queue = DemotionQueue(directory) if ready else None
        self.asked_queue = DemotionQueue(directory) if asked else None
        marks = np.zeros(directory.num_slots, np.uint8)
        ready_slots = directory.slots_in(SlotState.READY)
        for slots in (directory.slots_in(SlotState.WRITING), ready_slots):  # uses are not known
            marks[slots] = _ONE_USE
        self._marks = marks.data
        if self.ready_queue is not None:  # chunks of the previous daemon
            self.ready_queue.add(ready_slots[-MAX_QUEUED:])

    def note_begun(self, slots: list[int]) -> None:
        """Reset the marks of slots in which a request stores chunks."""
        for slot in slots:
            self._marks[slot] = _NO_USE

    def note_ready(self, slots: list[int]) -> None:
        """Queue chunks that became READY."""
        if self.ready_queue is not None:
            self.ready_queue.add(slots)
        if self.asked_queue is not None:
            self.asked_queue.add([slot for slot in slots if self._marks[slot] == _ASKED])

    def note_promoted(self, slot: int) -> None:
        """Mark a promoted chunk that became READY as asked for; queue it if some tier lacks it."""
        self._marks[slot] = _ASKED
        tiers = self._directory.tiers
        entry = tiers.find(self._directory.key(slot)) if tiers is not None else None
        if tiers is None or entry is None or entry.tiers != (1 << tiers.num_tiers) - 1:
            self.note_ready([slot])

    def note_put_failed(self, slot: int, generation: int) -> None:
        """Mark a chunk that a tier could not keep: the next use queues it again."""
        if self._directory.generation(slot) == generation:
            self._marks[slot] = _ONE_USE

    def note_pinned(self, slots: list[int]) -> None:
        """Mark READY chunks that a load pins as asked for; queue those that were not."""
        marks, asked = self._marks, []
        for slot in slots:
            if marks[slot] != _ASKED:
                marks[slot] = _ASKED
                asked.append(slot)
        if asked and self.asked_queue is not None:
            self.asked_queue.add(asked)

    def note_finished(self, slots: list[int]) -> None:
        """Count a finished request for each of these chunks, READY or WRITING.

        The second one makes a chunk asked for: queued now if READY, otherwise by `note_ready`.
        """
        marks, state, asked = self._marks, self._directory.state, []
        for slot in slots:
            if (mark := marks[slot]) != _ASKED:
                marks[slot] = mark + 1  # the next of the three marks
                if mark == _ONE_USE and state(slot) == SlotState.READY:
                    asked.append(slot)
        if asked and self.asked_queue is not None:
            self.asked_queue.add(asked)


class ChunkUses:
    """The last uses of one namespace's chunks.

    Args:
        stamps: one for each slot, updated here.
        pool: gives stamps that grow over all namespaces.
        counts: `evicted` and `eviction_age` of these grow.

    Attributes:
        demotion_queues: the chunks to demote to tiers; None if no tier keeps any.
    """

    def __init__(self, stamps: npt.NDArray[np.uint64], pool: Pool, counts: ChunkCounts) -> None:
        self._counts = counts
        self._stamps = stamps
        self._stamps_view = stamps.data  # faster for few of them
        self._pool = pool
        self._now = 0  # microseconds
        self.demotion_queues: DemotionQueues | None = None

    def set_time(self, now: float) -> None:
        """Set the time, in seconds of a clock that never goes back, also over restarts."""
        self._now = max(self._now, int(now * 1e6))

    @property
    def now(self) -> float:
        """The time that was set last, in seconds."""
        return self._now / 1e6

    def stamp(self, slots: list[int]) -> None:
        """Note that these chunks were used now, the hottest first."""
        if slots:
            last = self._pool.next_stamps(len(slots), self._now)
            if len(slots) <= FEW:
                for slot in slots:
                    self._stamps_view[slot] = last
                    last -= 1
                return
            self._stamps[slots[::-1]] = np.arange(last - len(slots) + 1, last + 1, dtype=np.uint64)

    def count_evicted(self, slots: Sequence[int]) -> None:
        """Count chunks that were evicted from these slots, with their ages."""
        if slots:
            self._counts.eviction_age.observe_all(self.ages(slots))
            self._counts.evicted += len(slots)

    def ages(self, slots: Sequence[int]) -> npt.NDArray[np.float64]:
        """Return for each of these chunks the seconds since its last use."""
        # Rounded to milliseconds: stamps of uses at the same moment are a microsecond apart.
        ages = np.maximum(self._now - self._stamps[slots].astype(np.float64), 0.0)
        rounded: npt.NDArray[np.float64] = np.round(ages / 1e6, 3)
        return rounded


class Loads:
    """What requests do with one namespace's chunks: pin them for loads, and finish."""

    def __init__(self, slots: Slots, uses: ChunkUses) -> None:
        self._slots = slots
        self._directory = slots.directory
        self._uses = uses
        self._counts = slots.counts

    def pin(  # noqa: PLR0917 a lease has these parts
        self,
        number: int,
        slots: Sequence[int],
        generations: Sequence[int],
        owner: int,
        now: float,
        seconds: float,
    ) -> None:
        """Pin chunks ([n] slots and generations) with a lease for `seconds`, and refresh them.

        Chunks that are no longer READY with their generations are counted as late. A lease that the
        owner has under the same number ends. Loans of the slots end.
        """
        self._uses.set_time(now)
        pinned = self._directory.ready(slots, generations)
        if pinned:
            self._slots.free_unpinned(
                self._slots.leases.grant(owner, number, pinned, now, now + seconds)
            )
            used = list(dict.fromkeys(pinned))
            self._slots.end_loans(used)
            policy = self._slots.policy  # without chunks that a store of more blocks has replaced
            policy.refresh_all([slot for slot in reversed(used) if slot in policy], now)
            self._uses.stamp(used)
            if self._uses.demotion_queues is not None:
                self._uses.demotion_queues.note_pinned(used)
        counts = self._counts
        counts.asked += len(slots)
        counts.hits += len(pinned)
        counts.pins_late += len(slots) - len(pinned)
        counts.leases += bool(pinned)

    def count_refused_pin(self, chunks: int) -> None:
        """Count chunks that were not pinned because their owner has too many leases."""
        self._counts.asked += chunks
        self._counts.pins_refused += chunks

    def unpin(self, lease_id: int, owner: int) -> bool:
        """End a lease; False if it has expired or is not this owner's."""
        unpinned = self._slots.leases.release(lease_id, owner)
        if unpinned is None:
            return False
        self._slots.free_unpinned(unpinned)
        return True

    def refresh(self, keys: Sequence[bytes], now: float, label: Label = Label.NONE) -> int:
        """Refresh the chunks of a request that has finished; `keys`: a prompt's head first.

        READY and WRITING chunks become the most recently used, and their loans end. Returns their
        number.
        """
        slots = self._find(keys)
        self._slots.end_loans(slots)
        # The tail of a prompt is useless without its head, so the tail gets older stamps.
        self._slots.policy.use_all(slots[::-1], now, label)
        self._uses.set_time(now)
        self._uses.stamp(slots)
        if self._uses.demotion_queues is not None:
            self._uses.demotion_queues.note_finished(slots)
        return len(slots)

    def relabel(self, keys: Sequence[bytes], label: Label) -> None:
        """Change the label of a request that has finished before; loans of its slots end.

        Without its last chunk the label stays: the deepest chunk left may be of another request.
        """
        slots = self._find(keys)
        self._slots.end_loans(slots)
        if slots and self._directory.find(keys[-1]) >= 0:
            self._slots.policy.relabel_all(slots[::-1], label)

    def _find(self, keys: Sequence[bytes]) -> list[int]:
        """Return the slots of the READY and WRITING chunks of these keys, each once."""
        slots = dict.fromkeys(map(self._directory.find, keys))
        slots.pop(-1, None)
        return list(slots)
