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

Backends put pages into this process's page table before jobs need them. A page that is first
touched by a copy costs several microseconds, which made the first pass over a new pool ten times
slower than the second, and the first load into a worker's block four times slower than the next
(measured on a virtual machine; reading is a cheaper first touch than writing, for it maps the
neighbours too). The broker allocates the pool's file piece by piece in the order of `FillOrder`;
only what is allocated is touched, so a full filesystem is the broker's error and never a SIGBUS
here. Of a worker's memory only pages that are there are touched: one that is not would be
allocated, and charged to this process instead of the worker's.
"""

import ctypes
import os
import threading
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NewType, TypeAlias

import numpy as np
import numpy.typing as npt

from kvd.pool.geometry import FillOrder
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


class PreparedRuns:
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


NO_RUNS = PreparedRuns([])


@dataclass(frozen=True, slots=True)
class Transfer:
    """One piece of a job: runs begin..end - 1 of what was prepared, `nbytes` in all.

    job: whose piece it is; the caller's.
    """

    job: Any
    memory: MemoryId
    direction: Direction
    moves: PreparedRuns
    begin: int
    end: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class CompletedTransfer:
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
    ) -> PreparedRuns:
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
    def progress(self) -> list[CompletedTransfer]:
        """The transfers that have ended since the last call; returns soon.

        A backend whose processor is the copy engine moves one piece in here.
        """

    @abstractmethod
    def close(self) -> None:
        """Unmap everything, the pool too.

        Raises:
            LaneError: transfers are in flight.
        """


_PAGE = 4096
_STEP = 16 * 2**20
_SHORT_STEP = 2 * 2**20  # `stop` waits for one
_WAIT_SECONDS = 0.01


def touch(mapping: memoryview, begin: int, end: int, stop: threading.Event) -> bool:
    """Read one byte of every page from begin to before end; False where `stop` was set first."""
    pages = np.frombuffer(mapping, np.uint8)
    for at in range(begin, end, _STEP):
        if stop.is_set():
            return False
        np.bitwise_or.reduce(pages[at : min(at + _STEP, end) : _PAGE])  # releases the GIL
    return True


class PoolPretouch:
    """A thread that reads one byte of every page of a mapping, once.

    Args:
        mapping: the whole file's mapping; in use until `stop` has returned.
        fd: the file; duplicated, stays the caller's.
        fill: the order in which it is allocated, of the mapping's size.
    """

    def __init__(self, mapping: memoryview, fd: int, fill: FillOrder) -> None:
        self._mapping = mapping
        self._fill = fill
        self._fd = os.dup(fd)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvd-pretouch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        done = 0
        for piece in self._fill.order:
            begin, end = self._fill.span(piece)
            before = done - begin
            while begin < end:
                if self._stop.is_set():
                    return
                allocated = os.fstat(self._fd).st_blocks * 512 - before
                until = min(end, allocated, begin + _STEP)
                if until <= begin:
                    self._stop.wait(_WAIT_SECONDS)
                    continue
                touch(self._mapping, begin, until, self._stop)
                done += until - begin
                begin = until

    def stop(self) -> None:
        """End the thread and release the mapping. May be called again."""
        self._stop.set()
        self._thread.join()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class MemoryPretouch:
    """A thread that reads one byte of every page that mappings have already, once.

    Args:
        mappings: whole files; in use until `stop` has returned, or the thread has ended.

    Attributes:
        thread: for who waits for its end.
    """

    def __init__(self, mappings: Sequence[memoryview]) -> None:
        self._stop = threading.Event()
        self.thread = threading.Thread(
            target=self._run, args=(mappings,), name="kvd-pretouch-memory", daemon=True
        )
        self.thread.start()

    def _run(self, mappings: Sequence[memoryview]) -> None:
        mincore = ctypes.CDLL(None).mincore
        mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        present = np.empty(_SHORT_STEP // _PAGE, np.uint8)
        for mapping in mappings:
            pages = np.frombuffer(mapping, np.uint8)
            for begin in range(0, len(pages), _SHORT_STEP):
                part = pages[begin : begin + _SHORT_STEP]
                if self._stop.is_set() or mincore(part.ctypes.data, len(part), present.ctypes.data):
                    return
                firsts = part[::_PAGE]
                firsts[(present[: len(firsts)] & 1).nonzero()[0]].any()

    def stop(self) -> None:
        """End the thread and release the mappings. May be called again."""
        self._stop.set()
        self.thread.join()
