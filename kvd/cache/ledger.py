"""The ledger of one namespace: which chunks are READY, in memory that outlives the daemon.

The directory ends with the daemon. The next daemon reads the ledger: key, generation and blocks of
every READY chunk, and when each was last used. It lies in a file beside the pool's, which only the
broker maps.

Little-endian. A header page, then the stamps, then the records::

    offset  type    header
         0  8 bytes magic "kvd-led" and a zero byte, written last: without it the ledger is empty
         8  u32     version (5)
        12  u32     size of a record (80)
        16  u64     number of slots
        24  u32     length of the description
        28  u32     zlib.crc32 of bytes 8..28 and the description
        32          description: `LedgerDescription` as JSON
     65512  u64     number of the last change, see kvd.cache.recovery
     65520  8 bytes the namespace's salt (`kvd.cache.recovery`) when its chunks were stored; zeros:
                    it was never reset
     65528  u64     floor: a record is valid only if its generation is above

    u64 for every slot: when its chunk was last used, in microseconds; 0: never

    offset  type     record
         0  u64      generation; 0 while the slot holds no READY chunk. Written last, erased first
         8  u32      zlib.crc32 of the key
        12  u16, u16 first block that holds bytes, and how many do
        16  u8       key length, and a zero byte
        18  u16      group whose blocks those are; 4 zero bytes follow
        24  48 bytes key, padded with zeros
        72  u32      zlib.crc32 of bytes 0..72, started with the slot's number; 4 zero bytes follow

A killed process has done all its stores to memory up to some point and none after it, and tmpfs
keeps them. The generation is one store of eight bytes and decides: a chunk has a complete record or
none. Two rules hold:

- a chunk is recorded when its bytes are in the pool, before the directory makes it READY;
- it is erased before the directory frees its slot, so before anything may write there.

Every change has a number, which the trailer of the pool's file has, too (`kvd.cache.recovery`): if
the ledger or the pool was replaced by an older copy, the numbers differ, and the ledger is
discarded. Stamps are not covered: a wrong one only changes the order of eviction.

The check words detect changes by anything but the daemon: if one is wrong, the whole ledger is
discarded.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Self
from zlib import crc32

import msgspec
import numpy as np
import numpy.typing as npt

from kvd.cache.recovery import SALT_BYTES, PoolTrailer
from kvd.errors import LedgerDamaged
from kvd_proto.directory import KEY_BYTES, MAX_BLOCKS, MAX_SLOTS

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

MAGIC = b"kvd-led\0"
VERSION = 5
HEADER_BYTES = 65536  # the description of a thousand ranks fits
RECORD_BYTES = 80
_WORDS = RECORD_BYTES // 8
_CHECKED = 72
_HEAD = struct.Struct("<IIQI")
_CHECK = struct.Struct("<I")
_DESCRIPTION_AT = 32
_FLOOR_AT = HEADER_BYTES - 8
_SALT_AT = HEADER_BYTES - 16
_NUMBER_AT = HEADER_BYTES - 24
_RECORD = struct.Struct(f"<QIHHBxH4x{KEY_BYTES}s")
_TAIL = struct.Struct("<I4x")
_DTYPE = np.dtype(
    {
        "names": ["generation", "hash", "first", "count", "key_len", "group", "key", "check"],
        "formats": ["<u8", "<u4", "<u2", "<u2", "u1", "<u2", f"V{KEY_BYTES}", "<u4"],
        "offsets": [0, 8, 12, 14, 16, 18, 24, 72],
        "itemsize": RECORD_BYTES,
    }
)


class LedgerDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the next daemon needs to know of a namespace besides its chunks.

    `pool` is the name of the pool with the chunks' bytes; `namespace` is in hex.
    """

    namespace: str
    label: str
    pool: str
    cpu_bytes: int
    slot_bytes: tuple[int, ...]
    world_size: int
    replicated: bool
    blocks_per_chunk: Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCKS)]


@dataclass(frozen=True, slots=True)
class LedgerChunks:
    """The chunks of a ledger, the least recently used first: [n] each.

    `records` is a structured array: generation, hash, first, count, key_len, group, key.
    """

    slots: npt.NDArray[np.int64]
    stamps: npt.NDArray[np.uint64]
    records: npt.NDArray[Any]

    def __len__(self) -> int:
        return len(self.slots)


