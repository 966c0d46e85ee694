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
from fractions import Fraction

from kvd_proto.errors import SizeError
from kvd_proto.layout import RankLayout

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000 ** (i + 1) for i, letter in enumerate("kmgtp")},
    **{f"{letter}ib": 1024 ** (i + 1) for i, letter in enumerate("kmgtp")},
}
_SIZE = re.compile(r"\s*([0-9]{1,18})(\.[0-9]{1,18})?\s*([a-z]*)\s*", re.IGNORECASE)


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
    if not count:
        raise SizeError(
            f"a pool of {cpu_bytes} bytes ({format_size(cpu_bytes)}) holds no chunk of"
            f" {chunk} bytes ({format_size(chunk)}); raise --cpu-bytes to at least"
            f" {chunk}, or lower blocks_per_chunk"
        )
    return ChunkSizes(arenas, chunk, count)


def _shares(layouts: Sequence[RankLayout]) -> Sequence[RankLayout]:
    """Return the ranks whose shares are stored: one of those that hold the same."""
    return layouts[:1] if layouts[0].replicated else layouts


def auto_cpu_bytes(
    layouts: Sequence[RankLayout], *, available: int, reserve: int, ratio: float = 2.0
) -> tuple[int, str]:
    """Ratio x the KV bytes of all ranks of an engine, at most what is available less a reserve.

    Replicated shares count once. The order of the ranks does not matter.

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
        f"{ratio:g} x {kv} = {format_size(wanted)}; available {format_size(available)} - reserve"
        f" {format_size(reserve)} = {format_size(room)}; pool {format_size(size)}"
    )
    return size, text


def parse_size(text: str | int) -> int:
    """Bytes from `64GiB`, `512MiB`, `1.5GB` or a plain number; a fraction of a byte is dropped.

    Raises:
        SizeError: it is none of these, or negative.
    """
    match = _SIZE.fullmatch(str(text))
    unit = _UNITS.get(match[3].lower()) if match else None
    if match is None or unit is None or isinstance(text, bool):
        raise SizeError(f"{text!r} is no size; write bytes or a number with a unit, such as 64GiB")
    return int(Fraction(match[1] + (match[2] or "")) * unit)


def format_size(nbytes: int) -> str:
    """For people: `1.5 GiB`."""
    power = min(max(abs(nbytes).bit_length() - 1, 0) // 10, len(_BINARY) - 1)
    if power == 0:
        return f"{nbytes} B"
    return f"{round(nbytes / 1024**power, 2):g} {_BINARY[power]}"
