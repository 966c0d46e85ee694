"""A directory that is changed by plain operations, also while somebody reads a piece of it."""

from dataclasses import replace
from typing import TypeAlias
from zlib import crc32

import numpy as np
from hypothesis import strategies as st

from kvd.cache.directory import DirectoryWriter
from kvd.cache.ledger import LedgerChunks
from kvd_proto.directory import DirectoryHeader, DirectoryView, SlotState
from kvd_proto.tier_table import TierEntry, TierTableView

KEYS = [bytes([97 + i]) * (1 + 3 * i) for i in range(12)]
SLOTS = 24
RING = 8  # changes
LIMIT = 32  # places where a key may be
HOMES = 16  # of the tier table: several keys have one
TIERS = 2
COVERAGES = [(0, 4), (0, 4), (2, 2), (1, 3)]

Operation: TypeAlias = tuple[str, int, int]
"""A word, which key, and which coverage. A swap puts the key before into this one's slot. Of tiers
the coverage says which one, too."""

Found: TypeAlias = dict[bytes, tuple[int, int, int, int]]
"""Slot, generation, first block and count of blocks of chunks."""

operations = st.tuples(
    st.sampled_from(
        ["store"] * 6
        + ["drop"] * 3
        + ["swap", "swap", "doom", "doom", "sweep", "clear"]
        + ["keep"] * 5
        + ["release"] * 3
        + ["forget", "leave", "sweep"]
    ),
    st.integers(0, len(KEYS) - 1),
    st.integers(0, len(COVERAGES) - 1),
)


class Changing:
    """One daemon's directory after the other, each with one writer."""

    def __init__(self) -> None:
        self.open(warm=False)

    def open(self, *, warm: bool) -> None:
        """A new daemon's directory, without the chunks of the one before or with them."""
        kept = self.kept() if warm else None
        header = DirectoryHeader.plan(
            *(SLOTS, bytes(16), bytes(16), 4, RING), tier_capacity=HOMES, num_tiers=TIERS
        )
        header = replace(header, probe_limit=LIMIT)
        self.buffer = bytearray(header.total_bytes)
        self.writer = DirectoryWriter(self.buffer, header)
        assert self.writer.tiers is not None
        self.tiers = self.writer.tiers
        if kept is not None:
            self.writer.restore(kept, np.ones(len(kept), np.uint64))

    def view(self) -> "InterruptedView":
        """Of the directory of now."""
        return InterruptedView(self)

    def found(self) -> Found:
        """What lookups find READY."""
        entries = ((key, self.writer.entry(key)) for key in KEYS)
        return {
            key: (entry[0], entry[1], entry[3], entry[4])
            for key, entry in entries
            if entry is not None and entry[2] == SlotState.READY
        }

    def below(self) -> dict[bytes, tuple[int, int]]:
        """First block and count of blocks of what tiers hold, once those that leave have left."""
        while not self.tiers.is_swept:
            self.tiers.sweep()
        places = {key: self.tiers.find(key) for key in KEYS}
        return {key: (place.first, place.count) for key, place in places.items() if place}

    def kept(self) -> LedgerChunks:
        """As a ledger keeps them."""
        found = self.found()
        fields = ("<u8", "<u4", "<u2", "<u2", "u1", "<u2", "V48")
        names = ("generation", "hash", "first", "count", "key_len", "group", "key")
        records = np.zeros(len(found), np.dtype(list(zip(names, fields, strict=True))))
        for record, (key, (_, generation, first, count)) in zip(
            records, found.items(), strict=True
        ):
            record["generation"], record["hash"] = generation, crc32(key)
            record["first"], record["count"], record["key_len"] = first, count, len(key)
            record["key"] = np.void(key.ljust(48, b"\0"))
        slots = np.array([place[0] for place in found.values()], np.int64)
        return LedgerChunks(slots, np.zeros(len(found), np.uint64), records)

    def apply(self, operation: Operation) -> None:
        """Do one; what is not possible now changes nothing."""
        word, key, coverage = operation
        entry = self.writer.entry(KEYS[key])
        if word == "store":
            self._store(KEYS[key], COVERAGES[coverage])
        elif word == "drop" and entry is not None:
            self.writer.free([entry[0]])
        elif word == "swap" and entry is not None and not self.writer.entry(KEYS[key - 1]):
            self.writer.free([entry[0]])
            self._store_at(entry[0], KEYS[key - 1], COVERAGES[coverage])
        elif word == "doom" and entry is not None:
            self.writer.unindex(entry[0])
            self.writer.write_state(entry[0], SlotState.DRAINING)
        elif word == "clear":
            self.writer.forget()
        elif word == "sweep":
            self._sweep()
            self.tiers.sweep()
        elif word == "keep":
            self.tiers.hold(KEYS[key], coverage % TIERS, *COVERAGES[coverage], 0)
        elif word == "release":
            self.tiers.release(KEYS[key], coverage % TIERS)
        elif word == "forget":
            self.tiers.forget()
        elif word == "leave":
            self.tiers.release_tier(coverage % TIERS)

    def _store(self, key: bytes, coverage: tuple[int, int]) -> None:
        writer = self.writer
        entry = writer.entry(key)
        if entry is not None:
            writer.free([entry[0]])
        free = writer.slots_in(SlotState.FREE)
        if free:
            self._store_at(free[0], key, coverage)

    def _store_at(self, slot: int, key: bytes, coverage: tuple[int, int]) -> None:
        self.writer.place(key, slot, 1)
        self.writer.add_share(slot, 0, *coverage, 0)
        self.writer.make_ready(slot)

    def _sweep(self) -> None:
        self.writer.free(self.writer.forgotten_slots(0, SLOTS))
        for slot in self.writer.slots_in(SlotState.DRAINING):
            self.writer.write_state(slot, SlotState.FREE)


