"""Which blocks of chunks are meant, as callers say it and as it is sent."""

from collections.abc import Collection
from typing import TypeAlias

from kvd_client.arguments import collection, shown, whole
from kvd_client.errors import UsageError
from kvd_proto.arrays import IntArray
from kvd_proto.directory import MAX_BLOCKS

Blocks: TypeAlias = tuple[int, int]
"""The first of some blocks of a chunk, counted within the chunk, and how many they are."""


def check_blocks(first: object, count: object) -> None:
    """Raise UsageError where these are not some blocks of a chunk; no count: all that follow."""
    begin = whole("first", first, 0, MAX_BLOCKS - 1)
    if count is not None:
        whole("count", count, 1, MAX_BLOCKS - begin)


def pack_blocks(
    blocks: Collection[Blocks] | None, keys: Collection[bytes]
) -> tuple[IntArray, IntArray]:
    """First blocks and counts, one for each key; nothing where all blocks are meant.

    Raises:
        UsageError: not a pair for each key, or not some blocks of a chunk.
    """
    if blocks is None:
        return IntArray.of((), "u2"), IntArray.of((), "u2")
    pairs = collection("blocks", blocks, "pairs (first block, count)")
    if len(pairs) != len(keys):
        raise UsageError(f"{len(pairs)} blocks with {len(keys)} keys: one pair for each is needed")
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise UsageError(f"blocks={shown(pair)}: a pair (first block, count) is needed")
        check_blocks(pair[0], whole("count", pair[1], 1, MAX_BLOCKS))
    return IntArray.of((p[0] for p in pairs), "u2"), IntArray.of((p[1] for p in pairs), "u2")
