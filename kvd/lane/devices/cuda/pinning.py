"""The pool, mapped and pinned in pieces.

One registration of a large pool may fail where several smaller ones work, so
the pool is registered in pieces. Slots have another size in every namespace, so
no size of piece suits them all: a boundary may cut a slot, and copies are split
where they cross one (`runs.py`); no copy spans two registrations.

Pieces are registered by a thread in the order of `kvd.pool.filling`, each as soon as its
pages were touched, so that one piece is pinned while later ones are still being
allocated and touched. What comes later is not usable yet. A failure undoes what was
registered and stays: pageable memory is never used instead.
"""

import logging
import mmap
import os
import threading
import time

import numpy as np

from kvd.errors import CudaError, LaneError
from kvd.lane.devices.cuda import driver
from kvd.lane.devices.cuda.driver import Addresses, Context, Undo
from kvd.lane.devices.device import map_pool
from kvd.lane.devices.pretouch import Pretouch
from kvd.pool.filling import FillOrder, piece_bytes_for

_log = logging.getLogger(__name__)

_WAIT_SECONDS = 0.01
_STEPS_OF_PROGRESS = 10


class PinnedPool:
    """The pool's mapping; starts to pin it.

    Args:
        pool_fd: the pool's file; stays the caller's.
        pool_bytes: its size.
        context: the device's.
        piece_bytes: of one registration; whole pages of the file, which may be huge ones. None:
            the pieces in which the broker fills the pool.

    Raises:
        LaneError: a file that is too small or cannot be mapped.
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
        pieces = len(self.fill.order)
        # By piece: what is added to a host address for a kernel to find it.
        self.kernel_shift: Addresses = np.zeros(pieces, np.uint64)
        self._context = context
        self._pinned = 0
        self._error = ""
        self._since: float | None = None
        self._stop = threading.Event()
        self._pretouch = Pretouch(self._mapping, pool_fd, self.fill)
        self._thread = threading.Thread(target=self._run, name="kvd-pinning", daemon=True)
        self._thread.start()

    @property
    def pinned(self) -> int:
        """Bytes, in the order of filling, that copies may use."""
        return self._pinned

    def holds(self, begin: int, end: int) -> bool:
        """Whether copies may use pool bytes begin..end - 1."""
        return self.fill.needed(begin, end) <= self._pinned

    @property
    def error(self) -> str:
        """Why the pool is not and will not be pinned; empty while there is hope."""
        return self._error

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
        self._stop.set()
        self._thread.join()
        self._pretouch.stop()
        end, self._pinned = self._pinned, 0
        try:
            self._unregister(end)
        finally:
            self._mapping.release()

    def _run(self) -> None:
        try:
            driver.use_context(self._context)
            self._pin()
        except LaneError as error:
            end, self._pinned = self._pinned, 0
            self._since = None
            self._error = (
                f"the pool cannot be pinned after {end} of {self.nbytes} bytes ({error});"
                " raise the limit of locked memory (LimitMEMLOCK=infinity, ulimit -l unlimited)"
                " or make the pool smaller"
            )
            _log.error("%s", self._error)
            try:
                self._unregister(end)
            except LaneError:
                _log.exception("and what was pinned cannot be undone")

    def _pin(self) -> None:
        logged = 0
        for piece in self.fill.order:
            begin, end = self.fill.span(piece)
            filled = self._pinned + end - begin
            while self._pretouch.done < filled and not self._stop.is_set():
                self._stop.wait(_WAIT_SECONDS)
            if self._stop.is_set():
                return
            address = self.address + begin
            self._since = time.monotonic()
            driver.register_host(address, end - begin)
            # What is registered is this object's to undo from here on; it may be used once
            # kernels can find it.
            try:
                shift = driver.device_address(address) - address
            except CudaError:
                driver.unregister_host(address)
                raise
            self.kernel_shift[piece] = shift % 2**64
            self._pinned = filled
            self._since = None
            if filled * _STEPS_OF_PROGRESS // self.nbytes > logged:
                logged = filled * _STEPS_OF_PROGRESS // self.nbytes
                _log.info("pinned %d of %d bytes of the pool", filled, self.nbytes)

    def _unregister(self, filled: int) -> None:
        """Unpin the first `filled` bytes, as many as can be."""
        with Undo() as undo:
            for piece in self.fill.order:
                if self.fill.filled_with[piece] <= filled:
                    undo.add(driver.unregister_host, self.address + self.fill.span(piece)[0])

    def __repr__(self) -> str:
        return f"<PinnedPool {self._pinned} of {self.nbytes} bytes>"
