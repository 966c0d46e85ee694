"""Follows what a directory holds, as differences to what was said: READY chunks, and tiers' chunks.

The ring of changes says what begins and ceases to be there. Who attaches, meets a new daemon, or
has fallen behind the whole ring looks through the directory, piece by piece, while it goes on
reading the ring; at the end it takes back what it had said and has found nowhere.

- The ring is read from the head that was there before the first piece: nothing is missed. A change
  that a piece has shown already is applied once more, which changes nothing.
- A slot that changed while its piece was read counts by the ring only: what was read of it may be
  of two chunks. An entry of the tier table is always of one.
- A removal names slot and generation. Of a chunk that has come again under the same key it does
  not speak, and that chunk stays. A tier's chunk is known by its key alone.
- The tier table is read from its last place to its first, as entries move to lower places. Where
  tiers' chunks go all at once it alone is looked through anew.

Sans-I/O, like the directory's view. Nothing here waits, and each call does a bounded amount.
"""

import time
from collections.abc import Callable, Mapping

from kvd_proto.changes import Change, ChangeKind
from kvd_proto.directory import DirectoryView
from kvd_proto.errors import ReaderFault
from kvd_proto.said import NO_SLOT, Differences, Place, Said
from kvd_proto.tier_table import TierTableView

PIECE_SLOTS = 512
PIECE_PLACES = 512
MOST_PIECES = 32  # in one call, of a directory that is nearly empty
MOST_PLACES_PIECES = 256  # and of a tier table, of which an empty piece takes a few microseconds
DEFAULT_LIMIT = 1000

_READY, _REMOVED, _CLEARED = map(int, (ChangeKind.READY, ChangeKind.REMOVED, ChangeKind.CLEARED))
_KEPT, _RELEASED = int(ChangeKind.KEPT), int(ChangeKind.RELEASED)

