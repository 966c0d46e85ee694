"""From a job's arrays to the bytes it moves, vectorised.

The j-th listed block of group g sits at position
``block_indices[g] % blocks_per_chunk + j``; it belongs to the group's chunk
number ``position // blocks_per_chunk`` and is block
``position % blocks_per_chunk`` of it. What is counted is what the job lists:
at a sliding window's edge a chunk's first blocks are simply not listed.
"""

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
    group_sizes: Ints, block_indices: Ints, blocks_per_chunk: int
) -> npt.NDArray[np.int64]:
    """cdiv(size + block_index % factor, factor) for each group, 0 for an empty one."""
    sizes = np.asarray(group_sizes, dtype=np.int64)
    skip = np.asarray(block_indices, dtype=np.int64) % blocks_per_chunk
    return np.where(sizes > 0, -(-(sizes + skip) // blocks_per_chunk), 0)


def coverage(
    group_sizes: Ints, block_indices: Ints, blocks_per_chunk: int
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16]]:
    """Which blocks of each chunk the job lists: (first, count) per chunk, in job order."""
    firsts: list[npt.NDArray[np.int64]] = []
    counts: list[npt.NDArray[np.int64]] = []
    chunks = chunks_per_group(group_sizes, block_indices, blocks_per_chunk)
    for size, index, number in zip(
        np.asarray(group_sizes).tolist(),
        np.asarray(block_indices).tolist(),
        chunks.tolist(),
        strict=True,
    ):
        if number == 0:
            continue
        skip = index % blocks_per_chunk
        starts = np.arange(number, dtype=np.int64) * blocks_per_chunk
        first = np.maximum(starts, skip)
        end = np.minimum(starts + blocks_per_chunk, skip + size)
        firsts.append(first - starts)
        counts.append(end - first)
    if not firsts:
        return np.empty(0, np.uint16), np.empty(0, np.uint16)
    return np.concatenate(firsts).astype(np.uint16), np.concatenate(counts).astype(np.uint16)


def expand_job(
    layout: RankLayout, block_ids: Ints, group_sizes: Ints, block_indices: Ints, slots: Ints
) -> Copies:
    """The byte ranges of a job, coalesced.

    Args:
        layout: the rank's memory; it was validated before.
        block_ids: int[sum(group_sizes)], flat, group by group.
        group_sizes: int[number of groups].
        block_indices: int[number of groups].
        slots: int[sum(chunks_per_group)], group by group.

    Raises:
        JobShapeError: arrays that do not fit each other or the layout.
    """
    blocks = np.asarray(block_ids).astype(np.int64)
    sizes = np.asarray(group_sizes).astype(np.int64)
    indices = np.asarray(block_indices).astype(np.int64)
    slot_ids = np.asarray(slots).astype(np.int64)
    chunks = _check(layout, blocks, sizes, indices, slot_ids)
    stride = slot_bytes(layout)
    parts: list[tuple[Ints, Ints, Ints, Ints]] = []
    block_at = chunk_at = 0
    for group, (size, number) in enumerate(zip(sizes.tolist(), chunks.tolist(), strict=True)):
        if size:
            position = int(indices[group]) % layout.blocks_per_chunk + np.arange(size)
            slot = slot_ids[chunk_at : chunk_at + number][position // layout.blocks_per_chunk]
            inside = position % layout.blocks_per_chunk
            ids = blocks[block_at : block_at + size]
            parts.append(_runs(layout, group, ids, slot * stride, inside))
        block_at += size
        chunk_at += number
    if not parts:
        empty = np.empty(0, np.int64)
        return Copies(np.empty(0, np.int32), empty, empty, empty)
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return Copies(columns[0].astype(np.int32), columns[1], columns[2], columns[3])


def _runs(
    layout: RankLayout,
    group: int,
    ids: npt.NDArray[np.int64],
    slot_offset: npt.NDArray[np.int64],
    inside: npt.NDArray[np.int64],
) -> tuple[Ints, Ints, Ints, Ints]:
    """One group's copies, all refs at once; neighbours that follow each other on both sides merge.

    ids, slot_offset, inside: [blocks], a block's id, its slot's bytes from the arena's start, and
    its place in the chunk.
    """
    regions = _regions(layout, group)
    storage = np.array([region[0] for region in regions], dtype=np.int32)
    column = np.array([region[1:] for region in regions], dtype=np.int64).T[:, :, np.newaxis]
    offset, stride, page, start = column
    memory = offset + ids * stride  # [refs, blocks]
    arena = slot_offset + start + inside * page
    first = np.ones(memory.shape, dtype=np.bool_)
    first[:, 1:] = (np.diff(memory, axis=1) != page) | (np.diff(arena, axis=1) != page)
    starts = np.flatnonzero(first)
    ref = starts // len(ids)
    blocks = np.diff(starts, append=first.size)
    return (
        storage[ref],
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
    sizes: npt.NDArray[np.int64],
    indices: npt.NDArray[np.int64],
    slots: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """The chunks per group, if the arrays fit."""
    groups = len(layout.groups)
    if len(sizes) != groups or len(indices) != groups:
        raise JobShapeError(
            f"{len(sizes)} group sizes and {len(indices)} block indices for {groups} groups;"
            " give one of each per group, 0 for a group without blocks"
        )
    if (sizes < 0).any() or (indices < 0).any():
        raise JobShapeError(
            f"group sizes {sizes.tolist()} and block indices {indices.tolist()} must not be below 0"
        )
    total = sum(sizes.tolist())  # Python's integers do not wrap around
    if total != len(blocks):
        raise JobShapeError(
            f"group sizes {sizes.tolist()} sum to {total}, but {len(blocks)} block ids are listed;"
            " count what was appended"
        )
    chunks = chunks_per_group(sizes, indices, layout.blocks_per_chunk)
    if int(chunks.sum()) != len(slots):
        raise JobShapeError(
            f"{len(slots)} slots for {chunks.tolist()} chunks per group (sizes {sizes.tolist()},"
            f" block indices {indices.tolist()}, {layout.blocks_per_chunk} blocks per chunk)"
        )
    if len(slots) and int(slots.min()) < 0:
        raise JobShapeError(f"slot {int(slots.min())} is below 0")
    if len(blocks):
        low, high = int(blocks.min()), int(blocks.max())
        if low == NULL_BLOCK:
            raise JobShapeError(
                "block id 0 is the null block; leave it out and let block_indices start after it"
            )
        if low < 0 or high >= layout.num_blocks:
            raise JobShapeError(
                f"block ids {low}..{high} are not within 1..{layout.num_blocks - 1}"
            )
    return chunks
