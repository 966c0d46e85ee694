"""Which chunks are to go down to tiers: those that are READY, or those that were asked for.

A chunk is asked for when it is pinned for a load, or when a second request finishes that used it;
the first one stored it. The broker takes from the queues when a tier has room for more. A queue
pins no chunk: one that is evicted before its turn is left out, and counted for the tiers.
"""

from collections import deque

import numpy as np

from kvd.cache.directory import DirectoryWriter
from kvd_proto.directory import SlotState

MOST = 65_536

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
        while len(refs) > MOST:
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
            self.on_ready.add(there[-MOST:])

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
