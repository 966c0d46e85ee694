"""From a job's arrays to the bytes it moves, vectorised.

The j-th listed block of group g sits at position
``block_indices[g] % blocks_per_chunk + j``; it belongs to the group's chunk
number ``position // blocks_per_chunk`` and is block
``position % blocks_per_chunk`` of it. What is counted is what the job lists:
at a sliding window's edge a chunk's first blocks are simply not listed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvd_proto.errors import JobShapeError
from kvd_proto.layout import RankLayout, ref_offsets, slot_bytes

Ints: TypeAlias = npt.NDArray[Any]
NULL_BLOCK = 0


@dataclass(frozen=True, slots=True)
class Copies:
    """Byte ranges to move; either side may be the source.

    storage: int32, index of the rank's storage; tensor_offset: int64, bytes
    from its start; arena_offset: int64, bytes from the start of the rank's
    arena; nbytes: int64. Runs that are contiguous on both sides are one entry.
    """

    storage: npt.NDArray[np.int32]
    tensor_offset: npt.NDArray[np.int64]
    arena_offset: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]

    @property
    def total_bytes(self) -> int:
        """Bytes moved in all."""
        return int(self.nbytes.sum())

    def __len__(self) -> int:
        return len(self.nbytes)

    def __repr__(self) -> str:
        return f"<Copies {len(self)} runs, {self.total_bytes} bytes>"


def chunks_per_group(
    group_sizes: Sequence[int], block_indices: Sequence[int], blocks_per_chunk: int
) -> list[int]:
    """cdiv(size + block_index % factor, factor) for each group, 0 for an empty one."""
    return [
        -(-(size + index % blocks_per_chunk) // blocks_per_chunk) if size else 0
        for size, index in zip(group_sizes, block_indices, strict=True)
    ]


def coverage(
    group_sizes: Sequence[int], block_indices: Sequence[int], blocks_per_chunk: int
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16]]:
    """Which blocks of each chunk the job lists: (first, count) per chunk, in job order."""
    chunks = chunks_per_group(group_sizes, block_indices, blocks_per_chunk)
    first = np.zeros(sum(chunks), np.uint16)
    count = np.full(len(first), blocks_per_chunk, np.uint16)
    at = 0
    for size, index, number in zip(group_sizes, block_indices, chunks, strict=True):
        if number:
            skip = index % blocks_per_chunk
            first[at] = skip
            count[at] -= skip
            count[at + number - 1] -= number * blocks_per_chunk - skip - size
            at += number
    return first, count


@dataclass(frozen=True, slots=True)
class _Group:
    """The regions of one group's refs: storage [refs]; the others int64[refs, 1]."""

    storage: npt.NDArray[np.int32]
    offset: npt.NDArray[np.int64]
    stride: npt.NDArray[np.int64]
    page: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]


class Expander:
    """Turns one rank's jobs into byte ranges; what depends on the layout alone is kept.

    Args:
        layout: the rank's memory; it was validated before.
    """

    def __init__(self, layout: RankLayout) -> None:
        self.layout = layout
        self.slot_bytes = slot_bytes(layout)
        self._groups = [_group(layout, index) for index in range(len(layout.groups))]

    def expand(
        self,
        block_ids: Ints,
        group_sizes: Sequence[int],
        block_indices: Sequence[int],
        slots: Ints,
    ) -> Copies:
        """The byte ranges of a job, coalesced.

        Args:
            block_ids: int[sum(group_sizes)], flat, group by group.
            group_sizes: one number per group.
            block_indices: one number per group.
            slots: int[sum(chunks_per_group)], group by group.

        Raises:
            JobShapeError: arrays that do not fit each other or the layout.
        """
        factor = self.layout.blocks_per_chunk
        blocks = np.asarray(block_ids).astype(np.int64)
        slot_ids = np.asarray(slots).astype(np.int64)
        chunks = _check(self.layout, blocks, group_sizes, block_indices, slot_ids)
        parts: list[tuple[Ints, Ints, Ints, Ints]] = []
        block_at = chunk_at = 0
        for group, (size, number) in enumerate(zip(group_sizes, chunks, strict=True)):
            if size:
                skip = block_indices[group] % factor
                ordinal, inside = np.divmod(np.arange(skip, skip + size), factor)
                slot = slot_ids[chunk_at + ordinal]
                ids = blocks[block_at : block_at + size]
                parts.append(_runs(self._groups[group], ids, slot * self.slot_bytes, inside))
            block_at += size
            chunk_at += number
        if len(parts) == 1:
            return Copies(*parts[0])
        if not parts:
            empty = np.empty(0, np.int64)
            return Copies(np.empty(0, np.int32), empty, empty, empty)
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        return Copies(*columns)

    def __repr__(self) -> str:
        return f"<Expander {len(self._groups)} groups, slots of {self.slot_bytes} bytes>"


