"""Ghosts, records of chunks that are not in memory, and why a key is missed.

A ghost takes at most 48 bytes in arrays: the key's hash instead of the key, two times and one byte.
Two keys of the same 64-bit hash share a ghost, which only makes a count wrong. A hash table finds
ghosts: buckets, each a chain. A ring links all ghosts in the order in which they were added. The
arrays are zero-filled lazily, so a namespace that evicts nothing uses no memory for them.

A missed key has one reason, the first of these that applies:

1. the key has a ghost, which says why its chunk left memory or was not stored; no key in memory has
   a ghost;
2. the directory has the key: it is being stored, or READY by now;
3. another namespace has the key;
4. the key was never seen, as far back as ghosts go. They end with the daemon.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from kvd.cache.directory import DirectoryWriter
from kvd.errors import IntegrityError
from kvd.metrics.counts import ChunkCounts, MissReason
from kvd_proto.directory import SlotState
from kvd_proto.messages import Label


class GhostCause(IntEnum):
    """Why a chunk is not in memory."""

    EVICTED = 0
    REFUSED = 1  # not stored: no slot on loan
    QUOTA = 2  # not stored: its model is at its cap
    RESET = 3
    REMOVED = 4  # by an operator


_CAUSES, _LABELS = tuple(GhostCause), tuple(Label)  # by value: faster than calling the enum


class Ghost(NamedTuple):
    """A chunk that is not in memory.

    Attributes:
        cause: why it is not.
        seen: finished requests that had the chunk, 3 for more.
        label: of the last of these requests.
        used: when the chunk was last used, in seconds.
        left_at: when it left memory, or was not stored, in seconds.
    """

    cause: GhostCause
    seen: int
    label: Label
    used: float
    left_at: float


class Ghosts:
    """The ghosts of one namespace: the latest of each key, and of all the latest `capacity`."""

    def __init__(self, capacity: int) -> None:
        # Ghost 0 is the head of the ring and in no bucket, so 0 means "none" everywhere.
        self._capacity = capacity
        length, buckets = capacity + 1, 1 << max(0, capacity - 1).bit_length()
        self._mask = buckets - 1
        self._buckets = np.zeros(buckets, np.uint32).data  # first ghost of each chain
        self._chain = np.zeros(length, np.uint32).data  # next ghost of the chain
        self._newer = np.zeros(length, np.uint32).data
        self._older = np.zeros(length, np.uint32).data
        self._hashes = np.zeros(length, np.int64).data
        self._used = np.zeros(8 * length, np.uint8).data.cast("d")
        self._left_at = np.zeros(8 * length, np.uint8).data.cast("d")
        self._facts = np.zeros(length, np.uint8).data  # cause << 5 | label << 2 | seen
        self._free = 0  # first of a chain of indices whose ghosts were taken
        self._touched = 0  # indices above this one never had a ghost
        self._count = 0

    def add(
        self,
        key: bytes,
        cause: GhostCause,
        now: float,
        *,
        used: float = 0.0,
        seen: int = 0,
        label: Label = Label.NONE,
    ) -> None:
        """Add a ghost as the newest, in place of an older one of the same key.

        `seen` 0: the chunk was refused, and not used since; the older ghost's seen, label and used
        stay.
        """
        key_hash = hash(key)
        ghost = self._find(key_hash)
        if ghost:
            self._unlink(ghost)
            if not seen:
                seen, label = self._facts[ghost] & 3, _LABELS[self._facts[ghost] >> 2 & 7]
                used = self._used[ghost]
        else:
            ghost = self._allocate()
            bucket = key_hash & self._mask
            self._chain[ghost] = self._buckets[bucket]
            self._buckets[bucket] = ghost
            self._hashes[ghost] = key_hash
            self._count += 1
        self._used[ghost] = used
        self._left_at[ghost] = now
        self._facts[ghost] = cause << 5 | label << 2 | seen
        newest = self._older[0]
        self._newer[newest] = ghost
        self._older[ghost] = newest
        self._newer[ghost] = 0
        self._older[0] = ghost

    def find(self, key: bytes) -> Ghost | None:
        """Return the key's ghost, or None."""
        ghost = self._find(hash(key))
        return self._ghost(ghost) if ghost else None

    def take(self, key: bytes) -> Ghost | None:
        """Remove and return the key's ghost, or None."""
        key_hash = hash(key)
        index = self._find(key_hash)
        if not index:
            return None
        ghost = self._ghost(index)
        self._drop(index, key_hash)
        self._chain[index] = self._free
        self._free = index
        return ghost

    def _find(self, key_hash: int) -> int:
        chain, hashes = self._chain, self._hashes
        ghost: int = self._buckets[key_hash & self._mask]
        while ghost and hashes[ghost] != key_hash:
            ghost = chain[ghost]
        return ghost

    def _ghost(self, index: int) -> Ghost:
        facts = self._facts[index]
        cause, label = _CAUSES[facts >> 5], _LABELS[facts >> 2 & 7]
        return Ghost(cause, facts & 3, label, self._used[index], self._left_at[index])

    def _allocate(self) -> int:
        """Return an unused index; if there is none, drop the oldest ghost and return its index."""
        if self._free:
            index = self._free
            self._free = self._chain[index]
        elif self._touched < self._capacity:
            self._touched = index = self._touched + 1
        else:
            index = self._newer[0]
            self._drop(index, self._hashes[index])
        return index

    def _drop(self, ghost: int, key_hash: int) -> None:
        """Remove a ghost from its bucket and from the ring."""
        chain, bucket = self._chain, key_hash & self._mask
        current: int = self._buckets[bucket]
        if current == ghost:
            self._buckets[bucket] = chain[ghost]
        else:
            while chain[current] != ghost:
                current = chain[current]
            chain[current] = chain[ghost]
        self._unlink(ghost)
        self._count -= 1

    def _unlink(self, ghost: int) -> None:
        newer, older = self._newer[ghost], self._older[ghost]
        self._newer[older] = newer
        self._older[newer] = older

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays once every index was used."""
        arrays = (self._buckets, self._chain, self._newer, self._older)
        values = (self._hashes, self._used, self._left_at, self._facts)
        return sum(array.nbytes for array in (*arrays, *values))

    def __len__(self) -> int:
        return self._count

    def check_integrity(self) -> None:
        """Raise IntegrityError if ring, buckets and counts disagree."""
        ring, ghost, previous = set[int](), self._newer[0], 0
        while ghost:
            if ghost in ring or self._older[ghost] != previous:
                raise IntegrityError(f"ghost {ghost} is linked wrongly in the ring")
            ring.add(ghost)
            ghost, previous = self._newer[ghost], ghost
        if self._older[0] != previous or not len(ring) == self._count <= self._capacity:
            raise IntegrityError(
                f"the ring has {len(ring)} ghosts, {self._count} counted, {self._capacity} allowed"
            )
        in_buckets = {ghost for ghost in ring if self._find(self._hashes[ghost]) == ghost}
        if in_buckets != ring:
            raise IntegrityError(f"ghosts in no bucket: {ring - in_buckets}")
        free, index = set[int](), self._free
        while index and index not in free:
            free.add(index)
            index = self._chain[index]
        if index or free & ring or len(free) + len(ring) != self._touched:
            raise IntegrityError(
                f"{len(free)} indices are free, {len(ring)} have ghosts, {self._touched} were used"
            )


_REASON_OF_CAUSE = tuple(MissReason[cause.name] for cause in GhostCause)


class MissReasons:
    """Counts the missed keys of one namespace by reason.

    Args:
        directory: of the namespace.
        ghosts: of the namespace.
        counts: `missed` and `missed_age` of these grow.
        elsewhere: tells whether another namespace has a key.
    """

    def __init__(
        self,
        directory: DirectoryWriter,
        ghosts: Ghosts,
        counts: ChunkCounts,
        elsewhere: Callable[[bytes], bool],
    ) -> None:
        self._directory = directory
        self._ghosts = ghosts
        self._counts = counts
        self._elsewhere = elsewhere

    def count(self, keys: Sequence[bytes], now: float) -> None:
        """Count each of these missed keys under its reason; `now` in seconds of the ghosts' clock.

        Call it before the stores of the same step begin: otherwise these would be `being_stored`.
        """
        reason_of = self.reason
        ages: list[float] = []
        reasons = list[MissReason]()
        for key in keys:
            reason, ghost = reason_of(key)
            reasons.append(reason)
            if ghost is not None and reason is MissReason.EVICTED:
                ages.append(now - ghost.left_at)
        for reason, count in Counter(reasons).items():
            self._counts.missed[reason] += count
        if ages:
            self._counts.missed_age.observe_all(np.array(ages))

    def reason(self, key: bytes) -> tuple[MissReason, Ghost | None]:
        """Return why the key is missed, and its ghost, if any."""
        ghost = self._ghosts.find(key)
        if ghost is not None:
            return _REASON_OF_CAUSE[ghost.cause], ghost
        slot = self._directory.find(key)
        if slot >= 0:
            ready = self._directory.state(slot) == SlotState.READY
            return MissReason.READY if ready else MissReason.BEING_STORED, None
        return MissReason.OTHER_LAYOUT if self._elsewhere(key) else MissReason.NEVER_SEEN, None
