"""A job's runs as the driver takes them: columns of addresses, made once a job.

Most jobs have the same runs in every layer. Then a column is one addition for all of it, and what
must hold of every run is asked for all layers together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvd.lane.devices.cuda.driver import Addresses
from kvd.lane.devices.device import Ends, Moves
from kvd_proto.copies import Copies, Grid, Run

Ints = npt.NDArray[np.int64]

HOST, DEVICE, NBYTES = range(3)
_WORD = 8


class Columns:
    """Runs by address: uint64[3, runs], each row contiguous.

    Row HOST: the pool's side, where the device finds it, which need not be where this process
    does. Row DEVICE: the worker's side. Row NBYTES: the length.
    """

    __slots__ = ("_begins", "table")

    def __init__(self, table: Addresses) -> None:
        self.table = table
        # Half as long as by `ctypes.data`, which makes an object.
        (first, _), row = table.__array_interface__["data"], table.strides[0]
        self._begins = (first, first + row, first + 2 * row)

    def pointers(self, run: int) -> tuple[int, int, int]:
        """Where the numbers of a run and of those behind it lie, by row."""
        host, device, nbytes = self._begins
        skip = _WORD * run
        return host + skip, device + skip, nbytes + skip

    @property
    def all(self) -> "Runs":
        """All of them."""
        return Runs(self, 0, self.table.shape[1])


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs begin..end - 1 of these columns."""

    columns: Columns
    begin: int
    end: int

    @property
    def table(self) -> Addresses:
        """Their part of the table: uint64[3, runs]."""
        return self.columns.table[:, self.begin : self.end]

    def pointers(self) -> tuple[int, int, int]:
        """Where their numbers begin, by row."""
        return self.columns.pointers(self.begin)

    def __len__(self) -> int:
        return self.end - self.begin


class CudaMoves(Moves):
    """Runs by address, none across two registrations of the pool.

    ends: see Moves.
    columns: see Columns.
    """

    __slots__ = ("columns",)

    def __init__(self, ends: Ends, table: Ints) -> None:
        super().__init__(ends)
        self.columns = Columns(table.view(np.uint64))


class PoolSide(NamedTuple):
    """Where a job's arena lies, as the device finds it.

    base: where the arena begins in the pool.
    unit: bytes of one registration of the pool.
    where: uint64[registrations], what to add to an offset in the pool for an address.
    """

    base: int
    unit: int
    where: Addresses


def prepare(copies: Copies, pool: PoolSide, storages: Addresses, longest: int) -> CudaMoves:
    """Turn runs into addresses; what they touch of the pool is pinned.

    Args:
        copies: a job's runs.
        pool: see PoolSide.
        storages: uint64[storages], where the worker's storages begin.
        longest: bytes of a run, at most.
    """
    starts = storages.view(np.int64)
    moves = None
    if len(copies.grids) == 1:
        moves = _of_grid(copies.grids[0], pool, starts, longest)
    elif copies.few:
        moves = _of_few(copies.runs, pool, starts, longest)
    return moves or _of_columns(copies.shorten(longest).split(pool.unit, pool.base), pool, starts)


def _of_grid(grid: Grid, pool: PoolSide, storages: Ints, longest: int) -> CudaMoves | None:
    """The same runs in each region: additions of what differs by region to what differs by run.

    None if one run may have to be cut.
    """
    regions, nbytes = grid.regions, grid.nbytes
    begin = grid.arena + (pool.base + regions.first)
    registration = begin // pool.unit
    end = begin + nbytes
    end += regions.last - regions.first - 1
    end //= pool.unit
    # Of short arrays, bytes are compared fastest.
    if grid.longest > longest or end.tobytes() != registration.tobytes():
        return None
    count, runs = len(regions.start), len(nbytes)
    table = np.empty((3, count, runs), np.int64)
    begin += pool.where[registration].view(np.int64)
    begin -= regions.first
    np.add(regions.start[:, np.newaxis], begin, out=table[HOST])
    starts = storages[regions.storage] + regions.offset
    np.add(starts[:, np.newaxis], grid.memory, out=table[DEVICE])
    table[NBYTES] = nbytes
    return CudaMoves(table[NBYTES].cumsum(), table.reshape(3, -1))


def _of_few(runs: Sequence[Run], pool: PoolSide, storages: Ints, longest: int) -> CudaMoves | None:
    """One by one; None if one run must be cut."""
    host, device, sizes = [], [], []
    for storage, offset, arena, nbytes in runs:
        number, inside = divmod(pool.base + arena, pool.unit)
        if nbytes > longest or inside + nbytes > pool.unit:
            return None
        host.append((pool.base + arena + int(pool.where[number])) % 2**64)
        device.append(int(storages[storage]) + offset)
        sizes.append(nbytes)
    table = np.array([host, device, sizes], np.uint64).view(np.int64)
    return CudaMoves(list(accumulate(sizes)), table)


def _of_columns(copies: Copies, pool: PoolSide, storages: Ints) -> CudaMoves:
    storage, offset, arena, nbytes = copies.columns
    table = np.empty((3, len(nbytes)), np.int64)
    np.add(arena, pool.base, out=table[HOST])
    table[HOST] += pool.where[table[HOST] // pool.unit].view(np.int64)
    np.add(storages[storage], offset, out=table[DEVICE])
    table[NBYTES] = nbytes
    return CudaMoves(nbytes.cumsum(), table)
