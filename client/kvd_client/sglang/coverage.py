"""Which pages of a prompt are in the pool, and in which chunks. No I/O.

SGLang names pages by hashes that stand for the whole prompt up to the page's end, and stores
the pages of a node of its tree at a time, wherever the node begins. A chunk is named by the hash
of its last page and filled from its end: page i lies in block `factor - 1` of the chunk that ends
with it, the page before it in the block before. So it does not matter where a chunk begins, how
many pages it has, or at which page a lookup starts; equal hashes mean equal pages.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvd_client.tickets import BlockRange

Held = Callable[[bytes], BlockRange | None]
"""The blocks of a key's chunk that are in the pool: the first, and how many; None: no chunk."""


class Piece(NamedTuple):
    """Consecutive pages that lie in one chunk.

    key: of the chunk.
    page: number of the first one among the pages in question.
    pages: how many.
    block: of the chunk, where the first one lies.
    """

    key: bytes
    page: int
    pages: int
    block: int

    @property
    def blocks(self) -> BlockRange:
        """The chunk's blocks that are needed."""
        return self.block, self.pages


def chunk_keys(pages: Sequence[str]) -> list[bytes]:
    """The keys of chunks that end with these pages, from SGLang's hashes in hex.

    Raises:
        ValueError: one is no hex string.
    """
    return [bytes.fromhex(page) for page in pages]


def cut(keys: Sequence[bytes], factor: int) -> list[Piece]:
    """Chunks for pages that are to be stored: each full from the first on, but the last."""
    pieces = []
    for first in range(0, len(keys), factor):
        count = min(factor, len(keys) - first)
        pieces.append(Piece(keys[first + count - 1], first, count, factor - count))
    return pieces


def prefix(keys: Sequence[bytes], factor: int, held: Held) -> list[Piece]:
    """The pieces that hold the first pages, as far as there is no gap.

    Of several chunks that hold a page the one that ends last is taken, so that there are few.
    """
    pieces: list[Piece] = []
    reach = 0
    while reach < len(keys):
        for end in range(min(reach + factor, len(keys)) - 1, reach - 1, -1):
            block = factor - 1 - (end - reach)
            if _holds(held(keys[end]), block, factor):
                pieces.append(Piece(keys[end], reach, end + 1 - reach, block))
                reach = end + 1
                break
        else:
            break
    return pieces


def covered(keys: Sequence[bytes], factor: int, held: Held) -> list[bool]:
    """Whether each page is in the pool, in whichever chunk."""
    found = [False] * len(keys)
    for end, key in enumerate(keys):
        blocks = held(key)
        if blocks is not None and blocks[0] + blocks[1] == factor:
            first = max(0, end + 1 - blocks[1])
            found[first : end + 1] = [True] * (end + 1 - first)
    return found


def windows(found: Sequence[bool], size: int) -> set[int]:
    """The prefix lengths, in pages, whose last `size` pages were all found."""
    ends = set()
    run = 0
    for end, there in enumerate(found, 1):
        run = run + 1 if there else 0
        if run >= min(size, end):
            ends.add(end)
    return ends


def _holds(blocks: BlockRange | None, first: int, factor: int) -> bool:
    """Whether a chunk has its blocks from `first` to the last."""
    return blocks is not None and blocks[0] <= first and blocks[0] + blocks[1] == factor