def ledger_bytes(num_slots: int) -> int:
    """Return the size in bytes of a ledger for `num_slots` slots."""
    return HEADER_BYTES + num_slots * (8 + RECORD_BYTES)


class Ledger:
    """Reads and writes the ledger of a namespace, but for `stamps`, which `ChunkUses` writes.

    Args:
        buffer: the ledger's memory.
        trailer: of the pool with its chunks' bytes.


    Raises:
        LedgerDamaged: it is no ledger of this version, or is older or newer than the pool.
    """

    def __init__(self, buffer: "WriteableBuffer", trailer: PoolTrailer) -> None:
        memory = memoryview(buffer).cast("B")
        self.description, self.num_slots = _read_header(memory)
        self._trailer = trailer
        self._entry = trailer.entry(self.description.namespace)
        self._memory = memory
        stamps_end = HEADER_BYTES + self.num_slots * 8
        self._floor = memory[_FLOOR_AT:HEADER_BYTES].cast("Q")
        self._salt = memory[_SALT_AT:_FLOOR_AT]
        self._number = memory[_NUMBER_AT:_SALT_AT].cast("Q")
        numbers = trailer.numbers(self._entry)
        if self._number[0] not in numbers:
            raise LedgerDamaged(
                f"its last change is number {self._number[0]}, the pool's trailer has number"
                f" {numbers[1]}: the ledger or the pool is an older copy"
            )
        self._records = memory[stamps_end : stamps_end + self.num_slots * RECORD_BYTES]
        self._words = self._records.cast("Q")
        self.stamps: npt.NDArray[np.uint64] = np.frombuffer(
            memory, "<u8", self.num_slots, HEADER_BYTES
        )

    @classmethod
    def create(
        cls,
        buffer: "WriteableBuffer",
        num_slots: int,
        description: LedgerDescription,
        trailer: PoolTrailer,
        salt: bytes = b"",
    ) -> Self:
        """Make a ledger in memory that is all zero; touches only its header.

        Raises:
            LedgerDamaged: the buffer is too small, or the description too long.
        """
        memory = memoryview(buffer).cast("B")
        encoded = msgspec.json.encode(description)
        end = _DESCRIPTION_AT + len(encoded)
        if len(memory) < ledger_bytes(num_slots) or end > _NUMBER_AT:
            raise LedgerDamaged(
                f"{len(memory)} bytes for a ledger of {ledger_bytes(num_slots)} bytes whose"
                f" header has {end} of {_NUMBER_AT}"
            )
        head = _HEAD.pack(VERSION, RECORD_BYTES, num_slots, len(encoded))
        memory[8 : 8 + len(head)] = head
        memory[28:32] = _CHECK.pack(crc32(encoded, crc32(head)))
        memory[_DESCRIPTION_AT:end] = encoded
        memory[:8] = MAGIC
        trailer.add(description.namespace)
        ledger = cls(buffer, trailer)
        ledger.write_salt(salt)
        return ledger

    def renumber(self) -> None:
        """Give the ledger a new number, so that copies from before are discarded."""
        self._end_change(self._begin_change())

    def _begin_change(self) -> int:
        return self._trailer.begin(self._entry)

    def _end_change(self, number: int) -> None:
        self._number[0] = number
        self._trailer.end(self._entry, number)

    def record(  # noqa: PLR0917  # the parts of a record
        self, slot: int, generation: int, first: int, count: int, group: int, key: bytes
    ) -> None:
        """Record a READY chunk."""
        packed = _RECORD.pack(generation, crc32(key), first, count, len(key), group, key)
        base = slot * RECORD_BYTES
        number = self._begin_change()
        self._words[slot * _WORDS] = 0
        self._records[base + 8 : base + RECORD_BYTES] = packed[8:] + _TAIL.pack(crc32(packed, slot))
        self._words[slot * _WORDS] = generation
        self._end_change(number)

    def erase(self, slots: Sequence[int]) -> None:
        """Erase the records of these slots."""
        words, number = self._words, self._begin_change()
        for slot in slots:
            words[slot * _WORDS] = 0
        self._end_change(number)

    def forget(self, floor: int) -> None:
        """Make all records up to this generation invalid, with one store."""
        number = self._begin_change()
        self._floor[0] = floor
        self._end_change(number)

    @property
    def salt(self) -> bytes:
        """The namespace's salt when its chunks were stored; empty: it was never reset."""
        return _salt(self._salt)

    def write_salt(self, salt: bytes) -> None:
        """Set the salt."""
        number = self._begin_change()
        self._salt[:] = salt or bytes(SALT_BYTES)
        self._end_change(number)

    def __len__(self) -> int:
        return int(np.count_nonzero(self._table()["generation"] > np.uint64(self._floor[0])))

    def chunks(self) -> LedgerChunks:
        """Return every chunk, the least recently used first.

        Raises:
            LedgerDamaged: a record's check word is wrong, or its figures are out of range.
        """
        table = self._table()
        slots = np.flatnonzero(table["generation"] > np.uint64(self._floor[0]))
        slots = slots[np.argsort(self.stamps[slots], kind="stable")]
        rows = np.frombuffer(self._records, np.uint8).reshape(-1, RECORD_BYTES)[slots]
        records = rows.view(_DTYPE).reshape(-1)
        checked = np.ascontiguousarray(rows[:, :_CHECKED]).view(f"V{_CHECKED}").reshape(-1)
        # In C only: a Python loop over a million records would dominate the start.
        checks = np.array(list(map(crc32, checked.tolist(), slots.tolist())), np.uint32)
        wrong_check, wrong_key = checks != records["check"], records["key_len"] - 1 >= KEY_BYTES
        damaged = wrong_check | wrong_key | (records["count"] < 1)
        if damaged.any():
            raise LedgerDamaged(
                f"{int(damaged.sum())} of {len(slots)} records are damaged, the first is that of"
                f" slot {slots[int(np.argmax(damaged))]}"
            )
        return LedgerChunks(slots, self.stamps[slots], records)

    def _table(self) -> npt.NDArray[Any]:
        return np.frombuffer(self._records, _DTYPE, self.num_slots)

    def release(self) -> None:
        """Release the buffer. Nothing works afterwards."""
        self.stamps = np.zeros(0, np.uint64)
        self._floor.release()
        self._salt.release()
        self._number.release()
        self._words.release()
        self._records.release()
        self._memory.release()


