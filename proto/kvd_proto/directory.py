"""The directory: a table of chunks in shared memory. Only the broker writes it.

Its parts, in order (docs/protocol.md has the format):

1. a header page (`DirectoryHeader`);
2. a record for every slot;
3. an index from keys to slots: linear probing; deletion shifts entries back, so there are no
   tombstones. It holds WRITING and READY chunks only;
4. the ring of changes (`kvd_proto.changes`);
5. with tiers, the tier table (`kvd_proto.tier_table`).

**Reset.** A reset raises the floor to the highest generation so far. Chunks up to the floor are
misses at once; their records and index entries are removed piece by piece afterwards.

**Loans.** A slot on loan is FREE or READY, and its record has the loan's number. Its chunk is
found, pinned and loaded as any other until the broker reads the step that gives the slot to
another key. Then the slot is WRITING, with the generation under which it was lent; no byte is
written before.

**Partial chunks.** A chunk at a sliding window's edge holds only some of its blocks; a lookup of
others is a miss. The record names the group because groups lay out a slot differently: a load for
another group would read bytes that this chunk does not have.

**Readers** take no lock. They compare the key in the record, so they never mistake one key for
another; while the writer shifts index entries they may miss a key. A lookup is a hint: only a
lease makes a chunk safe to read. A chunk removed from the index while a lease pins it is READY with
a key of length 0.
"""

import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Self, TypeAlias
from zlib import crc32

import numpy as np
import numpy.typing as npt

from kvd_proto.changes import CHANGE_BYTES, MIN_CHANGES, ChangesView
from kvd_proto.errors import DirectoryError
from kvd_proto.tier_table import ENTRY_BYTES, MAX_TIERS, TierTableView, table_places

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


MAGIC = b"kvd-dir\0"
VERSION = 6
HEADER_BYTES = 4096
RECORD_BYTES = 80
MAX_SLOTS = 2**31 - 2
MAX_BLOCKS = 0xFFFF  # of a chunk
PROBE_LIMIT = 512
FLOOR_AT = 136

