"""The pool, mapped and pinned in pieces: those that ranks of this device use, and no others.

A pinned piece costs kernel memory and, for the device's page tables, GPU memory in every process
that pins it, so a lane pins the arenas of the ranks that are bound to it. One registration of a
large range may fail where several smaller ones work, so the pool is registered piece by piece.
Slots have another size in every namespace: a boundary may cut a slot, and copies are split where
they cross one (`copies.py`).

One thread makes the set of pinned pieces equal to the wanted one. It pins in the order of
`kvd.pool.geometry`, in which the broker allocates: a piece's pages are touched once they are there,
then registered. Then it unpins pieces that are not wanted. Pieces of a rank that has left stay
pinned until an arena is wanted anew, so an engine that restarts finds its arena pinned.

By NVIDIA's sources, to pin and to unpin take locks of the driver that every process of the machine
needs to start work on a GPU. So pieces are small, only one lane of a daemon at a time registers or
unregisters one (the pin lock), and after each piece the driver is left alone for as long as the
piece took, 0.25 s at most.

A failure to pin is final for the whole pool: pageable memory is never used instead. Pieces that
are pinned stay so until the copies that use them have ended and their owners have let go.
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
from kvd.lane.device import touch
from kvd.machine import cuda
from kvd.machine.process import map_pool
from kvd.pool.geometry import FillOrder, piece_bytes_for

_log = logging.getLogger(__name__)

_LINES = 10  # of the log
_POLL_SECONDS = 0.005
LONGEST_PAUSE = 0.25  # seconds between two pieces

Pieces = npt.NDArray[np.bool_]


def pause_after(seconds: float) -> float:
    """How long others have the driver after a piece that took so long; in seconds."""
    return min(seconds, LONGEST_PAUSE)


class PinnedPool:
    """The pool's mapping, and the pieces of it that are pinned.

    Attributes:
        nbytes: of the pool.
        piece_bytes: of one registration; the last one may be shorter.
        where: by piece, what to add to an offset in the pool for the device's address of it.
        usable: the longest prefix of the pool, in the order of filling, of which every wanted
            piece is pinned; `nbytes` where no piece is wanted.
        pinned: bytes that are pinned.
        error: why pieces are not and will not be pinned; empty while there is hope.
        failures: of calls of the driver, so far: each may mean that the context is lost.

    Args:
        pool_fd: the pool's file; stays the caller's.
        pool_bytes: its size.
        context: the device's.
        piece_bytes: of one registration; whole pages of the file, which may be huge ones. None:
            the pieces in which the broker fills the pool.
        pin_lock: a file whose record lock this process holds while it pins or unpins a piece;
            stays the caller's. None: no other process pins.

    Raises:
        PoolError: a file that is too small or cannot be mapped.
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
        self._behind = os.fstat(pool_fd).st_size - pool_bytes  # the trailer, allocated first
        self.where: Addresses = np.zeros(len(self._order), np.uint64)
        self.usable, self.pinned, self.error, self.failures = pool_bytes, 0, "", 0
        self._needs: dict[int, Pieces] = {}  # by owner
        self._wanted: Pieces = np.zeros(len(self._order), np.bool_)
        self._is_pinned: Pieces = np.zeros(len(self._order), np.bool_)
        self._stays: Pieces = np.zeros(len(self._order), np.bool_)  # the driver does not unpin it
        self._since: float | None = None  # when the driver's call began
        self._changed = threading.Condition()  # guards what this thread and the lane's both write
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvd-pin", daemon=True)
        self._thread.start()

    # -------------------------------------------------- called by the lane's thread

    def need(self, owner: int, begin: int, end: int) -> None:
        """Pin pool bytes begin..end - 1 for an owner, besides what it needs already.

        Pieces that no owner needs any more are unpinned.
        """
        first, last = begin // self.piece_bytes, (end - 1) // self.piece_bytes
        with self._changed:
            needs = self._needs.setdefault(owner, np.zeros_like(self._wanted))
            needs[first : last + 1] = True
            self._want(list(self._needs.values()))

    def drop(self, owner: int) -> None:
        """An owner needs nothing any more, and no copy of it is in flight."""
        with self._changed:
            self._needs.pop(owner, None)
            if self.error:
                self._want(list(self._needs.values()))

    def unpin(self) -> bool:
        """Unpin all pieces, one after another; no copy may be in flight.

        Returns:
            Whether nothing is pinned but what the driver does not unpin, and no call is under way.
        """
        with self._changed:
            if self._wanted.any():
                self._needs.clear()
                self._want([])
        return self._since is None and not (self._is_pinned & ~self._stays).any()

    def _want(self, needs: list[Pieces]) -> None:
        self._wanted = np.logical_or.reduce(needs) if needs else np.zeros_like(self._wanted)
        self._measure()
        self._changed.notify()

    def holds(self, begin: int, end: int) -> bool:
        """Whether copies may use pool bytes begin..end - 1."""
        first, last = begin // self.piece_bytes, (end - 1) // self.piece_bytes
        return not self.error and bool(self._is_pinned[first : last + 1].all())

    @property
    def stuck_seconds(self) -> float:
        """For how long the driver has been at one piece; 0 where it is not."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def close(self) -> None:
        """Stop, unpin everything without a pause, and unmap; no copy may be in flight.

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
                elif self._touch(piece):
                    self._pin_piece(piece)
            except Exception as error:  # noqa: BLE001  # the lane's thread reports it
                self._give_up(error)

    def _next_piece(self) -> int | None:
        """Wait for a piece to pin or, where there is none, to unpin; None: the end."""
        with self._changed:
            while not self._closing.is_set():
                missing = (self._wanted & ~self._is_pinned)[self._order]
                if missing.any() and not self.error:
                    return int(self._order[missing.argmax()])
                needless = self._is_pinned & ~self._wanted & ~self._stays
                if needless.any():
                    return int(needless.argmax())
                self._changed.wait()
        return None

    def _touch(self, piece: int) -> bool:
        """Read every page of a piece once it is allocated; whether to go on.

        To touch is cheap, and to register what was not touched keeps the driver ten times as long.
        """
        begin, end = self._fill.span(piece)
        filled = self._fill.filled_with[piece] + self._behind
        while os.fstat(self._fd).st_blocks * 512 < filled:
            if self._closing.wait(_POLL_SECONDS) or not self._wanted[piece]:
                return False
        return touch(self._mapping, begin, end, self._closing)

    def _pin_piece(self, piece: int) -> None:
        begin, end = self._fill.span(piece)
        with self._turn() as acquired:
            if not (acquired and self._wanted[piece]):
                return
            address = self._address + begin
            driver.register_host(address, end - begin)
            try:
                where = (driver.device_address(address) - begin) % 2**64
            except LaneError:
                driver.unregister_host(address)
                raise
            with self._changed:
                self.where[piece] = where
                self._is_pinned[piece] = True
                before, self.pinned = self.pinned, self.pinned + end - begin
                self._measure()
        wanted_bytes = max(1, int(self._wanted.sum())) * self.piece_bytes
        if before * _LINES // wanted_bytes < self.pinned * _LINES // wanted_bytes:
            _log.info("pinned %d of %d bytes of the pool", self.pinned, wanted_bytes)

    def _unpin_piece(self, piece: int) -> None:
        begin, end = self._fill.span(piece)
        with self._turn() as acquired:
            with self._changed:
                if not acquired or self._wanted[piece]:
                    return
                self._is_pinned[piece] = False
            try:
                driver.unregister_host(self._address + begin)
            except LaneError as error:
                with self._changed:
                    self._is_pinned[piece] = self._stays[piece] = True
                    self.failures += 1
                    self._measure()
                _log.error("%d bytes stay pinned until this lane ends: %s", end - begin, error)
            else:
                self.pinned -= end - begin

    @contextmanager
    def _turn(self) -> Iterator[bool]:
        """Hold the pin lock for a call of the driver and the pause after it; False: the end."""
        acquired = self._acquire()
        try:
            self._since = began = time.monotonic()
            yield acquired
            took, self._since = time.monotonic() - began, None
            if acquired:
                self._closing.wait(pause_after(took))
        finally:
            self._since = None
            if acquired and self._pin_lock is not None:
                fcntl.lockf(self._pin_lock, fcntl.LOCK_UN)

    def _acquire(self) -> bool:
        while not self._closing.is_set():
            if self._pin_lock is None:
                return True
            try:
                fcntl.lockf(self._pin_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):  # another lane has it
                self._closing.wait(_POLL_SECONDS)
            except OSError as error:
                _log.warning("this lane pins without waiting for others: %s", error)
                self._pin_lock = None
            else:
                return True
        return False

    def _give_up(self, error: Exception) -> None:
        text = (
            f"the pool cannot be pinned after {self.pinned} bytes ({error}); look at dmesg and"
            " MemAvailable: the driver takes kernel memory for pinned pages (12 MiB a GiB), Linux"
            " 6.11 to 6.13 pins no more than 2 GB at a time, and pages in a movable zone cannot be"
            " pinned; a smaller pool needs less"
        )
        with self._changed:
            self.failures += 1
            self.error, self.usable = text, 0
        _log.error("%s", text)  # no bug: no traceback

    def _unregister_all(self) -> None:
        with cuda.Undo() as undo:
            for piece in np.flatnonzero(self._is_pinned).tolist():
                undo.add(driver.unregister_host, self._address + self._fill.span(piece)[0])
        self._is_pinned[:] = False
        self.pinned = 0

    def _measure(self) -> None:
        if self.error:
            return
        missing = (self._wanted & ~self._is_pinned)[self._order]
        if not missing.any():
            self.usable = self.nbytes
            return
        piece = int(self._order[missing.argmax()])
        begin, end = self._fill.span(piece)
        self.usable = self._fill.filled_with[piece] - (end - begin)

    def __repr__(self) -> str:
        return f"<PinnedPool {self.pinned} of {self.nbytes} bytes>"
