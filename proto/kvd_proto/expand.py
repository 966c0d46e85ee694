"""From a job's blocks to the bytes it moves, vectorised."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvd_proto.blocks import JobBlocks, chunks_per_group
from kvd_proto.errors import JobShapeError
from kvd_proto.layout import RankLayout

Ints: TypeAlias = npt.NDArray[Any]


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

    def select(self, which: npt.NDArray[np.bool_] | slice) -> "Copies":
        """Return some of the runs."""
        return Copies(
            storage=self.storage[which],
            tensor_offset=self.tensor_offset[which],
            arena_offset=self.arena_offset[which],
            nbytes=self.nbytes[which],
        )

    def split(self, unit: int) -> "Copies":
        """Cut runs so that none crosses a multiple of `unit` bytes of the arena."""
        begins = self.arena_offset
        ends = begins + self.nbytes
        first = begins // unit
        parts = (ends - 1) // unit - first + 1
        if bool((parts == 1).all()):
            return self
        run = np.repeat(np.arange(len(parts)), parts)
        part = np.arange(len(run)) - np.repeat(np.cumsum(parts) - parts, parts)
        begin = np.maximum((first[run] + part) * unit, begins[run])
        end = np.minimum((first[run] + part + 1) * unit, ends[run])
        return Copies(
            storage=self.storage[run],
            tensor_offset=self.tensor_offset[run] + (begin - begins[run]),
            arena_offset=begin,
            nbytes=end - begin,
        )

    def pieces(self, piece_bytes: int) -> list[tuple["Copies", int]]:
        """Cut into pieces of about `piece_bytes` (below twice that), each with its bytes, in order.

        A run belongs to the piece that its last byte falls into, were all pieces alike.
        """
        total = self.total_bytes
        if 0 < total <= piece_bytes:
            return [(self, total)]
        copies = self.split(piece_bytes)
        end = np.cumsum(copies.nbytes)
        cuts = (np.flatnonzero(np.diff((end - 1) // piece_bytes)) + 1).tolist()
        bounds = [0, *cuts, len(copies)]
        moved = [0, *(int(end[index - 1]) for index in bounds[1:] if index)]
        return [
            (copies.select(slice(bounds[i], bounds[i + 1])), moved[i + 1] - moved[i])
            for i in range(len(moved) - 1)
        ]

    def check_bounds(self, storages: Sequence[int], arena_bytes: int) -> None:
        """Check that every run lies inside its storage and inside the arena.

        Raises:
            JobShapeError: one does not.
        """
        if not len(self.nbytes):
            return
        sizes = np.array(storages, dtype=np.int64)
        inside = (
            (self.storage >= 0)
            & (self.storage < len(sizes))
            & (self.nbytes > 0)
            & (self.tensor_offset >= 0)
            & (self.arena_offset >= 0)
            & (self.arena_offset + self.nbytes <= arena_bytes)
        )
        if bool(inside.all()):
            inside = self.tensor_offset + self.nbytes <= sizes[self.storage]
        if not bool(inside.all()):
            worst = int(np.argmin(inside))
            raise JobShapeError(
                f"{self.nbytes[worst]} bytes between offset {self.tensor_offset[worst]} of storage"
                f" {self.storage[worst]} and offset {self.arena_offset[worst]} of the arena of"
                f" {arena_bytes} bytes lie outside"
            )

    def __len__(self) -> int:
        return len(self.nbytes)

    def __repr__(self) -> str:
        return f"<Copies {len(self)} runs, {self.total_bytes} bytes>"


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
        self._groups = [_group(layout, index) for index in range(len(layout.groups))]

    def expand(self, blocks: JobBlocks) -> Copies:
        """The byte ranges of a job that was checked against the layout, coalesced."""
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
