"""What fits: chunks into kvd's pool, requests into the engine's. Formulas are vLLM's.

::

    kv_bytes_per_block = total_gpu_kv_bytes // num_blocks * world_size
    bytes_per_chunk    = kv_bytes_per_block * blocks_per_chunk
    num_chunks         = cpu_bytes // bytes_per_chunk

Never from a page size times a number of tensors: a group's page size is already a sum over its
layers when they differ, and would be counted twice.

An operator's block-count override beats the measured count everywhere, so that nobody admits by a
capacity that the engine does not have (``v1/core/kv_cache_utils.py``).
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvd_proto.errors import SizeError
from kvd_proto.layout import RankLayout
from kvd_proto.text import format_size

NULL_BLOCKS = 1  # block 0 is never handed out
DEFAULT_BATCHED_TOKENS = 8192

PIN_KERNEL_BYTES = 12 * 2**20
"""Kernel memory of a pinned GiB, in each lane that pins it.

48 bytes for each page of 4 KiB, measured on an H200 (driver 580, 2026-11-26); the sources of the
driver's kernel module name 32. It cannot be swapped out, and no control group's limit counts it.
"""
PIN_GPU_BYTES = 2 * 2**20
"""Memory of a lane's GPU that a pinned GiB takes; measured with the above."""
CONTEXT_GPU_BYTES = 528 * 2**20
"""Memory of its GPU that a lane takes before it pins anything; measured with the above."""


def tokens_per_chunk(layout: RankLayout) -> int | None:
    """Tokens of one chunk; None where groups' blocks hold different numbers of them."""
    sizes = {group.block_size for group in layout.groups}
    return layout.blocks_per_chunk * sizes.pop() if len(sizes) == 1 else None


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """A pool laid out for one engine: one arena per rank, or one for all if replicated."""

    slot_bytes: tuple[int, ...]
    bytes_per_chunk: int
    num_chunks: int


def size_pool(layouts: Sequence[RankLayout], cpu_bytes: int) -> PoolSizes:
    """Sizes for one engine's ranks, in rank order.

    Pipeline stages may hold different layers, so bytes per chunk is the sum of
    the ranks' own shares, each rounded up to 4 KiB; `* world_size` is the case
    where all are equal. The layouts are valid (`validate_layout`), one at least.

    Raises:
        SizeError: no chunk fits, with the figures.
        LayoutError: a rank's groups need more than it reported.
    """
    arenas = tuple(layout.slot_bytes for layout in _shares(layouts))
    chunk = sum(arenas)
    count = cpu_bytes // chunk if chunk else 0
    if count < 1:
        raise SizeError(
            f"a pool of {cpu_bytes} bytes ({format_size(cpu_bytes)}) holds no chunk of"
            f" {chunk} bytes ({format_size(chunk)}); raise --cpu-bytes to at least"
            f" {chunk}, or lower blocks_per_chunk"
        )
    return PoolSizes(arenas, chunk, count)


def _shares(layouts: Sequence[RankLayout]) -> Sequence[RankLayout]:
    """Return the ranks whose shares are stored: one of those that hold the same."""
    return layouts[:1] if layouts[0].replicated else layouts


def pinning_lanes(layouts: Sequence[RankLayout], devices: Sequence[str]) -> int:
    """How many lanes pin all of a pool for one engine; those whose arenas divide it are one.

    A GPU's lane pins the arenas of its ranks: together one pool, and with replicated shares all of
    it in each lane. The host's lane pins nothing.
    """
    lanes = len({device for device in devices if device.startswith("cuda:")})
    return lanes if layouts[0].replicated else min(lanes, 1)


def pin_kernel_bytes(nbytes: int, lanes: int) -> int:
    """Return the kernel memory that pinning `nbytes` in each of so many lanes takes."""
    return _cdiv(nbytes * lanes * PIN_KERNEL_BYTES, 2**30)


def pin_gpu_bytes(nbytes: int) -> int:
    """Return the memory of its GPU that a lane takes for pinning `nbytes`."""
    return _cdiv(nbytes * PIN_GPU_BYTES, 2**30)


