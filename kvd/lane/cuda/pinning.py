"""The pool's mapping, and its pinned pieces: those that ranks of this device use.

A pinned piece costs kernel memory and, for the device's page tables, GPU memory in every process
that pins it. So a lane pins only the arenas of ranks that are bound to it. One registration of a
large range may fail where several smaller ones work, so each piece is registered by itself. Slots
have another size in every namespace: a boundary may cut a slot, and copies are split there
(`copies.py`).

One thread makes the pinned pieces equal to the requested ones:

1. It pins in `FillOrder` (`kvd.pool.geometry`), in which the broker allocates: once a piece is
   allocated, its pages are touched, then registered.
2. Then it unpins pieces that are not requested. Pieces of a rank that has left stay pinned until
   the next request, so a restarted engine finds its arena pinned.

By NVIDIA's sources, pinning and unpinning take driver locks that every process of the machine needs
to start work on a GPU. So pieces are small, one lane of a daemon at a time registers or unregisters
a piece (the pin lock), and after each piece the thread pauses for as long as the piece took, 0.25 s
at most.

A failure to pin is final for the whole pool: pageable memory is never used instead. Pinned pieces
stay pinned until the copies that use them have ended and their owners have released them.
"""

import fcntl
import logging
import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from kvd.errors import LaneError
from kvd.lane.cuda import driver
from kvd.lane.cuda.driver import Addresses, Context
from kvd.lane.pretouch import touch_pages
from kvd.machine import cuda
from kvd.machine.process import map_pool
from kvd.pool.geometry import FillOrder, piece_bytes_for

_log = logging.getLogger(__name__)

_LOG_LINES = 10  # while the pool is pinned
_POLL_SECONDS = 0.005
LONGEST_PAUSE_SECONDS = 0.25

Pieces = npt.NDArray[np.bool_]


def pause_after(seconds: float) -> float:
    """Return the pause after a piece, in which other processes get the driver; in seconds."""
    return min(seconds, LONGEST_PAUSE_SECONDS)


