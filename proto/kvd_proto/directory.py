"""The directory: a table of chunks in shared memory, written by the broker alone.

docs/protocol.md has its format: a header page (`DirectoryHeader`), a record for every
slot, an index with linear probing in which deletion shifts entries back, so that there are no
tombstones, the ring of changes (`kvd_proto.changes`), and where there are tiers the tier table
(`kvd_proto.tier_table`), which says what lies below the pool. Only WRITING and READY chunks are in
the index. A reset raises the floor above all generations so far: whatever was there is a miss at
once, and leaves records and index piece by piece afterwards. A chunk that has left the index while
it is still being read is READY with a key of length 0.

A slot on loan is FREE or READY, and its record has the number of the loan. A chunk there is found,
pinned and loaded as any other, until the broker has read the step that gives the slot to another
key: then the slot is WRITING, with the generation under which it was lent. A store's bytes are
written from then on and not before.

A chunk at a sliding window's edge holds only some of its blocks; who asks for others has a miss,
not what the slot held before. The group is recorded because groups lay a slot out differently, so
that a load for another one would read such bytes too.

A reader needs no lock. It compares the key in the record, so it never takes one key for another;
while the writer shifts entries it may miss a key that is there. Lookups are hints: a lease is what
makes a chunk safe to read.
"""

import struct
import sys
from array import array
from collections.abc import Sequence
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
    """The header page, and the arithmetic of the parts behind it."""

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
        """The header of a directory of `num_slots` slots for chunks of so many blocks.

        The index capacity is the power of two that keeps its load at 0.75 or less. The ring
        holds `changes` changes, a power of two. Where there are tiers the table of what they hold
        has `tier_capacity` homes, a power of two.

        Raises:
            DirectoryError: a count out of range, or ids that are not 16 bytes.
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
        """Bytes from the start to slot record 0."""
        return HEADER_BYTES

    @property
    def index_offset(self) -> int:
        """Bytes from the start to index entry 0."""
        return HEADER_BYTES + self.num_slots * RECORD_BYTES

    @property
    def changes_offset(self) -> int:
        """Bytes from the start to record 0 of the ring of changes."""
        return self.index_offset + self.index_capacity * 8

    @property
    def tiers_offset(self) -> int:
        """Bytes from the start to place 0 of the tier table."""
        return self.changes_offset + self.change_capacity * CHANGE_BYTES

    @property
    def total_bytes(self) -> int:
        """Size of the whole directory in bytes."""
        return self.tiers_offset + table_places(self.tier_capacity, self.probe_limit) * ENTRY_BYTES

    def pack(self) -> bytes:
        """The header's bytes with their check word; zeros fill the page behind them."""
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
            DirectoryError: not a directory, another version, damaged, or too small.
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
        *places, ns, boot, change, changes, changes_at, entry, homes, tiers_at, tiers = rest
        header = cls(slots, capacity, ns, boot, blocks, changes, limit, homes, tiers)
        expected = [header.records_offset, header.index_offset, header.total_bytes]
        if (
            (record, places, change, entry) != (RECORD_BYTES, expected, CHANGE_BYTES, ENTRY_BYTES)
            or (changes_at, tiers_at) != (header.changes_offset, header.tiers_offset)
            or homes.bit_count() > 1
            or bool(homes) != (1 <= tiers <= MAX_TIERS)
            or capacity.bit_count() != 1
            or changes.bit_count() != 1
        ):
            raise DirectoryError("the directory's header contradicts itself")
        if len(buffer) < header.total_bytes:
            raise DirectoryError(f"{len(buffer)} bytes of a directory of {places[-1]} bytes")
        return header


KEY_BYTES = 48
FEW = 8
"""Records up to which slices are read faster than numpy gathers."""
NO_SHARE_YET = 0xFFFF
TIER_OWNER = 0xFFFF_FFFF  # of a slot that a tier fills
READ_STATE = struct.Struct("<Q12xB").unpack_from  # generation and state
_READ_LOAN = struct.Struct("<28xI").unpack_from

RECORD = struct.Struct("<QQIBBHHHI48s")
SLOT_MASK = 0xFFFF_FFFF

# By key length: generation, state, key length, first block and count of blocks, and the key
# itself, read in one call.
KEY_READERS = tuple(struct.Struct(f"<Q12xBBHH6x{n}s").unpack_from for n in range(KEY_BYTES + 1))

