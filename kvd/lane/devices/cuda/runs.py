"""From a transfer's copies to addresses, with every bound checked once more."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvd.errors import LaneError
from kvd.lane.devices.cuda.driver import Addresses
from kvd.lane.devices.cuda.importing import ImportedMemory
from kvd.lane.devices.cuda.pinning import PinnedPool
from kvd.lane.devices.device import Direction, Transfer
from kvd.lane.jobs import split_runs
from kvd_proto.expand import Copies


@dataclass(frozen=True, slots=True)
class Runs:
    """Byte ranges by address: uint64[n] each.

    kernel_shift: what is added to the host side's address for a kernel to find it.
    """

    host: Addresses
    device: Addresses
    nbytes: Addresses
    kernel_shift: Addresses

    def ends(self, direction: Direction) -> tuple[Addresses, Addresses]:
        """Targets and sources."""
        if direction is Direction.STORE:
            return self.host, self.device
        return self.device, self.host

    def select(self, which: npt.NDArray[np.bool_]) -> "Runs":
        """Some of them."""
        return Runs(
            self.host[which], self.device[which], self.nbytes[which], self.kernel_shift[which]
        )

    def __len__(self) -> int:
        return len(self.nbytes)


def resolve(transfer: Transfer, memory: ImportedMemory, pool: PinnedPool) -> Runs:
    """The addresses of a transfer's runs, none across two registrations of the pool.

    A wrong address would not end in an error but in somebody else's bytes, so each run is held
    against the pool and its storage although the caller did so.

    Raises:
        LaneError: a run outside the pool or its storage.
    """
    given = transfer.copies
    copies = split_runs(
        Copies(
            given.storage,
            given.tensor_offset,
            given.arena_offset + transfer.pool_base,
            given.nbytes,
        ),
        pool.piece_bytes,
    )
    _check_bounds(copies, memory, pool)
    return Runs(
        host=copies.arena_offset.astype(np.uint64) + np.uint64(pool.address),
        device=memory.addresses[copies.storage] + copies.tensor_offset.astype(np.uint64),
        nbytes=copies.nbytes.astype(np.uint64),
        kernel_shift=pool.kernel_shift[copies.arena_offset // pool.piece_bytes],
    )


def _check_bounds(copies: Copies, memory: ImportedMemory, pool: PinnedPool) -> None:
    """Raise LaneError where a run leaves the pool or its storage."""
    inside = (
        (copies.storage >= 0)
        & (copies.storage < len(memory.sizes))
        & (copies.nbytes > 0)
        & (copies.tensor_offset >= 0)
        & (copies.arena_offset >= 0)
        & (copies.arena_offset + copies.nbytes <= pool.nbytes)
    )
    if inside.all():
        inside = copies.tensor_offset + copies.nbytes <= memory.sizes[copies.storage]
    if not inside.all():
        worst = int(np.argmin(inside))
        raise LaneError(
            f"copy failed: {copies.nbytes[worst]} bytes between offset"
            f" {copies.tensor_offset[worst]} of storage {copies.storage[worst]} and offset"
            f" {copies.arena_offset[worst]} of the pool lie outside"
        )
