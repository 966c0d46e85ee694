"""How many chunks fit kvd's pool, and how many requests the engine's; the formulas are vLLM's.

::

    kv_bytes_per_block = total_gpu_kv_bytes // num_blocks * world_size
    bytes_per_chunk    = kv_bytes_per_block * blocks_per_chunk
    num_chunks         = cpu_bytes // bytes_per_chunk

The first formula does not multiply a page size by a number of tensors: where layers differ, a
group's page size is already the sum over its layers, and would count twice.

An operator's override of the block count replaces the measured count everywhere, as in the engine
(``v1/core/kv_cache_utils.py``).
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
"""Kernel memory for a pinned GiB, in each lane that pins it.

48 bytes for each page of 4 KiB, measured on an H200 (driver 580, 2026-11-26); the sources of the
driver's kernel module name 32. It cannot be swapped out, and no control group's limit counts it.
"""
PIN_GPU_BYTES = 2 * 2**20
"""GPU memory that a lane takes for a pinned GiB; same measurement."""
CONTEXT_GPU_BYTES = 528 * 2**20
"""GPU memory that a lane takes before it pins anything; same measurement."""


def tokens_per_chunk(layout: RankLayout) -> int | None:
    """Return the tokens of one chunk; None if groups have different block sizes."""
    block_sizes = {group.block_size for group in layout.groups}
    return layout.blocks_per_chunk * block_sizes.pop() if len(block_sizes) == 1 else None


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """A pool laid out for one engine.

    slot_bytes: of each arena; one arena per rank, or one for all ranks if shares are replicated.
    """

    slot_bytes: tuple[int, ...]
    bytes_per_chunk: int
    num_chunks: int


def size_pool(layouts: Sequence[RankLayout], cpu_bytes: int) -> PoolSizes:
    """Return the pool's sizes for the ranks of one engine.

    Pipeline stages may hold different layers, so `bytes_per_chunk` is the sum of the ranks' own
    shares, each rounded up to 4 KiB. `layouts` are validated, in rank order, at least one.

    Raises:
        SizeError: not one chunk fits.
        LayoutError: a rank's groups need more bytes than it reported.
    """
    slot_bytes = tuple(layout.slot_bytes for layout in _stored_layouts(layouts))
    bytes_per_chunk = sum(slot_bytes)
    num_chunks = cpu_bytes // bytes_per_chunk if bytes_per_chunk else 0
    if num_chunks < 1:
        raise SizeError(
            f"a pool of {cpu_bytes} bytes ({format_size(cpu_bytes)}) holds no chunk of"
            f" {bytes_per_chunk} bytes ({format_size(bytes_per_chunk)}); raise --cpu-bytes to at"
            f" least {bytes_per_chunk}, or lower blocks_per_chunk"
        )
    return PoolSizes(slot_bytes, bytes_per_chunk, num_chunks)


def _stored_layouts(layouts: Sequence[RankLayout]) -> Sequence[RankLayout]:
    """Return the layouts whose shares are stored: one, if all ranks hold the same bytes."""
    return layouts[:1] if layouts[0].replicated else layouts


def pinning_lanes(layouts: Sequence[RankLayout], devices: Sequence[str]) -> int:
    """Return how many times one engine's lanes pin the whole pool.

    A GPU's lane pins the arenas of its ranks: with replicated shares that is the whole pool in each
    lane, otherwise the lanes divide it, which is 1. The host's lane pins nothing.
    """
    num_gpus = len({device for device in devices if device.startswith("cuda:")})
    return num_gpus if layouts[0].replicated else min(num_gpus, 1)


def pin_kernel_bytes(nbytes: int, lanes: int) -> int:
    """Return the kernel memory for pinning `nbytes` in each of `lanes` lanes."""
    return _cdiv(nbytes * lanes * PIN_KERNEL_BYTES, 2**30)


def pin_gpu_bytes(nbytes: int) -> int:
    """Return the GPU memory that a lane takes for pinning `nbytes`."""
    return _cdiv(nbytes * PIN_GPU_BYTES, 2**30)


def auto_cpu_bytes(
    layouts: Sequence[RankLayout],
    *,
    available: int,
    reserve: int,
    ratio: float = 2.0,
    lanes: int = 0,
) -> tuple[int, str]:
    """Return the size of the pool for `cpu_bytes = auto`, and its computation in one line of text.

    The size is `ratio` times the KV bytes of all ranks, but at most `available - reserve`.
    Replicated shares count once. The order of the ranks does not matter.

    Args:
        layouts: of the engine's ranks.
        available: bytes of the largest pool that fits beside the kernel memory for pinning it.
        reserve: bytes to leave free.
        ratio: bytes of the pool for each byte of KV.
        lanes: see `pinning_lanes`; for the text.

    Raises:
        SizeError: `available` or `reserve` is negative, or `ratio` not a finite number above 0.
    """
    _check_at_least("available", available, 0)
    _check_at_least("reserve", reserve, 0)
    if not 0 < ratio < math.inf:
        raise SizeError(f"ratio = {ratio}; give a finite number above 0")
    kv_bytes = [layout.used_bytes for layout in _stored_layouts(layouts)]
    desired_bytes = int(ratio * sum(kv_bytes))
    limit_bytes = max(0, available - reserve)
    pool_bytes = min(desired_bytes, limit_bytes)
    if len(set(kv_bytes)) == 1:
        kv = f"{format_size(kv_bytes[0])} GPU KV x {len(kv_bytes)} ranks"
    else:
        kv = f"{format_size(sum(kv_bytes))} GPU KV of {len(kv_bytes)} ranks"
    text = (
        f"{ratio:g} x {kv} = {format_size(desired_bytes)}; available {format_size(available)}"
        f"{' after pinning' if lanes else ''} - reserve {format_size(reserve)} ="
        f" {format_size(limit_bytes)}; pool {format_size(pool_bytes)}"
    )
    if lanes:
        pins = format_size(pin_kernel_bytes(pool_bytes, lanes))
        text += f", pinned {'once' if lanes == 1 else f'{lanes} times'} for {pins} of kernel memory"
    return pool_bytes, text


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share one block table.

    page_bytes: padded page size of each layer on one rank.
    block_size, sliding_window: in tokens.
    uniform_type: pages may differ in size; memory is laid out in tuples of one page of each size.

    Raises:
        SizeError: block size or window is below 1.
    """

    page_bytes: tuple[int, ...]
    block_size: int
    sliding_window: int | None = None
    uniform_type: bool = False

    def __post_init__(self) -> None:
        _check_at_least("block_size", self.block_size, 1)
        if self.sliding_window is not None:
            _check_at_least("sliding_window", self.sliding_window, 1)

    def blocks_for(self, tokens: int, batched_tokens: int) -> int:
        """Return the most blocks that a request of `tokens` holds in this group at any time.

        With a sliding window the engine frees blocks behind it: the window and one batch are alive,
        plus one block because they may start within a block.

        Raises:
            SizeError: `tokens` is negative, or `batched_tokens` below 1.
        """
        _check_at_least("tokens", tokens, 0)
        _check_at_least("batched_tokens", batched_tokens, 1)
        blocks = _cdiv(tokens, self.block_size)
        if self.sliding_window is None:
            return blocks
        alive_tokens = min(tokens, self.sliding_window - 1 + batched_tokens)
        return min(blocks, _cdiv(alive_tokens, self.block_size) + 1)


