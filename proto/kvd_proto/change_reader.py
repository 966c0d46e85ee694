"""Follows what a directory holds: which READY chunks there are, as differences to what was said.

The ring of changes says what begins and ceases to be there. Who attaches, meets a new daemon, or
has fallen behind the whole ring looks through the directory, piece by piece, while it goes on
reading the ring; at the end it takes back what it had said and has found nowhere.

- The ring is read from the head that was there before the first piece: nothing is missed. A change
  that a piece has shown already is applied once more, which changes nothing.
- A slot that changed while its piece was read counts by the ring only: what was read of it may be
  of two chunks.
- A removal names slot and generation. Of a chunk that has come again under the same key it does
  not speak, and that chunk stays.

Sans-I/O, like the directory's view. Nothing here waits, and each call does a bounded amount.
"""

import time
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvd_proto.changes import Change, ChangeKind
from kvd_proto.directory import DirectoryView
from kvd_proto.errors import ReaderFault

PIECE_SLOTS = 512
MOST_PIECES = 32  # in one call, of a directory that is nearly empty
DEFAULT_LIMIT = 1000

_READY, _REMOVED = int(ChangeKind.READY), int(ChangeKind.REMOVED)


class Place(NamedTuple):
    """Where a READY chunk lies, and which of its blocks it holds: first..first + count - 1.

    time_ns: when it became READY, by CLOCK_MONOTONIC; 0 where it was found in the directory.
    """

    slot: int
    generation: int
    first: int
    count: int  # type: ignore[assignment]  # a chunk has no other count
    time_ns: int


_PLACE = tuple.__new__


@dataclass(slots=True)
class Differences:
    """What has changed of what is said, each key once.

    stored: chunks that are there, and were not said to be there, or at another place or with other
        blocks: such a key has not been removed in between.
    removed: keys of chunks that were said to be there and are not.
    """

    stored: dict[bytes, Place] = field(default_factory=dict)
    removed: list[bytes] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.stored or self.removed)


