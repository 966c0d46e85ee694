"""What a device backend is: the one abstraction between jobs and hardware.

A backend maps the pool once and the workers' memory by handle, and moves bytes
between the two. It decides nothing: which job is next, whether a job is still
valid and what its end means is settled outside. The contract, which the
conformance suite in tests/lane/device_contract.py checks for every backend:

- No call waits for a transfer. `submit` enqueues, `progress` looks.
- Work is given in pieces of about `piece_bytes`, and `has_room` says when
  the next piece may come; so urgent work never queues behind much other work.
- A transfer is reported by `progress` exactly once, and only when nothing of it
  can touch memory any more: there is no way to abandon one.
- Transfers in opposite directions, and those of different memories, may finish
  in any order. The caller never submits two that overlap.
- The caller guarantees that `submit` is allowed by the worker's timeline; a
  backend never makes a queue wait for another process.
- `release_memory` is only legal when nothing is in flight on that memory.
- Mapping checks every size against what was promised, so that no later access
  can leave a mapping.
"""

import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NewType

from kvd.errors import LaneError
from kvd_proto.copies import Copies
from kvd_proto.messages import Handle

# A piece costs the lane's thread about the same whatever its size.
PIECE_BYTES = 8 * 2**20

MemoryId = NewType("MemoryId", int)
"""All storages of one worker, as a backend has mapped them."""


class Direction(StrEnum):
    """Which way bytes move, as the engine sees it."""

    STORE = "store"  # worker's memory -> pool
    LOAD = "load"  # pool -> worker's memory


@dataclass(frozen=True, slots=True)
class Transfer:
    """One piece of a job.

    Copies `copies.nbytes[i]` bytes between offset `copies.tensor_offset[i]` of
    storage `copies.storage[i]` and pool offset `pool_base + copies.arena_offset[i]`,
    `nbytes` in all. Bounds were checked by the caller, whose piece of work it is: `job`.
    """

    job: Any
    memory: MemoryId
    direction: Direction
    pool_base: int
    copies: Copies
    nbytes: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A transfer that has ended. `error` is empty where every byte has arrived.

    nanoseconds: how long the device was busy with it.
    """

    transfer: Transfer
    nanoseconds: int
    error: str = ""

    @property
    def nbytes(self) -> int:
        """That have arrived, as far as is known."""
        return 0 if self.error else self.transfer.nbytes


class Device(ABC):
    """A device backend. Used from one thread.

    Attributes:
        piece_bytes: how much of a job to submit at a time.
        pins: only what is pinned of the pool can be used.
    """

    piece_bytes: Mapping[Direction, int] = dict.fromkeys(Direction, PIECE_BYTES)
    pins = False

    @property
    @abstractmethod
    def usable_bytes(self) -> int:
        """Bytes of the pool usable now, in the order of `kvd.pool.filling`; only grows."""

    def holds(self, begin: int, end: int) -> bool:  # noqa: ARG002  # what is not pinned is there
        """Whether jobs may use pool bytes begin..end - 1 yet, as far as `pool_error` lets them."""
        return True

    @property
    def pool_error(self) -> str:
        """Why the rest of the pool will never be usable; empty while there is hope."""
        return ""

    @abstractmethod
    def import_memory(
        self, handles: Sequence[Handle], sizes: Sequence[int], descriptors: Sequence[int]
    ) -> MemoryId:
        """Map one worker's storages.

        Args:
            handles: one per storage.
            sizes: bytes of each storage that jobs may touch.
            descriptors: what the handles' `fd_index` counts in, all of which are there; they stay
                the caller's.

        Raises:
            ImportFailed: a handle that names no memory, memory smaller than promised, or a
                mapping that the system refuses. Nothing stays mapped.
        """

    @abstractmethod
    def release_memory(self, memory: MemoryId) -> None:
        """Unmap a worker's storages.

        Raises:
            LaneError: unknown, or transfers are in flight on it; it stays mapped.
        """

    @abstractmethod
    def has_room(self, direction: Direction) -> bool:
        """Whether one more piece may be submitted without making others wait for long."""

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Transfers submitted and not yet reported."""

    @abstractmethod
    def submit(self, transfer: Transfer) -> None:
        """Start a transfer, without waiting for it.

        Raises:
            LaneError: unknown memory; nothing was started.
        """

    @abstractmethod
    def progress(self) -> list[Finished]:
        """The transfers that have ended since the last call; returns soon.

        A backend whose processor is the copy engine moves one piece in here.
        """

    @abstractmethod
    def close(self) -> None:
        """Unmap everything, the pool too.

        Raises:
            LaneError: transfers are in flight.
        """


def map_pool(pool_fd: int, pool_bytes: int) -> memoryview:
    """Map the pool's file; the descriptor stays the caller's.

    Raises:
        LaneError: the file is smaller than `pool_bytes`, or cannot be mapped.
    """
    have = os.fstat(pool_fd).st_size
    if have < pool_bytes:
        raise LaneError(f"the pool's file has {have} bytes, {pool_bytes} were promised")
    try:
        return memoryview(mmap.mmap(pool_fd, pool_bytes))
    except (OSError, ValueError) as error:
        raise LaneError(f"the pool's {pool_bytes} bytes cannot be mapped: {error}") from error