def _salt(field: memoryview | bytes) -> bytes:
    return bytes(field) if any(field) else b""


def salt_in(header: bytes) -> bytes:
    """Return the salt in a ledger's header, which may be damaged; empty: it was never reset."""
    return _salt(header[_SALT_AT:_FLOOR_AT])


def _read_header(memory: memoryview) -> tuple[LedgerDescription, int]:
    if len(memory) < HEADER_BYTES:
        raise LedgerDamaged(f"{len(memory)} bytes cannot hold a ledger")
    if memory[:8] != MAGIC:
        raise LedgerDamaged(f"no ledger: it starts with {bytes(memory[:8])!r}")
    version, record, num_slots, length = _HEAD.unpack_from(memory, 8)
    if version != VERSION:
        raise LedgerDamaged(f"ledger version {version}, {VERSION} is needed")
    (check,) = _CHECK.unpack_from(memory, 28)
    end = _DESCRIPTION_AT + length
    if end > _NUMBER_AT or check != crc32(
        memory[_DESCRIPTION_AT:end], crc32(memory[8 : 8 + _HEAD.size])
    ):
        raise LedgerDamaged("the ledger's header is damaged: its check word does not fit")
    try:
        encoded = bytes(memory[_DESCRIPTION_AT:end])
        description = msgspec.json.decode(encoded, type=LedgerDescription)
    except msgspec.DecodeError as error:
        raise LedgerDamaged(f"the ledger's description is invalid: {error}") from error
    if (
        record != RECORD_BYTES
        or not 1 <= num_slots <= MAX_SLOTS
        or len(memory) < ledger_bytes(num_slots)
    ):
        raise LedgerDamaged(
            f"the ledger contradicts itself: {num_slots} records of {record} bytes in"
            f" {len(memory)} bytes"
        )
    return description, num_slots