class ChangeReader:
    """What one reader has said of a namespace's chunks, and what it has to say.

    Args:
        clock: CLOCK_MONOTONIC in ns, by which changes are dated.

    Attributes:
        changes: how many it has read from rings.
        snapshots: how often it has begun to look through a directory.
        overruns: how often a ring was overwritten before it was read.
    """

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        # No key is in two of these. What was said of a directory before and was not found in this
        # one yet is unconfirmed; what is known to be gone is taken back piece by piece.
        self._said: dict[bytes, Place] = {}
        self._unconfirmed: dict[bytes, Place] = {}
        self._gone: dict[bytes, Place] = {}
        self._directory: DirectoryView | None = None
        self._position = 0  # the number of the last change that was applied
        self._next_slot: int | None = None  # of the snapshot; None: all were seen
        self._snapshot_end = 0  # the change after which the snapshot is complete
        self._lag_ns = 0
        self.changes = 0
        self.snapshots = 0
        self.overruns = 0

    @property
    def said(self) -> Mapping[bytes, Place]:
        """All that was said to be there and was not taken back."""
        return ChainMap(self._said, self._unconfirmed, self._gone)

    def place(self, key: bytes) -> Place | None:
        """Where a chunk is said to be; None: it is not."""
        return self._said.get(key) or self._unconfirmed.get(key) or self._gone.get(key)

    @property
    def waiting(self) -> bool:
        """Whether `take` would find something to do."""
        if self._gone:
            return True
        there = self._directory
        return there is not None and (
            self._next_slot is not None
            or bool(self._unconfirmed)
            or there.changes.head != self._position
        )

    def __len__(self) -> int:
        return len(self._said) + len(self._unconfirmed) + len(self._gone)

    def take_lag(self) -> int:
        """The longest time in ns from a change until it was taken, since the last call."""
        lag, self._lag_ns = self._lag_ns, 0
        return lag

    # ------------------------------------------------------------- directories

    def follow(self, directory: DirectoryView) -> None:
        """Read this directory from now on, which is not released before `leave`."""
        self._directory = directory
        self._begin_snapshot(directory)

    def leave(self) -> None:
        """Read no directory from now on. What was said stays said."""
        self._directory = self._next_slot = None

    def forget(self) -> list[bytes]:
        """Take everything back; the keys. Of a directory that is followed all is said anew."""
        removed = list(self.said)
        self._said, self._unconfirmed, self._gone = {}, {}, {}
        if self._directory is not None:
            self._begin_snapshot(self._directory)
        return removed

    def withdraw(self) -> None:
        """Take everything back, by and by: the next calls of `take` say so.

        What is found meanwhile in a directory that is followed stays said.
        """
        self._gone = _joined(self._gone, _joined(self._unconfirmed, self._said))
        self._unconfirmed, self._said = {}, {}

    def _begin_snapshot(self, directory: DirectoryView) -> None:
        self.snapshots += 1
        self._unconfirmed = _joined(self._unconfirmed, self._said)
        self._said = {}
        self._position = directory.changes.head
        self._next_slot = 0

    # -------------------------------------------------------------------- take

    def take(self, limit: int = DEFAULT_LIMIT) -> Differences:
        """Return what has changed.

        Args:
            limit: changes that are read at most, chunks that are found in the directory, up to a
                piece more, and chunks that are taken back.
        """
        before: dict[bytes, Place | None] = {}
        if self._directory is not None:
            self._read_ring(self._directory, limit, before)
            if (begin := self._next_slot) is not None:
                self._look_through(self._directory, begin, limit, before)
            elif self._unconfirmed and self._position >= self._snapshot_end:
                self._gone = _joined(self._gone, self._unconfirmed)
                self._unconfirmed = {}
        differences = self._net(before)
        gone = self._gone
        for _ in range(min(limit, len(gone))):
            differences.removed.append(gone.popitem()[0])
        return differences

    def _net(self, before: dict[bytes, Place | None]) -> Differences:
        """What `before`, which holds what was said of each key that was touched, has become."""
        said = self._said.get
        stored: dict[bytes, Place] = {}
        removed = []
        for key, was in before.items():
            now = said(key) or self._unconfirmed.get(key)
            if now is not None:
                if was is None or now[:4] != was[:4]:
                    stored[key] = now
            elif was is None:
                self._gone.pop(key, None)  # it came and went within this call
            elif key not in self._gone:
                removed.append(key)
        return Differences(stored, removed)

    def _read_ring(
        self, directory: DirectoryView, limit: int, before: dict[bytes, Place | None]
    ) -> None:
        changes = directory.changes.read(self._position, limit)
        if changes is None:
            self.overruns += 1
            self._begin_snapshot(directory)
        elif changes:
            self._lag_ns = max(self._lag_ns, self._clock() - changes[0][1])
            self.changes += len(changes)
            self._apply(changes, before)
            self._position = changes[-1][0]

    def _apply(self, changes: list[Change], before: dict[bytes, Place | None]) -> None:
        said, touch = self._said, before.setdefault
        for _, time_ns, generation, slot, first, count, _group, kind, key in changes:
            if kind == _READY:
                was = said.get(key)
                if was is None and (self._unconfirmed or self._gone):
                    was = self._claim(key)
                touch(key, was)
                said[key] = _PLACE(Place, (slot, generation, first, count, time_ns))
            elif kind == _REMOVED:
                was = said.get(key)
                if was is None and (self._unconfirmed or self._gone):
                    was = self.place(key)
                if was is not None and was[1] == generation and was[0] == slot:
                    touch(key, was)
                    if said.pop(key, None) is None:
                        self._claim(key)
            else:
                # Whatever became READY after it comes after it in the ring, too.
                self._gone = _joined(self._gone, _joined(self._unconfirmed, said))
                self._unconfirmed, self._said = {}, {}
                said = self._said

    def _claim(self, key: bytes) -> Place | None:
        """Take a chunk out of those that may have to be taken back."""
        return self._unconfirmed.pop(key, None) or self._gone.pop(key, None)

    # ---------------------------------------------------------------- snapshot

    def _look_through(
        self, directory: DirectoryView, begin: int, limit: int, before: dict[bytes, Place | None]
    ) -> None:
        """Confirm or add what the slots from `begin` on hold."""
        found, ring = 0, directory.changes
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
                    was = self._said.get(key) or self._claim(key)
                    before.setdefault(key, was)
                    time_ns = 0 if was is None or was[:2] != (slot, generation) else was[4]
                    self._said[key] = Place(slot, generation, first, count, time_ns)
            found += len(chunks)
            begin += PIECE_SLOTS
            if begin >= directory.num_slots:
                self._next_slot, self._snapshot_end = None, ring.head
                return
            if found >= limit:
                break
        self._next_slot = begin

    @staticmethod
    def _changed_slots(directory: DirectoryView, since: int) -> set[int] | None:
        """The slots that changes after this one speak of; None: the ring holds them no more."""
        ring = directory.changes
        slots: set[int] = set()
        head = ring.head
        while since < head:
            changes = ring.read(since, head - since)
            if changes is None:
                return None
            slots.update(change[3] for change in changes)
            since += len(changes)
        return slots

    # --------------------------------------------------------------- integrity

    def check_integrity(self) -> None:
        """Raise ReaderFault where what is held contradicts itself."""
        said, unconfirmed, gone = self._said.keys(), self._unconfirmed.keys(), self._gone.keys()
        twice = (said & unconfirmed) | (said & gone) | (unconfirmed & gone)
        if twice:
            raise ReaderFault(f"{len(twice)} chunks are said twice: {self!r}")
        if self._directory is None and self._next_slot is not None:
            raise ReaderFault(f"a snapshot of nothing: {self!r}")
        if self._directory is not None and self._position > self._directory.changes.head:
            raise ReaderFault(f"ahead of the ring: {self!r}")
        if b"" in self.said:
            raise ReaderFault(f"a chunk has no key: {self!r}")

    def __repr__(self) -> str:
        where = "nothing" if self._directory is None else repr(self._directory.changes)
        snapshot = "" if self._next_slot is None else f", snapshot at slot {self._next_slot}"
        return (
            f"<ChangeReader at change {self._position} of {where}: {len(self._said)} chunks,"
            f" {len(self._unconfirmed)} unconfirmed, {len(self._gone)} gone{snapshot}>"
        )


def _joined(some: dict[bytes, Place], others: dict[bytes, Place]) -> dict[bytes, Place]:
    """Both in one; in constant time where one is empty, as it nearly always is."""
    if not some or not others:
        return some or others
    some.update(others)
    return some
