"""From what the workers report to chunks in the pool. Formulas are vLLM's published ones.

::

    kv_bytes_per_block = total_gpu_kv_bytes // num_blocks * world_size
    bytes_per_chunk    = kv_bytes_per_block * blocks_per_chunk
    num_chunks         = cpu_bytes // bytes_per_chunk

Never from a page size times a number of tensors: a group's page size is
already a sum over its layers when they differ, and would be counted twice.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvd_proto.errors import SizeError
from kvd_proto.layout import RankLayout, slot_bytes, used_storage_bytes

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000 ** (i + 1) for i, letter in enumerate("kmgtp")},
    **{f"{letter}ib": 1024 ** (i + 1) for i, letter in enumerate("kmgtp")},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def total_gpu_kv_bytes(layout: RankLayout) -> int:
    """Bytes of one rank's KV memory; a storage shared by tensors counts once."""
    return used_storage_bytes(layout)


def kv_bytes_per_block(total: int, num_blocks: int, world_size: int = 1) -> int:
    """Bytes of one block over all layers and ranks.

    Raises:
        SizeError: no blocks, no bytes or no ranks.
    """
    if num_blocks <= 0 or total <= 0 or world_size <= 0:
        raise SizeError(
            f"{total} KV bytes in {num_blocks} blocks over {world_size} ranks make 0 chunks;"
            " the engine must have allocated its KV cache before it registers"
        )
    return total // num_blocks * world_size


def bytes_per_chunk(per_block: int, blocks_per_chunk: int) -> int:
    """Bytes of one chunk: `per_block` (all ranks) times the factor."""
    return per_block * blocks_per_chunk


def num_chunks(cpu_bytes: int, chunk_bytes: int) -> int:
    """Chunks that a pool of `cpu_bytes` holds.

    Raises:
        SizeError: there would be none.
    """
    count = cpu_bytes // chunk_bytes if chunk_bytes > 0 else 0
    if count <= 0:
        raise SizeError(
            f"a pool of {cpu_bytes} bytes holds no chunk of {chunk_bytes} bytes; raise --cpu-bytes"
            f" to at least {format_size(max(chunk_bytes, 1))}, or lower blocks_per_chunk"
        )
    return count


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
    where all are equal.

    Raises:
        SizeError: no chunk fits, with the figures.
        LayoutError: a rank's groups need more than it reported.
    """
    shares = layouts[:1] if layouts[0].replicated else layouts
    arenas = tuple(slot_bytes(layout) for layout in shares)
    for layout in shares:
        kv_bytes_per_block(total_gpu_kv_bytes(layout), layout.num_blocks)
    total = sum(arenas)
    return ChunkSizes(arenas, total, num_chunks(cpu_bytes, total))


@dataclass(frozen=True, slots=True)
class AutoSize:
    """A pool size that was worked out, and how, in one line."""

    cpu_bytes: int
    explanation: str


def auto_cpu_bytes(
    gpu_kv_bytes_per_rank: int, world_size: int, *, ratio: float, available: int, reserve: int
) -> AutoSize:
    """Ratio x reported GPU KV bytes x world size, at most what is available less a reserve."""
    wanted = int(ratio * gpu_kv_bytes_per_rank * world_size)
    room = max(0, available - reserve)
    size = min(wanted, room)
    text = (
        f"{ratio:g} x {format_size(gpu_kv_bytes_per_rank)} GPU KV x {world_size} ranks ="
        f" {format_size(wanted)}; available {format_size(available)} - reserve"
        f" {format_size(reserve)} = {format_size(room)}; pool {format_size(size)}"
    )
    return AutoSize(size, text)


def parse_size(text: str | int) -> int:
    """Bytes from `64GiB`, `512MiB`, `1.5GB` or a plain number.

    Raises:
        SizeError: it is none of these.
    """
    if isinstance(text, int):
        return text
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise SizeError(f"{text!r} is no size; write bytes or a number with a unit, such as 64GiB")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def format_size(nbytes: int) -> str:
    """For people: `1.5 GiB`."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return f"{nbytes} B" if unit == "B" else f"{value:.4g} {unit}"
        value /= 1024
    raise SizeError(f"{nbytes} bytes")
