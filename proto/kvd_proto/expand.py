"""From a job's blocks to the bytes it moves: vectorised, and run by run where there are few."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvd_proto.blocks import JobBlocks, chunks_per_group
from kvd_proto.copies import Copies, Run
from kvd_proto.layout import RankLayout

Ints: TypeAlias = npt.NDArray[Any]
_Region: TypeAlias = tuple[int, int, int, int, int]
"""Storage, offset and stride in it, page, start in the slot."""
FEW_PAGES = 64  # of a job; above, numpy is faster


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
        self.slot_bytes = layout.slot_bytes
        self._regions = [_regions(layout, index) for index in range(len(layout.groups))]
        self._groups = [_group(regions) for regions in self._regions]
        self._most = max(map(len, self._regions), default=0)
        self._block_bytes = [sum(ref.page_bytes for ref in g.refs) for g in layout.groups]

    def named_bytes(self, blocks: JobBlocks) -> int:
        """Bytes of all listed blocks of a job that was checked against the layout."""
        return sum(map(operator.mul, blocks.sizes, self._block_bytes))

    def expand(self, blocks: JobBlocks) -> Copies:
        """The byte ranges of a job that was checked against the layout, coalesced."""
        if len(blocks.block_ids) * self._most <= FEW_PAGES:
            return Copies.of(self.expand_few(blocks))
        return self.expand_many(blocks)

    def expand_few(self, blocks: JobBlocks) -> list[Run]:
        """`expand`, run by run: faster where there are few."""
        factor, slot_bytes = self.layout.blocks_per_chunk, self.slot_bytes
        block_ids, slots = iter(blocks.block_ids.tolist()), iter(blocks.slots.tolist())
        runs: list[Run] = []
        for regions, size, index in zip(self._regions, blocks.sizes, blocks.indices, strict=True):
            # Neighbours in memory and in a chunk: block, byte of the slot, place, how many.
            stretches: list[list[int]] = []
            after = -1
            for place in range(index, index + size):
                block, inside = next(block_ids), place % factor
                if place == index or not inside:
                    at = next(slots) * slot_bytes
                elif block == after:
                    stretches[-1][3] += 1
                    after += 1
                    continue
                stretches.append([block, at, inside, 1])
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

    def expand_many(self, blocks: JobBlocks) -> Copies:
        """`expand`, all runs at once."""
        factor = self.layout.blocks_per_chunk
        sizes, indices = blocks.sizes, blocks.indices
        chunks = chunks_per_group(sizes, indices, factor)
        block_ids = blocks.block_ids.numpy().astype(np.int64)
        slots = blocks.slots.numpy().astype(np.int64)
        parts: list[tuple[Ints, Ints, Ints, Ints]] = []
        block_at = chunk_at = 0
        for group, (size, number) in enumerate(zip(sizes, chunks, strict=True)):
            if size:
                skip = indices[group] % factor
                ordinal, inside = np.divmod(np.arange(skip, skip + size), factor)
                slot = slots[chunk_at + ordinal]
                ids = block_ids[block_at : block_at + size]
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


def _group(regions: Sequence[_Region]) -> _Group:
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


def _regions(layout: RankLayout, group: int) -> list[_Region]:
    """(storage, offset, stride, page, start in slot) of each ref of a group.

    With one block a chunk, refs are page after page in the slot; where they are
    so in memory too (all layers of a block packed together) they are one.
    """
    regions: list[_Region] = []
    refs = layout.groups[group].refs
    for ref, start in zip(refs, layout.ref_offsets(group), strict=True):
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
