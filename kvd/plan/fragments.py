"""In how many runs of bytes a block lies in an engine's memory: its KV cache's layout.

vLLM 0.32 names six layouts by the order of five dimensions, the outermost first (``KVCacheLayout``
in ``vllm/v1/kv_cache_layout.py``)::

    L  layers of a group            B  blocks
    H  KV heads of the rank         N  tokens of a block
    C  what a head keeps of one token: key and value side by side, or the latent

C is innermost in all of them, so keys and values share a page (one block of one layer). Some
backends have two H, all keys and all values; they too are in one page. Whether H or N comes first
changes the order of the bytes in a page and not where pages lie. What counts is B:

- after L: a page is one run, a block as many runs as its group has layers;
- first of all: a block is one run. With groups of different sizes blocks are as far apart as the
  largest group needs (``get_kv_cache_config_from_groups`` in ``vllm/v1/core/kv_cache_utils.py``),
  and the others use the beginning;
- after H: each head's part of a page is a run.

Pages of one block that are padded are one run if the padding is small (`_merged` in
`kvd_client/vllm/fragments.py`).
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from kvd_proto.capacity import LayerGroup
from kvd_proto.sizes import format_size

PAGES = ("LBHNC", "LBNHC")
BLOCKS = ("BLHNC", "BLNHC")
HEADS_OUTSIDE = ("LHBNC", "BHLNC")

MOVED_PADDING = 32
"""Padding of at most this part of the bytes before it is moved along."""

SMALL_BYTES = 28 * 1024
"""Below this vLLM 0.32 loads with a kernel, for copy engines are slower: ``THRESHOLD_BYTES`` in
``vllm/v1/kv_offload/cpu/swap_blocks_triton.py``, by its authors' measurements on an H100."""


@dataclass(frozen=True, slots=True)
class Fragments:
    """The runs of one block of one rank.

    nbytes: of each; per_block: their number, less where blocks of one chunk lie side by side.
    """

    nbytes: int
    per_block: int


def fragments(group: LayerGroup, used: int, heads: int | None) -> dict[str, Fragments]:
    """The fragments of a block, by the names of the layouts that vLLM can take for the model.

    Args:
        group: all pages have the same size.
        used: bytes of each page that are in use.
        heads: of the rank; None where the model's layers differ in their number, which vLLM takes
            no layout for in which a page's heads lie apart.
    """
    layers, page = len(group.page_bytes), group.page_bytes[0]
    paged = Fragments(used, layers)
    joined = (page - used) * MOVED_PADDING <= used
    packed = Fragments((layers - 1) * page + used, 1) if joined else paged
    found = dict.fromkeys(PAGES, paged) | dict.fromkeys(BLOCKS, packed)
    if heads is not None:
        parts = Fragments(used // heads, layers * heads)
        found |= dict(zip(HEADS_OUTSIDE, (parts, packed), strict=True))
    return found


def describe(found: Collection[Fragments]) -> tuple[str, str]:
    """Return the number of fragments of a block and their size, from the least to the most."""
    return (
        _span([item.per_block for item in found], str),
        _span([item.nbytes for item in found], format_size),
    )


def _span(values: list[int], shown: Callable[[int], str]) -> str:
    least, most = shown(min(values)), shown(max(values))
    return least if least == most else f"{least} to {most}"
