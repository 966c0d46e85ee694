"""What fits into kvd's pool, and what pinning it takes. Formulas are vLLM's.

::

    kv_bytes_per_block = total_gpu_kv_bytes // num_blocks * world_size
    bytes_per_chunk    = kv_bytes_per_block * blocks_per_chunk
    num_chunks         = cpu_bytes // bytes_per_chunk

Never from a page size times a number of tensors: a group's page size is already a sum over its
layers when they differ, and would be counted twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvd_proto.errors import SizeError
from kvd_proto.layout import RankLayout
from kvd_proto.sizes import format_size

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
class ChunkSizes:
    """A pool laid out for one engine: one arena per rank, or one for all if replicated."""

    slot_bytes: tuple[int, ...]
    bytes_per_chunk: int
    num_chunks: int


def size_pool(layouts: Sequence[RankLayout], cpu_bytes: int) -> ChunkSizes:
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
    return ChunkSizes(arenas, chunk, count)


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
    """
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


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
