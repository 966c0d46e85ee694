"""From a job's blocks to the bytes it moves: vectorised, and run by run where there are few."""

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
"""Storage, offset and stride in it, page, start in the slot."""
_Where: TypeAlias = tuple[Ints, Ints, Ints | None]
"""Blocks; their slots' bytes in the arena; their places in chunks, None where a chunk is one."""
OnlySlots: TypeAlias = frozenset[int] | None
"""Slots of the chunks that are moved; None: all of the job's."""
FEW_PAGES = 32  # of a job; above, numpy is faster
_NEVER = np.zeros(0, np.bool_)
_PLACES = 4096  # blocks of a group, of which places in chunks are known beforehand


@dataclass(frozen=True, slots=True)
class _Alike:
    """A group's regions of one stride and page.

    merge: whether blocks may follow each other on both sides.
    """

    regions: Regions
    stride: int
    page: int
    merge: bool


class Expander:
    """Turns one rank's jobs into byte ranges; what depends on the layout alone is kept.

    Args:
        layout: the rank's memory; it was validated before.
    """

    def __init__(self, layout: RankLayout) -> None:
        self.layout = layout
        self.slot_bytes = layout.slot_bytes
        self._regions = [_regions(layout, index) for index in range(len(layout.groups))]
        self._groups = [_alike(regions, layout) for regions in self._regions]
        self._places = divmod(np.arange(_PLACES), layout.blocks_per_chunk)
        self._most = max(map(len, self._regions), default=0)
        self._block_bytes = [sum(ref.page_bytes for ref in g.refs) for g in layout.groups]

    def listed_bytes(self, blocks: JobBlocks) -> int:
        """Bytes of all listed blocks of a job that was checked against the layout."""
        return sum(map(operator.mul, blocks.sizes, self._block_bytes))

    @cached_property
    def inside(self) -> bool:
        """Whether no block of the layout lies outside its storage, and no page outside a slot.

        So it is with every layout that was validated. A job that was checked against such a
        layout and an arena moves no byte outside them, whichever its runs are.
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
        """The byte ranges of a job that was checked against the layout, coalesced."""
        if len(blocks.block_ids) * self._most <= FEW_PAGES and blocks.null_block is None:
            return Copies.of(self.expand_few(blocks, only))
        return self.expand_many(blocks, only)

    def expand_few(self, blocks: JobBlocks, only: OnlySlots = None) -> list[Run]:
        """`expand`, run by run: faster where there are few. No place may be left out."""
        factor, slot_bytes = self.layout.blocks_per_chunk, self.slot_bytes
        block_ids, slots = iter(blocks.block_ids.tolist()), iter(blocks.slots.tolist())
        runs: list[Run] = []
        for regions, size, index in zip(self._regions, blocks.sizes, blocks.indices, strict=True):
            # Neighbours in memory and in a chunk: block, byte of the slot, place, how many.
            stretches: list[list[int]] = []
            after, slot = -1, 0
            for place in range(index, index + size):
                block, inside = next(block_ids), place % factor
                if place == index or not inside:
                    slot = next(slots)
                    after = -1
                if only is not None and slot not in only:
                    continue
                if block == after:
                    stretches[-1][3] += 1
                    after += 1
                    continue
                stretches.append([block, slot * slot_bytes, inside, 1])
                after = block + 1
            for storage, offset, stride, page, start in regions:
                begin = begin_at = nbytes = 0
                for block, at, inside, count in stretches:
                    step, steps = (count * page, 1) if stride == page else (page, count)
                    here, here_at = offset + block * stride, at + start + inside * page
                    for _ in range(steps):
                        if here == begin + nbytes and here_at == begin_at + nbytes and nbytes:
                            nbytes += step
                        else:
                            if nbytes:
                                runs.append((storage, begin, begin_at, nbytes))
                            begin, begin_at, nbytes = here, here_at, step
                        here += stride
                        here_at += page
                if nbytes:
                    runs.append((storage, begin, begin_at, nbytes))
        return runs

    def expand_many(self, blocks: JobBlocks, only: OnlySlots = None) -> Copies:
        """`expand`, all runs at once."""
        placed = self._place(blocks, only)
        return Copies.of_grids(
            [_grid(alike, *where) for group, where in placed for alike in self._groups[group]]
        )

    def expand_layers(self, blocks: JobBlocks) -> tuple[Copies, list[int]]:
        """`expand`, layer by layer; with the bytes of all layers up to and with each."""
        placed = self._place(blocks, None)
        grids: list[Grid] = []
        ends: list[int] = []
        done = 0
        for groups in self._by_layer:
            for group, where in placed:
                made = [_grid(alike, *where) for alike in groups[group]]
                done += sum(len(g.regions.storage) * int(g.nbytes.sum()) for g in made)
                grids += made
            ends.append(done)
        return Copies.of_grids(grids), ends

    @cached_property
    def _by_layer(self) -> list[list[list[_Alike]]]:
        """Of each layer, each group's regions."""
        layout = self.layout
        return [
            [_alike(_regions(layout, group, layer), layout) for group in range(len(layout.groups))]
            for layer in range(layout.layers)
        ]

    def _place(self, blocks: JobBlocks, only: OnlySlots) -> list[tuple[int, _Where]]:
        """Of each group that is listed: blocks, and where their chunks are."""
        factor = self.layout.blocks_per_chunk
        sizes, indices = blocks.sizes, blocks.indices
        all_ids, all_slots = blocks.block_ids.numpy().astype(np.int64), blocks.slots.numpy()
        placed: list[tuple[int, _Where]] = []
        block_at = chunk_at = 0
        for group, (size, index) in enumerate(zip(sizes, indices, strict=True)):
            if not size:
                continue
            ids = all_ids[block_at : block_at + size]
            block_at += size
            skip = index % factor
            chunks = -(-(size + skip) // factor)
            slot = all_slots[chunk_at : chunk_at + chunks]
            chunk_at += chunks
            inside: Ints | None = None
            if factor > 1:
                ordinal, inside = self._placed(skip, size)
                slot = slot[ordinal]
            if only is not None:
                mine = np.isin(slot, list(only))
                ids, slot, inside = ids[mine], slot[mine], None if inside is None else inside[mine]
                if not len(ids):
                    continue
            if blocks.null_block is not None:
                listed = ids != blocks.null_block
                ids, slot = ids[listed], slot[listed]
                inside = None if inside is None else inside[listed]
                if not len(ids):
                    continue
            placed.append((group, (ids, slot * np.int64(self.slot_bytes), inside)))
        return placed

    def _placed(self, skip: int, size: int) -> tuple[Ints, Ints]:
        """Of blocks after the first `skip`: the chunk's ordinal, and the place in it."""
        if skip + size > _PLACES:
            return np.divmod(np.arange(skip, skip + size), self.layout.blocks_per_chunk)
        ordinal, inside = self._places
        return ordinal[skip : skip + size], inside[skip : skip + size]


def _alike(regions: Sequence[_Region], layout: RankLayout) -> list[_Alike]:
    """The same by stride and page; those that are equal in both are next to each other."""
    made = []
    for (stride, page), same in groupby(regions, key=_stride_and_page):
        storage, offset, _, _, start = zip(*same, strict=True)
        columns = np.array(storage, np.int32), np.array(offset, np.int64), np.array(start, np.int64)
        merge = stride == page and (layout.blocks_per_chunk > 1 or page == layout.slot_bytes)
        made.append(_Alike(Regions(*columns, min(start), max(start)), stride, page, merge))
    return made


def _grid(alike: _Alike, ids: Ints, at: Ints, inside: Ints | None) -> Grid:
    """The runs of blocks; neighbours that follow each other on both sides merge.

    Whether they do is the same for all regions of one stride and page.

    Args:
        alike: these regions.
        ids: int64[blocks], of a block.
        at: int64[blocks], its slot's byte in the arena.
        inside: int64[blocks], its place in the chunk; None where a chunk is one block.
    """
    page = alike.page
    memory = ids * alike.stride
    arena = at if inside is None else at + inside * page
    follows = memory[1:] - memory[:-1] == page if alike.merge else _NEVER
    if 1 in follows.tobytes():  # a comparison of bytes costs least
        follows &= arena[1:] - arena[:-1] == page
    if 1 not in follows.tobytes():
        nbytes = np.empty(len(ids), np.int64)
        nbytes.fill(page)
        return Grid(alike.regions, memory, arena, nbytes, page)
    first = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    nbytes = np.diff(first, append=len(ids)) * page
    return Grid(alike.regions, memory[first], arena[first], nbytes, int(nbytes.max()))


def _regions(layout: RankLayout, group: int, layer: int | None = None) -> list[_Region]:
    """(storage, offset, stride, page, start in slot) of each ref of a group, or of one layer of it.

    With one block a chunk, refs are page after page in the slot; where they are
    so in memory too (all layers of a block packed together) they are one. Those of one stride and
    page are next to each other.
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
    rank = {kind: number for number, kind in enumerate(kinds)}
    return sorted(regions, key=lambda region: rank[_stride_and_page(region)])


def _stride_and_page(region: _Region) -> tuple[int, int]:
    return region[2], region[3]