class InterruptedView(DirectoryView):
    """A view during whose pieces the directory changes, after every slot as said.

    Attributes:
        meanwhile: what happens while the next pieces are read, one after each slot.
    """

    def __init__(self, changing: Changing) -> None:
        super().__init__(memoryview(changing.buffer).toreadonly())
        self._changing, self._buffer = changing, changing.buffer
        self.meanwhile: list[Operation] = []

    def _view_tiers(self, whole: memoryview) -> TierTableView:
        head = self.header
        places = head.tiers_offset, head.tier_capacity, head.probe_limit
        return InterruptedTable(self, whole, *places)

    def happen(self) -> bool:
        """Something changes now; whether anything did."""
        if self.meanwhile:
            self._changing.apply(self.meanwhile.pop(0))
            return True
        return False

    def is_of(self, changing: Changing) -> bool:
        """Whether it shows the directory of now."""
        return self._buffer is changing.buffer

    def ready_chunks(self, begin: int, end: int) -> list[tuple[int, int, int, int, bytes]]:
        """The same, slot by slot; of one that changes meanwhile half is of either chunk."""
        found = []
        for slot in range(begin, min(end, self.num_slots)):
            here = super().ready_chunks(slot, slot + 1)
            if self.happen():
                for _, generation, first, count, _ in super().ready_chunks(slot, slot + 1):
                    here = [(slot, generation, first, count, key) for *_, key in here]
            found += here
        return found


class InterruptedTable(TierTableView):
    """A tier table that changes after each place that has an entry, while it is looked through."""

    def __init__(
        self, view: InterruptedView, whole: memoryview, offset: int, capacity: int, limit: int
    ) -> None:
        super().__init__(whole, offset, capacity, limit, TIERS)
        self._view = view

    def held_chunks(self, begin: int, end: int) -> list[tuple[bytes, TierEntry]]:
        """The same, place by place."""
        found = []
        for place in reversed(range(begin, end)):
            if here := super().held_chunks(place, place + 1):
                self._view.happen()
            found += here
        return found
