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
    columns: see Columns; the pool's side is an offset in the pool until `place` was called.
    needed: how many bytes of the pool must be pinned, in the order of filling.
    """

    __slots__ = ("_registration", "columns", "needed", "placed")

    def __init__(self, ends: Ends, table: Ints, registration: Ints, needed: int) -> None:
        super().__init__(ends)
        self.columns = Columns(table.view(np.uint64))
        self.needed = needed
        self.placed = False
        self._registration = registration  # of the first runs; those behind them repeat it

    def place(self, where: Addresses) -> None:
        """Make offsets in the pool addresses, once what they need of it is pinned.

        Args:
            where: uint64[registrations], what to add to an offset there.
        """
        self.placed = True
        if len(self):
            host = self.columns.table[HOST].reshape(-1, len(self._registration))
            host += where[self._registration]


def prepare(
    copies: Copies,
    *,
    pool_base: int,
    storages: Addresses,
    longest: int,
    registration_bytes: int,
    filled_with: Ints,
    where: Addresses | None = None,
) -> CudaMoves:
    """Turn runs into addresses.

    Args:
        copies: a job's runs.
        pool_base: where the arena begins in the pool.
        storages: uint64[storages], where the worker's storages begin.
        longest: bytes of a run, at most.
        registration_bytes: of one registration of the pool.
        filled_with: int64[registrations]; see FillOrder.
        where: what `place` takes, once all of the pool is pinned.
    """
    place = _Place(
        pool_base, storages.view(np.int64), longest, registration_bytes, filled_with, where
    )
    if len(copies.grids) == 1:
        made = _of_grid(copies.grids[0], place)
    elif copies.few:
        made = _of_few(copies.runs, place)
    else:
        made = None
    return made or _of_columns(copies.shorten(longest).split(registration_bytes, pool_base), place)


class _Place(NamedTuple):
    """The other arguments of `prepare`."""

    base: int
    storages: Ints
    longest: int
    unit: int
    filled_with: Ints
    where: Addresses | None

    def needed(self, registration: Ints) -> int:
        """How many bytes must be pinned for these registrations."""
        return 0 if self.where is not None else int(self.filled_with[registration].max(initial=0))


def _of_grid(grid: Grid, place: _Place) -> CudaMoves | None:
    """The same runs in each region: additions of what differs by region to what differs by run.

    None if one run may have to be cut.
    """
    regions, nbytes, unit = grid.regions, grid.nbytes, place.unit
    begin = grid.arena + (place.base + regions.first)
    registration = begin // unit
    end = begin + nbytes
    end += regions.last - regions.first - 1
    end //= unit
    # Of short arrays, bytes are compared fastest.
    if grid.longest > place.longest or end.tobytes() != registration.tobytes():
        return None
    count, runs = len(regions.start), len(nbytes)
    table = np.empty((3, count, runs), np.int64)
    begin -= regions.first
    if place.where is not None:
        begin += place.where[registration].view(np.int64)
    np.add(regions.start[:, np.newaxis], begin, out=table[HOST])
    starts = place.storages[regions.storage] + regions.offset
    np.add(starts[:, np.newaxis], grid.memory, out=table[DEVICE])
    table[NBYTES] = nbytes
    made = CudaMoves(
        table[NBYTES].cumsum(), table.reshape(3, -1), registration, place.needed(registration)
    )
    made.placed = place.where is not None
    return made


def _of_few(runs: Sequence[Run], place: _Place) -> CudaMoves | None:
    """One by one; None if one run must be cut."""
    base, storages, longest, unit, *_ = place
    host, device, sizes, registration = [], [], [], []
    for storage, offset, arena, nbytes in runs:
        number, inside = divmod(base + arena, unit)
        if nbytes > longest or inside + nbytes > unit:
            return None
        registration.append(number)
        host.append(base + arena)
        device.append(int(storages[storage]) + offset)
        sizes.append(nbytes)
    table, numbers = np.array([host, device, sizes], np.int64), np.array(registration, np.int64)
    return CudaMoves(list(accumulate(sizes)), table, numbers, place.needed(numbers))


def _of_columns(copies: Copies, place: _Place) -> CudaMoves:
    storage, offset, arena, nbytes = copies.columns
    table = np.empty((3, len(nbytes)), np.int64)
    np.add(arena, place.base, out=table[HOST])
    np.add(place.storages[storage], offset, out=table[DEVICE])
    table[NBYTES] = nbytes
    registration = table[HOST] // place.unit
    return CudaMoves(nbytes.cumsum(), table, registration, place.needed(registration))
