"""Descriptions of chunks: what a router must know of a chunk's blocks, kept with the chunk.

A scheduler describes a chunk when it begins to store it. The daemon keeps the encoded bytes, which
it does not look into, in a file for each namespace, and every scheduler of the namespace reads it.

Little-endian: a header page, then a record of `record_bytes` for every slot; see docs/protocol.md.
The daemon writes a record in pieces, and is followed by readers at any moment: the generation says
whether the record is the chunk's, the check word whether it is whole. Readers call `os.pread`: a
file that is shortened is short for them, where a mapping would end the process.
"""

import os
import struct
from typing import Annotated, Any, Final
from zlib import crc32

import msgspec
from msgspec import Meta

from kvd_proto.directory import MAX_SLOTS
from kvd_proto.errors import DescriptionError
from kvd_proto.layout import RankLayout

MAGIC = b"kvd-dsc\0"
VERSION = 1
HEADER_BYTES = 4096
MAX_DESCRIPTION_BYTES = 2**20
MAX_HASH_BYTES = 64
_HEADER = struct.Struct("<8sII")
_CHECK = struct.Struct("<I")
_RECORD = struct.Struct("<QII")  # generation, check word, length
_COVERED = struct.Struct("<IQI")  # by the check word, before the bytes: slot, generation, length
RECORD_HEADER_BYTES: Final = _RECORD.size

TOKEN_BYTES: Final = 4
MAX_LOOKAHEAD_TOKENS = 64
_HASH_BYTES = 34  # a hash of 32 bytes as msgpack has it
_EXTRA_BYTES = 96  # of a block, for extra keys: an image's hash and place, an adapter's name
_REST_BYTES = 768  # parent, kind, an adapter's name, lookahead
_ALIGNMENT = 64
_PLAIN = (bool, int, float, str, bytes)


