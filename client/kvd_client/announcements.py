"""What is announced of chunks: blocks that can be loaded now, and blocks that cannot any more."""

from typing import Any, NamedTuple, TypeAlias

from kvd_client.change_reader import Place
from kvd_proto.descriptions import TOKEN_BYTES, Description

_GROUP_BYTES = 4


class StoredBlocks(NamedTuple):
    """Blocks that can be loaded now, each the parent of the next.

    A chunk that is known by its key alone has one hash, no parent, no tokens and `block_size` 0.
    The other fields are those of `Description`.

    in_tiers: the blocks lie in tiers; else in memory.
    lookahead: for each block the u4 tokens after it that its hash covers; None: it covers none.
    """

    hashes: tuple[bytes, ...]
    parent: bytes
    tokens: bytes
    block_size: int
    group: int
    kind: str = ""
    window: int | None = None
    lora: str | None = None
    extra: tuple[tuple[Any, ...] | None, ...] | None = None
    in_tiers: bool = False
    lookahead: tuple[bytes, ...] | None = None


class RemovedBlocks(NamedTuple):
    """Blocks of one group that cannot be loaded from tiers (`in_tiers`) or memory any more."""

    hashes: tuple[bytes, ...]
    group: int
    in_tiers: bool = False


Announcement: TypeAlias = StoredBlocks | RemovedBlocks
MediumBlocks: TypeAlias = dict[tuple[int, bool], list[bytes]]
"""Hashes of blocks by their group and whether they are in tiers."""


class ChunkContents(NamedTuple):
    """A chunk that is announced: where it lies, and its blocks.

    description: None, and `parent` too: the chunk is known by its key alone.
    """

    key: bytes
    in_tiers: bool
    place: Place
    description: Description | None
    group: int
    hashes: tuple[bytes, ...]
    parent: bytes | None


def chunk_contents(
    key: bytes, place: Place, description: Description | None, *, in_tiers: bool
) -> ChunkContents:
    """Return the blocks that the chunk has at its place; without description the key's block."""
    if description is not None:
        first, end = place.first, place.first + place.count
        hashes = description.hashes[first:end]
        if len(hashes) == 1 or (hashes and len(set(hashes)) == len(hashes)):
            parent = description.hashes[first - 1] if first else description.parent
            group = description.group
            return ChunkContents(key, in_tiers, place, description, group, hashes, parent)
    block_hash, group = key, 0
    if len(key) > _GROUP_BYTES:
        block_hash, group = key[:-_GROUP_BYTES], int.from_bytes(key[-_GROUP_BYTES:], "big")
    return ChunkContents(key, in_tiers, place, None, group, (block_hash,), None)


def stored_blocks(contents: ChunkContents, begin: int, end: int) -> StoredBlocks:
    """Return the announcement of some of a chunk's blocks."""
    hashes, description = contents.hashes[begin:end], contents.description
    if description is None:
        return StoredBlocks(hashes, b"", b"", 0, contents.group, in_tiers=contents.in_tiers)
    parent = contents.hashes[begin - 1] if begin else contents.parent or b""
    begin, end = contents.place.first + begin, contents.place.first + end
    block_bytes = description.block_size * TOKEN_BYTES
    lookahead = None
    if covered := len(description.lookahead):
        tokens = description.tokens + description.lookahead
        ends = range((begin + 1) * block_bytes, (end + 1) * block_bytes, block_bytes)
        lookahead = tuple(tokens[at : at + covered] for at in ends)
    return StoredBlocks(
        hashes,
        parent,
        description.tokens[begin * block_bytes : end * block_bytes],
        description.block_size,
        contents.group,
        description.kind,
        description.window,
        description.lora,
        None if description.extra is None else description.extra[begin:end],
        contents.in_tiers,
        lookahead,
    )


def reannounced(stored: StoredBlocks) -> tuple[RemovedBlocks, StoredBlocks]:
    """Return the announcements that announce announced blocks again."""
    return RemovedBlocks(stored.hashes, stored.group, stored.in_tiers), stored


def removed_blocks(removed: MediumBlocks) -> list[RemovedBlocks]:
    """Return the announcements that remove these blocks."""
    return [
        RemovedBlocks(tuple(hashes), group, in_tiers)
        for (group, in_tiers), hashes in removed.items()
    ]
