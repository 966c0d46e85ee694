"""What is kept beside a chunk's bytes, by which a get knows that it got what a put was given.

The head of a record, little-endian: magic and version, the space's id, key, first block,
count of blocks and group, bytes of all shares and their xxh3-64; then the chunk's
description, if it has one; then the xxh3-64 of all of that.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from xxhash import xxh3_64, xxh3_64_intdigest

from kvd.errors import TierError
from kvd.tier.contract import Space
from kvd_proto.directory import KEY_BYTES

MAGIC = b"kvdC"
VERSION = 2
_HEAD = struct.Struct(f"<4sHBx16sQQHHH2xI4x{KEY_BYTES}s")
_CHECK = struct.Struct("<Q")
HEAD_BYTES: Final = _HEAD.size + _CHECK.size
"""Of a head without a description."""


class Damaged(TierError):
    """What was read is not what was put; the text says which part of it."""


class OtherChunk(Damaged):
    """A whole head, of another chunk: as where a power loss brings an old index back."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """What a head says.

    Attributes:
        coverage: first block, count of blocks, group.
        check: xxh3-64 of the shares.
        description: as the scheduler encoded it; empty: there is none.
    """

    coverage: tuple[int, int, int]
    check: int
    description: bytes


def check_of(shares: Sequence[memoryview]) -> int:
    """The xxh3-64 of the bytes of all shares, one after the other.

    The interpreter lock is let go while a large share is read.
    """
    if len(shares) == 1:
        return xxh3_64_intdigest(shares[0])
    state = xxh3_64()
    for share in shares:
        state.update(share)
    return state.intdigest()


def seal(
    space: Space, key: bytes, coverage: tuple[int, int, int], check: int, description: bytes
) -> bytes:
    """The head of a chunk.

    Args:
        space: its own.
        key: 1 to 48 bytes.
        coverage: first block, count of blocks, group; 16 bits each.
        check: `check_of` its shares.
        description: empty where there is none.
    """
    head = _HEAD.pack(
        MAGIC,
        VERSION,
        len(key),
        space.id,
        space.chunk_bytes,
        check,
        *coverage,
        len(description),
        key,
    )
    head += description
    return head + _CHECK.pack(xxh3_64_intdigest(head))


def unseal(head: bytes, space: Space, key: bytes) -> Sealed:
    """What a head says, which must be that of this chunk.

    Raises:
        Damaged: it is not, or not whole. The shares are to be compared with `Sealed.check`.
    """
    size = len(head) - _CHECK.size
    if size < _HEAD.size:
        raise Damaged(f"a head of {len(head)} bytes, {HEAD_BYTES} are the least")
    body = memoryview(head)[:size]
    if _CHECK.unpack_from(head, size)[0] != xxh3_64_intdigest(body):
        raise Damaged("the head's check word does not fit it")
    magic, version, key_len, space_id, nbytes, check, *coverage, length, padded = _HEAD.unpack_from(
        head
    )
    if (magic, version) != (MAGIC, VERSION):
        raise Damaged(f"a head of version {magic!r} {version}, this is {VERSION}")
    if (padded[:key_len], space_id) != (key, space.id):
        raise OtherChunk("the record of another chunk")
    if nbytes != space.chunk_bytes or size - _HEAD.size != length:
        raise Damaged(f"a record of {nbytes} bytes, a chunk has {space.chunk_bytes}")
    first, count, group = coverage
    return Sealed((first, count, group), check, bytes(body[_HEAD.size :]))