_PLACE = tuple.__new__


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
        self._memory, self._tiers = Said(), Said()
        self._directory: DirectoryView | None = None
        self._position = 0  # the number of the last change that was applied
        self._lag_ns = 0
        self.changes = 0
        self.snapshots = 0
        self.overruns = 0

    @property
    def said(self) -> Mapping[bytes, Place]:
        """All that was said to be READY and was not taken back."""
        return self._memory.all

    @property
    def kept(self) -> Mapping[bytes, Place]:
        """All that was said to lie in tiers and was not taken back."""
        return self._tiers.all

    @property
    def waiting(self) -> bool:
        """Whether `take` would find something to do."""
        memory, tiers = self._memory, self._tiers
        if memory.gone or tiers.gone:
            return True
        there = self._directory
        return there is not None and (
            memory.next is not None
            or tiers.next is not None
            or bool(memory.unconfirmed or tiers.unconfirmed)
            or there.changes.head != self._position
        )

    def __len__(self) -> int:
        return len(self._memory) + len(self._tiers)

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
        self._directory = self._memory.next = self._tiers.next = None

    def forget(self) -> None:
        """Take everything back. Of a directory that is followed all is said anew."""
        self._memory, self._tiers = Said(), Said()
        if self._directory is not None:
            self._begin_snapshot(self._directory)

    def withdraw(self) -> None:
        """Take everything back, by and by: the next calls of `take` say so.

        What is found meanwhile in a directory that is followed stays said.
        """
        self._memory.withdraw()
        self._tiers.withdraw()

    def _begin_snapshot(self, directory: DirectoryView) -> None:
        self.snapshots += 1
        self._position = directory.changes.head
        self._memory.begin(0)
        self._begin_tiers(directory)

    def _begin_tiers(self, directory: DirectoryView) -> None:
        self._tiers.begin(0 if directory.tiers is None else directory.tiers.places)

    # -------------------------------------------------------------------- take

    def take(self, limit: int = DEFAULT_LIMIT) -> Differences:
        """Return what has changed.

        Args:
            limit: changes that are read at most, chunks that are found in the directory, up to a
                piece more, and chunks that are taken back of memory, and as many of tiers.
        """
        before: dict[bytes, Place | None] = {}
        below: dict[bytes, Place | None] = {}
        memory, tiers, directory = self._memory, self._tiers, self._directory
        if directory is not None:
            self._read_ring(directory, limit, before, below)
            if memory.next is not None:
                self._look_through(directory, memory.next, limit, before)
            elif tiers.next is not None:
                self._look_below(directory, tiers.next, limit, below)
            if memory.unconfirmed or tiers.unconfirmed:
                memory.settle(self._position)
                tiers.settle(self._position)
        if not (below or tiers.gone):
            return Differences(*memory.net(before, limit))
        return Differences(*memory.net(before, limit), *tiers.net(below, limit))

    def _read_ring(
        self,
        directory: DirectoryView,
        limit: int,
        before: dict[bytes, Place | None],
        below: dict[bytes, Place | None],
    ) -> None:
        changes = directory.changes.read(self._position, limit)
        if changes is None:
            self.overruns += 1
            self._begin_snapshot(directory)
        elif changes:
            self._lag_ns = max(self._lag_ns, self._clock() - changes[0][1])
            self.changes += len(changes)
            self._apply(directory, changes, before, below)
            self._position = changes[-1][0]

    def _apply(
        self,
        directory: DirectoryView,
        changes: list[Change],
        before: dict[bytes, Place | None],
        below: dict[bytes, Place | None],
    ) -> None:
        memory, tiers = self._memory, self._tiers
        confirmed, touch = memory.confirmed, before.setdefault
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
            elif kind == _KEPT:
                below.setdefault(key, tiers.confirmed.get(key) or tiers.claim(key))
                tiers.confirmed[key] = _PLACE(Place, (NO_SLOT, 0, first, count, time_ns))
            elif kind == _RELEASED:
                was = tiers.confirmed.pop(key, None) or tiers.claim(key)
                if was is not None:
                    below.setdefault(key, was)
            elif kind == _CLEARED:
                # Whatever became READY after it comes after it in the ring, too.
                memory.withdraw()
                confirmed = memory.confirmed
            else:
                self._begin_tiers(directory)

    # ---------------------------------------------------------------- snapshot

    def _look_through(
        self, directory: DirectoryView, begin: int, limit: int, before: dict[bytes, Place | None]
    ) -> None:
        """Confirm or add what the slots from `begin` on hold."""
        found, ring, memory = 0, directory.changes, self._memory
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
                    was = memory.confirmed.get(key) or memory.claim(key)
                    before.setdefault(key, was)
                    time_ns = 0 if was is None or was[:2] != (slot, generation) else was[4]
                    memory.confirmed[key] = Place(slot, generation, first, count, time_ns)
            found += len(chunks)
            begin += PIECE_SLOTS
            if begin >= directory.num_slots:
                memory.next, memory.end = None, ring.head
                return
            if found >= limit:
                break
        memory.next = begin

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
            slots.update(change[3] for change in changes if change[7] <= _CLEARED)
            since += len(changes)
        return slots

    def _look_below(
        self, directory: DirectoryView, end: int, limit: int, below: dict[bytes, Place | None]
    ) -> None:
        """Confirm or add what the tier table's places below `end` have, the last ones first."""
        found, tiers, table = 0, self._tiers, directory.tiers
        for _ in range(MOST_PLACES_PIECES):
            if end <= 0 or table is None:
                tiers.next, tiers.end = None, directory.changes.head
                return
            begin = max(0, end - PIECE_PLACES)
            found += self._confirm(table, begin, end, below)
            end = begin
            if found >= limit:
                break
        tiers.next = end

    def _confirm(
        self, table: TierTableView, begin: int, end: int, below: dict[bytes, Place | None]
    ) -> int:
        """Say what some places have; how many chunks that are."""
        tiers, held = self._tiers, table.held(begin, end)
        for key, place in held:
            first, count = place.first, place.count
            was = tiers.confirmed.get(key) or tiers.claim(key)
            below.setdefault(key, was)
            time_ns = 0 if was is None or was[2:4] != (first, count) else was[4]
            tiers.confirmed[key] = Place(NO_SLOT, 0, first, count, time_ns)
        return len(held)

    # --------------------------------------------------------------- integrity

    def check_integrity(self) -> None:
        """Raise ReaderFault where what is held contradicts itself."""
        for said in (self._memory, self._tiers):
            said.check_integrity()
            if self._directory is None and said.next is not None:
                raise ReaderFault(f"a snapshot of nothing: {self!r}")
        if self._directory is not None and self._position > self._directory.changes.head:
            raise ReaderFault(f"ahead of the ring: {self!r}")

    def __repr__(self) -> str:
        where = "nothing" if self._directory is None else repr(self._directory.changes)
        return (
            f"<ChangeReader at change {self._position} of {where}:"
            f" in memory {self._memory!r}, in tiers {self._tiers!r}>"
        )
