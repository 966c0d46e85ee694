"""What a page must hold: bytes derived from the key, the rank, the tensor and the block.

A page's bytes are a fixed pseudo-random ramp, mixed with a 64-bit seed::

    seed    = blake2b(rank, tensor, block in chunk, key)
    word[i] = (ramp[i] ^ seed) * MULTIPLIER   (mod 2**64)

The multiplier is odd, so for every seed the words are a permutation of what
they could be: two pages with different seeds differ in every word, and two
words of one page differ because the ramp's do. A page of another key, rank,
tensor or block, a page shifted by a word, and a single flipped bit all show.
"""

import struct
from functools import cache
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

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
