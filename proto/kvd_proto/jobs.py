"""Integer arrays on the wire, and those of every job: its blocks and the chunks that they lie in.

An array is a declared dtype and little-endian bytes. The bytes are viewed, not copied, on decoding:
`IntArray.numpy()` is `np.frombuffer` over the received bytes, hence read-only.

The j-th listed block of group g sits at position
``block_indices[g] % blocks_per_chunk + j``; it belongs to the group's chunk
number ``position // blocks_per_chunk`` and is block
``position % blocks_per_chunk`` of it. What is counted is what the job lists:
at a sliding window's edge a chunk's first blocks are simply not listed. Where the layout has a null
block, that one stands for a place that is left out: so chunks that are full in part can be in the
middle of a job.

The control page: numbers in memory that a worker and its lane share.

All are u64, little-endian and aligned, so that no half of a number is read. Word 0
is the timeline. Each of those that follow is the epoch of one store at a time: a store
names its word and the number that stood there when it was sent, and is void as
soon as another one does; the lane looks after each copy, before it reports. So a
worker can take a store's blocks back at any moment, without a message that has to
arrive and without touching its other jobs, and a store that may have read blocks in
use for something else never becomes READY. A word can serve the next store at once:
what the lane may still do for the old one carries the old number.

The last words are the only ones that the lane writes: how many layers of a load have arrived, for
loads that ask for it by the number of such a word. The worker sets it to 0 before it sends the
load, and reads it while the load is under way. They are never used for stores, whose epochs must
not come back.
"""

import mmap
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvd_proto.errors import JobShapeError, Oversize, WrongType
from kvd_proto.layout import RankLayout

MAX_ARRAY_ITEMS = 65536
"""Items of an array or a list in one message, at most."""
FEW = 64
"""Items up to which plain numbers are faster than numpy, whose every call costs as much as many."""

Integers: TypeAlias = Iterable[int] | npt.NDArray[Any]
DType = Literal["u1", "u2", "u4", "u8"]
_TYPECODES: dict[DType, Literal["B", "H", "I", "Q"]] = {"u1": "B", "u2": "H", "u4": "I", "u8": "Q"}
"""Of this machine: little-endian."""
_DTYPES = {dtype: np.dtype("<" + dtype) for dtype in _TYPECODES}
_WIDTHS: dict[DType, int] = {"u1": 1, "u2": 2, "u4": 4, "u8": 8}