class Description(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A whole chunk's blocks, as KV events have them.

    parent: hash of the block before the chunk's first one; empty: there is none.
    hashes: of the chunk's blocks, in their order, 1 to 64 bytes each; at least one.
    tokens: u4, little-endian, `block_size` for each block.
    block_size: tokens of a block.
    group: index of the KV-cache group.
    kind: the engine's word for the group's kind of attention.
    window: tokens that attention looks back; None: all.
    lora: name of the adapter; None: none.
    extra: for each block what its hash was made of besides tokens, None for nothing: plain values,
        and tuples of plain values; None: nothing for all of them.
    lookahead: u4 token ids that follow the chunk and that the hash of its last blocks covers too,
        `MAX_LOOKAHEAD_TOKENS` at most; empty: hashes cover no tokens after a block.
    """

    parent: Annotated[bytes, Meta(max_length=MAX_HASH_BYTES)]
    hashes: Annotated[
        tuple[Annotated[bytes, Meta(min_length=1, max_length=MAX_HASH_BYTES)], ...],
        Meta(min_length=1),
    ]
    tokens: bytes
    block_size: Annotated[int, Meta(ge=1)]
    group: int = 0
    kind: str = ""
    window: int | None = None
    lora: str | None = None
    extra: tuple[tuple[Any, ...] | None, ...] | None = None
    lookahead: bytes = b""


_decoder = msgspec.msgpack.Decoder(Description)
_encoder = msgspec.msgpack.Encoder()


def encode(description: Description) -> bytes:
    """Return a description's bytes.

    Raises:
        DescriptionError: it contradicts itself, or has more than `MAX_DESCRIPTION_BYTES`.
    """
    try:
        _check_tokens(description)
        _check_hashes(description)
        if description.extra is not None:
            _check_extra(description)
        items = msgspec.structs.astuple(description)
        encoded: bytes = _encoder.encode(items if description.lookahead else items[:-1])
    except (TypeError, ValueError, OverflowError) as error:
        raise DescriptionError(f"{error}; pass what the fields are declared as") from error
    if len(encoded) > MAX_DESCRIPTION_BYTES:
        raise DescriptionError(
            f"a description of {len(encoded)} bytes, {MAX_DESCRIPTION_BYTES} are possible:"
            " use fewer blocks_per_chunk, or leave it out"
        )
    return encoded


def decode(encoded: bytes | memoryview) -> Description:
    """Return the description that these bytes are.

    Raises:
        DescriptionError: they are none.
    """
    try:
        found = _decoder.decode(encoded)
        if found.extra is not None:
            extra = tuple(None if keys is None else _tuples(keys) for keys in found.extra)
            found = msgspec.structs.replace(found, extra=extra)
            _check_extra(found)
    except (msgspec.DecodeError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise DescriptionError(f"no description: {error}") from error
    _check_tokens(found)
    return found


def _tuples(keys: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(tuple(key) if isinstance(key, list) else key for key in keys)


def _check_tokens(description: Description) -> None:
    blocks, size = len(description.hashes), description.block_size
    if not blocks or size < 1 or len(description.tokens) != TOKEN_BYTES * size * blocks:
        raise DescriptionError(
            f"{len(description.tokens)} bytes of tokens for {blocks} blocks of {size} tokens:"
            f" {TOKEN_BYTES} for each token are needed, and a block"
        )
    lookahead = len(description.lookahead)
    if lookahead % TOKEN_BYTES or lookahead > TOKEN_BYTES * MAX_LOOKAHEAD_TOKENS:
        raise DescriptionError(
            f"{lookahead} bytes of lookahead: {TOKEN_BYTES} for each token are needed,"
            f" for {MAX_LOOKAHEAD_TOKENS} tokens at most"
        )


def _check_hashes(description: Description) -> None:
    sizes = set(map(len, description.hashes))
    if min(sizes) < 1 or max(*sizes, len(description.parent)) > MAX_HASH_BYTES:
        raise DescriptionError(
            f"hashes of {sorted(sizes)} bytes, a parent of {len(description.parent)}:"
            f" 1 to {MAX_HASH_BYTES} are possible"
        )


def _check_extra(description: Description) -> None:
    extra, blocks = description.extra or (), len(description.hashes)
    if len(extra) != blocks or not all(keys is None or all(map(_is_extra, keys)) for keys in extra):
        raise DescriptionError(
            f"extra keys of {len(extra)} for {blocks} blocks: None or plain values for each"
        )


def _is_extra(key: object) -> bool:
    return isinstance(key, _PLAIN) or (
        isinstance(key, tuple) and all(part is None or isinstance(part, _PLAIN) for part in key)
    )


def record_bytes(layout: RankLayout) -> int:
    """Return the size of a record for the chunks of a layout: what their descriptions need.

    4 bytes for each token and 130 for each block of the group that has most; blocks are counted as
    if each had one hash of `hash_block_size` tokens. A longer description is not kept.
    """
    tokens = layout.blocks_per_chunk * max(group.block_size for group in layout.groups)
    hashes = tokens // layout.hash_block_size
    needed = tokens * TOKEN_BYTES + hashes * (_HASH_BYTES + _EXTRA_BYTES) + _REST_BYTES
    size = RECORD_HEADER_BYTES + min(needed, MAX_DESCRIPTION_BYTES)
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def max_description_bytes(record: int) -> int:
    """Return how many bytes a description may have that fits records of so many bytes."""
    return min(record - RECORD_HEADER_BYTES, MAX_DESCRIPTION_BYTES)


def pack_header(record: int) -> bytes:
    """Return the beginning of a file with records of so many bytes; zeros fill its page."""
    head = _HEADER.pack(MAGIC, VERSION, record)
    return head + _CHECK.pack(crc32(head))


def read_header(fd: int) -> int:
    """Return the size of the records of a file; 0 where it is none of this version."""
    try:
        page = os.pread(fd, _HEADER.size + _CHECK.size, 0)
    except OSError:
        return 0
    if len(page) < _HEADER.size + _CHECK.size:
        return 0
    magic, version, record = _HEADER.unpack_from(page)
    good = (magic, version) == (MAGIC, VERSION) and page == pack_header(record)
    largest = RECORD_HEADER_BYTES + MAX_DESCRIPTION_BYTES + _ALIGNMENT
    return record if good and RECORD_HEADER_BYTES < record <= largest else 0


def record_offset(slot: int, record: int) -> int:
    """Return where a slot's record begins in the file."""
    return HEADER_BYTES + slot * record


def pack_record(slot: int, generation: int, encoded: bytes) -> bytes:
    """Return the record of a chunk; `encoded` has at most `max_description_bytes` bytes."""
    check = crc32(encoded, crc32(_COVERED.pack(slot, generation, len(encoded))))
    return _RECORD.pack(generation, check, len(encoded)) + encoded


class DescriptionsView:
    """Reads the descriptions of a namespace; never raises for what the file has.

    Args:
        fd: of the file; it stays open, and the caller's, as long as this is used.

    Attributes:
        record_bytes: of a slot; 0 where the file is none of this version: nothing is described.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.record_bytes = read_header(fd)

    def read(self, slot: int, generation: int) -> Description | None:
        """Return the description of the chunk that a slot holds, or held, with this generation.

        None: it has none, or not any more, or what is there is damaged.
        """
        encoded = self.read_encoded(slot, generation)
        try:
            return decode(encoded) if encoded else None
        except DescriptionError:
            return None

    def read_encoded(self, slot: int, generation: int) -> bytes:
        """Return the bytes that `read` decodes; empty where there are none, or damaged ones."""
        size = self.record_bytes
        if not size or not 0 <= slot < MAX_SLOTS:
            return b""
        try:
            record = os.pread(self._fd, size, record_offset(slot, size))
        except (OSError, OverflowError):
            return b""
        if len(record) < RECORD_HEADER_BYTES:
            return b""
        found, check, length = _RECORD.unpack_from(record)
        encoded = record[RECORD_HEADER_BYTES : RECORD_HEADER_BYTES + length]
        if found != generation or len(encoded) != length:
            return b""
        if check != crc32(encoded, crc32(_COVERED.pack(slot, generation, length))):
            return b""
        return encoded
