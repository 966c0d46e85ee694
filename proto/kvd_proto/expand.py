"""Turns a job's blocks into the byte ranges to copy: with numpy, or one by one if they are few."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvd_proto.copies import Copies, Grid, Regions, Run
from kvd_proto.jobs import JobBlocks
from kvd_proto.layout import RankLayout

Ints: TypeAlias = npt.NDArray[np.int64]
_Region: TypeAlias = tuple[int, int, int, int, int]
"""Storage index, offset and block stride in it, page size, start in the slot; in bytes."""
_Located: TypeAlias = tuple[Ints, Ints, Ints | None]
"""Block ids; the arena offsets of their slots; their positions in their chunks, None if a chunk is
one block. [blocks] each."""
OnlySlots: TypeAlias = frozenset[int] | None
"""The slots whose chunks are copied; None: all of the job's."""
FEW_PAGES = 32  # of a job; above it numpy is faster
_NEVER = np.zeros(0, np.bool_)
_NUM_POSITIONS = 4096  # of a group's blocks, whose chunks and positions are computed in advance


@dataclass(frozen=True, slots=True)
class _UniformRegions:
    """A group's regions of one stride and page size.

    merge: neighbouring blocks may be contiguous on both sides.
    """

    regions: Regions
    stride: int
    page: int
    merge: bool


