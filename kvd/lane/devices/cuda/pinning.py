"""The pool, mapped and pinned in pieces.

One registration of a large pool may fail where several smaller ones work, so
the pool is registered in pieces. Slots have another size in every namespace, so
no size of piece suits them all: a boundary may cut a slot, and copies are split
where they cross one (`moves.py`); no copy spans two registrations.

Pieces are registered by the thread that touches their pages, in the order of
`kvd.pool.filling`, so that one piece is pinned while later ones are still being
allocated. What comes later is not usable yet. A failure undoes what was
registered and stays: pageable memory is never used instead.

To pin memory takes locks of the driver that every process of the machine needs to start work on
a GPU, about 0.1 s a GB. So pieces are small, and after each the driver is left alone for as long
as that piece took; the next piece's pages are touched meanwhile. In all a pool takes at most
twice the time that the driver needs for it.
"""

import logging
import mmap
import os
import threading
import time

import numpy as np

from kvd.errors import LaneError
from kvd.lane.devices.cuda import driver
from kvd.lane.devices.cuda.driver import Addresses, Context, Undo
from kvd.lane.devices.pretouch import Pretouch
from kvd.machine.pool_map import map_pool
from kvd.pool.filling import FillOrder, piece_bytes_for

_log = logging.getLogger(__name__)

_LINES = 10  # of the log
LONGEST_PAUSE = 0.25  # seconds between two registrations


def pause_after(seconds: float) -> float:
    """How long others have the driver after a registration that took so long; in seconds."""
    return min(seconds, LONGEST_PAUSE)


class PinnedPool:
    """The pool's mapping; starts to pin it.

    Attributes:
        pinned: bytes, in the order of filling, that copies may use.
        error: why the pool is not and will not be pinned; empty while there is hope.

    Args:
        pool_fd: the pool's file; stays the caller's.
        pool_bytes: its size.
        context: the device's.
        piece_bytes: of one registration; whole pages of the file, which may be huge ones. None:
            the pieces in which the broker fills the pool.

    Raises:
        PoolError: a file that is too small or cannot be mapped.
    """

    def __init__(
        self,
        pool_fd: int,
        pool_bytes: int,
        context: Context,
        piece_bytes: int | None = None,
    ) -> None:
        if piece_bytes is None:
            page_bytes = max(mmap.PAGESIZE, os.fstat(pool_fd).st_blksize)
            piece_bytes = piece_bytes_for(pool_bytes, page_bytes)
        self._mapping = map_pool(pool_fd, pool_bytes)
        self.nbytes = pool_bytes
        self.piece_bytes = piece_bytes
        self.address = np.frombuffer(self._mapping, np.uint8).ctypes.data
        self.fill = FillOrder(pool_bytes, piece_bytes)
        # By piece: what is added to an offset in the pool for the device to find it.
        self.where: Addresses = np.zeros(len(self.fill.order), np.uint64)
        self.pinned = 0
        self.error = ""
        self._context = context
        self._since: float | None = None
        self._rested = 0.0  # when the next registration may begin
        self._closing = threading.Event()
        self._registered = Undo()
        self._pretouch = Pretouch(self._mapping, pool_fd, self.fill, self._pin)

    def holds(self, begin: int, end: int) -> bool:
        """Whether copies may use pool bytes begin..end - 1."""
        return self.pinned >= self.nbytes or self.fill.needed(begin, end) <= self.pinned

    @property
    def stuck_seconds(self) -> float:
        """For how long the driver has been at the registration of one piece; 0 where it is not."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def close(self) -> None:
        """Stop, unpin and unmap; no copy may be in flight.

        Raises:
            CudaError: a piece cannot be unpinned.
        """
        self._closing.set()
        self._pretouch.stop()
        self.pinned = 0
        try:
            self._unregister()
        finally:
            self._mapping.release()

    def _pin(self, piece: int) -> bool:
        """Register a piece; whether to go on."""
        if self._closing.wait(max(0.0, self._rested - time.monotonic())):
            return False
        try:
            self._register(piece)
        except LaneError as error:
            done, self.pinned = self.pinned, 0
            self._since = None
            self.error = (
                f"the pool cannot be pinned after {done} of {self.nbytes} bytes ({error});"
                " raise the limit of locked memory (LimitMEMLOCK=infinity, ulimit -l unlimited)"
                " or make the pool smaller"
            )
            _log.error("%s", self.error)  # no bug: no traceback
            try:
                self._unregister()
            except LaneError:
                _log.exception("and what was pinned cannot be undone")
            return False
        return True

    def _register(self, piece: int) -> None:
        begin, end = self.fill.span(piece)
        address = self.address + begin
        self._since = began = time.monotonic()
        driver.use_context(self._context)  # this thread's, for its first call
        driver.register_host(address, end - begin)
        self._registered.add(driver.unregister_host, address)
        # Copies may use it once its address is known.
        self.where[piece] = (driver.device_address(address) - begin) % 2**64
        before, self.pinned = self.pinned, self.pinned + end - begin
        now, self._since = time.monotonic(), None
        self._rested = now + pause_after(now - began)
        if before * _LINES // self.nbytes < self.pinned * _LINES // self.nbytes:
            _log.info("pinned %d of %d bytes of the pool", self.pinned, self.nbytes)

    def _unregister(self) -> None:
        """As much as can be."""
        self._registered.close()

    def __repr__(self) -> str:
        return f"<PinnedPool {self.pinned} of {self.nbytes} bytes>"