HEADER = struct.Struct("<8s6I3Q16s16s2IQ2IQI4x")
CHECK_WORD = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class DirectoryHeader:
    """The header page, and the offsets of the parts behind it."""

    num_slots: int
    index_capacity: int
    namespace: bytes
    boot_id: bytes
    blocks_per_chunk: int
    change_capacity: int = MIN_CHANGES
    probe_limit: int = PROBE_LIMIT
    tier_capacity: int = 0
    num_tiers: int = 0

    @classmethod
    def plan(
        cls,
        num_slots: int,
        namespace: bytes,
        boot_id: bytes,
        blocks_per_chunk: int = 1,
        changes: int = MIN_CHANGES,
        *,
        tier_capacity: int = 0,
        num_tiers: int = 0,
    ) -> Self:
        """Return the header of a new directory.

        Ids have 16 bytes. `changes`, the ring's capacity, and `tier_capacity`, the homes of the
        tier table, are powers of two. The index gets the power of two for a load of 0.75 or less.

        Raises:
            DirectoryError: a count is out of range, or an id has not 16 bytes.
        """
        if not 1 <= num_slots <= MAX_SLOTS:
            raise DirectoryError(f"a directory has 1 to {MAX_SLOTS} slots, not {num_slots}")
        if len(namespace) != 16 or len(boot_id) != 16:
            raise DirectoryError(
                f"ids have 16 bytes; namespace has {len(namespace)}, boot id {len(boot_id)}"
            )
        if not 1 <= blocks_per_chunk <= MAX_BLOCKS:
            raise DirectoryError(
                f"a chunk has 1 to {MAX_BLOCKS} blocks in a directory, not {blocks_per_chunk}"
            )
        if changes.bit_count() != 1:
            raise DirectoryError(f"a ring holds a power of two of changes, not {changes}")
        capacity = 1 << (num_slots * 4 // 3).bit_length()
        return cls(
            *(num_slots, capacity, namespace, boot_id, blocks_per_chunk, changes),
            tier_capacity=tier_capacity,
            num_tiers=num_tiers,
        )

    @property
    def records_offset(self) -> int:
        """Bytes from the directory's start to record 0."""
        return HEADER_BYTES

    @property
    def index_offset(self) -> int:
        """Bytes from the directory's start to index entry 0."""
        return HEADER_BYTES + self.num_slots * RECORD_BYTES

    @property
    def changes_offset(self) -> int:
        """Bytes from the directory's start to record 0 of the ring of changes."""
        return self.index_offset + self.index_capacity * 8

    @property
    def tiers_offset(self) -> int:
        """Bytes from the directory's start to place 0 of the tier table."""
        return self.changes_offset + self.change_capacity * CHANGE_BYTES

    @property
    def total_bytes(self) -> int:
        """Size of the whole directory in bytes."""
        return self.tiers_offset + table_places(self.tier_capacity, self.probe_limit) * ENTRY_BYTES

    def pack(self) -> bytes:
        """Return the header's bytes with their check word; the rest of its page is 0."""
        head = HEADER.pack(
            MAGIC,
            VERSION,
            RECORD_BYTES,
            self.num_slots,
            self.index_capacity,
            self.probe_limit,
            self.blocks_per_chunk,
            self.records_offset,
            self.index_offset,
            self.total_bytes,
            self.namespace,
            self.boot_id,
            CHANGE_BYTES,
            self.change_capacity,
            self.changes_offset,
            ENTRY_BYTES,
            self.tier_capacity,
            self.tiers_offset,
            self.num_tiers,
        )
        return head + CHECK_WORD.pack(crc32(head))

    @classmethod
    def unpack(cls, buffer: memoryview) -> Self:
        """Read and check the header of a directory.

        Raises:
            DirectoryError: it is no directory of this version, damaged, or too small.
        """
        if len(buffer) < HEADER_BYTES:
            raise DirectoryError(
                f"{len(buffer)} bytes cannot hold a directory: its header alone has {HEADER_BYTES}"
            )
        magic, version, record, slots, capacity, limit, blocks, *rest = HEADER.unpack_from(buffer)
        if magic != MAGIC:
            raise DirectoryError(f"not a chunk directory: it starts with {magic!r}")
        if version != VERSION:
            raise DirectoryError(
                f"directory version {version}, not {VERSION}: restart the engine or the daemon"
            )
        (check,) = CHECK_WORD.unpack_from(buffer, HEADER.size)
        if check != crc32(buffer[: HEADER.size]):
            raise DirectoryError("the directory's header is damaged: its check word does not fit")
        *offsets, ns, boot, change, changes, changes_at, entry, tier_homes, tiers_at, tiers = rest
        header = cls(slots, capacity, ns, boot, blocks, changes, limit, tier_homes, tiers)
        expected = [header.records_offset, header.index_offset, header.total_bytes]
        if (
            (record, offsets, change, entry) != (RECORD_BYTES, expected, CHANGE_BYTES, ENTRY_BYTES)
            or (changes_at, tiers_at) != (header.changes_offset, header.tiers_offset)
            or tier_homes.bit_count() > 1
            or bool(tier_homes) != (1 <= tiers <= MAX_TIERS)
            or capacity.bit_count() != 1
            or changes.bit_count() != 1
        ):
            raise DirectoryError("the directory's header contradicts itself")
        if len(buffer) < header.total_bytes:
            raise DirectoryError(f"{len(buffer)} bytes of a directory of {offsets[-1]} bytes")
        return header


KEY_BYTES = 48
FEW = 8
"""Up to so many records slicing is faster than numpy's gather."""
NO_SHARE_YET = 0xFFFF
TIER_OWNER = 0xFFFF_FFFF  # owner of a slot that a tier fills
READ_STATE = struct.Struct("<Q12xB").unpack_from  # generation and state
_READ_LOAN = struct.Struct("<28xI").unpack_from

RECORD = struct.Struct("<QQIBBHHHI48s")
SLOT_MASK = 0xFFFF_FFFF

# By key length: read generation, state, key length, first block, count of blocks, and key at once.
KEY_READERS = tuple(struct.Struct(f"<Q12xBBHH6x{n}s").unpack_from for n in range(KEY_BYTES + 1))
# By key length: read generation, the bytes from state to count of blocks, and key at once.
_HIT_READERS = tuple(struct.Struct(f"<Q12x6s6x{n}s").unpack_from for n in range(KEY_BYTES + 1))
_WHOLE = struct.Struct("<BBHH")
HitTable: TypeAlias = tuple[
    "memoryview[int]",
    int,
    int,
    memoryview,
    "memoryview[int]",
    tuple[tuple[Callable[[memoryview, int], tuple[Any, ...]], bytes], ...],
]
"""See `DirectoryView.hit_table`."""
_NO_WORDS = memoryview(bytes(8)).cast("I")
NO_HITS: HitTable = (_NO_WORDS, 0, 1, memoryview(b""), _NO_WORDS, ())
"""Of a directory without chunks."""

_HEAD_FIELDS = [
    *(("generation", "<u8"), ("ranks_done", "<u8"), ("owner", "<u4")),
    *(("state", "u1"), ("key_len", "u1")),
    *(("first", "<u2"), ("count", "<u2"), ("group", "<u2"), ("loan", "<u4")),
]
HEAD_DTYPE = np.dtype(_HEAD_FIELDS)
_HEAD_BYTES = HEAD_DTYPE.itemsize
RECORD_DTYPE = np.dtype([*_HEAD_FIELDS, ("key", f"V{KEY_BYTES}")])
READ_HEADS = struct.Struct("<Q8xIBxHHHI").iter_unpack
"""Reads heads: generation, owner, `SlotState`, first block, count of blocks, group and loan."""


def loan_number(generation: int) -> int:
    """Return a loan's number in the record: the low 32 bits of its generation, never 0."""
    return generation & 0xFFFF_FFFF


class LookupResult(IntEnum):
    """The result of a lookup. A hint: only a lease makes sure that the chunk stays."""

    MISS = 0  # not in memory
    HIT = 1  # READY: every rank's share is in the pool
    HIT_PENDING = 2  # being written


class SlotState(IntEnum):
    """The state byte of a slot record."""

    FREE = 0
    WRITING = 1
    READY = 2
    DRAINING = 3


_WRITING, _READY = int(SlotState.WRITING), int(SlotState.READY)
_MISS, _HIT, _HIT_PENDING = LookupResult.MISS, LookupResult.HIT, LookupResult.HIT_PENDING


Entry: TypeAlias = tuple[int, int, int, int, int]
"""A chunk's record: slot, generation, `SlotState`, first block and count of blocks."""


class DirectoryView:
    """Looks chunks up in a directory. Never writes; no I/O.

    Args:
        buffer: the whole directory, e.g. an mmap; referenced until `release`.

    Attributes:
        header: the header; `num_slots`, `blocks_per_chunk` and `boot_id` are copied from it.
        changes: the ring of changes.
        tiers: the tier table; None if the daemon has no tiers.

    Raises:
        DirectoryError: the buffer is not a directory of this version.
    """

    def __init__(self, buffer: "ReadableBuffer") -> None:
        if sys.byteorder != "little":
            raise DirectoryError("directories are little-endian, this machine is not")
        memory = memoryview(buffer).cast("B")
        self.header = DirectoryHeader.unpack(memory)
        header = self.header
        self._memory = memory
        self._records = memory[header.records_offset : header.index_offset]
        self._floor = memory[FLOOR_AT : FLOOR_AT + 8].cast("Q")
        self._index = memory[header.index_offset : header.changes_offset].cast("Q")
        self.changes = ChangesView(memory, header.changes_offset, header.change_capacity)
        self.tiers = self._view_tiers(memory)
        self._mask = header.index_capacity - 1
        self._probe_limit = header.probe_limit
        self.num_slots = header.num_slots
        self.blocks_per_chunk = header.blocks_per_chunk
        self.boot_id = header.boot_id
        self._records_bytes = len(self._records)
        offset = header.records_offset
        table = np.frombuffer(memory, RECORD_DTYPE, header.num_slots, offset)
        self._columns: dict[str, npt.NDArray[Any]] = {
            name: table[name] for name in ("generation", "state")
        }
        item_type, strides = f"V{_HEAD_BYTES}", (RECORD_BYTES,)
        # Items without fields: numpy gathers them ten times as fast.
        self._heads: npt.NDArray[Any] = np.ndarray(
            (header.num_slots,), item_type, buffer=memory, offset=offset, strides=strides
        )

    def _view_tiers(self, memory: memoryview) -> TierTableView | None:
        header = self.header
        if not header.num_tiers:
            return None
        offset, capacity, limit = header.tiers_offset, header.tier_capacity, header.probe_limit
        return TierTableView(memory, offset, capacity, limit, header.num_tiers)

    @property
    def hit_table(self) -> HitTable:
        """What a caller needs to find a whole READY chunk without a call; see `Scheduler.lookup`.

        1. The index as u4 words: of each entry the slot + 1 (0: none) and the hash.
        2. A mask of the entries' numbers, and how many to try.
        3. The records behind one unused record, so that slot + 1 numbers them; the floor.
        4. By key length a reader of records, and what it reads of a whole READY chunk.
        """
        header, memory, blocks = self.header, self._memory, self.blocks_per_chunk
        words = memory[header.index_offset : header.changes_offset].cast("I")
        records = memory[header.records_offset - RECORD_BYTES : header.index_offset]
        # No key has length 0: of that no record is whole.
        whole = [_WHOLE.pack(_READY, n, 0, blocks) if n else b"" for n in range(KEY_BYTES + 1)]
        readers = tuple(zip(_HIT_READERS, whole, strict=True))
        return words, self._mask, self._probe_limit, records, self._floor, readers

    def find(self, key: bytes) -> int:
        """Return the slot of a WRITING or READY chunk, or -1."""
        size = len(key)
        if not 0 < size <= KEY_BYTES:
            return -1
        hash32 = crc32(key)
        index, mask, probes_left = self._index, self._mask, self._probe_limit
        i = hash32 & mask
        while probes_left and (entry := index[i]):
            if entry >> 32 == hash32:
                base: int = ((entry & SLOT_MASK) - 1) * RECORD_BYTES
                if base < self._records_bytes:
                    generation, state, length, _, _, stored = KEY_READERS[size](self._records, base)
                    if (
                        stored == key
                        and length == size
                        and _WRITING <= state <= _READY
                        and generation > self._floor[0]
                    ):
                        return base // RECORD_BYTES
            probes_left -= 1
            i = (i + 1) & mask
        return -1

    def lookup(self, key: bytes, first: int = 0, count: int | None = None) -> LookupResult:
        """Return HIT, HIT_PENDING or MISS. A hint: it may be outdated at once.

        A READY chunk without one of the blocks first..first + count - 1 is a MISS. `count` None:
        all blocks from `first` on.
        """
        entry = self.entry(key)
        if entry is None:
            return _MISS
        _, _, state, begin, num_blocks = entry
        if state == _WRITING:
            return _HIT_PENDING
        end = self.blocks_per_chunk if count is None else first + count
        return _HIT if begin <= first and end <= begin + num_blocks else _MISS

    def lookup_many(self, keys: Sequence[bytes]) -> list[LookupResult]:
        """Return the `lookup` of every key, in order."""
        return list(map(self.lookup, keys))

    def entry(self, key: bytes) -> Entry | None:
        """Return the record of a WRITING or READY chunk, or None. A hint.

        Its blocks are valid only if it is READY.
        """
        # The loop of `find` again: calling it would add a quarter to the time.
        size = len(key)
        if not 0 < size <= KEY_BYTES:
            return None
        hash32 = crc32(key)
        index, mask, probes_left = self._index, self._mask, self._probe_limit
        i = hash32 & mask
        while probes_left and (index_entry := index[i]):
            if index_entry >> 32 == hash32:
                slot = (index_entry & SLOT_MASK) - 1
                base = slot * RECORD_BYTES
                if base < self._records_bytes:
                    generation, state, length, first, count, stored = KEY_READERS[size](
                        self._records, base
                    )
                    if (
                        stored == key
                        and length == size
                        and _WRITING <= state <= _READY
                        and generation > self._floor[0]
                    ):
                        return slot, generation, state, first, count
            probes_left -= 1
            i = (i + 1) & mask
        return None

    def is_lent(self, slot: int, generation: int) -> bool:
        """Whether the slot is on loan under this generation; any number is valid for `slot`."""
        if not 0 <= slot < self.num_slots:
            return False
        (loan,) = _READ_LOAN(self._records, slot * RECORD_BYTES)
        return bool(loan == loan_number(generation))

    def holds(self, slot: int, generation: int, state: SlotState, key: bytes) -> bool:
        """Whether the slot holds this chunk in this state, above the floor; any `slot` is valid.

        Reads the record alone, so unlike a lookup it never misses a key that is there.
        """
        if not 0 <= slot < self.num_slots or not 0 < len(key) <= KEY_BYTES:
            return False
        record = KEY_READERS[len(key)](self._records, slot * RECORD_BYTES)
        stored_generation, stored_state, length, _, _, stored = record
        return bool(
            stored_generation == generation
            and stored_state == state
            and length == len(key)
            and stored == key
            and generation > self._floor[0]
        )

    def heads(self, slots: "array[int]") -> bytes:
        """Return the records of slots without their keys, in the format of `HEAD_DTYPE`.

        Args:
            slots: an array of type "I".

        Raises:
            IndexError: a slot is out of range.
        """
        if len(slots) > FEW:
            indices = np.frombuffer(slots, np.uint32).astype(np.intp)
            heads: bytes = self._heads[indices].tobytes()
            return heads
        if slots and max(slots) >= self.num_slots:
            raise IndexError(f"slot {max(slots)} of {self.num_slots}")
        records = self._records
        begins = [slot * RECORD_BYTES for slot in slots]
        return b"".join([records[begin : begin + _HEAD_BYTES] for begin in begins])

    def ready_chunks(self, begin: int, end: int) -> list[tuple[int, int, int, int, bytes]]:
        """Return the chunks that lookups find READY in slots `begin` to `end - 1`, in slot order.

        Returns:
            Slot, generation, first block, count of blocks and key of each chunk. The fields of a
            slot that is written meanwhile may be of two chunks: the ring of changes tells which.
        """
        states = self._columns["state"][begin:end]
        records, floor, chunks = self._records, self._floor[0], []
        read = KEY_READERS[KEY_BYTES]
        for slot in (np.flatnonzero(states == _READY) + begin).tolist():
            generation, state, length, first, count, key = read(records, slot * RECORD_BYTES)
            if state == _READY and length and generation > floor:
                chunks.append((slot, generation, first, count, key[:length]))
        return chunks

    def release(self) -> None:
        """Release the buffer, so that its owner may unmap it. Nothing works afterwards."""
        self._columns.clear()
        self._heads = np.empty(0, "V1")
        self.changes.release()
        if self.tiers is not None:
            self.tiers.close()
        self._floor.release()
        self._index.release()
        self._records.release()
        self._memory.release()