class Expander:
    """Turns one rank's jobs into byte ranges; computes once what depends on the layout alone.

    Args:
        layout: of the rank's memory, validated.
    """

    def __init__(self, layout: RankLayout) -> None:
        self.layout = layout
        self.slot_bytes = layout.slot_bytes
        self._regions = [_regions(layout, index) for index in range(len(layout.groups))]
        self._groups = [_by_stride_and_page(regions, layout) for regions in self._regions]
        self._positions = divmod(np.arange(_NUM_POSITIONS), layout.blocks_per_chunk)
        self._max_regions = max(map(len, self._regions), default=0)
        self._block_bytes = [sum(ref.page_bytes for ref in g.refs) for g in layout.groups]

    def listed_bytes(self, blocks: JobBlocks) -> int:
        """Return the bytes of all listed blocks of a checked job, null blocks included."""
        return sum(map(operator.mul, blocks.sizes, self._block_bytes))

    @cached_property
    def inside(self) -> bool:
        """Whether every block of the layout lies in its storage, and every page in a slot.

        True for every validated layout: then no job that was checked against it and the arena
        copies a byte outside them, so its runs need no bounds check.
        """
        last, factor = self.layout.num_blocks - 1, self.layout.blocks_per_chunk
        storages = self.layout.storages
        return all(
            0 <= storage < len(storages)
            and min(offset, stride, page - 1, start) >= 0
            and offset + last * stride + page <= storages[storage]
            and start + factor * page <= self.slot_bytes
            for regions in self._regions
            for storage, offset, stride, page, start in regions
        )

    def expand(self, blocks: JobBlocks, only: OnlySlots = None) -> Copies:
        """Return the byte ranges of a job that was checked against the layout, coalesced."""
        if len(blocks.block_ids) * self._max_regions <= FEW_PAGES and blocks.null_block is None:
            return Copies.of(self.expand_few(blocks, only))
        return self.expand_many(blocks, only)

    def expand_few(self, blocks: JobBlocks, only: OnlySlots = None) -> list[Run]:
        """`expand` one block after another: faster for few. The job must have no null block."""
        factor, slot_bytes = self.layout.blocks_per_chunk, self.slot_bytes
        block_ids, slots = iter(blocks.block_ids.tolist()), iter(blocks.slots.tolist())
        runs: list[Run] = []
        for regions, size, index in zip(self._regions, blocks.sizes, blocks.indices, strict=True):
            # Consecutive blocks of one chunk: first block, slot's arena offset, position, count.
            stretches: list[list[int]] = []
            next_block, slot = -1, 0
            for number in range(index, index + size):
                block, position = next(block_ids), number % factor
                if number == index or not position:
                    slot = next(slots)
                    next_block = -1
                if only is not None and slot not in only:
                    continue
                if block == next_block:
                    stretches[-1][3] += 1
                    next_block += 1
                    continue
                stretches.append([block, slot * slot_bytes, position, 1])
                next_block = block + 1
            for storage, offset, stride, page, start in regions:
                run_memory = run_arena = nbytes = 0
                for block, slot_offset, position, count in stretches:
                    run_bytes, num_runs = (count * page, 1) if stride == page else (page, count)
                    memory = offset + block * stride
                    arena = slot_offset + start + position * page
                    for _ in range(num_runs):
                        if memory == run_memory + nbytes and arena == run_arena + nbytes and nbytes:
                            nbytes += run_bytes
                        else:
                            if nbytes:
                                runs.append((storage, run_memory, run_arena, nbytes))
                            run_memory, run_arena, nbytes = memory, arena, run_bytes
                        memory += stride
                        arena += page
                if nbytes:
                    runs.append((storage, run_memory, run_arena, nbytes))
        return runs

    def expand_many(self, blocks: JobBlocks, only: OnlySlots = None) -> Copies:
        """`expand` all blocks at once, with numpy."""
        located = self._locate(blocks, only)
        return Copies.of_grids(
            [_grid(regions, *at) for group, at in located for regions in self._groups[group]]
        )

    def expand_layers(self, blocks: JobBlocks) -> tuple[Copies, list[int]]:
        """`expand` layer by layer, with the bytes of all layers up to and including each."""
        located = self._locate(blocks, None)
        grids: list[Grid] = []
        ends: list[int] = []
        total_bytes = 0
        for groups in self._by_layer:
            for group, at in located:
                layer_grids = [_grid(regions, *at) for regions in groups[group]]
                total_bytes += sum(
                    len(g.regions.storage) * int(g.nbytes.sum()) for g in layer_grids
                )
                grids += layer_grids
            ends.append(total_bytes)
        return Copies.of_grids(grids), ends

    @cached_property
    def _by_layer(self) -> list[list[list[_UniformRegions]]]:
        """For each layer, each group's regions."""
        layout = self.layout
        groups = range(len(layout.groups))
        return [
            [_by_stride_and_page(_regions(layout, group, layer), layout) for group in groups]
            for layer in range(layout.layers)
        ]

    def _locate(self, blocks: JobBlocks, only: OnlySlots) -> list[tuple[int, _Located]]:
        """Return for each group with blocks to copy its number, and where these blocks lie."""
        factor = self.layout.blocks_per_chunk
        sizes, indices = blocks.sizes, blocks.indices
        all_ids, all_slots = blocks.block_ids.numpy().astype(np.int64), blocks.slots.numpy()
        located: list[tuple[int, _Located]] = []
        block_at = chunk_at = 0
        for group, (size, index) in enumerate(zip(sizes, indices, strict=True)):
            if not size:
                continue
            ids = all_ids[block_at : block_at + size]
            block_at += size
            skip = index % factor
            num_chunks = -(-(size + skip) // factor)
            slot = all_slots[chunk_at : chunk_at + num_chunks]
            chunk_at += num_chunks
            position: Ints | None = None
            if factor > 1:
                chunk, position = self._chunks_and_positions(skip, size)
                slot = slot[chunk]
            if only is not None:
                chosen = np.isin(slot, list(only))
                ids, slot = ids[chosen], slot[chosen]
                position = None if position is None else position[chosen]
                if not len(ids):
                    continue
            if blocks.null_block is not None:
                not_null = ids != blocks.null_block
                ids, slot = ids[not_null], slot[not_null]
                position = None if position is None else position[not_null]
                if not len(ids):
                    continue
            located.append((group, (ids, slot * np.int64(self.slot_bytes), position)))
        return located

    def _chunks_and_positions(self, skip: int, size: int) -> tuple[Ints, Ints]:
        """Return for `size` blocks from position `skip` on their chunk numbers and positions."""
        if skip + size > _NUM_POSITIONS:
            return np.divmod(np.arange(skip, skip + size), self.layout.blocks_per_chunk)
        chunk, position = self._positions
        return chunk[skip : skip + size], position[skip : skip + size]


def _by_stride_and_page(regions: Sequence[_Region], layout: RankLayout) -> list[_UniformRegions]:
    """Collect regions of equal stride and page size; these are neighbours in `regions`."""
    uniform = []
    for (stride, page), same in groupby(regions, key=_stride_and_page):
        storage, offset, _, _, start = zip(*same, strict=True)
        columns = np.array(storage, np.int32), np.array(offset, np.int64), np.array(start, np.int64)
        merge = stride == page and (layout.blocks_per_chunk > 1 or page == layout.slot_bytes)
        merged = Regions(*columns, min(start), max(start))
        uniform.append(_UniformRegions(merged, stride, page, merge))
    return uniform


def _grid(uniform: _UniformRegions, ids: Ints, slot_offset: Ints, position: Ints | None) -> Grid:
    """Return the runs of blocks; blocks that are contiguous on both sides merge.

    Whether they are is the same for all regions of one stride and page size.

    Args:
        uniform: the regions.
        ids: int64[blocks], block ids.
        slot_offset: int64[blocks], arena offset of each block's slot, in bytes.
        position: int64[blocks], position of each block in its chunk; None if a chunk is one block.
    """
    page = uniform.page
    memory = ids * uniform.stride
    arena = slot_offset if position is None else slot_offset + position * page
    follows = memory[1:] - memory[:-1] == page if uniform.merge else _NEVER
    if 1 in follows.tobytes():  # a comparison of bytes costs least
        follows &= arena[1:] - arena[:-1] == page
    if 1 not in follows.tobytes():
        nbytes = np.empty(len(ids), np.int64)
        nbytes.fill(page)
        return Grid(uniform.regions, memory, arena, nbytes, page)
    first = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    nbytes = np.diff(first, append=len(ids)) * page
    return Grid(uniform.regions, memory[first], arena[first], nbytes, int(nbytes.max()))


def _regions(layout: RankLayout, group: int, layer: int | None = None) -> list[_Region]:
    """Return the regions of a group's refs, or of those of one layer.

    If a chunk is one block, the slot holds the refs' pages back to back; refs whose pages are so in
    memory too (all layers of a block packed together) become one region. Regions of equal stride
    and page size are neighbours in the result.
    """
    regions: list[_Region] = []
    refs = layout.groups[group].refs
    for ref, start in zip(refs, layout.ref_offsets(group), strict=True):
        if layer is not None and ref.layer != layer:
            continue
        tensor = layout.tensors[ref.tensor]
        if regions and layout.blocks_per_chunk == 1:
            storage, offset, stride, page, first = regions[-1]
            if (first + page == start) and (storage, offset + page, stride) == (
                tensor.storage,
                tensor.offset,
                tensor.block_stride,
            ):
                regions[-1] = (storage, offset, stride, page + ref.page_bytes, first)
                continue
        regions.append((tensor.storage, tensor.offset, tensor.block_stride, ref.page_bytes, start))
    kinds = dict.fromkeys(map(_stride_and_page, regions))
    order = {kind: number for number, kind in enumerate(kinds)}
    return sorted(regions, key=lambda region: order[_stride_and_page(region)])


def _stride_and_page(region: _Region) -> tuple[int, int]:
    return region[2], region[3]
