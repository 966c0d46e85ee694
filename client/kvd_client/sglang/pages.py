"""Pages of a device pool: where they lie in memory, and which chunks hold them. No I/O.

SGLang names a page by a hash of the whole prompt up to the page's end, and stores the pages of a
tree node together, wherever the node begins. kvd names a chunk by the hash of its last page and
fills it from its end: page i lies in the last block of the chunk that ends with it, page i - 1 in
the block before. So chunks may begin anywhere, have any number of pages, and be looked up from any
page. Equal hashes mean equal pages.

SGLang's page is `page_size` tokens in every layer: a block of kvd, not the page of a layout.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvd_client import GroupSpec, RankLayout, TensorRef, UnsupportedMemory
from kvd_client.tickets import BlockRange
from kvd_client.torch_memory import BlockTensor, TorchTensors, describe_torch

NO_PAGE = 0  # the page for padded tokens, which SGLang's allocators never hand out


@dataclass(frozen=True, slots=True)
class LayerPages:
    """The pages of one layer in one tensor.

    Attributes:
        number: in the order of the forward pass.
        tensor: its first dimension is rows.
        rows: rows of a page.
    """

    number: int
    tensor: torch.Tensor
    rows: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, without gaps between rows."""
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
        has_gaps = self.rows > 1 and self.stride != self.row_bytes * self.rows
        if not row.is_contiguous() or has_gaps:
            raise UnsupportedMemory(
                f"layer {self.number}: a page of a tensor of shape {tuple(self.tensor.shape)} and"
                f" strides {self.tensor.stride()} is not one run of bytes; kvd cannot offload this"
                " KV-cache layout"
            )


@dataclass(frozen=True, slots=True)
class PagePool:
    """A device pool with one numbering of pages.

    Attributes:
        name: SGLang's name of the pool.
        page_tokens: number of SGLang's indices for each page.
        layers: the parts of a page, in the order of layers.
    """

    name: str
    page_tokens: int
    layers: tuple[LayerPages, ...]

    @property
    def num_pages(self) -> int:
        """Number of pages, the padding page included."""
        return min(int(layer.tensor.shape[0]) // layer.rows for layer in self.layers)

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.layers[0].tensor.device

    @property
    def contents(self) -> str:
        """Digest of what the bytes of a page are, in order."""
        forms = [
            (layer.number, layer.rows, tuple(layer.tensor.shape[1:]), str(layer.tensor.dtype))
            for layer in self.layers
        ]
        return hashlib.blake2b(json.dumps(forms).encode(), digest_size=16).hexdigest()

    def describe(self, blocks_per_chunk: int) -> tuple[TorchTensors, RankLayout]:
        """Describe the memory, for `Worker.register`.

        Raises:
            UnsupportedMemory: a page is not one run of bytes.
        """
        for layer in self.layers:
            layer.check()
        described = describe_torch(
            [
                BlockTensor(
                    layer.tensor, page_bytes=layer.row_bytes * layer.rows, block_stride=layer.stride
                )
                for layer in self.layers
            ]
        )
        refs = tuple(
            TensorRef(tensor, layer.row_bytes * layer.rows, layer=layer.number)
            for layer, (tensor,) in zip(self.layers, described.parts, strict=True)
        )
        group = GroupSpec(
            refs=refs, block_size=self.page_tokens, kind=self.name, contents=self.contents
        )
        layout = RankLayout(
            num_blocks=self.num_pages,
            blocks_per_chunk=blocks_per_chunk,
            hash_block_size=self.page_tokens,
            storages=described.storages,
            tensors=described.tensors,
            groups=(group,),
            null_block=NO_PAGE,
        )
        return described, layout


# ------------------------------------------------------------------- chunks

BlocksOfChunk = Callable[[bytes], BlockRange | None]
"""The blocks of a key's chunk that are in the pool, (first, number); None: no such chunk."""


class PagesInChunk(NamedTuple):
    """Consecutive pages of a prompt that lie in one chunk.

    Attributes:
        key: of the chunk.
        page: index of the first page in the prompt.
        num_pages: their number.
        block: the chunk's block with the first page.
    """

    key: bytes
    page: int
    num_pages: int
    block: int

    @property
    def blocks(self) -> BlockRange:
        """The chunk's blocks with these pages."""
        return self.block, self.num_pages


def chunk_keys(hashes: Sequence[str]) -> list[bytes]:
    """Return the keys of the chunks that end with these pages, from SGLang's hashes in hex.

    Raises:
        ValueError: one is not a hex string.
    """
    return [bytes.fromhex(page_hash) for page_hash in hashes]


def split_into_chunks(keys: Sequence[bytes], pages_per_chunk: int) -> list[PagesInChunk]:
    """Return the chunks for pages to store. All but the last chunk are full."""
    chunks = []
    for first in range(0, len(keys), pages_per_chunk):
        count = min(pages_per_chunk, len(keys) - first)
        chunks.append(PagesInChunk(keys[first + count - 1], first, count, pages_per_chunk - count))
    return chunks


def cached_prefix(
    keys: Sequence[bytes], pages_per_chunk: int, blocks_of: BlocksOfChunk
) -> list[PagesInChunk]:
    """Return the chunks with the first pages, up to the first page that no chunk has.

    Of several chunks with a page, the one that ends last is taken, so that there are few.
    """
    chunks: list[PagesInChunk] = []
    first = 0
    while first < len(keys):
        for last in range(min(first + pages_per_chunk, len(keys)) - 1, first - 1, -1):
            block = pages_per_chunk - 1 - (last - first)
            if _has_blocks(blocks_of(keys[last]), block, pages_per_chunk):
                chunks.append(PagesInChunk(keys[last], first, last + 1 - first, block))
                first = last + 1
                break
        else:
            break
    return chunks


def cached_pages(
    keys: Sequence[bytes], pages_per_chunk: int, blocks_of: BlocksOfChunk
) -> list[bool]:
    """Return for each page whether any chunk has it."""
    cached = [False] * len(keys)
    for last, key in enumerate(keys):
        blocks = blocks_of(key)
        if blocks is not None and blocks[0] + blocks[1] == pages_per_chunk:
            first = max(0, last + 1 - blocks[1])
            cached[first : last + 1] = [True] * (last + 1 - first)
    return cached


def window_ends(cached: Sequence[bool], window: int) -> set[int]:
    """Return the prefix lengths, in pages, whose last `window` pages are all cached."""
    ends = set()
    num_consecutive = 0
    for end, is_cached in enumerate(cached, 1):
        num_consecutive = num_consecutive + 1 if is_cached else 0
        if num_consecutive >= min(window, end):
            ends.add(end)
    return ends


def _has_blocks(blocks: BlockRange | None, first: int, pages_per_chunk: int) -> bool:
    """Whether a chunk has all blocks from `first` to its end."""
    return blocks is not None and blocks[0] <= first and blocks[0] + blocks[1] == pages_per_chunk
