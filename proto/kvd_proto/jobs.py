"""What a job says: arrays of integers, the blocks that it moves, and the control page.

**Arrays.** An array on the wire is a dtype and little-endian bytes. Decoding copies nothing:
`IntArray.numpy()` is `np.frombuffer` over the received bytes, hence read-only.

**Blocks.** The j-th listed block of group g has position
``block_indices[g] % blocks_per_chunk + j``. It is block ``position % blocks_per_chunk`` of the
group's chunk number ``position // blocks_per_chunk``. A chunk may be listed in part: at a sliding
window's edge its first blocks are not listed. A null block in `block_ids` leaves out a position
before the chunk's first block or behind its last one.

**Control page.** Memory that a worker shares with its lane: u64 words, little-endian and aligned,
so that reads and writes are whole.

- Word 0 is the timeline: how far the worker's streams are.
- An epoch word belongs to one store at a time. The store message carries the word's number and its
  epoch; the store is void once the word holds another epoch. The lane checks that after each copy,
  before it reports, so a store that may have read reused blocks never becomes READY. The worker
  can thus take a store's blocks back at any moment without a message, and use the word for its
  next store at once.
- A progress word says how many layers of a load have arrived. The worker sets it to 0 before it
  sends the load; then only the lane writes it. Progress words are separate, since an epoch must
  never come back.
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
"""The most items of an array or a list in one message."""
FEW = 64
"""Up to so many items plain Python is faster than numpy, because of the cost of each numpy call."""

Integers: TypeAlias = Iterable[int] | npt.NDArray[Any]
DType = Literal["u1", "u2", "u4", "u8"]
_TYPECODES: dict[DType, Literal["B", "H", "I", "Q"]] = {"u1": "B", "u2": "H", "u4": "I", "u8": "Q"}
"""Of this machine: little-endian."""
_DTYPES = {dtype: np.dtype("<" + dtype) for dtype in _TYPECODES}
_WIDTHS: dict[DType, int] = {"u1": 1, "u2": 2, "u4": 4, "u8": 8}


class IntArray(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A one-dimensional integer array: `[dtype, little-endian bytes]`.

    Raises:
        ValueError: the bytes are no whole number of items, or more than `MAX_ARRAY_ITEMS`; the
            codec turns it into a DecodeError.
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
            WrongType: a value is no integer or outside the dtype's range.
            Oversize: there are more than `MAX_ARRAY_ITEMS` values.
        """
        items = values.tolist() if isinstance(values, np.ndarray) else values
        try:
            # array() takes a bytes object for raw memory, so pass an iterator; lists are faster.
            source = items if type(items) is list else iter(items)
            numbers = array(_TYPECODES[dtype], source)
        except (TypeError, OverflowError) as error:
            raise WrongType(f"integers that fit {dtype} are needed: {error}") from error
        if len(numbers) > MAX_ARRAY_ITEMS:
            raise Oversize(_too_many(len(numbers)))
        return cls(dtype, numbers.tobytes())

    def numpy(self) -> npt.NDArray[Any]:
        """Return the values as a read-only array over the received bytes, without a copy."""
        return np.frombuffer(self.data, _DTYPES[self.dtype])

    def array(self) -> "array[int]":
        """Return a copy of the values; cheaper to make and to extend than a numpy array."""
        return array(_TYPECODES[self.dtype], self.data)

    def tolist(self) -> list[int]:
        """Return the values as a list; for few of them faster than an array."""
        return memoryview(self.data).cast(_TYPECODES[self.dtype]).tolist()

    def extent(self) -> tuple[int, int]:
        """Return the smallest and the largest value.

        Raises:
            ValueError: the array is empty.
        """
        if len(self) <= FEW:
            items = self.tolist()
            return min(items), max(items)
        values = self.numpy()
        return int(values.min()), int(values.max())

    def __len__(self) -> int:
        return len(self.data) // _WIDTHS[self.dtype]


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
    """The chunks of a job, one item per chunk in each array.

    slots, generations: u4 and u8, where the chunks are.
    first, count: u2, the blocks of each chunk that the job lists.
    group: u2, the KV-cache group of these blocks.
    """

    slots: "array[int]"
    generations: "array[int]"
    first: "array[int]"
    count: "array[int]"
    group: "array[int]"

    @property
    def columns(self) -> tuple["array[int]", ...]:
        """All five arrays."""
        return self.slots, self.generations, self.first, self.count, self.group

    def __len__(self) -> int:
        return len(self.slots)


