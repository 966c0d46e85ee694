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

_WORDS = ["sweep", "clear", "forget", "leave", "sweep"] + ["store"] * 6 + ["keep"] * 5
_WORDS += ["drop", "release"] * 3 + ["swap", "doom"] * 2
operations = st.tuples(
    st.sampled_from(_WORDS),
    st.integers(0, len(KEYS) - 1),
    st.integers(0, len(COVERAGES) - 1),
)


class Changing:
    """One daemon's directory after the other, each with one writer."""

    def __init__(self) -> None:
        self.open(warm=False)

    def open(self, *, warm: bool) -> None:
        """A new daemon's directory, without the chunks of the one before or with them."""
        chunks = self.kept() if warm else None
        header = DirectoryHeader.plan(
            *(SLOTS, bytes(16), bytes(16), 4, RING), tier_capacity=HOMES, num_tiers=TIERS
        )
        header = replace(header, probe_limit=LIMIT)
        self.buffer = bytearray(header.total_bytes)
        self.writer = DirectoryWriter(self.buffer, header)
        assert self.writer.tiers is not None
        self.tiers = self.writer.tiers
        if chunks is not None:
            self.writer.restore(chunks, np.ones(len(chunks), np.uint64))

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
        fields = ("<u8", "<u4", "<u2", "<u2", "u1", "<u2", "V48")
        names = ("generation", "hash", "first", "count", "key_len", "group", "key")
        ready = self.found()
        records = np.array(
            [
                (generation, crc32(key), first, count, len(key), 0, key.ljust(48, b"\0"))
                for key, (_, generation, first, count) in ready.items()
            ],
            np.dtype(list(zip(names, fields, strict=True))),
        )
        slots = np.array([place[0] for place in ready.values()], np.int64)
        return LedgerChunks(slots, np.zeros(len(ready), np.uint64), records)

    def apply(self, operation: Operation) -> None:
        """Do one; what is not possible now changes nothing."""
        word, number, which = operation
        key, coverage, tier = KEYS[number], COVERAGES[which], which % TIERS
        entry = self.writer.entry(key)
        if word == "store":
            self.writer.free([entry[0]] if entry is not None else [])
            if free := self.writer.slots_in(SlotState.FREE):
                self._store_at(free[0], key, coverage)
        elif word == "drop" and entry is not None:
            self.writer.free([entry[0]])
        elif word == "swap" and entry is not None and not self.writer.entry(KEYS[number - 1]):
            self.writer.free([entry[0]])
            self._store_at(entry[0], KEYS[number - 1], coverage)
        elif word == "doom" and entry is not None:
            self.writer.unindex(entry[0])
            self.writer.write_state(entry[0], SlotState.DRAINING)
        elif word == "clear":
            self.writer.forget()
        elif word == "sweep":
            self.writer.free(self.writer.forgotten_slots(0, SLOTS))
            for slot in self.writer.slots_in(SlotState.DRAINING):
                self.writer.write_state(slot, SlotState.FREE)
            self.tiers.sweep()
        elif word == "keep":
            self.tiers.hold(key, tier, *coverage, 0)
        elif word == "release":
            self.tiers.release(key, tier)
        elif word == "forget":
            self.tiers.forget()
        elif word == "leave":
            self.tiers.release_tier(tier)

    def _store_at(self, slot: int, key: bytes, coverage: tuple[int, int]) -> None:
        self.writer.place(key, slot, 1)
        self.writer.add_share(slot, 0, *coverage, 0)
        self.writer.make_ready(slot)


class InterruptedView(DirectoryView):
    """A view during whose pieces the directory changes: `meanwhile`, one after each slot."""

    def __init__(self, changing: Changing) -> None:
        super().__init__(memoryview(changing.buffer).toreadonly())
        self._changing, self._buffer = changing, changing.buffer
        self.meanwhile: list[Operation] = []

    def _view_tiers(self, whole: memoryview) -> TierTableView:
        head = self.header
        table = InterruptedTable(
            *(whole, head.tiers_offset, head.tier_capacity, head.probe_limit, TIERS)
        )
        table.view = self
        return table

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
        chunks = []
        for slot in range(begin, min(end, self.num_slots)):
            here = super().ready_chunks(slot, slot + 1)
            if self.happen():
                for _, generation, first, count, _ in super().ready_chunks(slot, slot + 1):
                    here = [(slot, generation, first, count, key) for *_, key in here]
            chunks += here
        return chunks


class InterruptedTable(TierTableView):
    """A tier table that changes after each place that has an entry, while it is looked through."""

    view: InterruptedView

    def held_chunks(self, begin: int, end: int) -> list[tuple[bytes, TierEntry]]:
        """The same, place by place."""
        chunks = []
        for place in reversed(range(begin, end)):
            if here := super().held_chunks(place, place + 1):
                self.view.happen()
            chunks += here
        return chunks