def auto_cpu_bytes(
    layouts: Sequence[RankLayout],
    *,
    available: int,
    reserve: int,
    ratio: float = 2.0,
    lanes: int = 0,
) -> tuple[int, str]:
    """Ratio x the KV bytes of all ranks of an engine, at most what is available less a reserve.

    Replicated shares count once. The order of the ranks does not matter.

    Args:
        layouts: of the ranks.
        available: bytes of the largest pool that fits, beside what pinning it takes.
        reserve: bytes that are left to others.
        ratio: bytes of the pool for each byte of KV.
        lanes: see `pinning_lanes`; for the line.

    Returns:
        The size, and how it came about, in one line.

    Raises:
        SizeError: a negative number, or a ratio that is none.
    """
    _at_least("available", available, 0)
    _at_least("reserve", reserve, 0)
    if not 0 < ratio < math.inf:
        raise SizeError(f"ratio = {ratio}; give a finite number above 0")
    reported = [layout.used_bytes for layout in _shares(layouts)]
    wanted = int(ratio * sum(reported))
    room = max(0, available - reserve)
    size = min(wanted, room)
    if len(set(reported)) == 1:
        kv = f"{format_size(reported[0])} GPU KV x {len(reported)} ranks"
    else:
        kv = f"{format_size(sum(reported))} GPU KV of {len(reported)} ranks"
    text = (
        f"{ratio:g} x {kv} = {format_size(wanted)}; available {format_size(available)}"
        f"{' after pinning' if lanes else ''} - reserve {format_size(reserve)} ="
        f" {format_size(room)}; pool {format_size(size)}"
    )
    if lanes:
        pins = format_size(pin_kernel_bytes(size, lanes))
        text += f", pinned {'once' if lanes == 1 else f'{lanes} times'} for {pins} of kernel memory"
    return size, text


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share one block table.

    page_bytes: padded page of each layer, in bytes of one rank.
    block_size, sliding_window: in tokens.
    uniform_type: pages may differ in size; memory is laid out in tuples of one page of each.

    Raises:
        SizeError: blocks or a window of no tokens.
    """

    page_bytes: tuple[int, ...]
    block_size: int
    sliding_window: int | None = None
    uniform_type: bool = False

    def __post_init__(self) -> None:
        _at_least("block_size", self.block_size, 1)
        if self.sliding_window is not None:
            _at_least("sliding_window", self.sliding_window, 1)

    def blocks_for(self, tokens: int, batched_tokens: int) -> int:
        """Blocks that a request of `tokens` holds in this group at its worst moment.

        Behind a window blocks are given back: the window and one batch are alive, and one block
        more where they do not start at a block's edge.

        Raises:
            SizeError: a negative request, or steps of no tokens.
        """
        _at_least("tokens", tokens, 0)
        _at_least("batched_tokens", batched_tokens, 1)
        blocks = _cdiv(tokens, self.block_size)
        if self.sliding_window is None:
            return blocks
        alive = min(tokens, self.sliding_window - 1 + batched_tokens)
        return min(blocks, _cdiv(alive, self.block_size) + 1)


def per_block_pool_bytes(groups: Sequence[LayerGroup]) -> int:
    """Bytes of one rank's pool that one block takes.

    - one group of uniform type: its page size, which is the sum over its
      layers; times a number of tensors it would be counted twice;
    - several groups, all of uniform type: one page of each size makes a tuple;
      the sum of those pages times the largest number of tuples of any group;
    - anything else: layers of the largest group times the common page size.

    Raises:
        SizeError: no layers, pages of no bytes, or pages that differ where
            they must be common.
    """
    if not groups or any(not group.page_bytes or min(group.page_bytes) <= 0 for group in groups):
        raise SizeError(
            f"{[group.page_bytes for group in groups]} are the pages per group; every group needs"
            " layers with pages of at least 1 byte"
        )
    uniform = all(group.uniform_type for group in groups)
    if uniform and len(groups) == 1:
        return sum(groups[0].page_bytes)
    sizes = sorted({page for group in groups for page in group.page_bytes})
    if uniform:
        return sum(sizes) * max(max(Counter(group.page_bytes).values()) for group in groups)
    if len(sizes) > 1:
        raise SizeError(
            f"page sizes {sizes} differ between layers that share blocks; pad the pages to"
            f" {sizes[-1]} bytes, or report the groups as uniform type"
        )
    return sizes[0] * max(len(group.page_bytes) for group in groups)


def blocks_needed(
    groups: Sequence[LayerGroup], tokens: int, batched_tokens: int = DEFAULT_BATCHED_TOKENS
) -> int:
    """Blocks that a request of `tokens` holds over all groups at its worst moment."""
    return sum(group.blocks_for(tokens, batched_tokens) for group in groups)


def longest_request(
    groups: Sequence[LayerGroup],
    num_blocks: int,
    limit: int,
    batched_tokens: int = DEFAULT_BATCHED_TOKENS,
) -> int:
    """Tokens of the longest request that fits (auto-fit), 0 if none does.

    Args:
        groups: all groups of the model.
        num_blocks: effective blocks, the null block included.
        limit: the model's own limit in tokens; with sliding windows alone
            nothing else may bound a request.
        batched_tokens: most tokens of one engine step.

    Raises:
        SizeError: no block, a negative limit, or steps of no tokens.
    """
    _at_least("num_blocks", num_blocks, 1)
    _at_least("limit", limit, 0)
    low, high = 0, limit
    while low < high:  # needs grow with tokens, so bisect
        middle = (low + high + 1) // 2
        if blocks_needed(groups, middle, batched_tokens) <= num_blocks - NULL_BLOCKS:
            low = middle
        else:
            high = middle - 1
    return low


def admit(
    max_seq_len: int,
    groups: Sequence[LayerGroup],
    measured: int,
    override: int | None = None,
    batched_tokens: int = DEFAULT_BATCHED_TOKENS,
) -> None:
    """Check that a request of `max_seq_len` tokens can ever be served.

    Raises:
        SizeError: it cannot, or there is no pool; with both figures, in blocks and bytes of one
            rank, and what to change.
    """
    blocks = measured if override is None else override
    origin = "measured" if override is None else "by the override"
    if blocks < 1:
        raise SizeError(
            f"{blocks} blocks, {origin}; an engine needs at least 1 block, give it more memory or"
            " a larger override"
        )
    available = blocks - NULL_BLOCKS
    needed = blocks_needed(groups, max_seq_len, batched_tokens)
    if needed <= available:
        return
    each = per_block_pool_bytes(groups)
    fits = longest_request(groups, blocks, max_seq_len, batched_tokens)
    more = "give the KV cache more memory" if override is None else "raise the block override"
    raise SizeError(
        f"max seq len {max_seq_len} needs {needed} blocks ({format_size(needed * each)} a rank),"
        f" available are {available} ({format_size(available * each)}; {blocks} blocks"
        f" {origin}, less the null block); {more}, or lower max seq len to {fits} or less"
    )


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise SizeError(f"{name} = {value}; give {least} or more")


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
