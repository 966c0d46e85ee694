"""Where the pages of a device pool lie: from tensors to the layout that a daemon serves."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvd_client import GroupSpec, RankLayout, TensorRef, UnsupportedMemory
from kvd_client.arguments import Blocks
from kvd_client.torch_memory import BlockTensor, SharedTensors, share_torch

NO_PAGE = 0  # where all of SGLang's allocators let padded tokens write; never handed out


@dataclass(frozen=True, slots=True)
class LayerPages:
    """The pages of one layer in one tensor.

    layer: number in the order of the forward pass.
    tensor: rows first; a page is `rows` of them.
    rows: of a page.
    """

    layer: int
    tensor: torch.Tensor
    rows: int

    @property
    def row_bytes(self) -> int:
        """Of one row, without what may lie between rows."""
        return int(self.tensor.nbytes // self.tensor.shape[0])

    @property
    def stride(self) -> int:
        """Bytes from one page to the next."""
        return int(self.tensor.stride(0)) * self.tensor.element_size() * self.rows

    def check(self) -> None:
        """Check that a page is one run of bytes.

        Raises:
            UnsupportedMemory: it is not.
        """
        row = self.tensor[0]
        apart = self.rows > 1 and self.stride != self.row_bytes * self.rows
        if not row.is_contiguous() or apart:
            raise UnsupportedMemory(
                f"layer {self.layer}: a page of a tensor of shape {tuple(self.tensor.shape)} and"
                f" strides {self.tensor.stride()} is not one run of bytes; kvd cannot offload this"
                " KV-cache layout"
            )


@dataclass(frozen=True, slots=True)
class PagePool:
    """A device pool of pages that are numbered together.

    Attributes:
        name: SGLang's, which transfers name.
        page_tokens: what SGLang counts in its indices, for each page.
        layers: all that a page consists of, in the order of layers.
    """

    name: str
    page_tokens: int
    layers: tuple[LayerPages, ...]

    @property
    def num_pages(self) -> int:
        """How many there are."""
        return min(int(part.tensor.shape[0]) // part.rows for part in self.layers)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.layers[0].tensor.device

    @property
    def contents(self) -> str:
        """Digest of what a page's bytes are, in their order."""
        parts = [
            (part.layer, part.rows, tuple(part.tensor.shape[1:]), str(part.tensor.dtype))
            for part in self.layers
        ]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    def share(self, blocks_per_chunk: int) -> tuple[SharedTensors, RankLayout]:
        """Make the memory mappable, host memory by moving it in place, and describe it.

        Raises:
            UnsupportedMemory: another process cannot map it, or pages are not in one piece.
        """
        for part in self.layers:
            part.check()
        shared = share_torch(
            [
                BlockTensor(
                    part.tensor, page_bytes=part.row_bytes * part.rows, block_stride=part.stride
                )
                for part in self.layers
            ]
        )
        refs = tuple(
            TensorRef(tensor, part.row_bytes * part.rows, layer=part.layer)
            for part, (tensor,) in zip(self.layers, shared.parts, strict=True)
        )
        group = GroupSpec(
            refs=refs, block_size=self.page_tokens, kind=self.name, contents=self.contents
        )
        layout = RankLayout(
            num_blocks=self.num_pages,
            blocks_per_chunk=blocks_per_chunk,
            hash_block_size=self.page_tokens,
            storages=shared.storages,
            tensors=shared.tensors,
            groups=(group,),
            null_block=NO_PAGE,
        )
        return shared, layout


# TODO coverage.py
# """Which pages of a prompt are in the pool, and in which chunks. No I/O.
#
# SGLang names pages by hashes that stand for the whole prompt up to the page's end, and stores
# the pages of a node of its tree at a time, wherever the node begins. A chunk is named by the hash
# of its last page and filled from its end: page i lies in block `factor - 1` of the chunk that ends
# with it, the page before it in the block before. So it does not matter where a chunk begins, how
# many pages it has, or at which page a lookup starts; equal hashes mean equal pages.
# """

Held = Callable[[bytes], Blocks | None]
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
    def blocks(self) -> Blocks:
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


def _holds(blocks: Blocks | None, first: int, factor: int) -> bool:
    """Whether a chunk has its blocks from `first` to the last."""
    return blocks is not None and blocks[0] <= first and blocks[0] + blocks[1] == factor