class IntArray(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A one-dimensional integer array: `[dtype, little-endian bytes]`.

    Raises:
        ValueError: the bytes are no whole number of items, or hold above `MAX_ARRAY_ITEMS`; on
            decoding the codec makes its own errors of it.
    """

    dtype: DType
    data: bytes

    def __post_init__(self) -> None:
        width, nbytes = _WIDTHS[self.dtype], len(self.data)
        if nbytes % width:
            raise ValueError(
                f"{nbytes} bytes are no whole number of {self.dtype} items ({width} bytes)"
            )
        if nbytes > MAX_ARRAY_ITEMS * width:
            raise ValueError(_too_many(nbytes // width))

    @classmethod
    def of(cls, values: Integers, dtype: DType) -> "IntArray":
        """Pack `values`.

        Raises:
            WrongType: a value is no integer or lies outside the dtype's range.
            Oversize: above `MAX_ARRAY_ITEMS` values.
        """
        listed = values.tolist() if isinstance(values, np.ndarray) else values
        try:
            # An iterator, lest bytes be taken for the array's own; a list is faster without.
            given = listed if type(listed) is list else iter(listed)
            numbers = array(_TYPECODES[dtype], given)
        except (TypeError, OverflowError) as error:
            raise WrongType(f"integers that fit {dtype} are needed: {error}") from error
        if len(numbers) > MAX_ARRAY_ITEMS:
            raise Oversize(_too_many(len(numbers)))
        return cls(dtype, numbers.tobytes())

    def numpy(self) -> npt.NDArray[Any]:
        """The values as a read-only array over the received bytes (no copy)."""
        return np.frombuffer(self.data, _DTYPES[self.dtype])

    def array(self) -> "array[int]":
        """The values, copied; faster than numpy to make, and to add to."""
        return array(_TYPECODES[self.dtype], self.data)

    def tolist(self) -> list[int]:
        """The values; where they are few, faster than an array is made."""
        return memoryview(self.data).cast(_TYPECODES[self.dtype]).tolist()

    def extent(self) -> tuple[int, int]:
        """The smallest and the largest value.

        Raises:
            ValueError: there is none.
        """
        if len(self) <= FEW:
            values = self.tolist()
            return min(values), max(values)
        many = self.numpy()
        return int(many.min()), int(many.max())

    def __len__(self) -> int:
        return len(self.data) // _WIDTHS[self.dtype]

    def __repr__(self) -> str:
        return f"<IntArray {self.dtype}[{len(self)}]>"


def _too_many(count: int) -> str:
    return f"an array of {count} items, at most {MAX_ARRAY_ITEMS} fit a message"


Ints = npt.NDArray[np.intp]
DTYPES: dict[str, DType] = {
    "block_ids": "u4",
    "group_sizes": "u4",
    "block_indices": "u4",
    "slots": "u4",
    "generations": "u8",
}
_JOB_DTYPES = tuple(DTYPES.values())
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

    block_ids: u4, flat, group by group; the layout's null block for a place of a chunk that is left
    out. The others of a chunk follow each other, and there is one at least.
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
        if dtypes != _JOB_DTYPES:
            raise ValueError(f"{', '.join(DTYPES)} are {[*dtypes]}, {[*_JOB_DTYPES]} is needed")

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
        if high >= layout.num_blocks:
            raise JobShapeError(
                f"block_ids {low}..{high} are not within 0..{layout.num_blocks - 1}"
            )
        null_block = layout.null_block
        within = null_block is not None and low <= null_block <= high
        named = within and null_block in self.block_ids.array()
        kept: dict[str, int | None] = self.__dict__
        kept["null_block"] = null_block if named else None
        if named:
            self._check_places(self.chunks(factor), factor)

    def chunks(self, blocks_per_chunk: int) -> Chunks:
        """The chunks of a job that was checked."""
        if self.null_block is not None:
            return self._sparse_chunks(blocks_per_chunk)
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

    @property
    def null_block(self) -> int | None:
        """Of a job that was checked: the layout's null block, where the job names it."""
        kept: dict[str, int | None] = self.__dict__
        return kept.get("null_block")

    def _places(self, factor: int) -> Iterator[tuple[int, Ints, Ints]]:
        """Of each group: its number, and chunk and place in the chunk of blocks not left out."""
        ids, at = self.block_ids.numpy(), 0
        for number, (size, index) in enumerate(zip(self.sizes, self.indices, strict=True)):
            skip = index % factor
            listed = np.flatnonzero(ids[at : at + size] != self.null_block) + skip
            yield number, listed // factor, listed % factor
            at += size

    def _sparse_chunks(self, factor: int) -> Chunks:
        """`chunks` where places are left out; a chunk of which all are has count 0."""
        first, count, group = array("H"), array("H"), array("H")
        many = chunks_per_group(self.sizes, self.indices, factor)
        for number, chunk, place in self._places(factor):
            lowest = np.full(many[number], factor)
            np.minimum.at(lowest, chunk, place)
            first.extend(lowest.tolist())
            count.extend(np.bincount(chunk, minlength=many[number]).tolist())
            group += array("H", (number,)) * many[number]
        return Chunks(self.slots.array(), self.generations.array(), first, count, group)

    def _check_places(self, chunks: Chunks, factor: int) -> None:
        """Check that the blocks of each chunk follow each other.

        Raises:
            JobShapeError: they do not, or there is none.
        """
        begin = 0
        many = chunks_per_group(self.sizes, self.indices, factor)
        for group, chunk, place in self._places(factor):
            highest = np.full(int(chunk.max(initial=-1)) + 1, -1)
            np.maximum.at(highest, chunk, place)
            for number, last in enumerate(highest.tolist(), begin):
                first, count = chunks.first[number], chunks.count[number]
                if count and last - first + 1 != count:
                    raise JobShapeError(
                        f"block_ids: chunk {number} of the job lists {count} blocks between its"
                        f" places {first} and {last}; those that are moved must follow each other"
                    )
            begin += many[group]
        if 0 in chunks.count:
            raise JobShapeError(
                f"block_ids: all places of chunk {chunks.count.index(0)} of the job are left out;"
                " leave the chunk out"
            )

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


CONTROL_BYTES = 64 * 1024
CONTROL_WORDS = CONTROL_BYTES // 8
TIMELINE_WORD = 0
PROGRESS_WORDS = 1024
EPOCH_WORDS = CONTROL_WORDS - PROGRESS_WORDS  # the timeline among them


class ControlWords:
    """The words of a control page, over memory that is shared.

    Args:
        memory: at least `CONTROL_BYTES`, writable where words are written.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        # Item access of a "Q" view reads or writes its eight bytes at once.
        self._words = memoryview(memory).cast("Q")

    @property
    def timeline(self) -> int:
        """The number that has been reached."""
        return self._words[TIMELINE_WORD]

    @timeline.setter
    def timeline(self, number: int) -> None:
        self._words[TIMELINE_WORD] = number

    def epoch(self, word: int) -> int:
        """The number at a word; a store that was sent with another one is void."""
        return self._words[word]

    def next_epoch(self, word: int) -> None:
        """Void the store whose word this is."""
        self._words[word] += 1

    def layers(self, number: int) -> int:
        """How many layers have arrived, at a load's progress word: 1 to `PROGRESS_WORDS`."""
        return self._words[EPOCH_WORDS + number - 1]

    def set_layers(self, number: int, layers: int) -> None:
        """Set a progress word: the worker to 0, its lane to what has arrived."""
        self._words[EPOCH_WORDS + number - 1] = layers

    def unmap(self) -> None:
        """Unmap the page; its words cannot be used afterwards."""
        self._words.release()
        self.memory.close()
