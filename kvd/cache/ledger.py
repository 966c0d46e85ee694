"""The ledger of one namespace: which chunks are READY, in memory that outlives the daemon.

The directory is the daemon's and its clients' and ends with it. The ledger is what the
next daemon reads: the key, generation and blocks of every READY chunk, and when each
was last of use. It lies in a file beside the pool's, mapped by the broker alone.

Little-endian. A header page, then the stamps, then the records::

    offset  type    header
         0  8 bytes magic "kvd-led" and a zero byte, written last: without it, nothing was kept
         8  u32     version (5)
        12  u32     size of a record (80)
        16  u64     number of slots
        24  u32     length of the description
        28  u32     zlib.crc32 of bytes 8..28 and the description
        32          description: `LedgerDescription` as JSON
     65512  u64     number of the last change, see kvd.cache.recovery
     65520  8 bytes the namespace's salt (`kvd.cache.recovery`) when its chunks were stored; zeros:
                    it was never reset
     65528  u64     floor: a record counts only where its generation is above it

    u64 for every slot: when its chunk was last of use, in microseconds; 0 for never

    offset  type     record
         0  u64      generation; 0 while the slot holds no READY chunk. Written last, erased first
         8  u32      zlib.crc32 of the key
        12  u16, u16 first block that holds bytes, and how many do
        16  u8       key length, and a zero byte
        18  u16      group whose blocks those are; 4 zero bytes follow
        24  48 bytes key, padded with zeros
        72  u32      zlib.crc32 of bytes 0..72, started with the slot's number; 4 zero bytes follow

A process that is killed has done all its stores up to some point and none after it, and
tmpfs keeps them. So the generation, one store of eight bytes, is what decides: a chunk is
there with all its record, or not at all. The rules for who writes it:

- a chunk is recorded when its bytes are in the pool, before the directory calls it READY;
- it is erased before the directory frees its slot, so before anybody may write there.

Every change has a number, and the trailer of the pool's file has the number of the last one
(`kvd.cache.recovery`): a ledger that was replaced by an older copy, or whose pool was, has another
number than the pool, and is not believed. Stamps have no part in that: a wrong one costs order.

The check words are against other hands than the daemon's: where one does not fit, nothing
of that ledger is believed.
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
    """What the next daemon must know of a namespace besides its chunks.

    `pool` names the pool that the chunks lie in; `namespace` is in hex.
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
    """The chunks of a ledger, the one used longest ago first: [n] each.

    `records` are structured: generation, hash, first, count, key_len, group, key.
    """

    slots: npt.NDArray[np.int64]
    stamps: npt.NDArray[np.uint64]
    records: npt.NDArray[Any]

    def __len__(self) -> int:
        return len(self.slots)


def ledger_bytes(num_slots: int) -> int:
    """Size in bytes of the ledger of `num_slots` slots."""
    return HEADER_BYTES + num_slots * (8 + RECORD_BYTES)


