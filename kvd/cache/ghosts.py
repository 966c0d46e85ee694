"""What is remembered of chunks that are not in memory, and so why a key is missed.

A ghost is at most 48 bytes in arrays: the key's hash instead of the key, two times and one byte.
Two keys of the same 64-bit hash share a ghost; that falsifies a count, nothing else. Finding goes
through buckets, each a chain of ghosts; a ring links all ghosts in the order in which they were
added. Memory is zero-filled lazily, so a namespace that evicts nothing pays for none.

Each missed key has one reason. The reasons are looked for in this order:

1. a ghost of the key says why its chunk left memory, or never came in; no key in memory has one;
2. the directory has the key: it is being stored, or READY by now;
3. another namespace has the key;
4. none of these: the key was never seen, as far back as ghosts go. They end with the daemon.
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
    REFUSED = 1  # it was not stored: no slot on loan
    QUOTA = 2  # it was not stored, or had to go: its namespace's share of the pool
    RESET = 3
    REMOVED = 4  # by an operator


_CAUSES, _LABELS = tuple(GhostCause), tuple(Label)  # by value: faster than to make one of each


class Ghost(NamedTuple):
    """One chunk that is not in memory.

    Attributes:
        seen: finished requests that had the chunk, 3 for more; 0: none was counted.
        label: what the last of them was labelled.
        used: when the last of them finished, s.
        gone: when the chunk left, s.
    """

    cause: GhostCause
    seen: int
    label: Label
    used: float
    gone: float


class Ghosts:
    """The ghosts of one namespace: of each key the latest, of all the latest `capacity`."""

    def __init__(self, capacity: int) -> None:
        # Ghost 0 is the head of the ring and never in a bucket, so 0 means "none" everywhere.
        self._capacity = capacity
        places, buckets = capacity + 1, 1 << max(0, capacity - 1).bit_length()
        self._mask = buckets - 1
        self._buckets = np.zeros(buckets, np.uint32).data  # the first ghost of each chain
        self._chain = np.zeros(places, np.uint32).data  # the next one of the chain
        self._newer = np.zeros(places, np.uint32).data
        self._older = np.zeros(places, np.uint32).data
        self._hashes = np.zeros(places, np.int64).data
        self._used = np.zeros(8 * places, np.uint8).data.cast("d")
        self._gone = np.zeros(8 * places, np.uint8).data.cast("d")
        self._facts = np.zeros(places, np.uint8).data  # cause << 5 | label << 2 | seen
        self._free = 0  # a chain of the places whose ghosts were taken
        self._touched = 0  # places above this one never had a ghost
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
        """Remember a chunk as the newest ghost, in place of an older one of the same key.

        Where `seen` is 0, the older one's seen, label and used are kept: a chunk that was not
        stored has not been used since.
        """
        key_hash = hash(key)
        ghost = self._find(key_hash)
        if ghost:
            self._unlink(ghost)
            if not seen:
                seen, label = self._facts[ghost] & 3, _LABELS[self._facts[ghost] >> 2 & 7]
                used = self._used[ghost]
        else:
            ghost = self._take_place()
            bucket = key_hash & self._mask
            self._chain[ghost] = self._buckets[bucket]
            self._buckets[bucket] = ghost
            self._hashes[ghost] = key_hash
            self._count += 1
        self._used[ghost] = used
        self._gone[ghost] = now
        self._facts[ghost] = cause << 5 | label << 2 | seen
        newest = self._older[0]
        self._newer[newest] = ghost
        self._older[ghost] = newest
        self._newer[ghost] = 0
        self._older[0] = ghost

    def find(self, key: bytes) -> Ghost | None:
        """The key's ghost, or None."""
        ghost = self._find(hash(key))
        return self._ghost(ghost) if ghost else None

    def take(self, key: bytes) -> Ghost | None:
        """The key's ghost, which is forgotten, or None."""
        key_hash = hash(key)
        ghost = self._find(key_hash)
        if not ghost:
            return None
        found = self._ghost(ghost)
        self._drop(ghost, key_hash)
        self._chain[ghost] = self._free
        self._free = ghost
        return found

    def _find(self, key_hash: int) -> int:
        chain, hashes = self._chain, self._hashes
        ghost: int = self._buckets[key_hash & self._mask]
        while ghost and hashes[ghost] != key_hash:
            ghost = chain[ghost]
        return ghost

    def _ghost(self, ghost: int) -> Ghost:
        facts = self._facts[ghost]
        cause, label = _CAUSES[facts >> 5], _LABELS[facts >> 2 & 7]
        return Ghost(cause, facts & 3, label, self._used[ghost], self._gone[ghost])

    def _take_place(self) -> int:
        """A place for a ghost; the oldest ghost's where all are taken."""
        if self._free:
            place = self._free
            self._free = self._chain[place]
        elif self._touched < self._capacity:
            self._touched = place = self._touched + 1
        else:
            place = self._newer[0]
            self._drop(place, self._hashes[place])
        return place

    def _drop(self, ghost: int, key_hash: int) -> None:
        """Take a ghost out of its bucket and of the ring."""
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
        """Bytes of all arrays, where every place has a ghost."""
        arrays = (self._buckets, self._chain, self._newer, self._older)
        values = (self._hashes, self._used, self._gone, self._facts)
        return sum(array.nbytes for array in (*arrays, *values))

    def __len__(self) -> int:
        return self._count

    def check_integrity(self) -> None:
        """Raise IntegrityError where ring, buckets and counts disagree."""
        ring, ghost, before = set[int](), self._newer[0], 0
        while ghost:
            if ghost in ring or self._older[ghost] != before:
                raise IntegrityError(f"ghost {ghost} is linked wrongly: {self!r}")
            ring.add(ghost)
            ghost, before = self._newer[ghost], ghost
        if self._older[0] != before or not len(ring) == self._count <= self._capacity:
            raise IntegrityError(f"the ring has {len(ring)} ghosts: {self!r}")
        found = {ghost for ghost in ring if self._find(self._hashes[ghost]) == ghost}
        if found != ring:
            raise IntegrityError(f"ghosts that no bucket has: {ring - found}")
        free, place = set[int](), self._free
        while place and place not in free:
            free.add(place)
            place = self._chain[place]
        if place or free & ring or len(free) + len(ring) != self._touched:
            raise IntegrityError(f"{len(free)} free places of {self._touched}: {self!r}")

    def __repr__(self) -> str:
        return f"<Ghosts {self._count} of {self._capacity}>"


