"""Byte ranges to move, as runs."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvd_proto.arrays import FEW
from kvd_proto.errors import JobShapeError

Run: TypeAlias = tuple[int, int, int, int]
"""Storage, byte in the storage, byte in the arena, and length."""
Columns: TypeAlias = tuple[
    npt.NDArray[np.int32],
    npt.NDArray[np.int64],
    npt.NDArray[np.int64],
    npt.NDArray[np.int64],
]


class Copies:
    """Byte ranges to move; either side may be the source. Not to be changed.

    Runs that are contiguous on both sides are one. There are two forms of the same: columns for
    arithmetic on many, and a list for going through few; each is made from the other when it is
    first asked for.

    Args:
        storage: int32, index of the rank's storage.
        tensor_offset: int64, bytes from its start.
        arena_offset: int64, bytes from the start of the rank's arena.
        nbytes: int64.

    Attributes:
        few: going through the runs is faster than arithmetic on columns.
    """

    __slots__ = ("_columns", "_runs", "few")

    def __init__(
        self,
        storage: npt.NDArray[np.int32],
        tensor_offset: npt.NDArray[np.int64],
        arena_offset: npt.NDArray[np.int64],
        nbytes: npt.NDArray[np.int64],
    ) -> None:
        self._columns: Columns | None = (storage, tensor_offset, arena_offset, nbytes)
        self._runs: list[Run] | None = None
        self.few = len(nbytes) <= FEW

    @classmethod
    def of(cls, runs: list[Run]) -> "Copies":
        """The same by runs, of which there are few."""
        made = cls.__new__(cls)
        made._columns, made._runs = None, runs  # noqa: SLF001  # of this class
        made.few = len(runs) <= FEW
        return made

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
            table = np.array(self._runs, np.int64).reshape(-1, 4)
            storage, *others = np.ascontiguousarray(table.T)
            self._columns = storage.astype(np.int32), *others
        return self._columns

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

    def select(self, which: npt.NDArray[np.bool_] | slice) -> "Copies":
        """Return some of the runs."""
        return Copies(
            storage=self.storage[which],
            tensor_offset=self.tensor_offset[which],
            arena_offset=self.arena_offset[which],
            nbytes=self.nbytes[which],
        )

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
        if self.few and all(run[3] <= longest for run in self.runs):
            return self
        parts = -(-self.nbytes // longest)
        if bool((parts == 1).all()):
            return self
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
            raise _outside(*self.select(slice(worst, worst + 1)).runs[0], arena_bytes)

    def __len__(self) -> int:
        return len(self.columns[3] if self._runs is None else self._runs)

    def __repr__(self) -> str:
        return f"<Copies {len(self)} runs, {self.total_bytes} bytes>"


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