class PinnedPool:
    """The pool's mapping and its pinned pieces. Owners request ranges; a thread pins them.

    Attributes:
        nbytes: of the pool.
        piece_bytes: of one registration; the last one may be shorter.
        address_bases: by piece, the device's address of a byte minus its offset in the pool.
        usable_bytes: length of the longest prefix of the pool, in `FillOrder`, in which every
            requested piece is pinned; `nbytes` if no piece is missing.
        pinned_bytes: bytes that are pinned.
        error: why no more pieces will be pinned; empty if nothing has failed.
        num_failures: failed calls of the driver: each may mean that the context is lost.

    Args:
        pool_fd, pool_bytes: the pool's file, which stays the caller's, and its size.
        context: of the device.
        piece_bytes: of one registration: whole, perhaps huge, pages of the file. None: the pieces
            in which the broker fills the pool.
        pin_lock: a file whose record lock this process holds while it pins or unpins a piece;
            stays the caller's. None: no other process pins.

    Raises:
        PoolError: the file is too small, or cannot be mapped.
    """

    def __init__(
        self,
        pool_fd: int,
        pool_bytes: int,
        context: Context,
        piece_bytes: int | None = None,
        pin_lock: int | None = None,
    ) -> None:
        if piece_bytes is None:
            page_bytes = max(mmap.PAGESIZE, os.fstat(pool_fd).st_blksize)
            piece_bytes = piece_bytes_for(pool_bytes, page_bytes)
        self._mapping = map_pool(pool_fd, pool_bytes)
        self.nbytes = pool_bytes
        self.piece_bytes = piece_bytes
        self._fill = FillOrder(pool_bytes, piece_bytes)
        self._order = np.array(self._fill.order, np.intp)
        self._address = np.frombuffer(self._mapping, np.uint8).ctypes.data
        self._context = context
        self._pin_lock = pin_lock
        self._fd = os.dup(pool_fd)
        self._trailer_bytes = os.fstat(pool_fd).st_size - pool_bytes  # allocated first
        self.address_bases: Addresses = np.zeros(len(self._order), np.uint64)
        self.usable_bytes, self.pinned_bytes, self.error, self.num_failures = pool_bytes, 0, "", 0
        self._requests: dict[int, Pieces] = {}  # by owner
        self._requested: Pieces = np.zeros(len(self._order), np.bool_)
        self._is_pinned: Pieces = np.zeros(len(self._order), np.bool_)
        self._cannot_unpin: Pieces = np.zeros(len(self._order), np.bool_)  # the driver refused
        self._call_start: float | None = None  # when the running call of the driver began
        self._changed = threading.Condition()  # guards what both threads write
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvd-pin", daemon=True)
        self._thread.start()

    # -------------------------------------------------- called by the lane's thread

    def request(self, owner: int, begin: int, end: int) -> None:
        """Request pool bytes begin..end - 1 for an owner, besides its earlier requests.

        Pieces that no owner requests any more will be unpinned.
        """
        first, last = begin // self.piece_bytes, (end - 1) // self.piece_bytes
        with self._changed:
            pieces = self._requests.setdefault(owner, np.zeros_like(self._requested))
            pieces[first : last + 1] = True
            self._set_requested(list(self._requests.values()))

    def release(self, owner: int) -> None:
        """Forget an owner's requests; no copy of it may be in flight."""
        with self._changed:
            self._requests.pop(owner, None)
            if self.error:
                self._set_requested(list(self._requests.values()))

    def unpin(self) -> bool:
        """Start to unpin all pieces; no copy may be in flight.

        Returns:
            Whether no piece is pinned, except those that the driver refuses to unpin, and no call
            of the driver runs.
        """
        with self._changed:
            if self._requested.any():
                self._requests.clear()
                self._set_requested([])
        return self._call_start is None and not (self._is_pinned & ~self._cannot_unpin).any()

    def _set_requested(self, requests: list[Pieces]) -> None:
        self._requested = (
            np.logical_or.reduce(requests) if requests else np.zeros_like(self._requested)
        )
        self._update_usable()
        self._changed.notify()

    def is_usable(self, begin: int, end: int) -> bool:
        """Return whether copies may use pool bytes begin..end - 1."""
        first, last = begin // self.piece_bytes, (end - 1) // self.piece_bytes
        return not self.error and bool(self._is_pinned[first : last + 1].all())

    @property
    def stuck_seconds(self) -> float:
        """How long the running call of the driver has taken; 0 if none runs."""
        start = self._call_start
        return 0.0 if start is None else time.monotonic() - start

    def close(self) -> None:
        """Stop the thread, unpin everything without pauses, and unmap; no copy may be in flight.

        Raises:
            CudaDriverError: a piece cannot be unpinned.
        """
        self._closing.set()
        with self._changed:
            self._changed.notify()
        self._thread.join()
        os.close(self._fd)
        try:
            self._unregister_all()
        finally:
            self._mapping.release()

    # ----------------------------------------------------------- the pinning thread

    def _run(self) -> None:
        try:
            driver.use_context(self._context)
        except LaneError as error:
            self._give_up(error)
            return
        while (piece := self._next_piece()) is not None:
            try:
                if self._is_pinned[piece]:
                    self._unpin_piece(piece)
                elif self._touch_piece(piece):
                    self._pin_piece(piece)
            except Exception as error:  # noqa: BLE001  # the lane's thread reports it
                self._give_up(error)

    def _next_piece(self) -> int | None:
        """Wait for a piece to pin or, if there is none, to unpin; return None at the end."""
        with self._changed:
            while not self._closing.is_set():
                missing = (self._requested & ~self._is_pinned)[self._order]
                if missing.any() and not self.error:
                    return int(self._order[missing.argmax()])
                surplus = self._is_pinned & ~self._requested & ~self._cannot_unpin
                if surplus.any():
                    return int(surplus.argmax())
                self._changed.wait()
        return None

    def _touch_piece(self, piece: int) -> bool:
        """Read every page of a piece once it is allocated; return False if it need not be pinned.

        Touching is cheap, and registering untouched pages takes the driver ten times as long.
        """
        begin, end = self._fill.span(piece)
        allocated_bytes = self._fill.filled_with[piece] + self._trailer_bytes
        while os.fstat(self._fd).st_blocks * 512 < allocated_bytes:
            if self._closing.wait(_POLL_SECONDS) or not self._requested[piece]:
                return False
        return touch_pages(self._mapping, begin, end, self._closing)

    def _pin_piece(self, piece: int) -> None:
        """Pin a piece if it is still requested; log after each tenth of the requested bytes."""
        begin, end = self._fill.span(piece)
        with self._pin_turn() as acquired:
            if not (acquired and self._requested[piece]):
                return
            address = self._address + begin
            driver.register_host(address, end - begin)
            try:
                address_base = (driver.device_address(address) - begin) % 2**64
            except LaneError:
                driver.unregister_host(address)
                raise
            with self._changed:
                self.address_bases[piece] = address_base
                self._is_pinned[piece] = True
                bytes_before, self.pinned_bytes = self.pinned_bytes, self.pinned_bytes + end - begin
                self._update_usable()
        requested_bytes = max(1, int(self._requested.sum())) * self.piece_bytes
        logged_tenths = bytes_before * _LOG_LINES // requested_bytes
        if logged_tenths < self.pinned_bytes * _LOG_LINES // requested_bytes:
            _log.info("pinned %d of %d bytes of the pool", self.pinned_bytes, requested_bytes)

    def _unpin_piece(self, piece: int) -> None:
        """Unpin a piece unless it is requested again; if that fails, it stays pinned for good."""
        begin, end = self._fill.span(piece)
        with self._pin_turn() as acquired:
            with self._changed:
                if not acquired or self._requested[piece]:
                    return
                self._is_pinned[piece] = False
            try:
                driver.unregister_host(self._address + begin)
            except LaneError as error:
                with self._changed:
                    self._is_pinned[piece] = self._cannot_unpin[piece] = True
                    self.num_failures += 1
                    self._update_usable()
                _log.error("%d bytes stay pinned until this lane ends: %s", end - begin, error)
            else:
                self.pinned_bytes -= end - begin

    @contextmanager
    def _pin_turn(self) -> Iterator[bool]:
        """Hold the pin lock for a call of the driver and a pause after it.

        No lane of the daemon pins in the pause, so engines get the driver.

        Yields:
            Whether the driver may be called; False if the pool is being closed.
        """
        acquired = self._acquire_lock()
        try:
            self._call_start = start = time.monotonic()
            yield acquired
            seconds, self._call_start = time.monotonic() - start, None
            if acquired:
                self._closing.wait(pause_after(seconds))
        finally:
            self._call_start = None
            if acquired and self._pin_lock is not None:
                fcntl.lockf(self._pin_lock, fcntl.LOCK_UN)

    def _acquire_lock(self) -> bool:
        while not self._closing.is_set():
            if self._pin_lock is None:
                return True
            try:
                fcntl.lockf(self._pin_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):  # another lane holds it
                self._closing.wait(_POLL_SECONDS)
            except OSError as error:
                _log.warning("this lane pins without the pin lock: %s", error)
                self._pin_lock = None
            else:
                return True
        return False

    def _give_up(self, error: Exception) -> None:
        text = (
            f"the pool cannot be pinned after {self.pinned_bytes} bytes ({error}); look at dmesg"
            " and MemAvailable: the driver takes kernel memory for pinned pages (12 MiB a GiB),"
            " Linux 6.11 to 6.13 pins no more than 2 GB at a time, and pages in a movable zone"
            " cannot be pinned; a smaller pool needs less"
        )
        with self._changed:
            self.num_failures += 1
            self.error, self.usable_bytes = text, 0
        _log.error("%s", text)  # not a bug, so no traceback

    def _unregister_all(self) -> None:
        with cuda.Undo() as undo:
            for piece in np.flatnonzero(self._is_pinned).tolist():
                undo.add(driver.unregister_host, self._address + self._fill.span(piece)[0])
        self._is_pinned[:] = False
        self.pinned_bytes = 0

    def _update_usable(self) -> None:
        if self.error:
            return
        missing = (self._requested & ~self._is_pinned)[self._order]
        if not missing.any():
            self.usable_bytes = self.nbytes
            return
        piece = int(self._order[missing.argmax()])
        begin, end = self._fill.span(piece)
        self.usable_bytes = self._fill.filled_with[piece] - (end - begin)

    def __repr__(self) -> str:
        return f"<PinnedPool {self.pinned_bytes} of {self.nbytes} bytes>"
