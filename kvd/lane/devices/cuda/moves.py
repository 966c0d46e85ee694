"""A job's runs as the driver takes them: columns of addresses, made once a job."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvd.lane.devices.cuda.driver import Addresses
from kvd.lane.devices.device import Ends, Moves
from kvd_proto.copies import Copies, Run

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
        first, row = table.ctypes.data, table.strides[0]
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

    def __init__(
        self, ends: Ends, table: Addresses, registration: npt.NDArray[np.int64], needed: int
    ) -> None:
        super().__init__(ends)
        self.columns = Columns(table)
        self.needed = needed
        self.placed = False
        self._registration = registration

    def place(self, where: Addresses) -> None:
        """Make offsets in the pool addresses, once what they need of it is pinned.

        Args:
            where: uint64[registrations], what to add to an offset there.
        """
        self.columns.table[HOST] += where[self._registration]
        self.placed = True


def prepare(
    copies: Copies,
    *,
    pool_base: int,
    storages: Addresses,
    longest: int,
    registration_bytes: int,
    filled_with: npt.NDArray[np.int64],
) -> CudaMoves:
    """Turn runs into addresses.

    Args:
        copies: a job's runs.
        pool_base: where the arena begins in the pool.
        storages: uint64[storages], where the worker's storages begin.
        longest: bytes of a run, at most.
        registration_bytes: of one registration of the pool.
        filled_with: int64[registrations]; see FillOrder.
    """
    if not (copies.few and _is_whole(copies.runs, pool_base, longest, registration_bytes)):
        copies = copies.shorten(longest).split(registration_bytes, pool_base)
    storage, offset, arena, nbytes = copies.columns
    table = np.empty((3, len(nbytes)), np.uint64)
    in_pool = table[HOST].view(np.int64)
    np.add(arena, pool_base, out=in_pool)
    np.add(storages[storage], offset.view(np.uint64), out=table[DEVICE])
    table[NBYTES] = nbytes
    registration = in_pool // registration_bytes
    needed = int(filled_with[registration].max(initial=0))
    return CudaMoves(nbytes.cumsum(), table, registration, needed)


def _is_whole(runs: Sequence[Run], base: int, longest: int, unit: int) -> bool:
    """Whether no run must be cut."""
    return all(
        nbytes <= longest and (base + arena) % unit + nbytes <= unit for _, _, arena, nbytes in runs
    )
