"""The byte ranges that a job copies between a rank's storages and its arena, as runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvd_proto.errors import JobShapeError
from kvd_proto.jobs import FEW

Run: TypeAlias = tuple[int, int, int, int]
"""Storage index, offset in the storage, offset in the arena, and length; in bytes."""
Columns: TypeAlias = tuple[
    npt.NDArray[np.int32],
    npt.NDArray[np.int64],
    npt.NDArray[np.int64],
    npt.NDArray[np.int64],
]


@dataclass(frozen=True, slots=True)
class Regions:
    """Where the pages of several tensors lie, in memory and in a slot: one item per tensor.

    storage: int32[regions], index of the rank's storage.
    offset: int64[regions], of block 0 in the storage, in bytes.
    start: int64[regions], of a chunk's first page in its slot, in bytes.
    first, last: the smallest and the largest start.
    """

    storage: npt.NDArray[np.int32]
    offset: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    first: int
    last: int


class Grid(NamedTuple):
    """The same runs in each of several regions, so [regions, runs] runs in total.

    memory: int64[runs], bytes from the region's offset.
    arena: int64[runs], bytes from the arena's start, to which the region's start is added.
    nbytes: int64[runs], length of each run.
    longest: the largest length.
    """

    regions: Regions
    memory: npt.NDArray[np.int64]
    arena: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    longest: int

    @property
    def columns(self) -> Columns:
        """All runs, region by region."""
        regions, count = self.regions, len(self.nbytes)
        return (
            regions.storage.repeat(count),
            (regions.offset[:, np.newaxis] + self.memory).reshape(-1),
            (regions.start[:, np.newaxis] + self.arena).reshape(-1),
            np.tile(self.nbytes, len(regions.storage)),
        )

    @property
    def size(self) -> int:
        """The number of runs."""
        return len(self.regions.storage) * len(self.nbytes)


class Copies:
    """An immutable set of byte ranges to copy, in either direction.

    Ranges that are contiguous on both sides form one run. The runs have three forms: columns for
    arithmetic on many of them, grids where many are alike, and a list to iterate over few. Columns
    and list are computed on first use.

    Args:
        storage: int32[runs], index of the rank's storage.
        tensor_offset: int64[runs], bytes from the storage's start.
        arena_offset: int64[runs], bytes from the start of the rank's arena.
        nbytes: int64[runs], length of each run.

    Attributes:
        few: iterating over the runs is faster than arithmetic on columns.
        grids: all runs, if they were given as grids; otherwise empty.
    """

    __slots__ = ("_columns", "_runs", "few", "grids")

    def __init__(
        self,
        storage: npt.NDArray[np.int32],
        tensor_offset: npt.NDArray[np.int64],
        arena_offset: npt.NDArray[np.int64],
        nbytes: npt.NDArray[np.int64],
    ) -> None:
        self._set((storage, tensor_offset, arena_offset, nbytes), None, ())

    @classmethod
    def of(cls, runs: list[Run]) -> "Copies":
        """Return copies given as a short list of runs."""
        copies = cls.__new__(cls)
        copies._columns, copies._runs, copies.grids = None, runs, ()  # noqa: SLF001  # own class
        copies.few = len(runs) <= FEW
        return copies

    @classmethod
    def of_grids(cls, grids: Sequence[Grid]) -> "Copies":
        """Return copies given as grids; none may be empty."""
        copies = cls.__new__(cls)
        copies._set(None, None if grids else [], grids)  # noqa: SLF001  # own class
        return copies

    def _set(self, columns: Columns | None, runs: list[Run] | None, grids: Sequence[Grid]) -> None:
        self._columns, self._runs, self.grids = columns, runs, grids
        self.few = len(self) <= FEW

    @property
    def runs(self) -> list[Run]:
        """All runs as a list."""
        if self._runs is None:
            self._runs = list(zip(*(column.tolist() for column in self.columns), strict=True))
        return self._runs

    @property
    def columns(self) -> Columns:
        """Storage, tensor offset, arena offset and length of every run: [runs] each."""
        if self._columns is None:
            self._columns = self._make_columns()
        return self._columns

    def _make_columns(self) -> Columns:
        if not self.grids:
            table = np.array(self._runs, np.int64).reshape(-1, 4)
            storage, *offsets_and_lengths = np.ascontiguousarray(table.T)
            return storage.astype(np.int32), *offsets_and_lengths
        by_grid = [grid.columns for grid in self.grids]
        if len(by_grid) == 1:
            return by_grid[0]
        storages, tensor_offsets, arena_offsets, nbytes = zip(*by_grid, strict=True)
        offsets = np.concatenate(tensor_offsets), np.concatenate(arena_offsets)
        return np.concatenate(storages), *offsets, np.concatenate(nbytes)

    @property
    def storage(self) -> npt.NDArray[np.int32]:
        """Index of the rank's storage: [runs]."""
        return self.columns[0]

    @property
    def tensor_offset(self) -> npt.NDArray[np.int64]:
        """Bytes from the storage's start: [runs]."""
        return self.columns[1]

    @property
    def arena_offset(self) -> npt.NDArray[np.int64]:
        """Bytes from the arena's start: [runs]."""
        return self.columns[2]

    @property
    def nbytes(self) -> npt.NDArray[np.int64]:
        """Length in bytes: [runs]."""
        return self.columns[3]

    @property
    def total_bytes(self) -> int:
        """Bytes of all runs together."""
        if self.few:
            return sum([run[3] for run in self.runs])
        return int(self.nbytes.sum())

    @property
    def longest(self) -> int:
        """Bytes of the longest run; 0 if there is none."""
        if self.grids:
            return max([grid.longest for grid in self.grids])
        if self.few:
            return max([run[3] for run in self.runs], default=0)
        return int(self.nbytes.max())

    def split(self, unit: int, base: int = 0) -> "Copies":
        """Return the runs cut at multiples of `unit` bytes of the pool; `base`: of the arena."""
        begins = self.arena_offset + base
        first = begins // unit
        parts = (begins + self.nbytes - 1) // unit - first + 1
        if bool((parts == 1).all()):
            return self
        run, part = _numbered(parts)
        return self._cut(run, np.maximum((first[run] + part) * unit - begins[run], 0))

    def shorten(self, longest: int) -> "Copies":
        """Return the runs cut into pieces of `longest` bytes at most."""
        if self.longest <= longest:
            return self
        parts = -(-self.nbytes // longest)
        run, part = _numbered(parts)
        return self._cut(run, part * longest)

    def _cut(self, run: npt.NDArray[np.int64], begin: npt.NDArray[np.int64]) -> "Copies":
        """Return pieces of runs: piece i is of run[i], from byte begin[i] to the next piece."""
        end = np.empty_like(begin)
        end[:-1] = begin[1:]
        last = np.flatnonzero(np.diff(run, append=-1))
        end[last] = self.nbytes[run[last]]
        return Copies(
            storage=self.storage[run],
            tensor_offset=self.tensor_offset[run] + begin,
            arena_offset=self.arena_offset[run] + begin,
            nbytes=end - begin,
        )

    def check_bounds(self, storages: Sequence[int], arena_bytes: int) -> None:
        """Check that every run lies inside its storage and inside the arena.

        Raises:
            JobShapeError: a run does not.
        """
        if self.few:
            for storage, tensor_offset, arena_offset, nbytes in self.runs:
                if not (
                    0 <= storage < len(storages)
                    and nbytes > 0
                    and 0 <= tensor_offset <= storages[storage] - nbytes
                    and 0 <= arena_offset <= arena_bytes - nbytes
                ):
                    run = storage, tensor_offset, arena_offset, nbytes
                    raise _out_of_bounds(run, arena_bytes)
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
            raise _out_of_bounds(self.runs[int(np.argmin(inside))], arena_bytes)

    def __len__(self) -> int:
        if self._runs is not None:
            return len(self._runs)
        return sum([grid.size for grid in self.grids]) if self.grids else len(self.nbytes)


def _numbered(
    parts: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return for each part, in order, its run and its number in the run; run i has parts[i]."""
    run = np.repeat(np.arange(len(parts)), parts)
    return run, np.arange(len(run)) - np.repeat(np.cumsum(parts) - parts, parts)


def _out_of_bounds(run: Run, arena_bytes: int) -> JobShapeError:
    storage, tensor_offset, arena_offset, nbytes = run
    return JobShapeError(
        f"{nbytes} bytes between offset {tensor_offset} of storage {storage} and offset"
        f" {arena_offset} of the arena of {arena_bytes} bytes lie outside"
    )
