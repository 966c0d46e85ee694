"""Writes a directory (format: `kvd_proto.directory`), its ring of changes and its ledger.

The shared memory is the only copy of a slot's state. Only this module writes the ledger's records
(`kvd.cache.ledger`) and the changes of chunks in memory (`kvd.cache.change_log`), so that no path
can free a slot without them. Batches are loops over local names, because a store of a thousand keys
must not block the broker for more than a few milliseconds.
"""

import struct
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias
from zlib import crc32

import numpy as np
import numpy.typing as npt

from kvd.cache.change_log import ChangeLog
from kvd.cache.ledger import Ledger, LedgerChunks
from kvd.cache.tier_table import TierTable
from kvd.errors import IntegrityError, LedgerDamaged
from kvd_proto.changes import ChangeKind
from kvd_proto.directory import (
    KEY_BYTES,
    NO_SHARE_YET,
    READ_STATE,
    RECORD,
    RECORD_BYTES,
    RECORD_DTYPE,
    SLOT_MASK,
    DirectoryHeader,
    DirectoryView,
    SlotState,
    loan_number,
)
from kvd_proto.errors import DirectoryError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_AT = {name: field[1] for name, field in (RECORD_DTYPE.fields or {}).items()}
_STATE, _KEY_LEN, _KEY = _AT["state"], _AT["key_len"], _AT["key"]
_RANKS_DONE = _AT["ranks_done"] // 8
_OWNER, _LOAN = _AT["owner"] // 4, _AT["loan"] // 4
_BLOCKS = _AT["first"] // 2
_READ_KEY = struct.Struct(f"<B10x{KEY_BYTES}s").unpack_from  # from the key's length on
_WRITE_KEY = struct.Struct(f"<{KEY_BYTES}s").pack_into
_WORDS, _HALVES, _QUARTERS = RECORD_BYTES // 8, RECORD_BYTES // 2, RECORD_BYTES // 4
_FREE = int(SlotState.FREE)
_WRITING, _READY = int(SlotState.WRITING), int(SlotState.READY)
_NOW_READY, _REMOVED = int(ChangeKind.READY), int(ChangeKind.REMOVED)


Blocks: TypeAlias = tuple[int, int]
"""Consecutive blocks of a chunk: the first, and the count."""

ChunkRefs: TypeAlias = list[tuple[int, int]]
"""References to chunks: slot and generation."""


def covers(blocks: Blocks, part: Blocks) -> bool:
    """Whether `blocks` include all of `part`."""
    return blocks[0] <= part[0] and part[0] + part[1] <= blocks[0] + blocks[1]


def directory_bytes(num_slots: int) -> int:
    """Return the size in bytes of a directory of `num_slots` slots."""
    return DirectoryHeader.plan(num_slots, bytes(16), bytes(16)).total_bytes


