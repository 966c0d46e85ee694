"""The interface of a device backend, which copies bytes between workers' memory and the pool.

A backend maps the pool once and workers' memory by handle. It knows no jobs: the runner decides
which job is next, whether it is still valid, and what its end means. The contract, which
tests/lane/device_contract.py checks for every backend:

- No call waits for a transfer. `submit` enqueues, `progress` polls.
- `prepare` turns a job's runs into the backend's own form once. They are submitted in pieces: of
  about `piece_bytes` while other jobs wait, of `bulk_bytes` otherwise. `has_room` says when the
  next piece may be submitted, so urgent work never queues behind much other work.
- `progress` reports each transfer exactly once, when nothing of it can touch memory any more. A
  transfer cannot be abandoned.
- Transfers in opposite directions, and those of different memories, may end in any order. The
  caller never submits two that overlap.
- The caller submits only what the worker's timeline allows; no queue of a backend ever waits for
  another process.
- `release_memory` is legal only when nothing is in flight on that memory.
- Mapping checks every size against the promised one, so no later access leaves a mapping.
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
    """The direction in which bytes move, as the engine sees it."""

    STORE = "store"  # worker's memory -> pool
    LOAD = "load"  # pool -> worker's memory


class PreparedRuns:
    """A job's runs of bytes in a backend's own form.

    Args:
        ends: int64[runs], cumulative bytes up to and including each run; a list if there are few.
    """

    __slots__ = ("ends",)

    def __init__(self, ends: Ends) -> None:
        self.ends = ends

    def next_piece(self, begin: int, max_bytes: int) -> tuple[int, int]:
        """Return the end and the bytes of the piece that begins with run `begin`.

        The rest is cut into as few pieces as `max_bytes` allows, of about equal size; a piece
        exceeds `max_bytes` by less than one run.
        """
        ends = self.ends
        offset = int(ends[begin - 1]) if begin else 0
        remaining = int(ends[-1]) - offset
        num_pieces = -(-remaining // max_bytes)
        if num_pieces == 1:
            return len(ends), remaining
        end = bisect_left(ends, offset + -(-remaining // num_pieces), begin) + 1
        return end, int(ends[end - 1]) - offset

    def __len__(self) -> int:
        return len(self.ends)


NO_RUNS = PreparedRuns([])


@dataclass(frozen=True, slots=True)
class Transfer:
    """One piece of a job: the prepared runs begin..end - 1, `nbytes` in all.

    `job` is opaque to backends.
    """

    job: Any
    memory: MemoryId
    direction: Direction
    runs: PreparedRuns
    begin: int
    end: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class CompletedTransfer:
    """A transfer that has ended; `error` is empty if every byte has arrived.

    `nanoseconds` counts from its submission or the end of the transfer before it, whichever was
    later, until a poll saw its end.
    """

    transfer: Transfer
    nanoseconds: int
    error: str = ""

    @property
    def arrived_bytes(self) -> int:
        """Bytes known to have arrived."""
        return 0 if self.error else self.transfer.nbytes


class Device(ABC):
    """A device backend. Used from one thread.

    Attributes:
        piece_bytes: size of a transfer while other jobs wait for their turn.
        bulk_bytes: size of a transfer while none does; at least `piece_bytes`.
        needs_pinning: whether only pinned bytes of the pool can be used; see `pin_arena`.
    """

    piece_bytes: Mapping[Direction, int] = dict.fromkeys(Direction, PIECE_BYTES)
    bulk_bytes: Mapping[Direction, int] = piece_bytes
    needs_pinning = False

    @property
    @abstractmethod
    def usable_bytes(self) -> int:
        """Length of the longest usable prefix of the pool, in `FillOrder`.

        A device that pins: the longest prefix in which every byte that `pin_arena` requested is
        pinned. It grows as bytes are pinned; a new request may reduce it.
        """

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the pool that are pinned."""
        return 0

    def pin_arena(self, memory: MemoryId, begin: int, end: int) -> None:
        """Request pool bytes begin..end - 1 for jobs of this memory, until it is released.

        Returns at once; see `is_usable`. A device without pins can always use all of the pool.
        """
        del memory, begin, end

    def is_usable(self, begin: int, end: int) -> bool:  # noqa: ARG002  # needs no pins
        """Whether jobs may use pool bytes begin..end - 1 now."""
        return True

    @property
    def pool_error(self) -> str:
        """Why the rest of the pool will never be usable; empty if nothing has failed."""
        return ""

    def unpin(self) -> bool:
        """Start to unpin the pool; return whether it is unpinned. Call again until it is.

        Legal only after the last job.
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
            descriptors: indexed by the handles' `fd_index`, which are in range; they stay the
                caller's.

        Raises:
            ImportFailed: a handle names no memory, the memory is smaller than promised, or the
                system refuses the mapping. Nothing stays mapped.
        """

    @abstractmethod
    def release_memory(self, memory: MemoryId) -> None:
        """Unmap a worker's storages; if the driver refuses, log it.

        Raises:
            LaneError: the memory is unknown, or transfers are in flight on it; it stays mapped.
        """

    @abstractmethod
    def has_room(self, direction: Direction) -> bool:
        """Whether one more piece may be submitted without delaying urgent work."""

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Number of transfers submitted and not yet reported."""

    @abstractmethod
    def prepare(
        self, memory: MemoryId, direction: Direction, pool_base: int, copies: Copies
    ) -> PreparedRuns:
        """Return a job's runs in the form that `submit` takes, none longer than `piece_bytes`.

        Args:
            memory: the worker's.
            direction: of the job.
            pool_base: offset of the worker's arena in the pool.
            copies: the runs; the caller has checked that they lie inside memory and arena, and
                that their pool bytes are usable.

        Raises:
            LaneError: the memory is unknown.
        """

    @abstractmethod
    def submit(self, transfer: Transfer) -> None:
        """Start a transfer, without waiting for it.

        Raises:
            LaneError: the memory is unknown; nothing was started.
        """

    @abstractmethod
    def progress(self) -> list[CompletedTransfer]:
        """Return the transfers that have ended since the last call, without waiting.

        The host backend moves one piece in this call.
        """

    @abstractmethod
    def close(self) -> None:
        """Unmap everything, including the pool.

        Raises:
            LaneError: transfers are in flight.
        """
