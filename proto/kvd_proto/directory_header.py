"""The directory's header page: how many of what it has, and where its parts begin."""

import struct
from dataclasses import dataclass
from typing import Self
from zlib import crc32

from kvd_proto.changes import CHANGE_BYTES, MIN_CHANGES
from kvd_proto.errors import DirectoryError
from kvd_proto.tier_table import ENTRY_BYTES, MAX_TIERS, table_places

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
