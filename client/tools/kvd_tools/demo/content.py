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
from collections.abc import Iterator
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

Page = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]

MULTIPLIER = np.uint64(0x9E37_79B9_7F4A_7C15)
POISON = 0xA5  # what a block holds before a load: never right by chance
_COORDINATES = struct.Struct("<III")


def page_seed(key: bytes, rank: int, tensor: int, block: int) -> int:
    """Return the 64-bit seed of one page; `block` counts within its chunk."""
    digest = blake2b(_COORDINATES.pack(rank, tensor, block) + key, digest_size=8).digest()
    return int.from_bytes(digest, "little")


class PageContent:
    """Makes and checks pages of one size; holds scratch memory, so one per thread.

    Args:
        page_bytes: bytes of a page, a multiple of 8.
    """

    def __init__(self, page_bytes: int) -> None:
        if page_bytes <= 0 or page_bytes % 8:
            raise ValueError(f"a page of {page_bytes} bytes is no whole number of 8-byte words")
        ramp = np.random.default_rng(page_bytes).integers(0, 2**64, page_bytes // 8, np.uint64)
        self.page_bytes = page_bytes
        self._ramp: Words = ramp
        self._scratch: Words = np.empty_like(ramp)

    def _expected(self, seed: int) -> Words:
        np.bitwise_xor(self._ramp, np.uint64(seed), out=self._scratch)
        np.multiply(self._scratch, MULTIPLIER, out=self._scratch)
        return self._scratch

    def fill(self, page: Page, seed: int) -> None:
        """Write the content of `seed` into `page` ([page_bytes], contiguous)."""
        page.view(np.uint64)[:] = self._expected(seed)

    def mismatches(self, page: Page, seed: int) -> int:
        """Return how many bytes of `page` differ from the content of `seed`."""
        expected = self._expected(seed)
        if np.array_equal(page.view(np.uint64), expected):
            return 0
        return int(np.count_nonzero(page != expected.view(np.uint8)))

    def __repr__(self) -> str:
        return f"<PageContent {self.page_bytes} bytes>"


def chain(pieces: tuple[int, ...]) -> Iterator[bytes]:
    """Yield prefix-chained hashes, 32 bytes each: a hash names its piece and all before it."""
    before = b""
    for piece in pieces:
        before = blake2b(before + piece.to_bytes(8, "little"), digest_size=32).digest()
        yield before


def chunk_key(chunk_hash: bytes, group: int) -> bytes:
    """Return the key of one group's chunk, 34 bytes: its hash and the group's index."""
    return chunk_hash + group.to_bytes(2, "little")
