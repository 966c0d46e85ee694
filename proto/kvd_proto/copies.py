"""Byte ranges to move, as runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvd_proto.errors import JobShapeError
from kvd_proto.jobs import FEW

Run: TypeAlias = tuple[int, int, int, int]
"""Storage, byte in the storage, byte in the arena, and length."""
Columns: TypeAlias = tuple[
    npt.NDArray[np.int32],
    npt.NDArray[np.int64],
    npt.NDArray[np.int64],
    npt.NDArray[np.int64],
]


@dataclass(frozen=True, slots=True)
class Regions:
    """Where the pages of several tensors lie, in memory and in a slot, one item each.

    storage: int32[regions], index of the rank's storage.
    offset: int64[regions], byte of block 0 in the storage.
    start: int64[regions], byte of a chunk's first page in its slot.
    first, last: the smallest and the largest start.
    """

    storage: npt.NDArray[np.int32]
    offset: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    first: int
    last: int


class Grid(NamedTuple):
    """The same runs in each of several regions: [regions, runs] in all.

    memory: int64[runs], bytes from the region's offset.
    arena: int64[runs], bytes from the arena's start without the region's.
    nbytes: int64[runs].
    longest: the largest of these.
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
        """How many runs it has."""
        return len(self.regions.storage) * len(self.nbytes)


class Copies:
    """Byte ranges to move; either side may be the source. Not to be changed.

    Runs that are contiguous on both sides are one. There are three forms of the same: columns for
    arithmetic on many, grids where many are alike, and a list for going through few. Columns and
    list are made when they are first asked for.

    Args:
        storage: int32, index of the rank's storage.
        tensor_offset: int64, bytes from its start.
        arena_offset: int64, bytes from the start of the rank's arena.
        nbytes: int64.

    Attributes:
        few: going through the runs is faster than arithmetic on columns.
        grids: all of it, where it is made of grids; else empty.
    """

    __slots__ = ("_columns", "_runs", "few", "grids")

    def __init__(
        self,
        storage: npt.NDArray[np.int32],
        tensor_offset: npt.NDArray[np.int64],
        arena_offset: npt.NDArray[np.int64],
        nbytes: npt.NDArray[np.int64],
    ) -> None:
        self._keep((storage, tensor_offset, arena_offset, nbytes), None, ())

    @classmethod
    def of(cls, runs: list[Run]) -> "Copies":
        """The same by runs, of which there are few."""
        made = cls.__new__(cls)
        made._columns, made._runs, made.grids = None, runs, ()  # noqa: SLF001  # of this class
        made.few = len(runs) <= FEW
        return made

    @classmethod
    def of_grids(cls, grids: Sequence[Grid]) -> "Copies":
        """The same by grids; none is empty."""
        made = cls.__new__(cls)
        made._keep(None, None if grids else [], grids)  # noqa: SLF001  # of this class
        return made

    def _keep(self, columns: Columns | None, runs: list[Run] | None, grids: Sequence[Grid]) -> None:
        self._columns, self._runs, self.grids = columns, runs, grids
        self.few = len(self) <= FEW

    @property
    def runs(self) -> list[Run]:
        """All of it, one run after another."""
        if self._runs is None:
            self._runs = list(zip(*(column.tolist() for column in self.columns), strict=True))
        return self._runs

    @property
    def columns(self) -> Columns:
        """Storage, tensor offset, arena offset and bytes of every run: [runs] each."""
        if self._columns is None:
            self._columns = self._made_columns()
        return self._columns

    def _made_columns(self) -> Columns:
        if not self.grids:
            table = np.array(self._runs, np.int64).reshape(-1, 4)
            storage, *others = np.ascontiguousarray(table.T)
            return storage.astype(np.int32), *others
        parts = [grid.columns for grid in self.grids]
        if len(parts) == 1:
            return parts[0]
        storages, offsets, at, nbytes = zip(*parts, strict=True)
        joined = np.concatenate(offsets), np.concatenate(at), np.concatenate(nbytes)
        return np.concatenate(storages), *joined

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
        """Bytes: [runs]."""
        return self.columns[3]

    @property
    def total_bytes(self) -> int:
        """Bytes moved in all."""
        if self.few:
            return sum([run[3] for run in self.runs])
        return int(self.nbytes.sum())

    @property
    def longest(self) -> int:
        """Bytes of the longest run; 0 where there is none."""
        if self.grids:
            return max([grid.longest for grid in self.grids])
        if self.few:
            return max([run[3] for run in self.runs], default=0)
        return int(self.nbytes.max())

    def split(self, unit: int, base: int = 0) -> "Copies":
        """Cut runs so that none crosses a multiple of `unit` bytes; the arena begins at `base`."""
        begins = self.arena_offset + base
        first = begins // unit
        parts = (begins + self.nbytes - 1) // unit - first + 1
        if bool((parts == 1).all()):
            return self
        run, part = _numbered(parts)
        return self._cut(run, np.maximum((first[run] + part) * unit - begins[run], 0))

    def shorten(self, longest: int) -> "Copies":
        """Cut runs so that none has more than `longest` bytes."""
        if self.longest <= longest:
            return self
        parts = -(-self.nbytes // longest)
        run, part = _numbered(parts)
        return self._cut(run, part * longest)

    def _cut(self, run: npt.NDArray[np.int64], begin: npt.NDArray[np.int64]) -> "Copies":
        """Parts of runs, each from this byte of its run on to where the next part begins."""
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
            JobShapeError: one does not.
        """
        if self.few:
            for storage, offset, at, nbytes in self.runs:
                if not (
                    0 <= storage < len(storages)
                    and nbytes > 0
                    and 0 <= offset <= storages[storage] - nbytes
                    and 0 <= at <= arena_bytes - nbytes
                ):
                    raise _outside(storage, offset, at, nbytes, arena_bytes)
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
            raise _outside(*self.runs[worst], arena_bytes)

    def __len__(self) -> int:
        if self._runs is not None:
            return len(self._runs)
        return sum([grid.size for grid in self.grids]) if self.grids else len(self.nbytes)


def _numbered(
    parts: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Of all parts of runs of so many parts, in order: the run, and which part of it."""
    run = np.repeat(np.arange(len(parts)), parts)
    return run, np.arange(len(run)) - np.repeat(np.cumsum(parts) - parts, parts)


def _outside(storage: int, offset: int, at: int, nbytes: int, arena: int) -> JobShapeError:
    return JobShapeError(
        f"{nbytes} bytes between offset {offset} of storage {storage} and offset {at} of the arena"
        f" of {arena} bytes lie outside"
    )