def _group(layout: RankLayout, group: int) -> _Group:
    regions = _regions(layout, group)
    columns = np.array([region[1:] for region in regions], dtype=np.int64).T[:, :, np.newaxis]
    storage = np.array([region[0] for region in regions], dtype=np.int32)
    return _Group(storage, *np.ascontiguousarray(columns))


def _runs(
    group: _Group,
    ids: npt.NDArray[np.int64],
    slot_offset: npt.NDArray[np.int64],
    inside: npt.NDArray[np.int64],
) -> tuple[Ints, Ints, Ints, Ints]:
    """One group's copies, all refs at once; neighbours that follow each other on both sides merge.

    ids, slot_offset, inside: [blocks], a block's id, its slot's bytes from the arena's start, and
    its place in the chunk.
    """
    page = group.page
    memory = group.offset + ids * group.stride  # [refs, blocks]
    arena = slot_offset + group.start + inside * page
    first = np.ones(memory.shape, dtype=np.bool_)
    first[:, 1:] = (memory[:, 1:] - memory[:, :-1] != page) | (arena[:, 1:] - arena[:, :-1] != page)
    starts = first.reshape(-1).nonzero()[0]
    ref = starts // len(ids)
    blocks = np.empty_like(starts)
    blocks[:-1] = starts[1:] - starts[:-1]
    blocks[-1] = first.size - starts[-1]
    return (
        group.storage[ref],
        memory.reshape(-1)[starts],
        arena.reshape(-1)[starts],
        blocks * page[ref, 0],
    )


def _regions(layout: RankLayout, group: int) -> list[tuple[int, int, int, int, int]]:
    """(storage, offset, stride, page, start in slot) of each ref of a group.

    With one block a chunk, refs are page after page in the slot; where they are
    so in memory too (all layers of a block packed together) they are one.
    """
    regions: list[tuple[int, int, int, int, int]] = []
    refs = layout.groups[group].refs
    for ref, start in zip(refs, ref_offsets(layout, group), strict=True):
        tensor = layout.tensors[ref.tensor]
        if regions and layout.blocks_per_chunk == 1:
            storage, offset, stride, page, first = regions[-1]
            if (storage, offset + page, stride) == (
                tensor.storage,
                tensor.offset,
                tensor.block_stride,
            ):
                regions[-1] = (storage, offset, stride, page + ref.page_bytes, first)
                continue
        regions.append((tensor.storage, tensor.offset, tensor.block_stride, ref.page_bytes, start))
    return regions


def _check(
    layout: RankLayout,
    blocks: npt.NDArray[np.int64],
    sizes: Sequence[int],
    indices: Sequence[int],
    slots: npt.NDArray[np.int64],
) -> list[int]:
    """The chunks per group, if the arrays fit."""
    check_shape(layout, sizes, indices, len(blocks))
    chunks = chunks_per_group(sizes, indices, layout.blocks_per_chunk)
    if sum(chunks) != len(slots):
        raise JobShapeError(
            f"{len(slots)} slots for {chunks} chunks per group (sizes {list(sizes)},"
            f" block indices {list(indices)}, {layout.blocks_per_chunk} blocks per chunk)"
        )
    if len(slots) and int(slots.min()) < 0:
        raise JobShapeError(f"slot {int(slots.min())} is below 0")
    check_blocks(layout, blocks)
    return chunks


def check_blocks(layout: RankLayout, blocks: Ints) -> None:
    """Every listed block is one that the layout has and that may hold something.

    Raises:
        JobShapeError: naming the null block, or the bounds.
    """
    if not len(blocks):
        return
    low, high = int(blocks.min()), int(blocks.max())
    if low == NULL_BLOCK:
        raise JobShapeError(
            "block id 0 is the null block; leave it out and let block_indices start after it"
        )
    if low < 0 or high >= layout.num_blocks:
        raise JobShapeError(f"block ids {low}..{high} are not within 1..{layout.num_blocks - 1}")


def check_shape(
    layout: RankLayout, sizes: Sequence[int], indices: Sequence[int], num_blocks: int
) -> None:
    """Group sizes and block indices fit the layout and the number of listed blocks.

    To be asked before anything is sized by them.

    Raises:
        JobShapeError: they do not.
    """
    groups = len(layout.groups)
    if len(sizes) != groups or len(indices) != groups:
        raise JobShapeError(
            f"{len(sizes)} group sizes and {len(indices)} block indices for {groups} groups;"
            " give one of each per group, 0 for a group without blocks"
        )
    if min(sizes) < 0 or min(indices) < 0:
        raise JobShapeError(
            f"group sizes {list(sizes)} and block indices {list(indices)} must not be below 0"
        )
    total = sum(sizes)
    if total != num_blocks:
        raise JobShapeError(
            f"group sizes {list(sizes)} sum to {total}, but {num_blocks} block ids are listed;"
            " count what was appended"
        )
