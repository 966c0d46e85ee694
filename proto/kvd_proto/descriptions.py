"""Descriptions of chunks: what routers need to know of a chunk's blocks, stored with the chunk.

A scheduler describes a chunk when it begins to store it. The daemon writes the encoded bytes, which
it does not decode, into a file for each namespace; every scheduler of the namespace reads it.

The file is little-endian: a header page, then a record of `record_bytes` for every slot; see
docs/protocol.md. A record may be read while it is written: its generation says whether it is the
chunk's, its check word whether it is complete. Readers use `os.pread`, which returns short reads
when the file was truncated; access to a truncated mapping would kill the process.
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
    """The blocks of a whole chunk, with the fields of a KV event.

    parent: hash of the block before the chunk's first one; empty: none.
    hashes: of the chunk's blocks, in their order, 1 to 64 bytes each; at least one.
    tokens: u4, little-endian, `block_size` for each block.
    block_size: tokens of a block.
    group: index of the KV-cache group.
    kind: the engine's word for the group's kind of attention.
    window: tokens that attention looks back; None: all.
    lora: name of the adapter; None: none.
    extra: for each block the keys that its hash covers besides tokens: plain values and tuples of
        plain values, or None; None: no block has any.
    lookahead: u4 token ids after the chunk that the hashes of its last blocks cover too, at most
        `MAX_LOOKAHEAD_TOKENS`; empty: no hash covers tokens after its block.
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
        DescriptionError: it contradicts itself, or is longer than `MAX_DESCRIPTION_BYTES`.
    """
    try:
        _check_tokens(description)
        _check_hashes(description)
        if description.extra is not None:
            _check_extra(description)
        fields = msgspec.structs.astuple(description)
        encoded: bytes = _encoder.encode(fields if description.lookahead else fields[:-1])
    except (TypeError, ValueError, OverflowError) as error:
        raise DescriptionError(f"{error}; pass the declared types") from error
    if len(encoded) > MAX_DESCRIPTION_BYTES:
        raise DescriptionError(
            f"a description of {len(encoded)} bytes, {MAX_DESCRIPTION_BYTES} are possible:"
            " use fewer blocks_per_chunk, or leave it out"
        )
    return encoded


def decode(encoded: bytes | memoryview) -> Description:
    """Return the description encoded in these bytes.

    Raises:
        DescriptionError: they are no description.
    """
    try:
        description = _decoder.decode(encoded)
        if description.extra is not None:
            extra = tuple(None if keys is None else _as_tuples(keys) for keys in description.extra)
            description = msgspec.structs.replace(description, extra=extra)
            _check_extra(description)
    except (msgspec.DecodeError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise DescriptionError(f"no description: {error}") from error
    _check_tokens(description)
    return description


def _as_tuples(keys: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(tuple(key) if isinstance(key, list) else key for key in keys)


def _check_tokens(description: Description) -> None:
    num_blocks, size = len(description.hashes), description.block_size
    if not num_blocks or size < 1 or len(description.tokens) != TOKEN_BYTES * size * num_blocks:
        raise DescriptionError(
            f"{len(description.tokens)} bytes of tokens for {num_blocks} blocks of {size} tokens:"
            f" {TOKEN_BYTES} for each token are needed, and at least one block"
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
    extra, num_blocks = description.extra or (), len(description.hashes)
    if len(extra) != num_blocks or not all(
        keys is None or all(map(_is_extra_key, keys)) for keys in extra
    ):
        raise DescriptionError(
            f"extra has {len(extra)} items for {num_blocks} blocks: give None or plain values for"
            " each block"
        )


def _is_extra_key(key: object) -> bool:
    return isinstance(key, _PLAIN) or (
        isinstance(key, tuple) and all(item is None or isinstance(item, _PLAIN) for item in key)
    )


def record_bytes(layout: RankLayout) -> int:
    """Return the size of a record that fits usual descriptions of the layout's chunks.

    4 bytes for each token and 130 for each hash of the group with the most tokens in a chunk, as if
    each hash covered `hash_block_size` tokens. Longer descriptions are not kept.
    """
    num_tokens = layout.blocks_per_chunk * max(group.block_size for group in layout.groups)
    num_hashes = num_tokens // layout.hash_block_size
    usual = num_tokens * TOKEN_BYTES + num_hashes * (_HASH_BYTES + _EXTRA_BYTES) + _REST_BYTES
    size = RECORD_HEADER_BYTES + min(usual, MAX_DESCRIPTION_BYTES)
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def max_description_bytes(record_size: int) -> int:
    """Return the size of the longest description that fits a record of `record_size` bytes."""
    return min(record_size - RECORD_HEADER_BYTES, MAX_DESCRIPTION_BYTES)


def pack_header(record_size: int) -> bytes:
    """Return the header of a file of records of `record_size` bytes; the rest of its page is 0."""
    head = _HEADER.pack(MAGIC, VERSION, record_size)
    return head + _CHECK.pack(crc32(head))


def read_header(fd: int) -> int:
    """Return the record size of a file; 0 if it is no file of this version."""
    try:
        page = os.pread(fd, _HEADER.size + _CHECK.size, 0)
    except OSError:
        return 0
    if len(page) < _HEADER.size + _CHECK.size:
        return 0
    magic, version, record_size = _HEADER.unpack_from(page)
    intact = (magic, version) == (MAGIC, VERSION) and page == pack_header(record_size)
    largest = RECORD_HEADER_BYTES + MAX_DESCRIPTION_BYTES + _ALIGNMENT
    return record_size if intact and RECORD_HEADER_BYTES < record_size <= largest else 0


def record_offset(slot: int, record_size: int) -> int:
    """Return the file offset of a slot's record."""
    return HEADER_BYTES + slot * record_size


def pack_record(slot: int, generation: int, encoded: bytes) -> bytes:
    """Return the record of a chunk; `encoded` has at most `max_description_bytes` bytes."""
    check = crc32(encoded, crc32(_COVERED.pack(slot, generation, len(encoded))))
    return _RECORD.pack(generation, check, len(encoded)) + encoded


class DescriptionsView:
    """Reads the descriptions of a namespace; a damaged file raises no error.

    Args:
        fd: of the file; the caller closes it after the last use of this object.

    Attributes:
        record_bytes: size of a record; 0 if the file is not of this version: then `read` finds
            nothing.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.record_bytes = read_header(fd)

    def read(self, slot: int, generation: int) -> Description | None:
        """Return the description of the slot's chunk of this generation.

        None: there is none, a later chunk's has replaced it, or it is damaged.
        """
        encoded = self.read_encoded(slot, generation)
        try:
            return decode(encoded) if encoded else None
        except DescriptionError:
            return None

    def read_encoded(self, slot: int, generation: int) -> bytes:
        """Return the encoded description; empty if there is none, or a damaged one."""
        size = self.record_bytes
        if not size or not 0 <= slot < MAX_SLOTS:
            return b""
        try:
            record = os.pread(self._fd, size, record_offset(slot, size))
        except (OSError, OverflowError):
            return b""
        if len(record) < RECORD_HEADER_BYTES:
            return b""
        record_generation, check, length = _RECORD.unpack_from(record)
        encoded = record[RECORD_HEADER_BYTES : RECORD_HEADER_BYTES + length]
        if record_generation != generation or len(encoded) != length:
            return b""
        if check != crc32(encoded, crc32(_COVERED.pack(slot, generation, length))):
            return b""
        return encoded
