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
- after H (LHBNC): a page is in several runs; vLLM's connector interface does not hand it over
  whole, so kvd does not serve it.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from kvd_proto.capacity import LayerGroup
from kvd_proto.sizes import format_size

PAGES = ("LBHNC", "LBNHC")
BLOCKS = ("BLHNC", "BLNHC", "BHLNC")

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


def fragments(group: LayerGroup, used: int) -> dict[str, Fragments]:
    """The fragments of a block by the layout's name.

    All pages of the group have the same size, and so many bytes of each are in use.
    """
    paged = Fragments(used, len(group.page_bytes))
    whole = Fragments(sum(group.page_bytes), 1)
    return dict.fromkeys(PAGES, paged) | dict.fromkeys(BLOCKS, whole)


def describe(found: Collection[Fragments]) -> tuple[str, str]:
    """Return the number of fragments of a block and their size, from the least to the most."""
    return (
        _span([item.per_block for item in found], str),
        _span([item.nbytes for item in found], format_size),
    )


def _span(values: list[int], shown: Callable[[int], str]) -> str:
    least, most = shown(min(values)), shown(max(values))
    return least if least == most else f"{least} to {most}"