_HEAD_FIELDS = [
    *(("generation", "<u8"), ("ranks_done", "<u8"), ("owner", "<u4")),
    *(("state", "u1"), ("key_len", "u1")),
    *(("first", "<u2"), ("count", "<u2"), ("group", "<u2"), ("loan", "<u4")),
]
HEAD_DTYPE = np.dtype(_HEAD_FIELDS)
_HEAD_BYTES = HEAD_DTYPE.itemsize
RECORD_DTYPE = np.dtype([*_HEAD_FIELDS, ("key", f"V{KEY_BYTES}")])
READ_HEADS = struct.Struct("<Q8xIBxHHHI").iter_unpack
"""Of many heads generation, owner, `SlotState`, first block, count of blocks, group and loan."""


def loan_number(generation: int) -> int:
    """What a record says of a loan: the low 32 bits of the generation, which are never 0."""
    return generation & 0xFFFF_FFFF


class LookupResult(IntEnum):
    """What the directory says about a key. A hint: only a lease is the truth."""

    MISS = 0  # it is not there
    HIT = 1  # READY: every rank's share is there
    HIT_PENDING = 2  # somebody is writing it


class SlotState(IntEnum):
    """The state byte of a slot record."""

    FREE = 0
    WRITING = 1
    READY = 2
    DRAINING = 3


_WRITING, _READY = int(SlotState.WRITING), int(SlotState.READY)
_MISS, _HIT, _HIT_PENDING = LookupResult.MISS, LookupResult.HIT, LookupResult.HIT_PENDING


Entry: TypeAlias = tuple[int, int, int, int, int]
"""What a record says: slot, generation, `SlotState`, first block and count of blocks."""


