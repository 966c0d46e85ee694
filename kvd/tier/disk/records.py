"""Records of an index file: what lies in each slot of a slab. All is little-endian.

A header page, then one record for each slot::

    offset  type      header
         0  8 bytes   magic "kvd-dsk" and a zero byte
         8  u32, u32  version, number of slots
        16  u64       bytes of a slot
        24  u64       identity: a random number that this slab alone has
        32  u64       check word of bytes 0..32

    offset  type      record
         0  u64       check word of bytes 8..104, the slab's identity and the slot's number
         8  u64       sequence: grows with every chunk that is put; 0: the slot is empty
        16  u64       epoch of the namespace
        24  u64       xxh3-64 of the shares
        32  u64       bytes of the shares
        40  u32       bytes of the head
        44  u16, u16  first block, and how many
        48  u16, u16  group; number of the namespace
        52  u8        length of the key, 3 zero bytes follow
        56  48 bytes  key, padded with zeros

Behind the shares in a slot lies a tail: 32 bytes that say whose they are, then the head::

         0  u64       check word of bytes 8..32
         8  u64       sequence, as in the record
        16  u64       identity of the slab
        24  u32       bytes of the head, 4 zero bytes follow

The check words find what was torn or came from elsewhere. They are sums of products modulo 2^64
with odd random factors: multilinear hashing (Carter and Wegman, "Universal classes of hash
functions", 1979), which numpy computes for a million records at once. They are no defence
against somebody who can write the files.
"""

import hashlib
import operator
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MAGIC = b"kvd-dsk\0"
VERSION = 1
HEADER_BYTES = 4096
RECORD_BYTES = 104
KEY_BYTES = 48
TAIL_BYTES = 32
RECORD = np.dtype(
    [
        ("check", "<u8"),
        ("sequence", "<u8"),
        ("epoch", "<u8"),
        ("shares_check", "<u8"),
        ("shares_bytes", "<u8"),
        ("head_bytes", "<u4"),
        ("first", "<u2"),
        ("count", "<u2"),
        ("group", "<u2"),
        ("number", "<u2"),
        ("key_len", "u1"),
        ("zeros", "V3"),
        ("key", f"V{KEY_BYTES}"),
    ]
)
_PACKED = struct.Struct(f"<QQQQQIHHHHB3x{KEY_BYTES}s")
_HEADER = struct.Struct("<8sIIQQQ")
_TAIL = struct.Struct("<QQQI4x")
_OWNER = struct.Struct(f"<HB3x{KEY_BYTES}s")
_OWNER_AT = 50
_WORDS = RECORD_BYTES // 8
_CHECK, _BODY = struct.Struct("<Q"), struct.Struct(f"<{_WORDS - 1}Q")
_FEW = 8  # records, whose check words numpy computes no sooner
_FACTORS = np.frombuffer(
    b"".join(hashlib.blake2b(b"kvd-disk %d" % i).digest() for i in range(2)), "<u8"
) | np.uint64(1)

Records = npt.NDArray[np.void]
Flags = npt.NDArray[np.bool_]


class Record(NamedTuple):
    """What lies in one slot; see the module."""

    sequence: int
    epoch: int
    shares_check: int
    shares_bytes: int
    head_bytes: int
    coverage: tuple[int, int, int]
    number: int
    key: bytes


def empty(slots: int) -> Records:
    """Return records of empty slots."""
    return np.zeros(slots, RECORD)


def read(records: memoryview, slot: int) -> Record:
    """Return the record of a slot, from the bytes of all."""
    (_, sequence, epoch, check, shares, head, first, count, group, number, length, key) = (
        _PACKED.unpack_from(records, slot * RECORD_BYTES)
    )
    return Record(sequence, epoch, check, shares, head, (first, count, group), number, key[:length])


def owner(records: memoryview, slot: int) -> tuple[int, bytes]:
    """Return number of the namespace and key of what lies in a slot."""
    number, length, key = _OWNER.unpack_from(records, slot * RECORD_BYTES + _OWNER_AT)
    return number, key[:length]