class JobBlocks(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """Blocks of one rank, and the chunks that they lie in.

    block_ids: u4, flat, group by group; the layout's null block leaves out a position at either end
    of a chunk. The other blocks of a chunk are consecutive, and there is at least one.
    group_sizes: u4, the number of listed blocks of each group, 0 for none.
    block_indices: u4, logical index of each group's first listed block.
    slots: u4, of the chunks of the listed blocks, group by group.
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
            WrongType, Oversize: as `IntArray.of`; the text names the array.
        """
        columns = (block_ids, group_sizes, block_indices, slots, generations)
        packed = []
        for (name, dtype), values in zip(DTYPES.items(), columns, strict=True):
            try:
                packed.append(IntArray.of(values, dtype))
            except (WrongType, Oversize) as error:
                raise type(error)(f"{name}: {error}") from error
        return cls(*packed)

    @property
    def sizes(self) -> list[int]:
        """The group sizes as a list."""
        return self._cached_list("sizes", self.group_sizes)

    @property
    def indices(self) -> list[int]:
        """The block indices as a list."""
        return self._cached_list("indices", self.block_indices)

    def _cached_list(self, name: str, array: IntArray) -> list[int]:
        """Return the array's values, cached; functools.cached_property would take a lock."""
        cache: dict[str, list[int]] = self.__dict__
        if name not in cache:
            cache[name] = array.tolist()
        return cache[name]

    def check(self, layout: RankLayout, num_slots: int = 2**32) -> None:
        """Check that the arrays fit each other, the layout and an arena of `num_slots`.

        Raises:
            JobShapeError: they do not; the text has the figures.
        """
        sizes, indices, num_groups = self.sizes, self.indices, len(layout.groups)
        if not len(sizes) == len(indices) == num_groups:
            raise JobShapeError(
                f"{len(sizes)} group_sizes and {len(indices)} block_indices for {num_groups}"
                " groups; give one of each per group, 0 for a group without blocks"
            )
        num_blocks = len(self.block_ids)
        if sum(sizes) != num_blocks:
            raise JobShapeError(
                f"group_sizes {sizes} sum to {sum(sizes)}, but there are {num_blocks} block_ids;"
                " give as many block_ids as group_sizes add up to"
            )
        factor = layout.blocks_per_chunk
        num_chunks = sum(chunks_per_group(sizes, indices, factor))
        if not len(self.slots) == len(self.generations) == num_chunks:
            raise JobShapeError(
                f"these blocks lie in {num_chunks} chunks (blocks_per_chunk {factor}), given are"
                f" {len(self.slots)} slots with {len(self.generations)} generations"
            )
        if not num_chunks:
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
        in_range = null_block is not None and low <= null_block <= high
        is_sparse = in_range and null_block in self.block_ids.array()
        cache: dict[str, int | None] = self.__dict__
        cache["null_block"] = null_block if is_sparse else None
        if is_sparse:
            self._check_contiguous(self.chunks(factor), factor)

    def chunks(self, blocks_per_chunk: int) -> Chunks:
        """Return the job's chunks. Call `check` first."""
        if self.null_block is not None:
            return self._sparse_chunks(blocks_per_chunk)
        first, count, group = array("H"), array("H"), array("H")
        for number, (size, index) in enumerate(zip(self.sizes, self.indices, strict=True)):
            if size:
                skip = index % blocks_per_chunk
                num_chunks = -(-(size + skip) // blocks_per_chunk)
                if num_chunks == 1:
                    first.append(skip)
                    count.append(size)
                    group.append(number)
                    continue
                head = len(count)
                first += _ZERO * num_chunks
                count += array("H", (blocks_per_chunk,)) * num_chunks
                group += array("H", (number,)) * num_chunks
                first[head] = skip
                count[head] -= skip
                count[-1] -= num_chunks * blocks_per_chunk - skip - size
        return Chunks(self.slots.array(), self.generations.array(), first, count, group)

    @property
    def null_block(self) -> int | None:
        """The layout's null block if `check` found it in `block_ids`, otherwise None."""
        cache: dict[str, int | None] = self.__dict__
        return cache.get("null_block")

    def _non_null_blocks(self, factor: int) -> Iterator[tuple[int, Ints, Ints]]:
        """Yield every group's number and, of each non-null block, its chunk and its index there.

        Chunks are numbered within the group.
        """
        ids, begin = self.block_ids.numpy(), 0
        for number, (size, index) in enumerate(zip(self.sizes, self.indices, strict=True)):
            skip = index % factor
            positions = np.flatnonzero(ids[begin : begin + size] != self.null_block) + skip
            yield number, positions // factor, positions % factor
            begin += size

    def _sparse_chunks(self, factor: int) -> Chunks:
        """`chunks` for a job with null blocks; a chunk of null blocks only has count 0."""
        first, count, group = array("H"), array("H"), array("H")
        num_chunks = chunks_per_group(self.sizes, self.indices, factor)
        for number, chunk, position in self._non_null_blocks(factor):
            lowest = np.full(num_chunks[number], factor)
            np.minimum.at(lowest, chunk, position)
            first.extend(lowest.tolist())
            count.extend(np.bincount(chunk, minlength=num_chunks[number]).tolist())
            group += array("H", (number,)) * num_chunks[number]
        return Chunks(self.slots.array(), self.generations.array(), first, count, group)

    def _check_contiguous(self, chunks: Chunks, factor: int) -> None:
        """Check that each chunk lists at least one block, and consecutive ones only.

        Raises:
            JobShapeError: a chunk does not.
        """
        begin = 0
        num_chunks = chunks_per_group(self.sizes, self.indices, factor)
        for group, chunk, position in self._non_null_blocks(factor):
            highest = np.full(int(chunk.max(initial=-1)) + 1, -1)
            np.maximum.at(highest, chunk, position)
            for number, last in enumerate(highest.tolist(), begin):
                first, count = chunks.first[number], chunks.count[number]
                if count and last - first + 1 != count:
                    raise JobShapeError(
                        f"block_ids: chunk {number} of the job has {count} blocks other than the"
                        f" null block at positions {first} to {last}; they must be consecutive"
                    )
            begin += num_chunks[group]
        if 0 in chunks.count:
            raise JobShapeError(
                f"block_ids: chunk {chunks.count.index(0)} of the job has only null blocks; leave"
                " the chunk out"
            )


def chunks_per_group(
    group_sizes: Sequence[int], block_indices: Sequence[int], blocks_per_chunk: int
) -> list[int]:
    """Return cdiv(size + block_index % factor, factor) for each group, 0 for an empty one."""
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
    """The words of a control page.

    Args:
        memory: `CONTROL_BYTES` or more of shared memory, writable if words are written.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        # Access to an item of a "Q" view reads or writes its eight bytes at once.
        self._words = memoryview(memory).cast("Q")

    @property
    def timeline(self) -> int:
        """The timeline number that the worker's streams have reached."""
        return self._words[TIMELINE_WORD]

    @timeline.setter
    def timeline(self, number: int) -> None:
        self._words[TIMELINE_WORD] = number

    def epoch(self, word: int) -> int:
        """Return the epoch at a word; a store sent with another one is void."""
        return self._words[word]

    def next_epoch(self, word: int) -> None:
        """Void the store that uses this word."""
        self._words[word] += 1

    def layers(self, number: int) -> int:
        """Return how many layers of a load have arrived; `number`: 1 to `PROGRESS_WORDS`."""
        return self._words[EPOCH_WORDS + number - 1]

    def set_layers(self, number: int, layers: int) -> None:
        """Set a progress word: the worker to 0, the lane to the layers that have arrived."""
        self._words[EPOCH_WORDS + number - 1] = layers

    def unmap(self) -> None:
        """Unmap the page. Nothing works afterwards."""
        self._words.release()
        self.memory.close()
