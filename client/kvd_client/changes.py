"""Reads a directory's changes, and returns how its chunks differ from what is published.

The ring of changes says which chunks come and go. A reader that attaches, meets a new daemon, or
falls behind the whole ring takes a snapshot: it scans the directory, piece by piece, while it goes
on reading the ring, and in the end removes what was published and is not there.

- The ring is read from the head before the first piece, so no change is missed. A change that a
  piece has shown already is applied again, which has no effect.
- For a slot that changed while its piece was read, only the ring counts: the two words that were
  read may be of two chunks. An entry of the tier table is always of one chunk.
- A removal names slot and generation, so it does not remove a chunk that came again under the same
  key. A tier's chunk is known by its key alone.
- The tier table is read from its last place to its first, because entries move to lower places.
  When the chunks of all tiers are dropped at once, only the tier table is scanned again.

Sans-I/O, as the directory's view is. No call blocks, and each does a bounded amount of work.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvd_proto.changes import Change, ChangeKind
from kvd_proto.directory import DirectoryView

PIECE_SLOTS = 512
TIER_TABLE_PIECE = 512  # places
MAX_SLOT_PIECES = 32  # in one call, of a directory that is nearly empty
MAX_PLACE_PIECES = 256  # in one call; an empty piece of a tier table takes a few microseconds
DEFAULT_LIMIT = 1000

_READY, _REMOVED, _CLEARED = map(int, (ChangeKind.READY, ChangeKind.REMOVED, ChangeKind.CLEARED))
_KEPT, _RELEASED = int(ChangeKind.KEPT), int(ChangeKind.RELEASED)

_new = tuple.__new__  # skips the constructor's argument parsing

NO_SLOT: Final = 0xFFFF_FFFF
"""The slot, with generation 0, of a chunk in tiers."""


class ChunkLocation(NamedTuple):
    """Where a chunk lies, and which of its blocks it has: first..first + count - 1.

    slot, generation: of a READY chunk; `NO_SLOT` and 0 for one in tiers.
    time_ns: when it became so, by CLOCK_MONOTONIC; 0 if a snapshot has shown it.
    """

    slot: int
    generation: int
    first: int
    count: int  # type: ignore[assignment]  # a chunk has no other count
    time_ns: int


@dataclass(slots=True)
class Differences:
    """Changes of what is published.

    No key is in both `stored` and `removed`, nor in both `stored_in_tiers` and
    `removed_from_tiers`.

    stored: chunks that became READY, or are READY at another location or with other blocks; such a
        key is not removed in between.
    removed: keys of chunks that are not READY any more.
    stored_in_tiers: chunks that came into tiers, or lie in tiers with other blocks.
    removed_from_tiers: keys of chunks that lie in no tier any more.
    last_locations: for keys in `stored_in_tiers` whose chunk has left memory since the last call,
        its last location there. Its description can be read until the slot is used again. The chunk
        may be in `stored` again.
    """

    stored: dict[bytes, ChunkLocation] = field(default_factory=dict)
    removed: list[bytes] = field(default_factory=list)
    stored_in_tiers: dict[bytes, ChunkLocation] = field(default_factory=dict)
    removed_from_tiers: list[bytes] = field(default_factory=list)
    last_locations: dict[bytes, ChunkLocation] = field(default_factory=dict)

    def __len__(self) -> int:
        num_stored = len(self.stored) + len(self.stored_in_tiers)
        return num_stored + len(self.removed) + len(self.removed_from_tiers)


@dataclass(slots=True)
class PublishedState:
    """What is published of chunks in memory, or of those in tiers. Each key is in one dict at most.

    Attributes:
        confirmed: published, and there as far as is known.
        unconfirmed: published before the snapshot began, and not seen in it yet.
        to_remove: published, and known to be gone; removals are published piece by piece.
        snapshot_at: slot or place where the snapshot goes on; None: it is complete.
        snapshot_end: number of the change after which what the snapshot has not shown is gone.
        touched: keys that this call of `take` has changed, with their published locations before.
    """

    confirmed: dict[bytes, ChunkLocation] = field(default_factory=dict)
    unconfirmed: dict[bytes, ChunkLocation] = field(default_factory=dict)
    to_remove: dict[bytes, ChunkLocation] = field(default_factory=dict)
    touched: dict[bytes, ChunkLocation | None] = field(default_factory=dict)
    snapshot_at: int | None = None
    snapshot_end: int = 0

    @property
    def is_unfinished(self) -> bool:
        """Whether `ChangeReader.take` has work to do here even if nothing changes."""
        return self.snapshot_at is not None or bool(self.to_remove)

    def location(self, key: bytes) -> ChunkLocation | None:
        """Return where a chunk is published; None: it is not."""
        return self.confirmed.get(key) or self.unconfirmed.get(key) or self.to_remove.get(key)

    def pop_doubtful(self, key: bytes) -> ChunkLocation | None:
        """Remove a key from `unconfirmed` and `to_remove`; return its published location there."""
        return self.unconfirmed.pop(key, None) or self.to_remove.pop(key, None)

    def confirm(self, key: bytes, slot: int, generation: int, first: int, count: int) -> None:
        """Publish a chunk that a snapshot has shown."""
        old = self.confirmed.get(key) or self.pop_doubtful(key)
        self.touched.setdefault(key, old)
        time_ns = 0 if old is None or old[:4] != (slot, generation, first, count) else old[4]
        self.confirmed[key] = ChunkLocation(slot, generation, first, count, time_ns)

    def begin_snapshot(self, at: int) -> None:
        """Begin a snapshot here, which must confirm all that is published."""
        self.unconfirmed = _joined(self.unconfirmed, self.confirmed)
        self.confirmed = {}
        self.snapshot_at = at

    def withdraw(self) -> None:
        """Treat all that is published as gone, unless a snapshot that goes on shows it."""
        self.to_remove = _joined(self.to_remove, _joined(self.unconfirmed, self.confirmed))
        self.unconfirmed, self.confirmed = {}, {}

    def end_snapshot(self, position: int) -> None:
        """Treat as gone what a complete snapshot has not shown, if the ring is read so far."""
        if self.unconfirmed and self.snapshot_at is None and position >= self.snapshot_end:
            self.to_remove = _joined(self.to_remove, self.unconfirmed)
            self.unconfirmed = {}

    def take(self, limit: int) -> tuple[dict[bytes, ChunkLocation], list[bytes]]:
        """Return the touched chunks to publish, and the keys to remove.

        Besides touched keys, at most `limit` keys of `to_remove` are removed.
        """
        stored: dict[bytes, ChunkLocation] = {}
        removed: list[bytes] = []
        touched, self.touched = self.touched, {}
        confirmed, unconfirmed, to_remove = self.confirmed.get, self.unconfirmed.get, self.to_remove
        for key, old in touched.items():
            new = confirmed(key) or unconfirmed(key)
            if new is not None:
                if old is None or new[:4] != old[:4]:
                    stored[key] = new
            elif old is None:
                to_remove.pop(key, None)  # it came and went within this call
            elif key not in to_remove:
                removed.append(key)
        if to_remove:
            removed += [to_remove.popitem()[0] for _ in range(min(limit, len(to_remove)))]
        return stored, removed

    def __len__(self) -> int:
        return len(self.confirmed) + len(self.unconfirmed) + len(self.to_remove)


def _joined(
    some: dict[bytes, ChunkLocation], others: dict[bytes, ChunkLocation]
) -> dict[bytes, ChunkLocation]:
    """Return both in one; in constant time if one is empty, as it nearly always is."""
    if not some or not others:
        return some or others
    some.update(others)
    return some


class ChangeReader:
    """Reads the changes of a namespace's chunks from its directory.

    Args:
        clock: CLOCK_MONOTONIC in ns, by which changes are dated.

    Attributes:
        num_changes: changes that were read from rings.
        num_snapshots: snapshots that were begun.
        num_overruns: how often a ring was overwritten before it was read.
    """

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self._memory, self._tiers = PublishedState(), PublishedState()
        self._last_locations: dict[bytes, ChunkLocation] = {}  # of chunks removed in this call
        self._directory: DirectoryView | None = None
        self._position = 0  # the number of the last change that was applied
        self._lag_ns = 0
        self.num_changes = 0
        self.num_snapshots = 0
        self.num_overruns = 0

    @property
    def waiting(self) -> bool:
        """Whether `take` has something to do."""
        directory = self._directory
        return self.is_unfinished or (
            directory is not None
            and (
                bool(self._memory.unconfirmed or self._tiers.unconfirmed)
                or directory.changes.head != self._position
            )
        )

    @property
    def is_unfinished(self) -> bool:
        """Whether `take` has stopped at its limit in a snapshot or while it removed chunks."""
        return self._memory.is_unfinished or self._tiers.is_unfinished

    def __len__(self) -> int:
        return len(self._memory) + len(self._tiers)

    def take_lag(self) -> int:
        """Return the longest time in ns from a change until it was read, since the last call."""
        lag_ns, self._lag_ns = self._lag_ns, 0
        return lag_ns

    # ------------------------------------------------------------- directories

    def attach(self, directory: DirectoryView) -> None:
        """Read this directory from now on; keep it open until `detach`."""
        self._directory = directory
        self._begin_snapshot(directory)

    def detach(self) -> None:
        """Read no directory from now on. What is published stays so."""
        self._directory = self._memory.snapshot_at = self._tiers.snapshot_at = None

    def forget(self) -> None:
        """Treat nothing as published; `take` returns everything in the current directory again."""
        self._memory, self._tiers = PublishedState(), PublishedState()
        if self._directory is not None:
            self._begin_snapshot(self._directory)

    def withdraw(self) -> None:
        """Remove all that is published, in the next calls of `take`.

        What they find in the current directory meanwhile stays published.
        """
        self._memory.withdraw()
        self._tiers.withdraw()

    def _begin_snapshot(self, directory: DirectoryView) -> None:
        self.num_snapshots += 1
        self._position = directory.changes.head
        self._memory.begin_snapshot(0)
        self._begin_tiers_snapshot(directory)

    def _begin_tiers_snapshot(self, directory: DirectoryView) -> None:
        self._tiers.begin_snapshot(0 if directory.tiers is None else directory.tiers.places)

    # -------------------------------------------------------------------- take

    def take(self, limit: int = DEFAULT_LIMIT) -> Differences:
        """Return what has changed.

        Args:
            limit: for each of: changes to read; chunks that a snapshot shows, plus up to a piece;
                chunks removed of memory; chunks removed of tiers.
        """
        memory, tiers, directory = self._memory, self._tiers, self._directory
        if directory is not None:
            self._read_ring(directory, limit)
            if memory.snapshot_at is not None:
                self._scan_slots(directory, memory.snapshot_at, limit)
            elif tiers.snapshot_at is not None:
                self._scan_tier_table(directory, tiers.snapshot_at, limit)
            if memory.unconfirmed or tiers.unconfirmed:
                memory.end_snapshot(self._position)
                tiers.end_snapshot(self._position)
        last_locations, self._last_locations = self._last_locations, {}
        if not (tiers.touched or tiers.to_remove):
            return Differences(*memory.take(limit))
        stored, removed = memory.take(limit)
        in_tiers, removed_from_tiers = tiers.take(limit)
        last_locations = {key: last_locations[key] for key in in_tiers if key in last_locations}
        return Differences(stored, removed, in_tiers, removed_from_tiers, last_locations)

    def _read_ring(self, directory: DirectoryView, limit: int) -> None:
        changes = directory.changes.read(self._position, limit)
        if changes is None:
            self.num_overruns += 1
            self._begin_snapshot(directory)
        elif changes:
            self._lag_ns = max(self._lag_ns, self._clock() - changes[0][1])
            self.num_changes += len(changes)
            self._apply(directory, changes)
            self._position = changes[-1][0]

    def _apply(self, directory: DirectoryView, changes: list[Change]) -> None:
        """Apply changes of the ring, in order, to what is published in memory and in tiers."""
        memory, tiers = self._memory, self._tiers
        confirmed, touch = memory.confirmed, memory.touched.setdefault
        last_locations = self._last_locations
        for _, time_ns, generation, slot, first, count, _group, kind, key in changes:
            if kind == _READY:
                old = confirmed.get(key)
                if old is None and (memory.unconfirmed or memory.to_remove):
                    old = memory.pop_doubtful(key)
                touch(key, old)
                confirmed[key] = _new(ChunkLocation, (slot, generation, first, count, time_ns))
            elif kind == _REMOVED:
                old = confirmed.get(key)
                if old is None and (memory.unconfirmed or memory.to_remove):
                    old = memory.location(key)
                if old is not None and old[1] == generation and old[0] == slot:
                    touch(key, old)
                    if confirmed.pop(key, None) is None:
                        memory.pop_doubtful(key)
                    last_locations[key] = old
            elif kind == _KEPT:
                tiers.touched.setdefault(key, tiers.confirmed.get(key) or tiers.pop_doubtful(key))
                tiers.confirmed[key] = _new(ChunkLocation, (NO_SLOT, 0, first, count, time_ns))
            elif kind == _RELEASED:
                old = tiers.confirmed.pop(key, None) or tiers.pop_doubtful(key)
                if old is not None:
                    tiers.touched.setdefault(key, old)
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
        for _ in range(MAX_SLOT_PIECES):
            head = ring.head
            chunks = directory.ready_chunks(begin, begin + PIECE_SLOTS)
            changed = self._changed_slots(directory, head)
            if changed is None:
                self.num_overruns += 1
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
        for _ in range(MAX_PLACE_PIECES):
            if end <= 0 or table is None:
                tiers.snapshot_at, tiers.snapshot_end = None, directory.changes.head
                return
            begin = max(0, end - TIER_TABLE_PIECE)
            chunks = table.held_chunks(begin, end)
            for key, tier_place in chunks:
                tiers.confirm(key, NO_SLOT, 0, tier_place.first, tier_place.count)
            num_chunks += len(chunks)
            end = begin
            if num_chunks >= limit:
                break
        tiers.snapshot_at = end
