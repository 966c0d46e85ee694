"""What engines have used a namespace's chunks for, and so which chunks go down to tiers.

Every use of a chunk (its store begun, pinned for a load, named by a request that has finished)
has a stamp, microseconds that always grow: a time and an order. A chunk's age at eviction says
whether the pool is large enough: those evicted within minutes would have been found by the
next turn of a conversation.

Two queues feed the tiers: chunks that are READY, and chunks that were asked for, that is pinned
for a load, or part of a second finished request; the first one stored them. The broker takes from
a queue when a tier has room. A queue pins no chunk: one that is evicted before its turn is left
out, and counted for the tiers.
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

_BEGUN, _STORED, _ASKED = range(3)


class DemotionQueue:
    """Chunks of one namespace that are to go down, those that came first in front.

    Args:
        directory: theirs.
    """

    def __init__(self, directory: DirectoryWriter) -> None:
        self._directory = directory
        self._missed = 0
        self._refs: deque[tuple[int, int]] = deque()

    def add(self, slots: list[int]) -> None:
        """These are READY. Where the queue is full its oldest go."""
        refs = self._refs
        refs.extend(zip(slots, map(self._directory.generation, slots), strict=True))
        while len(refs) > MAX_QUEUED:
            refs.popleft()
            self._missed += 1

    def take(self, n: int) -> list[tuple[bytes, int, int, int, int, int]]:
        """The next `n` chunks that are there still, fewer where many have gone.

        Returns:
            Key, slot, generation, first block, count of blocks and group of each.
        """
        refs, read = self._refs, self._directory.chunk
        found: list[tuple[bytes, int, int, int, int, int]] = []
        for _ in range(min(2 * n, len(refs))):
            if len(found) == n:
                break
            chunk = read(*refs.popleft())
            if chunk is None:
                self._missed += 1
            else:
                found.append(chunk)
        return found

    def take_missed(self) -> int:
        """How many chunks left memory before their turn, since the last call."""
        missed, self._missed = self._missed, 0
        return missed

    def __len__(self) -> int:
        """How many wait, with those that have gone."""
        return len(self._refs)


class DemotionQueues:
    """The queues of one namespace, and what each of its chunks has been used for.

    Args:
        directory: of the namespace.
        ready: whether some tier wants all chunks.
        asked: whether some tier wants those that were asked for.

    Attributes:
        on_ready: of chunks that have become READY; None where no tier wants them.
        on_asked: of READY chunks that have been asked for; None where no tier wants them.
    """

    def __init__(self, directory: DirectoryWriter, *, ready: bool, asked: bool) -> None:
        self._directory = directory
        self.on_ready = DemotionQueue(directory) if ready else None
        self.on_asked = DemotionQueue(directory) if asked else None
        marks = np.zeros(directory.num_slots, np.uint8)
        there = directory.slots_in(SlotState.READY)
        for slots in (directory.slots_in(SlotState.WRITING), there):  # who used these nobody knows
            marks[slots] = _STORED
        self._marks = marks.data
        if self.on_ready is not None:  # those of the daemon before
            self.on_ready.add(there[-MAX_QUEUED:])

    def begun(self, slots: list[int]) -> None:
        """A request stores chunks here."""
        for slot in slots:
            self._marks[slot] = _BEGUN

    def ready(self, slots: list[int]) -> None:
        """These are READY from now on."""
        if self.on_ready is not None:
            self.on_ready.add(slots)
        if self.on_asked is not None:
            self.on_asked.add([slot for slot in slots if self._marks[slot] == _ASKED])

    def promoted(self, slot: int) -> None:
        """A chunk that came up from a tier, because it was asked for, is READY.

        It goes down again only where there is a tier that does not have it.
        """
        self._marks[slot] = _ASKED
        tiers = self._directory.tiers
        place = tiers.find(self._directory.key(slot)) if tiers is not None else None
        if tiers is None or place is None or place.tiers != (1 << tiers.num_tiers) - 1:
            self.ready([slot])

    def put_failed(self, slot: int, generation: int) -> None:
        """A tier could not keep this chunk: it goes down again when it is asked for once more."""
        if self._directory.generation(slot) == generation:
            self._marks[slot] = _STORED

    def pinned(self, slots: list[int]) -> None:
        """These READY chunks are about to be loaded."""
        marks, new = self._marks, []
        for slot in slots:
            if marks[slot] != _ASKED:
                marks[slot] = _ASKED
                new.append(slot)
        if new and self.on_asked is not None:
            self.on_asked.add(new)

    def finished(self, slots: list[int]) -> None:
        """A request has finished that used these, READY or not yet."""
        marks, state, new = self._marks, self._directory.state, []
        for slot in slots:
            if (mark := marks[slot]) != _ASKED:
                marks[slot] = mark + 1
                if mark == _STORED and state(slot) == SlotState.READY:
                    new.append(slot)
        if new and self.on_asked is not None:
            self.on_asked.add(new)


class ChunkUses:
    """The last uses of one namespace's chunks.

    Args:
        stamps: one for each slot.
        pool: whose stamps grow over all namespaces.
        counts: of evicted chunks.

    Attributes:
        demotion_queues: which chunks are to go down to tiers; None where no tier wants any.
    """

    def __init__(self, stamps: npt.NDArray[np.uint64], pool: Pool, counts: ChunkCounts) -> None:
        self._counts = counts
        self._stamps = stamps
        self._marks = stamps.data  # for few of them
        self._pool = pool
        self._now = 0  # microseconds
        self.demotion_queues: DemotionQueues | None = None

    def set_time(self, now: float) -> None:
        """Set the time, `now`, in seconds of a clock that never goes back, also over restarts."""
        self._now = max(self._now, int(now * 1e6))

    @property
    def now(self) -> float:
        """The time that was set last, in seconds."""
        return self._now / 1e6

    def mark(self, slots: list[int]) -> None:
        """Note that these were of use now, the hottest first."""
        if slots:
            last = self._pool.tick(len(slots), self._now)
            if len(slots) <= FEW:
                for slot in slots:
                    self._marks[slot] = last
                    last -= 1
                return
            self._stamps[slots[::-1]] = np.arange(last - len(slots) + 1, last + 1, dtype=np.uint64)

    def count_evicted(self, slots: Sequence[int]) -> None:
        """Count chunks that were evicted from these slots, and how long they were of no use."""
        if slots:
            self._counts.eviction_age.observe_all(self.ages(slots))
            self._counts.evicted += len(slots)

    def ages(self, slots: Sequence[int]) -> npt.NDArray[np.float64]:
        """Seconds, to the millisecond, since each of these chunks was of use."""
        # Stamps of uses at the same moment are a microsecond apart.
        ages = np.maximum(self._now - self._stamps[slots].astype(np.float64), 0.0)
        rounded: npt.NDArray[np.float64] = np.round(ages / 1e6, 3)
        return rounded


class Loads:
    """What requests use of one namespace's chunks."""

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
        """Pin chunks for so many seconds, under the owner's number of the lease: [n] each.

        Those that are not READY any more with their generations come too late.
        """
        self._uses.set_time(now)
        pinned = self._directory.ready(slots, generations)
        if pinned:
            self._slots.unpinned(self._slots.leases.hold(owner, number, pinned, now, now + seconds))
            used = list(dict.fromkeys(pinned))
            self._slots.end_loans(used)
            policy = self._slots.policy  # a chunk that a fuller store has replaced is not in it
            policy.refresh_all([slot for slot in reversed(used) if slot in policy], now)
            self._uses.mark(used)
            if self._uses.demotion_queues is not None:
                self._uses.demotion_queues.pinned(used)
        counts = self._counts
        counts.asked += len(slots)
        counts.hits += len(pinned)
        counts.pins_late += len(slots) - len(pinned)
        counts.leases += bool(pinned)

    def count_refused_pin(self, chunks: int) -> None:
        """Count chunks that are not pinned, because their owner has too many leases."""
        self._counts.asked += chunks
        self._counts.pins_refused += chunks

    def unpin(self, lease_id: int, owner: int) -> bool:
        """Give a lease back. False where it has run out or is not this session's."""
        unpinned = self._slots.leases.release(lease_id, owner)
        if unpinned is None:
            return False
        self._slots.unpinned(unpinned)
        return True

    def refresh(self, keys: Sequence[bytes], now: float, label: Label = Label.NONE) -> int:
        """A request with these keys has finished, its head first.

        Those that are here are as recent as the request, whether their bytes are here already or
        not, and their loans end.

        Returns:
            How many of them, each counted once, are here.
        """
        slots = self._find(keys)
        self._slots.end_loans(slots)
        # The tail of a prompt is useless without its head, so it has to look colder.
        self._slots.policy.use_all(slots[::-1], now, label)
        self._uses.set_time(now)
        self._uses.mark(slots)
        if self._uses.demotion_queues is not None:
            self._uses.demotion_queues.finished(slots)
        return len(slots)

    def relabel(self, keys: Sequence[bytes], label: Label) -> None:
        """A request that has finished before gets another label, if its last chunk is here.

        Where that is gone, the deepest chunk left may be another request's too. Loans end anyway.
        """
        slots = self._find(keys)
        self._slots.end_loans(slots)
        if slots and self._directory.find(keys[-1]) >= 0:
            self._slots.policy.relabel_all(slots[::-1], label)

    def _find(self, keys: Sequence[bytes]) -> list[int]:
        """The slots of those of these keys that are here, each once."""
        found = dict.fromkeys(map(self._directory.find, keys))
        found.pop(-1, None)
        return list(found)
