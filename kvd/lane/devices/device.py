"""What a device backend is: the one abstraction between jobs and hardware.

A backend maps the pool once and the workers' memory by handle, and moves bytes
between the two. It decides nothing: which job is next, whether a job is still
valid and what its end means is settled outside. The contract, which the
conformance suite in tests/lane/device_contract.py checks for every backend:

- No call waits for a transfer. `submit` enqueues, `progress` looks.
- A job's runs are prepared once, in the backend's own form, and given in pieces: of about
  `piece_bytes` while other work waits for its turn, of `bulk_bytes` while none does. `has_room`
  says when the next piece may come; so urgent work never queues behind much other work.
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

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NewType, TypeAlias

import numpy as np
import numpy.typing as npt

from kvd_proto.copies import Copies
from kvd_proto.messages import Handle

PIECE_BYTES = 8 * 2**20

Ends: TypeAlias = list[int] | npt.NDArray[np.int64]

MemoryId = NewType("MemoryId", int)
"""All storages of one worker, as a backend has mapped them."""


class Direction(StrEnum):
    """Which way bytes move, as the engine sees it."""

    STORE = "store"  # worker's memory -> pool
    LOAD = "load"  # pool -> worker's memory


class Moves:
    """A job's runs, as a backend has prepared them.

    Args:
        ends: int64[runs], bytes up to and with each run; a list where there are few.
    """

    __slots__ = ("ends",)

    def __init__(self, ends: Ends) -> None:
        self.ends = ends

    def piece(self, begin: int, most: int) -> tuple[int, int]:
        """The end and the bytes of a piece that begins with run `begin`, which there is.

        What is left is cut into as few pieces as `most` bytes each allow, all about alike: none
        is longer than `most` by a whole run.
        """
        ends = self.ends
        done = int(ends[begin - 1]) if begin else 0
        left = int(ends[-1]) - done
        pieces = -(-left // most)
        if pieces == 1:
            return len(ends), left
        end = bisect_left(ends, done + -(-left // pieces), begin) + 1
        return end, int(ends[end - 1]) - done

    def __len__(self) -> int:
        return len(self.ends)

    def __repr__(self) -> str:
        nbytes = self.ends[-1] if len(self) else 0
        return f"<{type(self).__name__} {len(self)} runs, {nbytes} bytes>"


NO_MOVES = Moves([])


@dataclass(frozen=True, slots=True)
class Transfer:
    """One piece of a job: runs begin..end - 1 of what was prepared, `nbytes` in all.

    job: whose piece it is; the caller's.
    """

    job: Any
    memory: MemoryId
    direction: Direction
    moves: Moves
    begin: int
    end: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A transfer that has ended. `error` is empty where every byte has arrived.

    nanoseconds: from its submission, or the end of the one before it, until its end was seen.
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
        piece_bytes: how much of a job to submit at a time while other jobs wait for their turn.
        bulk_bytes: the same while none does; not less.
        pins: only what is pinned of the pool can be used, and arenas are pinned once they are used.
    """

    piece_bytes: Mapping[Direction, int] = dict.fromkeys(Direction, PIECE_BYTES)
    bulk_bytes: Mapping[Direction, int] = piece_bytes
    pins = False

    @property
    @abstractmethod
    def usable_bytes(self) -> int:
        """The longest prefix of the pool, in the order of `kvd.pool.geometry`, that can be used.

        Of a device that pins: in which everything is pinned that `use_arena` asked for. It grows
        with what is pinned, and `use_arena` may reduce it.
        """

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the pool that are pinned."""
        return 0

    def use_arena(self, memory: MemoryId, begin: int, end: int) -> None:
        """Jobs of this memory may use pool bytes begin..end - 1, until it is released."""
        del memory, begin, end  # memory that needs no pins can always be used

    def holds(self, begin: int, end: int) -> bool:  # noqa: ARG002  # needs no pins
        """Whether jobs may use pool bytes begin..end - 1 yet, as far as `pool_error` lets them."""
        return True

    @property
    def pool_error(self) -> str:
        """Why the rest of the pool will never be usable; empty while there is hope."""
        return ""

    def unpin(self) -> bool:
        """Unpin the pool piece by piece, called again until True: nothing of it is pinned.

        No job is left, and none follows.
        """
        return True

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
        """Unmap a worker's storages; what the driver refuses to unmap is logged.

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
    def prepare(
        self, memory: MemoryId, direction: Direction, pool_base: int, copies: Copies
    ) -> Moves:
        """Put a job's runs into the form that `submit` takes; no run is above `piece_bytes`.

        `holds` is true of everything in the pool that they touch.

        Args:
            memory: the worker's.
            direction: which way the bytes move.
            pool_base: where its arena begins in the pool.
            copies: inside the memory and the arena; the caller has checked that.

        Raises:
            LaneError: unknown memory.
        """

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