class DirectoryView:
    """A directory to look things up in. Never writes; sans-I/O: the buffer is given.

    Args:
        buffer: the whole directory, e.g. an mmap; it stays referenced until `release`.

    Attributes:
        header: its header, of which `num_slots`, `blocks_per_chunk` and `boot_id` are copies.
        changes: the ring of changes.
        tiers: what lies below the pool; None where the daemon has no tiers.

    Raises:
        DirectoryError: the buffer is not a directory of this version.
    """

    def __init__(self, buffer: "ReadableBuffer") -> None:
        if sys.byteorder != "little":
            raise DirectoryError("directories are little-endian, this machine is not")
        whole = memoryview(buffer).cast("B")
        self.header = DirectoryHeader.unpack(whole)
        head = self.header
        self._whole = whole
        self._records = whole[head.records_offset : head.index_offset]
        self._floor = whole[FLOOR_AT : FLOOR_AT + 8].cast("Q")
        self._index = whole[head.index_offset : head.changes_offset].cast("Q")
        self.changes = ChangesView(whole, head.changes_offset, head.change_capacity)
        self.tiers = self._view_tiers(whole)
        self._mask = head.index_capacity - 1
        self._limit = head.probe_limit
        self.num_slots = head.num_slots
        self.blocks_per_chunk = head.blocks_per_chunk
        self.boot_id = head.boot_id
        self._records_bytes = len(self._records)
        at = head.records_offset
        table = np.frombuffer(whole, RECORD_DTYPE, head.num_slots, at)
        self._columns: dict[str, npt.NDArray[Any]] = {
            name: table[name] for name in ("generation", "state")
        }
        kind, strides = f"V{_HEAD_BYTES}", (RECORD_BYTES,)
        # As items without fields: these are gathered ten times as fast.
        self._heads: npt.NDArray[Any] = np.ndarray(
            (head.num_slots,), kind, buffer=whole, offset=at, strides=strides
        )

    def _view_tiers(self, whole: memoryview) -> TierTableView | None:
        head = self.header
        if not head.num_tiers:
            return None
        at, homes, limit = head.tiers_offset, head.tier_capacity, head.probe_limit
        return TierTableView(whole, at, homes, limit, head.num_tiers)

    def find(self, key: bytes) -> int:
        """The slot of a WRITING or READY chunk, or -1."""
        size = len(key)
        if not 0 < size <= KEY_BYTES:
            return -1
        hash32 = crc32(key)
        index, mask, left = self._index, self._mask, self._limit
        i = hash32 & mask
        while left and (entry := index[i]):
            if entry >> 32 == hash32:
                base: int = ((entry & SLOT_MASK) - 1) * RECORD_BYTES
                if base < self._records_bytes:
                    generation, state, length, _, _, name = KEY_READERS[size](self._records, base)
                    if (
                        name == key
                        and length == size
                        and _WRITING <= state <= _READY
                        and generation > self._floor[0]
                    ):
                        return base // RECORD_BYTES
            left -= 1
            i = (i + 1) & mask
        return -1

    def lookup(self, key: bytes, first: int = 0, count: int | None = None) -> LookupResult:
        """HIT, HIT_PENDING or MISS. A hint: it may be outdated when it returns.

        A chunk that lacks one of the blocks first..first + count - 1 is a MISS. Without a
        count these are all blocks from `first` on.
        """
        # The same walk as `find`, written out: a call more would cost a quarter of it.
        size = len(key)
        if not 0 < size <= KEY_BYTES:
            return _MISS
        hash32 = crc32(key)
        index, mask, left = self._index, self._mask, self._limit
        i = hash32 & mask
        while left and (entry := index[i]):
            if entry >> 32 == hash32:
                base = ((entry & SLOT_MASK) - 1) * RECORD_BYTES
                if base < self._records_bytes:
                    generation, state, length, start, held, name = KEY_READERS[size](
                        self._records, base
                    )
                    if name == key and length == size and generation > self._floor[0]:
                        if state == _READY:
                            end = self.blocks_per_chunk if count is None else first + count
                            return _HIT if start <= first and end <= start + held else _MISS
                        if state == _WRITING:
                            return _HIT_PENDING
            left -= 1
            i = (i + 1) & mask
        return _MISS

    def lookup_many(self, keys: Sequence[bytes]) -> list[LookupResult]:
        """`lookup` of every key, in order."""
        return list(map(self.lookup, keys))

    def entry(self, key: bytes) -> Entry | None:
        """The record of a WRITING or READY chunk; None where there is none. A hint, too.

        Its blocks say something only where it is READY.
        """
        # The same walk once more.
        size = len(key)
        if not 0 < size <= KEY_BYTES:
            return None
        hash32 = crc32(key)
        index, mask, left = self._index, self._mask, self._limit
        i = hash32 & mask
        while left and (place := index[i]):
            if place >> 32 == hash32:
                slot = (place & SLOT_MASK) - 1
                base = slot * RECORD_BYTES
                if base < self._records_bytes:
                    generation, state, length, first, held, name = KEY_READERS[size](
                        self._records, base
                    )
                    if (
                        name == key
                        and length == size
                        and _WRITING <= state <= _READY
                        and generation > self._floor[0]
                    ):
                        return slot, generation, state, first, held
            left -= 1
            i = (i + 1) & mask
        return None

    def is_lent(self, slot: int, generation: int) -> bool:
        """Whether the slot, any number, is on loan and will have this generation."""
        if not 0 <= slot < self.num_slots:
            return False
        (loan,) = _READ_LOAN(self._records, slot * RECORD_BYTES)
        return bool(loan == loan_number(generation))

    def holds(self, slot: int, generation: int, state: SlotState, key: bytes) -> bool:
        """Whether the slot, any number, holds this chunk in this state, and it was not forgotten.

        Says so by the record alone, where a look-up by key is a hint.
        """
        if not 0 <= slot < self.num_slots or not 0 < len(key) <= KEY_BYTES:
            return False
        found, is_in, length, _, _, name = KEY_READERS[len(key)](self._records, slot * RECORD_BYTES)
        return bool(
            found == generation
            and is_in == state
            and length == len(key)
            and name == key
            and generation > self._floor[0]
        )

    def heads(self, slots: "array[int]") -> bytes:
        """The records of these slots at one moment, without their keys: see `HEAD_DTYPE`.

        Args:
            slots: of type I.

        Raises:
            IndexError: there is no such slot.
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
        """What lookups find READY in the slots from `begin` up to `end`, one after the other.

        Returns:
            Slot, generation, first block, count of blocks and key of each. What is read of a slot
            that is written meanwhile may be of two chunks: the ring of changes tells which.
        """
        states = self._columns["state"][begin:end]
        records, floor, found = self._records, self._floor[0], []
        read = KEY_READERS[KEY_BYTES]
        for slot in (np.flatnonzero(states == _READY) + begin).tolist():
            generation, state, length, first, count, key = read(records, slot * RECORD_BYTES)
            if state == _READY and length and generation > floor:
                found.append((slot, generation, first, count, key[:length]))
        return found

    def release(self) -> None:
        """Let go of the buffer, so that its owner may unmap it. Nothing works afterwards."""
        self._columns.clear()
        self._heads = np.empty(0, "V1")
        self.changes.release()
        if self.tiers is not None:
            self.tiers.close()
        self._floor.release()
        self._index.release()
        self._records.release()
        self._whole.release()

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.header.namespace.hex()[:8]}"
            f" {self.num_slots} slots, {self.header.total_bytes} bytes>"
        )
