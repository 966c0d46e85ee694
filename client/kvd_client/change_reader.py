"""Follows a directory, and returns differences to what was published: READY chunks, tiers' chunks.

The ring of changes says which chunks come and go. A reader that attaches, meets a new daemon, or
falls behind the whole ring takes a snapshot: it looks through the directory, piece by piece, while
it goes on reading the ring, and in the end removes what it published and has not seen.

- The ring is read from the head that was there before the first piece, so no change is missed. A
  change that a piece has shown already is applied once more, which changes nothing.
- A slot that changed while its piece was read counts by the ring only: the two words that were read
  may be of two chunks. An entry of the tier table is always of one.
- A removal names slot and generation. It does not remove a chunk that came again under the same
  key. A tier's chunk is known by its key alone.
- The tier table is read from its last place to its first, because entries move to lower places.
  Where all tiers' chunks go at once only the tier table is looked through anew.

Sans-I/O, as the directory's view is. Nothing here waits, and each call does a bounded amount.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvd_proto.changes import Change, ChangeKind
from kvd_proto.directory import DirectoryView

PIECE_SLOTS = 512
PIECE_PLACES = 512
MOST_PIECES = 32  # in one call, of a directory that is nearly empty
MOST_PLACES_PIECES = 256  # and of a tier table, of which an empty piece takes a few microseconds
DEFAULT_LIMIT = 1000

_READY, _REMOVED, _CLEARED = map(int, (ChangeKind.READY, ChangeKind.REMOVED, ChangeKind.CLEARED))
_KEPT, _RELEASED = int(ChangeKind.KEPT), int(ChangeKind.RELEASED)

_PLACE = tuple.__new__

NO_SLOT: Final = 0xFFFF_FFFF
"""The slot, with generation 0, of a chunk in tiers."""


class Place(NamedTuple):
    """Where a chunk lies, and which of its blocks it has: first..first + count - 1.

    slot, generation: of a READY chunk; `NO_SLOT` and 0 of one in tiers.
    time_ns: when it became so, by CLOCK_MONOTONIC; 0 where a snapshot has shown it.
    """

    slot: int
    generation: int
    first: int
    count: int  # type: ignore[assignment]  # a chunk has no other count
    time_ns: int


@dataclass(slots=True)
class Differences:
    """Changes of what is published.

    A key is in one of `stored` and `removed` at most, and in one of `kept` and `released`.

    stored: chunks that became READY, or are READY at another place or with other blocks: such a key
        is not removed in between.
    removed: keys of chunks that are not READY any more.
    kept: chunks that came into tiers, or lie in tiers with other blocks.
    released: keys of chunks that lie in no tier any more.
    left: of keys in `kept` whose chunk has left memory since the last call, its last place there,
        where its description can be read until the slot is used again. The chunk may be in `stored`
        again.
    """

    stored: dict[bytes, Place] = field(default_factory=dict)
    removed: list[bytes] = field(default_factory=list)
    kept: dict[bytes, Place] = field(default_factory=dict)
    released: list[bytes] = field(default_factory=list)
    left: dict[bytes, Place] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.stored or self.removed or self.kept or self.released)

    def __len__(self) -> int:
        return len(self.stored) + len(self.removed) + len(self.kept) + len(self.released)


@dataclass(slots=True)
class PublishedState:
    """What is published of chunks in memory, or of those in tiers. No key is in two of the three.

    Attributes:
        confirmed: published, and there as far as is known.
        unconfirmed: published before the snapshot began, and not seen in it yet.
        gone: published, and known to be gone: removed piece by piece.
        snapshot_at: slot or place where the snapshot goes on; None: it is complete.
        snapshot_end: number of the change after which what the snapshot has not shown is gone.
        before: of the keys that this call of `take` has touched, where they were published.
    """

    confirmed: dict[bytes, Place] = field(default_factory=dict)
    unconfirmed: dict[bytes, Place] = field(default_factory=dict)
    gone: dict[bytes, Place] = field(default_factory=dict)
    before: dict[bytes, Place | None] = field(default_factory=dict)
    snapshot_at: int | None = None
    snapshot_end: int = 0

    @property
    def unfinished(self) -> bool:
        """Whether `ChangeReader.take` would go on here, though nothing changes."""
        return self.snapshot_at is not None or bool(self.gone)

    def place(self, key: bytes) -> Place | None:
        """Return where a chunk is published; None: it is not."""
        return self.confirmed.get(key) or self.unconfirmed.get(key) or self.gone.get(key)

    def claim(self, key: bytes) -> Place | None:
        """Return where a chunk is published that may have to be removed; it is not any more."""
        return self.unconfirmed.pop(key, None) or self.gone.pop(key, None)

    def confirm(self, key: bytes, slot: int, generation: int, first: int, count: int) -> None:
        """Publish a chunk that a snapshot has shown."""
        was = self.confirmed.get(key) or self.claim(key)
        self.before.setdefault(key, was)
        time_ns = 0 if was is None or was[:4] != (slot, generation, first, count) else was[4]
        self.confirmed[key] = Place(slot, generation, first, count, time_ns)

    def begin_snapshot(self, at: int) -> None:
        """Let a snapshot from here on confirm all that is published."""
        self.unconfirmed = _joined(self.unconfirmed, self.confirmed)
        self.confirmed = {}
        self.snapshot_at = at

    def withdraw(self) -> None:
        """Treat all that is published as gone, unless a snapshot that goes on shows it."""
        self.gone = _joined(self.gone, _joined(self.unconfirmed, self.confirmed))
        self.unconfirmed, self.confirmed = {}, {}

    def settle(self, position: int) -> None:
        """Treat as gone what a complete snapshot has not shown."""
        if self.unconfirmed and self.snapshot_at is None and position >= self.snapshot_end:
            self.gone = _joined(self.gone, self.unconfirmed)
            self.unconfirmed = {}

    def take(self, limit: int) -> tuple[dict[bytes, Place], list[bytes]]:
        """Return the chunks to publish and the keys to remove, of what was touched.

        Besides those that were touched, `limit` chunks are removed at most.
        """
        stored: dict[bytes, Place] = {}
        removed: list[bytes] = []
        before, self.before = self.before, {}
        confirmed, unconfirmed, gone = self.confirmed.get, self.unconfirmed.get, self.gone
        for key, was in before.items():
            now = confirmed(key) or unconfirmed(key)
            if now is not None:
                if was is None or now[:4] != was[:4]:
                    stored[key] = now
            elif was is None:
                gone.pop(key, None)  # it came and went within this call
            elif key not in gone:
                removed.append(key)
        if gone:
            removed += [gone.popitem()[0] for _ in range(min(limit, len(gone)))]
        return stored, removed

    def __len__(self) -> int:
        return len(self.confirmed) + len(self.unconfirmed) + len(self.gone)


def _joined(some: dict[bytes, Place], others: dict[bytes, Place]) -> dict[bytes, Place]:
    """Return both in one; in constant time where one is empty, as it nearly always is."""
    if not some or not others:
        return some or others
    some.update(others)
    return some


class ChangeReader:
    """Reads what changes of a namespace's chunks.

    Args:
        clock: CLOCK_MONOTONIC in ns, by which changes are dated.

    Attributes:
        changes: changes that were read from rings.
        snapshots: snapshots that were begun.
        overruns: how often a ring was overwritten before it was read.
    """

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self._memory, self._tiers = PublishedState(), PublishedState()
        self._left: dict[bytes, Place] = {}  # last places of what left memory, in this call
        self._directory: DirectoryView | None = None
        self._position = 0  # the number of the last change that was applied
        self._lag_ns = 0
        self.changes = 0
        self.snapshots = 0
        self.overruns = 0

    @property
    def waiting(self) -> bool:
        """Whether `take` would find something to do."""
        directory = self._directory
        return self.unfinished or (
            directory is not None
            and (
                bool(self._memory.unconfirmed or self._tiers.unconfirmed)
                or directory.changes.head != self._position
            )
        )

    @property
    def unfinished(self) -> bool:
        """Whether `take` has stopped at its limit in a snapshot or while it removed chunks."""
        return self._memory.unfinished or self._tiers.unfinished

    def __len__(self) -> int:
        return len(self._memory) + len(self._tiers)

    def take_lag(self) -> int:
        """Return the longest time in ns from a change until it was read, since the last call."""
        lag, self._lag_ns = self._lag_ns, 0
        return lag

    # ------------------------------------------------------------- directories

    def follow(self, directory: DirectoryView) -> None:
        """Read this directory from now on; keep it open until `leave`."""
        self._directory = directory
        self._begin_snapshot(directory)

    def leave(self) -> None:
        """Read no directory from now on. What is published stays so."""
        self._directory = self._memory.snapshot_at = self._tiers.snapshot_at = None

    def forget(self) -> None:
        """Treat nothing as published; `take` returns all of a directory that is followed."""
        self._memory, self._tiers = PublishedState(), PublishedState()
        if self._directory is not None:
            self._begin_snapshot(self._directory)

    def withdraw(self) -> None:
        """Remove all that is published, in the next calls of `take`.

        What they see meanwhile in a directory that is followed stays published.
        """
        self._memory.withdraw()
        self._tiers.withdraw()

    def _begin_snapshot(self, directory: DirectoryView) -> None:
        self.snapshots += 1
        self._position = directory.changes.head
        self._memory.begin_snapshot(0)
        self._begin_tiers_snapshot(directory)

    def _begin_tiers_snapshot(self, directory: DirectoryView) -> None:
        self._tiers.begin_snapshot(0 if directory.tiers is None else directory.tiers.places)

    # -------------------------------------------------------------------- take

    def take(self, limit: int = DEFAULT_LIMIT) -> Differences:
        """Return what has changed.

        Args:
            limit: changes that are read at most, chunks that a snapshot shows, up to a piece more,
                and chunks that are removed of memory, and as many of tiers.
        """
        memory, tiers, directory = self._memory, self._tiers, self._directory
        if directory is not None:
            self._read_ring(directory, limit)
            if memory.snapshot_at is not None:
                self._scan_slots(directory, memory.snapshot_at, limit)
            elif tiers.snapshot_at is not None:
                self._scan_tier_table(directory, tiers.snapshot_at, limit)
            if memory.unconfirmed or tiers.unconfirmed:
                memory.settle(self._position)
                tiers.settle(self._position)
        left, self._left = self._left, {}
        if not (tiers.before or tiers.gone):
            return Differences(*memory.take(limit))
        stored, removed = memory.take(limit)
        kept, released = tiers.take(limit)
        left = {key: left[key] for key in kept if key in left}
        return Differences(stored, removed, kept, released, left)

    def _read_ring(self, directory: DirectoryView, limit: int) -> None:
        changes = directory.changes.read(self._position, limit)
        if changes is None:
            self.overruns += 1
            self._begin_snapshot(directory)
        elif changes:
            self._lag_ns = max(self._lag_ns, self._clock() - changes[0][1])
            self.changes += len(changes)
            self._apply(directory, changes)
            self._position = changes[-1][0]

    def _apply(self, directory: DirectoryView, changes: list[Change]) -> None:
        memory, tiers = self._memory, self._tiers
        confirmed, touch = memory.confirmed, memory.before.setdefault
        left = self._left
        for _, time_ns, generation, slot, first, count, _group, kind, key in changes:
            if kind == _READY:
                was = confirmed.get(key)
                if was is None and (memory.unconfirmed or memory.gone):
                    was = memory.claim(key)
                touch(key, was)
                confirmed[key] = _PLACE(Place, (slot, generation, first, count, time_ns))
            elif kind == _REMOVED:
                was = confirmed.get(key)
                if was is None and (memory.unconfirmed or memory.gone):
                    was = memory.place(key)
                if was is not None and was[1] == generation and was[0] == slot:
                    touch(key, was)
                    if confirmed.pop(key, None) is None:
                        memory.claim(key)
                    left[key] = was
            elif kind == _KEPT:
                tiers.before.setdefault(key, tiers.confirmed.get(key) or tiers.claim(key))
                tiers.confirmed[key] = _PLACE(Place, (NO_SLOT, 0, first, count, time_ns))
            elif kind == _RELEASED:
                was = tiers.confirmed.pop(key, None) or tiers.claim(key)
                if was is not None:
                    tiers.before.setdefault(key, was)
            elif kind == _CLEARED:
                # Chunks that became READY after it come after it in the ring, too.
                memory.withdraw()
                confirmed = memory.confirmed
            else:
                self._begin_tiers_snapshot(directory)

    # ---------------------------------------------------------------- snapshot

    def _scan_slots(self, directory: DirectoryView, begin: int, limit: int) -> None:
        """Publish the chunks in some slots from `begin` on."""
        num_chunks, ring, memory = 0, directory.changes, self._memory
        for _ in range(MOST_PIECES):
            head = ring.head
            chunks = directory.ready_chunks(begin, begin + PIECE_SLOTS)
            changed = self._changed_slots(directory, head)
            if changed is None:
                self.overruns += 1
                self._begin_snapshot(directory)
                return
            for slot, generation, first, count, key in chunks:
                if slot not in changed:
                    memory.confirm(key, slot, generation, first, count)
            num_chunks += len(chunks)
            begin += PIECE_SLOTS
            if begin >= directory.num_slots:
                memory.snapshot_at, memory.snapshot_end = None, ring.head
                return
            if num_chunks >= limit:
                break
        memory.snapshot_at = begin

    @staticmethod
    def _changed_slots(directory: DirectoryView, since: int) -> set[int] | None:
        """Return the slots of the changes after this one; None: the ring has lost some of them."""
        ring = directory.changes
        slots: set[int] = set()
        head = ring.head
        while since < head:
            changes = ring.read(since, head - since)
            if changes is None:
                return None
            slots.update(change[3] for change in changes if change[7] <= _CLEARED)
            since += len(changes)
        return slots

    def _scan_tier_table(self, directory: DirectoryView, end: int, limit: int) -> None:
        """Publish the chunks at some places of the tier table before `end`, the last ones first."""
        num_chunks, tiers, table = 0, self._tiers, directory.tiers
        for _ in range(MOST_PLACES_PIECES):
            if end <= 0 or table is None:
                tiers.snapshot_at, tiers.snapshot_end = None, directory.changes.head
                return
            begin = max(0, end - PIECE_PLACES)
            chunks = table.held_chunks(begin, end)
            for key, place in chunks:
                tiers.confirm(key, NO_SLOT, 0, place.first, place.count)
            num_chunks += len(chunks)
            end = begin
            if num_chunks >= limit:
                break
        tiers.snapshot_at = end