def per_block_pool_bytes(groups: Sequence[LayerGroup]) -> int:
    """Return the bytes of one block in one rank's engine memory.

    - One group of uniform type: the sum of its layers' pages.
    - Several groups, all of uniform type: one page of each size makes a tuple; the sum of these
      pages times the largest number of tuples of any group.
    - Otherwise: the number of layers of the largest group times the common page size.

    Raises:
        SizeError: a group has no layers, a page no bytes, or pages differ where they must be equal.
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
    """Return the most blocks that a request of `tokens` holds in all groups together."""
    return sum(group.blocks_for(tokens, batched_tokens) for group in groups)


def longest_request(
    groups: Sequence[LayerGroup],
    num_blocks: int,
    limit: int,
    batched_tokens: int = DEFAULT_BATCHED_TOKENS,
) -> int:
    """Return the tokens of the longest request that fits; 0: none does.

    Args:
        groups: all groups of the model.
        num_blocks: of the engine, the null block included.
        limit: the model's own limit in tokens.
        batched_tokens: the most tokens of one engine step.

    Raises:
        SizeError: `num_blocks` or `batched_tokens` is below 1, or `limit` negative.
    """
    _check_at_least("num_blocks", num_blocks, 1)
    _check_at_least("limit", limit, 0)
    low, high = 0, limit
    while low < high:  # the blocks needed grow with the tokens, so bisect
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
    """Check that the engine has blocks for a request of `max_seq_len` tokens.

    Raises:
        SizeError: it has not; the text has blocks and bytes, needed and available, and the remedy.
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
    block_bytes = per_block_pool_bytes(groups)
    max_tokens = longest_request(groups, blocks, max_seq_len, batched_tokens)
    remedy = "give the KV cache more memory" if override is None else "raise the block override"
    raise SizeError(
        f"max seq len {max_seq_len} needs {needed} blocks ({format_size(needed * block_bytes)} a"
        f" rank), available are {available} ({format_size(available * block_bytes)}; {blocks}"
        f" blocks {origin}, less the null block); {remedy}, or lower max seq len to {max_tokens} or"
        " less"
    )


def _check_at_least(name: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise SizeError(f"{name} = {value}; give {minimum} or more")


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
