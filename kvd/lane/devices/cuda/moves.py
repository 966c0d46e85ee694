"""A job's runs as the driver takes them: columns of addresses."""

import numpy as np
import numpy.typing as npt

from kvd.lane.devices.cuda.driver import Addresses
from kvd.lane.devices.device import Moves
from kvd_proto.copies import Copies


class CudaMoves(Moves):
    """Runs by address: contiguous uint64[runs] each. None crosses two registrations of the pool.

    ends: see Moves.
    host: in the lane's mapping of the pool.
    device: in the worker's memory.
    nbytes: of each run.
    registration: int64[runs], in which of the pool's pieces a run lies.
    needed: how many bytes of the pool must be pinned, in the order of filling.
    """

    __slots__ = ("device", "host", "nbytes", "needed", "registration")

    def __init__(
        self,
        copies: Copies,
        host: Addresses,
        device: Addresses,
        registration: npt.NDArray[np.int64],
        needed: int,
    ) -> None:
        super().__init__(copies.nbytes.cumsum())
        self.host = host
        self.device = device
        self.nbytes: Addresses = copies.nbytes.view(np.uint64)
        self.registration = registration
        self.needed = needed


def prepare(
    copies: Copies,
    *,
    pool_base: int,
    pool_address: int,
    storages: Addresses,
    longest: int,
    registration_bytes: int,
    filled_with: npt.NDArray[np.int64],
) -> CudaMoves:
    """Turn runs into addresses.

    Args:
        copies: a job's runs.
        pool_base: where the arena begins in the pool.
        pool_address: where the lane has mapped the pool.
        storages: uint64[storages], where the worker's storages begin.
        longest: bytes of a run, at most.
        registration_bytes: of one registration of the pool.
        filled_with: int64[registrations]; see FillOrder.
    """
    copies = copies.shorten(longest).split(registration_bytes, pool_base)
    storage, offset, arena, _ = copies.columns
    in_pool = arena + pool_base
    registration = in_pool // registration_bytes
    return CudaMoves(
        copies,
        host=in_pool.view(np.uint64) + np.uint64(pool_address),
        device=storages[storage] + offset.view(np.uint64),
        registration=registration,
        needed=int(filled_with[registration].max(initial=0)),
    )
