"""The blocks that a job moves and the chunks that they lie in: the arrays of every job.

The j-th listed block of group g sits at position
``block_indices[g] % blocks_per_chunk + j``; it belongs to the group's chunk
number ``position // blocks_per_chunk`` and is block
``position % blocks_per_chunk`` of it. What is counted is what the job lists:
at a sliding window's edge a chunk's first blocks are simply not listed.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kvd_proto.arrays import DType, IntArray, Integers
from kvd_proto.errors import JobShapeError, Oversize, WrongType
from kvd_proto.layout import RankLayout

NULL_BLOCK = 0
DTYPES: dict[str, DType] = {
    "block_ids": "u4",
    "group_sizes": "u4",
    "block_indices": "u4",
    "slots": "u4",
    "generations": "u8",
}
_DTYPES = tuple(DTYPES.values())
_ZERO = array("H", (0,))


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks that a job names, one item each.

    slots: u4. generations: u8, of these slots. first, count: u2, the blocks of the chunk that the
    job lists. group: u2, whose blocks they are.
    """

    slots: "array[int]"
    generations: "array[int]"
    first: "array[int]"
    count: "array[int]"
    group: "array[int]"

    @property
    def columns(self) -> tuple["array[int]", ...]:
        """All of it."""
        return self.slots, self.generations, self.first, self.count, self.group

    def __len__(self) -> int:
        return len(self.slots)


class JobBlocks(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """Blocks of one rank, and the chunks that they lie in.

    block_ids: u4, flat, group by group; block 0 is the engine's null block and never listed.
    group_sizes: u4, how many blocks of each group are listed, 0 for none.
    block_indices: u4, logical index of each group's first listed block.
    slots: u4, of the chunks, group by group, as many as the listed blocks lie in.
    generations: u8, of these slots.
    """

    block_ids: IntArray
    group_sizes: IntArray
    block_indices: IntArray
    slots: IntArray
    generations: IntArray

    def __post_init__(self) -> None:
        arrays = (self.block_ids, self.group_sizes, self.block_indices, self.slots)
        dtypes = (*[array.dtype for array in arrays], self.generations.dtype)
        if dtypes != _DTYPES:
            raise ValueError(f"{', '.join(DTYPES)} are {[*dtypes]}, {[*_DTYPES]} is needed")

    @classmethod
    def of(
        cls,
        block_ids: Integers,
        group_sizes: Integers,
        block_indices: Integers,
        slots: Integers,
        generations: Integers,
    ) -> "JobBlocks":
        """Pack the arrays of a job.

        Raises:
            WrongType, Oversize: naming the array that is not of integers that fit, or too long.
        """
        given = (block_ids, group_sizes, block_indices, slots, generations)
        packed = []
        for (name, dtype), values in zip(DTYPES.items(), given, strict=True):
            try:
                packed.append(IntArray.of(values, dtype))
            except (WrongType, Oversize) as error:
                raise type(error)(f"{name}: {error}") from error
        return cls(*packed)

    @property
    def sizes(self) -> list[int]:
        """The group sizes."""
        return self._listed("sizes", self.group_sizes)

    @property
    def indices(self) -> list[int]:
        """The block indices."""
        return self._listed("indices", self.block_indices)

    def _listed(self, name: str, array: IntArray) -> list[int]:
        """An array's values, kept: functools.cached_property takes a lock every time."""
        kept: dict[str, list[int]] = self.__dict__
        if name not in kept:
            kept[name] = array.tolist()
        return kept[name]

    def check(self, layout: RankLayout, num_slots: int = 2**32) -> None:
        """Check that the arrays fit each other, the layout and an arena of `num_slots`.

        Raises:
            JobShapeError: they do not; names the figures.
        """
        sizes, indices, groups = self.sizes, self.indices, len(layout.groups)
        if not len(sizes) == len(indices) == groups:
            raise JobShapeError(
                f"{len(sizes)} group_sizes and {len(indices)} block_indices for {groups} groups;"
                " give one of each per group, 0 for a group without blocks"
            )
        listed = len(self.block_ids)
        if sum(sizes) != listed:
            raise JobShapeError(
                f"group_sizes {sizes} sum to {sum(sizes)}, but {listed} block_ids are"
                " listed; count what was appended"
            )
        factor = layout.blocks_per_chunk
        chunks = sum(chunks_per_group(sizes, indices, factor))
        if not len(self.slots) == len(self.generations) == chunks:
            raise JobShapeError(
                f"these blocks lie in {chunks} chunks (blocks_per_chunk {factor}), given are"
                f" {len(self.slots)} slots with {len(self.generations)} generations"
            )
        if not chunks:
            return
        low, high = self.slots.extent()
        if high >= num_slots:
            raise JobShapeError(f"slots {low}..{high} of an arena of {num_slots}")
        low, high = self.block_ids.extent()
        if low == NULL_BLOCK:
            raise JobShapeError(
                "block_ids: block id 0 is the null block; leave it out and let block_indices start"
                " after it"
            )
        if high >= layout.num_blocks:
            raise JobShapeError(
                f"block_ids {low}..{high} are not within 1..{layout.num_blocks - 1}"
            )

    def chunks(self, blocks_per_chunk: int) -> Chunks:
        """The chunks of a job that was checked."""
        first, count, group = array("H"), array("H"), array("H")
        for number, (size, index) in enumerate(zip(self.sizes, self.indices, strict=True)):
            if size:
                skip = index % blocks_per_chunk
                chunks = -(-(size + skip) // blocks_per_chunk)
                if chunks == 1:
                    first.append(skip)
                    count.append(size)
                    group.append(number)
                    continue
                at = len(count)
                first += _ZERO * chunks
                count += array("H", (blocks_per_chunk,)) * chunks
                group += array("H", (number,)) * chunks
                first[at] = skip
                count[at] -= skip
                count[-1] -= chunks * blocks_per_chunk - skip - size
        return Chunks(self.slots.array(), self.generations.array(), first, count, group)

    def __repr__(self) -> str:
        return f"<JobBlocks {len(self.block_ids)} blocks in {len(self.slots)} chunks>"


def chunks_per_group(
    group_sizes: Sequence[int], block_indices: Sequence[int], blocks_per_chunk: int
) -> list[int]:
    """cdiv(size + block_index % factor, factor) for each group, 0 for an empty one."""
    return [
        -(-(size + index % blocks_per_chunk) // blocks_per_chunk) if size else 0
        for size, index in zip(group_sizes, block_indices, strict=True)
    ]