class DirectoryWriter(DirectoryView):
    """Makes, reads and writes a directory; each directory has one writer.

    Args:
        buffer: memory that is all zero; only its first page is touched.
        header: of the new directory.
        ledger: records READY chunks for the next daemon; None: they are not recorded.
        generation_base: new generations are greater; no earlier daemon gave a greater one.

    Raises:
        DirectoryError: the buffer is too small or read-only.
    """

    def __init__(
        self,
        buffer: "WriteableBuffer",
        header: DirectoryHeader,
        ledger: Ledger | None = None,
        generation_base: int = 0,
    ) -> None:
        memory = memoryview(buffer).cast("B")
        if memory.readonly or len(memory) < header.total_bytes:
            raise DirectoryError(
                f"{len(memory)} bytes for a directory of {header.total_bytes} writable bytes"
            )
        packed = header.pack()
        memory[: len(packed)] = packed
        super().__init__(buffer)
        self.changes: ChangeLog = ChangeLog(self._memory, header)
        self.tiers: TierTable | None = None
        if header.num_tiers:
            self.tiers = TierTable(self._memory, header, self.changes)
        self.ledger = ledger
        self._highest = generation_base
        self._words = self._records.cast("Q")
        self._halves = self._records.cast("H")
        self._quarters = self._records.cast("I")

    def state(self, slot: int) -> int:
        """Return the slot's `SlotState` as a plain number."""
        return self._records[slot * RECORD_BYTES + _STATE]

    def generation(self, slot: int) -> int:
        """Return the slot's generation."""
        return self._words[slot * _WORDS]

    def generations(self, slots: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
        """Return the generations of slots: [n]."""
        result: npt.NDArray[np.uint64] = self._columns["generation"][slots]
        return result

    def owner(self, slot: int) -> int:
        """Return the session that wrote the slot, or writes it."""
        return self._quarters[slot * _QUARTERS + _OWNER]

    def ranks_done(self, slot: int) -> int:
        """Return the ranks whose shares are in the pool, as a bit mask."""
        return self._words[slot * _WORDS + _RANKS_DONE]

    def slots_in(self, state: SlotState, first: int = 0, count: int | None = None) -> list[int]:
        """Return the slots in this state, of all or of `count` from `first` on, ascending."""
        states = self._columns["state"][first : None if count is None else first + count]
        return (np.flatnonzero(states == state) + first).tolist()

    @property
    def floor(self) -> int:
        """Chunks of this generation and lower ones are forgotten."""
        return self._floor[0]

    def forget(self) -> None:
        """Forget all chunks: for readers at once, and for the next daemon.

        One store here and one in the ledger, whatever the number of chunks. No chunk may be
        WRITING. Records and index entries stay until the slots are freed.
        """
        if self.ledger is not None:
            self.ledger.forget(self._highest)
        self._floor[0] = self._highest
        self.changes.write(ChangeKind.CLEARED, self._highest)

    def forgotten_slots(self, first: int, count: int) -> list[int]:
        """Return the READY slots of forgotten chunks, of `count` from `first` on, ascending."""
        slots = slice(first, first + count)
        ready = self._columns["state"][slots] == SlotState.READY
        forgotten = self._columns["generation"][slots] <= np.uint64(self.floor)
        return (np.flatnonzero(ready & forgotten) + first).tolist()

    def key(self, slot: int) -> bytes:
        """Return the key of the slot's present or last chunk."""
        length, padded = _READ_KEY(self._records, slot * RECORD_BYTES + _KEY_LEN)
        return bytes(padded[:length])

    def write_state(self, slot: int, state: SlotState) -> None:
        """Set the state byte."""
        self._records[slot * RECORD_BYTES + _STATE] = state

    def blocks(self, slot: int) -> Blocks:
        """Return the blocks of a READY chunk that every rank's share has."""
        half = slot * _HALVES + _BLOCKS
        first, count = self._halves[half : half + 2]
        return first, count

    def lend(self, slots: Sequence[int]) -> list[int]:
        """Mark FREE or READY slots as on loan, and return their generations once given to keys."""
        quarters, generations = self._quarters, self._next_generations(len(slots))
        for slot, generation in zip(slots, generations, strict=True):
            quarters[slot * _QUARTERS + _LOAN] = loan_number(generation)
        return generations

    def end_loans(self, slots: Iterable[int]) -> None:
        """Mark slots as not on loan."""
        for slot in slots:
            self._quarters[slot * _QUARTERS + _LOAN] = 0

    def loan_of(self, slot: int) -> int:
        """Return the low 32 bits of the generation under which the slot is lent; 0: it is not."""
        return self._quarters[slot * _QUARTERS + _LOAN]

    def _next_generations(self, n: int) -> list[int]:
        """Return `n` new generations; their low 32 bits, which number loans, are not 0."""
        first = self._highest + 1
        if (first + n) >> 32 != first - 1 >> 32:
            first = (first + n >> 32 << 32) + 1
        self._highest = first + n - 1
        return list(range(first, first + n))

    def ready(self, slots: Sequence[int], generations: Sequence[int]) -> list[int]:
        """Return the slots whose chunks are READY with these generations; any number is valid."""
        ready, records, num_slots, floor = [], self._records, self.num_slots, self.floor
        for slot, generation in zip(slots, generations, strict=True):
            if slot < num_slots:
                current, state = READ_STATE(records, slot * RECORD_BYTES)
                if current == generation > floor and state == _READY:
                    ready.append(slot)
        return ready

    def place(self, key: bytes, slot: int, owner: int, generation: int | None = None) -> bool:
        """FREE -> WRITING: give a slot to a key that the index does not have.

        Args:
            key: of 1 to 48 bytes.
            slot: a FREE one; its loan ends.
            owner: the session that writes it, or `TIER_OWNER`.
            generation: under which the slot was lent; None: it was not lent, take a new one.

        Returns:
            False: the index has no empty place near the key's home; nothing changed.
        """
        index, mask = self._index, self._mask
        hash32 = crc32(key)
        home = hash32 & mask
        for i in range(home, home + self._probe_limit):
            if not index[i & mask]:
                break
        else:
            return False
        if generation is None:
            (generation,) = self._next_generations(1)
        # Order matters to readers: WRITING is valid only with the new generation, so that is
        # written first; the loan ends last, so that until then the slot still counts as lent.
        base = slot * RECORD_BYTES
        records, halves = self._records, self._halves
        self._words[slot * _WORDS] = generation
        self._words[slot * _WORDS + _RANKS_DONE] = 0
        self._quarters[slot * _QUARTERS + _OWNER] = owner
        half = slot * _HALVES + _BLOCKS
        halves[half] = halves[half + 2] = 0
        halves[half + 1] = NO_SHARE_YET
        _WRITE_KEY(records, base + _KEY, key)
        records[base + _KEY_LEN] = len(key)
        records[base + _STATE] = _WRITING
        self._quarters[slot * _QUARTERS + _LOAN] = 0
        index[i & mask] = hash32 << 32 | slot + 1
        return True

    def free(self, slots: Sequence[int]) -> None:
        """READY -> FREE: remove chunks from ledger and index."""
        if self.ledger is not None:
            self.ledger.erase(slots)
        records, words, halves, floor = self._records, self._words, self._halves, self._floor[0]
        read_key, unindex, write_change = _READ_KEY, self._unindex, self.changes.write
        for slot in slots:
            base = slot * RECORD_BYTES
            length, padded = read_key(records, base + _KEY_LEN)
            key = padded[:length]
            records[base + _STATE] = _FREE
            unindex(key, slot)
            generation = words[slot * _WORDS]
            if generation > floor:  # for forgotten chunks there was a CLEARED
                half = slot * _HALVES + _BLOCKS
                first, count, group = halves[half : half + 3]
                write_change(_REMOVED, generation, slot, first, count, group, key)

    def unindex(self, slot: int) -> None:
        """Remove a chunk from ledger and index: lookups miss it from now on.

        A READY chunk stays READY without its key, for loads that are reading it.
        """
        if self.ledger is not None:
            self.ledger.erase((slot,))
        key, generation = self.key(slot), self.generation(slot)
        if self.state(slot) != _READY:
            self._unindex(key, slot)
            return
        self._records[slot * RECORD_BYTES + _KEY_LEN] = 0
        self._unindex(key, slot)
        if generation > self._floor[0]:
            half = slot * _HALVES + _BLOCKS
            first, count, group = self._halves[half : half + 3]
            self.changes.write(_REMOVED, generation, slot, first, count, group, key)

    def add_share(
        self, slot: int, rank: int, first: int, count: int, group: int
    ) -> tuple[int, int]:
        """Record that a rank's share is complete: blocks first..first + count - 1 of a group.

        Shares of different groups have no block in common: groups lay out a slot differently, so a
        load of another group would read bytes of the chunk before.

        Returns:
            The ranks done, as a bit mask, and the number of blocks that all their shares have.
        """
        ranks_done = self._words[slot * _WORDS + _RANKS_DONE] | 1 << rank
        half = slot * _HALVES + _BLOCKS
        halves = self._halves
        if halves[half + 1] != NO_SHARE_YET:
            end = min(first + count, halves[half] + halves[half + 1])
            first = max(first, halves[half])
            count = max(0, end - first) if group == halves[half + 2] else 0
        halves[half] = first
        halves[half + 1] = count
        halves[half + 2] = group
        self._words[slot * _WORDS + _RANKS_DONE] = ranks_done
        return ranks_done, count

    def fill(self, slot: int, ranks: int, first: int, count: int, group: int) -> None:
        """Record that the shares of `ranks`, a bit mask, are complete, all with these blocks."""
        half = slot * _HALVES + _BLOCKS
        self._halves[half] = first
        self._halves[half + 1] = count
        self._halves[half + 2] = group
        self._words[slot * _WORDS + _RANKS_DONE] = ranks

    def chunk(self, slot: int, generation: int) -> tuple[bytes, int, int, int, int, int] | None:
        """Return a chunk if lookups find it READY in the slot with this generation, or None.

        Returns:
            Key, slot, generation, first block, count of blocks and group.
        """
        current, _, _, state, length, first, count, group, _, key = RECORD.unpack_from(
            self._records, slot * RECORD_BYTES
        )
        if current != generation or generation <= self._floor[0] or state != _READY or not length:
            return None
        return key[:length], slot, generation, first, count, group

    def make_ready(self, slot: int) -> None:
        """WRITING -> READY: all shares of the chunk are in the pool."""
        half = slot * _HALVES + _BLOCKS
        first, count, group = self._halves[half : half + 3]
        generation, key = self._words[slot * _WORDS], self.key(slot)
        if self.ledger is not None:
            self.ledger.record(slot, generation, first, count, group, key)
        self._records[slot * RECORD_BYTES + _STATE] = _READY
        self.changes.write(_NOW_READY, generation, slot, first, count, group, key)

    def restore(self, chunks: LedgerChunks, ranks_done: npt.NDArray[np.uint64]) -> None:
        """Add the previous daemon's chunks to a new directory, READY with their generations.

        Args:
            chunks: from the ledger.
            ranks_done: of every chunk, as a bit mask: [n].

        Raises:
            LedgerDamaged: two chunks have one key, or the index has no place for a chunk.
        """
        head = self.header
        table = np.frombuffer(self._memory, RECORD_DTYPE, self.num_slots, head.records_offset)
        slots, records = chunks.slots, chunks.records
        self._highest = max(self._highest, int(records["generation"].max(initial=0)))
        for name in ("generation", "key", "key_len", "first", "count", "group"):
            table[name][slots] = records[name]
        table["ranks_done"][slots] = ranks_done
        table["state"][slots] = SlotState.READY
        # Linear probing of all entries at once: sorted by home, each entry goes to the first place
        # that is at or behind its home and behind the entry before.
        hashes = records["hash"]
        homes = hashes & np.uint32(self._mask)
        order = np.lexsort((hashes, homes))
        homes, hashes, slots = homes[order].astype(np.int64), hashes[order], slots[order]
        self._refuse_duplicates(hashes, slots)
        rank = np.arange(len(homes))
        places = np.maximum.accumulate(homes - rank) + rank
        entries = hashes.astype(np.uint64) << np.uint64(32) | (slots + 1).astype(np.uint64)
        index = self._entries()
        around = int(np.searchsorted(places, head.index_capacity))
        index[places[:around]] = entries[:around]
        if (places[:around] - homes[:around] >= self._probe_limit).any():
            raise LedgerDamaged("more chunks share a home in the index than it takes")
        for home, entry in zip(homes[around:].tolist(), entries[around:].tolist(), strict=True):
            for i in range(home, home + self._probe_limit):
                if not self._index[i & self._mask]:
                    self._index[i & self._mask] = entry
                    break
            else:
                raise LedgerDamaged("more chunks share a home in the index than it takes")

    def _refuse_duplicates(
        self, hashes: npt.NDArray[np.uint32], slots: npt.NDArray[np.int64]
    ) -> None:
        """Raise LedgerDamaged if two slots have one key; `hashes` are sorted."""
        same = np.flatnonzero(hashes[1:] == hashes[:-1])
        keys: set[tuple[int, bytes]] = set()
        for i in np.unique(np.concatenate((same, same + 1))).tolist():
            key = (int(hashes[i]), self.key(int(slots[i])))
            if key in keys:
                raise LedgerDamaged("two chunks have the same key")
            keys.add(key)

    def release(self) -> None:
        """Release the buffer. Nothing works afterwards."""
        if self.ledger is not None:
            self.ledger.release()
        self._words.release()
        self._halves.release()
        self._quarters.release()
        super().release()

    def _unindex(self, key: bytes, slot: int) -> None:
        """Remove the slot's index entry, and close the gap for linear probing."""
        index, mask = self._index, self._mask
        hash32 = crc32(key)
        entry = hash32 << 32 | slot + 1
        home = hash32 & mask
        for i in range(home, home + self._probe_limit):
            if index[i & mask] == entry:
                hole = i & mask
                break
        else:
            raise IntegrityError(f"slot {slot} is not in the index")
        # Shift back entries that the hole would separate from their homes. An entry is copied
        # before its old place is overwritten, so a reader sees it twice or misses it.
        j = hole
        while True:
            j = (j + 1) & mask
            entry = index[j]
            if not entry:
                break
            if (j - (entry >> 32)) & mask >= (j - hole) & mask:
                index[hole] = entry
                hole = j
        index[hole] = 0

    def _entries(self) -> npt.NDArray[np.uint64]:
        head = self.header
        return np.frombuffer(self._memory, "<u8", head.index_capacity, head.index_offset)

    def indexed_slots(self) -> list[int]:
        """Return the slots in the index, unordered; reads the whole index."""
        index = self._entries()
        entries = index[np.flatnonzero(index)]
        slots: list[int] = ((entries & np.uint64(SLOT_MASK)).astype(np.int64) - 1).tolist()
        return slots

    def check_integrity(self) -> None:
        """Raise IntegrityError if index, records and changes disagree."""
        self.changes.check_integrity()
        if self.tiers is not None:
            self.tiers.check_integrity()
        entries = self._entries()
        slots: set[int] = set()
        for place in map(int, np.flatnonzero(entries)):
            entry = int(entries[place])
            hash32, slot = entry >> 32, (entry & SLOT_MASK) - 1
            if not 0 <= slot < self.num_slots or slot in slots:
                raise IntegrityError(f"index entry {place} points to slot {slot}, as another does")
            slots.add(slot)
            key = self.key(slot)
            if not 0 < len(key) <= KEY_BYTES or crc32(key) != hash32:
                raise IntegrityError(f"index entry {place}: slot {slot} has another key")
            if self.generation(slot) > self.floor and self.find(key) != slot:
                raise IntegrityError(f"slot {slot} cannot be found by its key")
        self._check_changes()

    def _check_changes(self) -> None:
        """Raise IntegrityError if a slot's last change in the ring contradicts the directory."""
        changes = self.changes.newest()
        changes = changes[changes["kind"] < ChangeKind.CLEARED][::-1]
        slots, last = np.unique(changes["slot"], return_index=True)
        changes, indexed = changes[last], np.zeros(self.num_slots, bool)
        indexed[self.indexed_slots()] = True
        states, generations = (self._columns[name][slots] for name in ("state", "generation"))
        is_ready = (states == _READY) & (generations == changes["generation"]) & indexed[slots]
        was_ready = changes["kind"] == _NOW_READY
        above_floor = changes["generation"] > np.uint64(self.floor)
        wrong_slots = slots[(is_ready != was_ready) & above_floor]
        if len(wrong_slots):
            raise IntegrityError(f"slots {wrong_slots[:9].tolist()} contradict their last change")