class Ledger:
    """Reads and writes a ledger; there is one for each namespace.

    Args:
        buffer: its memory.
        trailer: of the pool that its chunks lie in.

    Raises:
        LedgerDamaged: it holds no ledger of this version, or is older or newer than the pool.
    """

    def __init__(self, buffer: "WriteableBuffer", trailer: PoolTrailer) -> None:
        whole = memoryview(buffer).cast("B")
        self.description, self.num_slots = _read_header(whole)
        self._trailer = trailer
        self._entry = trailer.entry(self.description.namespace)
        self._whole = whole
        stamps_end = HEADER_BYTES + self.num_slots * 8
        self._floor = whole[_FLOOR_AT:HEADER_BYTES].cast("Q")
        self._salt = whole[_SALT_AT:_FLOOR_AT]
        self._number = whole[_NUMBER_AT:_SALT_AT].cast("Q")
        numbers = trailer.numbers(self._entry)
        if self._number[0] not in numbers:
            raise LedgerDamaged(
                f"its last change is number {self._number[0]}, the pool has its chunks after change"
                f" {numbers[1]}: the ledger or the pool is an older one"
            )
        self._records = whole[stamps_end : stamps_end + self.num_slots * RECORD_BYTES]
        self._words = self._records.cast("Q")
        self.stamps: npt.NDArray[np.uint64] = np.frombuffer(
            whole, "<u8", self.num_slots, HEADER_BYTES
        )

    @classmethod
    def create(
        cls,
        buffer: "WriteableBuffer",
        num_slots: int,
        kept: LedgerDescription,
        trailer: PoolTrailer,
        salt: bytes = b"",
    ) -> Self:
        """Make a ledger in memory that is all zero; touches its header only.

        Raises:
            LedgerDamaged: the buffer is too small, or the description too long.
        """
        whole = memoryview(buffer).cast("B")
        description = msgspec.json.encode(kept)
        end = _DESCRIPTION_AT + len(description)
        if len(whole) < ledger_bytes(num_slots) or end > _NUMBER_AT:
            raise LedgerDamaged(
                f"{len(whole)} bytes for a ledger of {ledger_bytes(num_slots)} bytes whose"
                f" header has {end} of {_NUMBER_AT}"
            )
        head = _HEAD.pack(VERSION, RECORD_BYTES, num_slots, len(description))
        whole[8 : 8 + len(head)] = head
        whole[28:32] = _CHECK.pack(crc32(description, crc32(head)))
        whole[_DESCRIPTION_AT:end] = description
        whole[:8] = MAGIC
        trailer.add(kept.namespace)
        ledger = cls(buffer, trailer)
        ledger.write_salt(salt)
        return ledger

    def renumber(self) -> None:
        """Make a change of nothing: no copy from before is believed from now on."""
        self._end(self._begin())

    def _begin(self) -> int:
        return self._trailer.begin(self._entry)

    def _end(self, number: int) -> None:
        self._number[0] = number
        self._trailer.end(self._entry, number)

    def record(  # noqa: PLR0917 a record has these six parts
        self, slot: int, generation: int, first: int, count: int, group: int, key: bytes
    ) -> None:
        """The slot's chunk is READY from here on."""
        packed = _RECORD.pack(generation, crc32(key), first, count, len(key), group, key)
        base = slot * RECORD_BYTES
        number = self._begin()
        self._words[slot * _WORDS] = 0
        self._records[base + 8 : base + RECORD_BYTES] = packed[8:] + _TAIL.pack(crc32(packed, slot))
        self._words[slot * _WORDS] = generation
        self._end(number)

    def erase(self, slots: Sequence[int]) -> None:
        """These slots hold no READY chunk, as far as the next daemon is concerned."""
        words, number = self._words, self._begin()
        for slot in slots:
            words[slot * _WORDS] = 0
        self._end(number)

    def forget(self, floor: int) -> None:
        """Chunks of this generation or a lower one are none: one store, whatever their number."""
        number = self._begin()
        self._floor[0] = floor
        self._end(number)

    @property
    def salt(self) -> bytes:
        """The namespace's salt when its chunks were stored; empty where it was never reset."""
        salt = bytes(self._salt)
        return salt if any(salt) else b""

    def write_salt(self, salt: bytes) -> None:
        """The chunks are those of this salt from here on."""
        number = self._begin()
        self._salt[:] = salt or bytes(SALT_BYTES)
        self._end(number)

    def __len__(self) -> int:
        return int(np.count_nonzero(self._table()["generation"] > np.uint64(self._floor[0])))

    def chunks(self) -> LedgerChunks:
        """Every chunk, the one used longest ago first.

        Raises:
            LedgerDamaged: a record's check word does not fit, or its figures cannot be.
        """
        table = self._table()
        slots = np.flatnonzero(table["generation"] > np.uint64(self._floor[0]))
        slots = slots[np.argsort(self.stamps[slots], kind="stable")]
        rows = np.frombuffer(self._records, np.uint8).reshape(-1, RECORD_BYTES)[slots]
        found = rows.view(_DTYPE).reshape(-1)
        checked = np.ascontiguousarray(rows[:, :_CHECKED]).view(f"V{_CHECKED}").reshape(-1)
        # All of it in C: a loop over a million records would take most of the start.
        checks = np.array(list(map(crc32, checked.tolist(), slots.tolist())), np.uint32)
        bad = (
            (checks != found["check"]) | (found["key_len"] - 1 >= KEY_BYTES) | (found["count"] < 1)
        )
        if bad.any():
            raise LedgerDamaged(
                f"{int(bad.sum())} of {len(slots)} records are damaged, the first is that of"
                f" slot {slots[int(np.argmax(bad))]}"
            )
        return LedgerChunks(slots, self.stamps[slots], found)

    def _table(self) -> npt.NDArray[Any]:
        return np.frombuffer(self._records, _DTYPE, self.num_slots)

    def release(self) -> None:
        """Let go of the buffer. Nothing works afterwards."""
        self.stamps = np.zeros(0, np.uint64)
        self._floor.release()
        self._salt.release()
        self._number.release()
        self._words.release()
        self._records.release()
        self._whole.release()

    def __repr__(self) -> str:
        return f"<Ledger {self.description.namespace[:8]}: {len(self)} of {self.num_slots} slots>"


def _read_header(whole: memoryview) -> tuple[LedgerDescription, int]:
    if len(whole) < HEADER_BYTES:
        raise LedgerDamaged(f"{len(whole)} bytes cannot hold a ledger")
    if whole[:8] != MAGIC:
        raise LedgerDamaged(f"no ledger: it starts with {bytes(whole[:8])!r}")
    version, record, num_slots, length = _HEAD.unpack_from(whole, 8)
    if version != VERSION:
        raise LedgerDamaged(f"ledger version {version}, {VERSION} is needed")
    (check,) = _CHECK.unpack_from(whole, 28)
    end = _DESCRIPTION_AT + length
    if end > _NUMBER_AT or check != crc32(
        whole[_DESCRIPTION_AT:end], crc32(whole[8 : 8 + _HEAD.size])
    ):
        raise LedgerDamaged("the ledger's header is damaged: its check word does not fit")
    try:
        kept = msgspec.json.decode(bytes(whole[_DESCRIPTION_AT:end]), type=LedgerDescription)
    except msgspec.DecodeError as error:
        raise LedgerDamaged(f"the ledger's description is invalid: {error}") from error
    if (
        record != RECORD_BYTES
        or not 1 <= num_slots <= MAX_SLOTS
        or len(whole) < ledger_bytes(num_slots)
    ):
        raise LedgerDamaged(
            f"the ledger contradicts itself: {num_slots} records of {record} bytes in"
            f" {len(whole)} bytes"
        )
    return kept, num_slots
