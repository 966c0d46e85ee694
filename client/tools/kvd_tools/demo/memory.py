"""A rank's KV memory: its tensors, their description for the daemon, and their content.

Four tensors in three storages: two plain ones; then two that are packed, block by block, in
one storage, the first of which has padded pages. The full group uses all four, the window
group the first three, and they share the block ids.

A page holds bytes derived from the key, the rank, the tensor and the block: a fixed pseudo-random
ramp, mixed with a 64-bit seed::

    seed    = blake2b(rank, tensor, block in chunk, key)
    word[i] = (ramp[i] ^ seed) * MULTIPLIER   (mod 2**64)

The multiplier is odd, so for every seed the words are a permutation of what
they could be: two pages with different seeds differ in every word, and two
words of one page differ because the ramp's do. A page of another key, rank,
tensor or block, a page shifted by a word, and a single flipped bit all show.
"""

import struct
from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from kvd_client.tickets import ChunkBlocks
from kvd_proto.layout import GroupSpec, RankLayout, TensorRef, TensorSpec
from kvd_tools.demo.workload import BLOCK_TOKENS, BLOCKS_PER_CHUNK, NULL_BLOCK, WINDOW_BLOCKS

Page = npt.NDArray[np.uint8]

MULTIPLIER = np.uint64(0x9E37_79B9_7F4A_7C15)
POISON = 0xA5  # what a block holds before a load: never right by chance
_COORDINATES = struct.Struct("<III")


def page_seed(key: bytes, rank: int, tensor: int, block: int) -> int:
    """Return the 64-bit seed of one page; `block` counts within its chunk."""
    digest = blake2b(_COORDINATES.pack(rank, tensor, block) + key, digest_size=8).digest()
    return int.from_bytes(digest, "little")


def page_content(seed: int, page_bytes: int) -> Page:
    """Return the content of a page, u8[page_bytes]; its size is a multiple of 8."""
    return ((_ramp(page_bytes // 8) ^ np.uint64(seed)) * MULTIPLIER).view(np.uint8)


@cache
def _ramp(words: int) -> npt.NDArray[np.uint64]:
    return np.random.default_rng(8 * words).integers(0, 2**64, words, np.uint64)


def chunk_key(piece: int, group: int) -> bytes:
    """Return the key of one group's chunk, 34 bytes; a piece implies all that is before it."""
    return piece.to_bytes(32, "little") + group.to_bytes(2, "little")


STRIDES = (16384, 16384, 24576)
"""Bytes from block to block, by storage."""

TENSORS = (
    TensorSpec(storage=0, offset=0, page_bytes=16384, block_stride=STRIDES[0]),
    TensorSpec(storage=1, offset=0, page_bytes=16384, block_stride=STRIDES[1]),
    TensorSpec(storage=2, offset=0, page_bytes=12288, block_stride=STRIDES[2]),
    TensorSpec(storage=2, offset=12288, page_bytes=12288, block_stride=STRIDES[2]),
)
USED_BYTES = (16384, 16384, 8192, 12288)
"""Bytes of each tensor's pages that are in use; the rest is padding."""

GROUPS = ((0, 1, 2, 3), (0, 1, 2))
"""The tensors of the full and of the window group."""


def rank_layout(num_blocks: int) -> RankLayout:
    """Return what a rank with so many blocks reports to the daemon."""

    def group(tensors: Sequence[int], kind: str, window: int | None) -> GroupSpec:
        refs = tuple(TensorRef(i, USED_BYTES[i]) for i in tensors)
        return GroupSpec(refs, BLOCK_TOKENS, kind, window)

    return RankLayout(
        num_blocks=num_blocks,
        blocks_per_chunk=BLOCKS_PER_CHUNK,
        hash_block_size=BLOCK_TOKENS,
        storages=tuple(num_blocks * stride for stride in STRIDES),
        tensors=TENSORS,
        groups=(
            group(GROUPS[0], "full", None),
            group(GROUPS[1], "sliding_window", WINDOW_BLOCKS * BLOCK_TOKENS),
        ),
        null_block=NULL_BLOCK,
    )


class KvMemory:
    """The pages of one rank, and what each must hold. All of it is poison at first.

    A list of `ChunkBlocks` names blocks of the full group, then of the window group.

    Args:
        rank: decides the content.
        storages: u8[num_blocks, stride] for each of `STRIDES`.
    """

    def __init__(self, rank: int, storages: Sequence[npt.NDArray[np.uint8]]) -> None:
        self.rank = rank
        self.pages = [storages[t.storage][:, t.offset : t.offset + t.page_bytes] for t in TENSORS]
        for storage in storages:
            storage[:] = POISON

    def fill(self, groups: Sequence[ChunkBlocks]) -> None:
        """Compute: write the content of these blocks."""
        for page, seed in self._seeded(groups):
            page[:] = page_content(seed, len(page))

    def poison(self, groups: Sequence[ChunkBlocks]) -> None:
        """Overwrite these blocks, padding included, so that nothing is right by chance."""
        for tensors, group in zip(GROUPS, groups, strict=True):
            for tensor in tensors:
                self.pages[tensor][list(group.blocks)] = POISON

    def corrupt(self, groups: Sequence[ChunkBlocks]) -> None:
        """Flip one bit of the first block."""
        page, _ = next(self._seeded(groups))
        page[len(page) // 2] ^= 1

    def verify(self, groups: Sequence[ChunkBlocks]) -> tuple[int, int]:
        """Return how many bytes of these blocks were compared, and how many are wrong."""
        verified = mismatched = 0
        for page, seed in self._seeded(groups):
            verified += len(page)
            mismatched += int(np.count_nonzero(page != page_content(seed, len(page))))
        return verified, mismatched

    def strayed(self) -> int:
        """Count changed bytes where nothing may ever be written: null block and padding."""
        changed = 0
        for used, pages in zip(USED_BYTES, self.pages, strict=True):
            changed += int(np.count_nonzero(pages[NULL_BLOCK] != POISON))
            changed += int(np.count_nonzero(pages[:, used:] != POISON))
        return changed

    def _seeded(self, groups: Sequence[ChunkBlocks]) -> Iterator[tuple[Page, int]]:
        """Yield every page of these blocks, without its padding, and the seed of its content."""
        for tensors, group in zip(GROUPS, groups, strict=True):
            for at, block in enumerate(group.blocks, group.first % BLOCKS_PER_CHUNK):
                key = group.keys[at // BLOCKS_PER_CHUNK]
                for tensor in tensors:
                    page = self.pages[tensor][block, : USED_BYTES[tensor]]
                    yield page, page_seed(key, self.rank, tensor, at % BLOCKS_PER_CHUNK)