def packed(records: Sequence[Record], identity: int, first_slot: int) -> bytes:
    """Return the bytes of records of slots that follow each other, with their check words."""
    raw = bytearray(len(records) * RECORD_BYTES)
    for at, each in zip(range(0, len(raw), RECORD_BYTES), records, strict=True):
        _PACKED.pack_into(
            raw,
            at,
            0,
            each.sequence,
            each.epoch,
            each.shares_check,
            each.shares_bytes,
            each.head_bytes,
            *each.coverage,
            each.number,
            len(each.key),
            each.key,
        )
    if len(records) > _FEW:
        sealed = np.frombuffer(raw, RECORD)
        sealed["check"] = _checks(sealed, identity, first_slot)
    else:
        for i in range(len(records)):
            words = _BODY.unpack_from(raw, i * RECORD_BYTES + 8)
            _CHECK.pack_into(raw, i * RECORD_BYTES, _check((*words, first_slot + i, identity)))
    return bytes(raw)


def whole(records: Records, identity: int) -> Flags:
    """Which slots of a slab hold a chunk: those whose record is whole."""
    fits: Flags = records["check"] == _checks(records, identity, 0)
    lengths = records["key_len"]
    return fits & (records["sequence"] > 0) & (lengths > 0) & (lengths <= KEY_BYTES)


def _checks(records: Records, identity: int, first_slot: int) -> npt.NDArray[np.uint64]:
    words = records.view("<u8").reshape(len(records), _WORDS)
    slots = np.arange(first_slot, first_slot + len(records), dtype=np.uint64)
    sums: npt.NDArray[np.uint64] = words[:, 1:] @ _FACTORS[: _WORDS - 1]
    sums += slots * _FACTORS[_WORDS - 1]
    sums += np.uint64(_check([identity], _WORDS))
    return sums


def _check(words: Sequence[int], at: int = 0) -> int:
    """Return the check word of a few words, computed without numpy."""
    factors = _INTS[at : at + len(words)]
    products: Iterator[int] = map(operator.mul, words, factors)
    return (_INTS[-1] + sum(products)) % 2**64


_INTS: list[int] = _FACTORS.tolist()


def header(slots: int, slot_bytes: int, identity: int) -> bytes:
    """Return the header page of an index file."""
    raw = _HEADER.pack(MAGIC, VERSION, slots, slot_bytes, identity, 0)
    words = struct.unpack_from("<4Q", raw)
    return _HEADER.pack(MAGIC, VERSION, slots, slot_bytes, identity, _check(words)).ljust(
        HEADER_BYTES, b"\0"
    )


def parse_header(raw: bytes) -> tuple[int, int, int]:
    """Return slots, bytes of a slot and identity of an index file's header page.

    Raises:
        ValueError: it is none, or of another version; says which.
    """
    if len(raw) < HEADER_BYTES:
        raise ValueError(f"it has {len(raw)} bytes, fewer than a header")
    magic, version, slots, slot_bytes, identity, check = _HEADER.unpack_from(raw)
    if magic != MAGIC or check != _check(struct.unpack_from("<4Q", raw)):
        raise ValueError("its header is damaged")
    if version != VERSION:
        raise ValueError(f"it has version {version}, this kvd reads {VERSION}")
    return slots, slot_bytes, identity


def write_tail(raw: memoryview, sequence: int, identity: int, head: bytes) -> None:
    """Write a tail: what stands before the head, the head, and zeros to the end of the memory."""
    check = _check((sequence, identity, len(head)))
    _TAIL.pack_into(raw, 0, check, sequence, identity, len(head))
    end = TAIL_BYTES + len(head)
    raw[TAIL_BYTES:end] = head
    raw[end:] = bytes(len(raw) - end)


def tail_sequence(raw: memoryview, identity: int) -> int | None:
    """Return the sequence of the chunk that a slot's tail was written with; None: damaged."""
    check, sequence, found, length = _TAIL.unpack_from(raw)
    if check != _check((sequence, found, length)) or found != identity:
        return None
    return int(sequence)