_OF_CAUSE = tuple(MissReason[cause.name] for cause in GhostCause)


class MissReasons:
    """Counts the missed keys of one namespace by reason.

    Args:
        directory: of the namespace.
        ghosts: of the namespace.
        counts: `missed` and `missed_age` of these grow.
        elsewhere: whether another namespace has this key.
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

        To be called before the stores of the same step begin: those would all be `being_stored`.
        """
        reason_of, ages = self.reason, list[float]()
        reasons = list[MissReason]()
        for key in keys:
            reason, ghost = reason_of(key)
            reasons.append(reason)
            if ghost is not None and reason is MissReason.EVICTED:
                ages.append(now - ghost.gone)
        for reason, count in Counter(reasons).items():
            self._counts.missed[reason] += count
        if ages:
            self._counts.missed_age.observe_all(np.array(ages))

    def reason(self, key: bytes) -> tuple[MissReason, Ghost | None]:
        """Why the key is missed, with its ghost where it has one."""
        ghost = self._ghosts.find(key)
        if ghost is not None:
            return _OF_CAUSE[ghost.cause], ghost
        slot = self._directory.find(key)
        if slot >= 0:
            ready = self._directory.state(slot) == SlotState.READY
            return MissReason.READY if ready else MissReason.BEING_STORED, None
        return MissReason.OTHER_LAYOUT if self._elsewhere(key) else MissReason.NEVER_SEEN, None
