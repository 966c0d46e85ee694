"""The lane's loop: jobs from workers, orders from the broker, turns of the device.

One thread, and nothing in it waits for a peer: sends to workers and to the
broker are non-blocking, copies come in pieces of about a millisecond or less,
and both sockets are looked at between two pieces. In Python that is faster than
a second thread, which would compete for the interpreter's lock; a CUDA device has threads of its
own for calls of the driver that take long without that lock.
"""

import contextlib
import ctypes
import logging
import os
import select
import time
from pathlib import Path

from kvd.errors import LaneError
from kvd.lane.device import Device, Direction
from kvd.lane.host_device import HostDevice
from kvd.lane.orders import OrderHandler, RequestHandler
from kvd.lane.queue import QueueLimits
from kvd.lane.reports import SHARES_WAIT_MS, TEXT_LIMIT, Reporter
from kvd.lane.runner import Runner
from kvd.lane.workers import WorkerTable
from kvd.logs import configure
from kvd.machine.process import StallDetector, lock_pool, to_high_number
from kvd.wire.child_process import serve_broker
from kvd.wire.link import LINK, BeginLane, LaneFailed, LaneReady, PoolUsable
from kvd.wire.server import Server
from kvd_proto.channel import Channel
from kvd_proto.codec import MAX_MESSAGE_BYTES
from kvd_proto.errors import ChannelFull
from kvd_proto.messages import HOST

_log = logging.getLogger(__name__)

# Of workers, before the device gets its turn: a request takes about 50 µs, and 32 MiB, half of
# what a GPU has in flight, 580 µs.
REQUESTS_PER_TURN = 8
SHORTEST_NAP = 20e-6
LONGEST_NAP = 1e-3
PAUSE_EVERY = 1e-3
PAUSE_SECONDS = 30e-6
FILLING_MS = 10
LINGER_SECONDS = 0.5
# Of glibc's mallopt(3): from how many freed bytes on memory is given back to the kernel, and from
# which size on an allocation has a mapping of its own.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 32 * 2**20


class LaneService:
    """One lane process's life.

    Args:
        incarnation: which lane of this device since the broker started.
        endpoint: where workers send jobs.
        link: to the broker.
        device: the backend.
        pool_bytes: size of the pool that the device maps.
        lifeline: the read end of this process's lifeline. Taken over.
        limits: of what an engine may have waiting.
    """

    def __init__(
        self,
        *,
        incarnation: int,
        endpoint: str,
        link: Channel,
        device: Device,
        pool_bytes: int,
        lifeline: int,
        limits: QueueLimits | None = None,
    ) -> None:
        self._incarnation = incarnation
        self._endpoint = endpoint
        self._link = link
        self._link_writes = False
        self._epoll = select.epoll()
        path = Path(endpoint.removeprefix("ipc://"))
        self._server = Server(path, max_bytes=MAX_MESSAGE_BYTES, epoll=self._epoll)
        self._epoll.register(link, select.EPOLLIN)
        self._device = device
        self._pool_bytes = pool_bytes
        self._lifeline = lifeline
        self._reported = PoolUsable(usable_bytes=0, error="")
        self._standstill = StallDetector("lane")
        self._workers = WorkerTable(device)
        self._runner = Runner(device, limits)
        self._reports = Reporter(self._server, link, self._runner)
        self._orders = OrderHandler(self._reports, self._workers, device, pool_bytes)
        self._requests = RequestHandler(self._reports, self._workers)

    def run(self) -> None:
        """Serve until StopLane or the end of the broker.

        After StopLane queued work is finished, then the pool is unpinned piece by piece; orders and
        pings are answered meanwhile. Without the broker the process ends at once.

        Raises:
            LaneError: the device is lost or hangs; the broker has been told.
            ChannelFull: the broker does not read what it must know.
        """
        try:
            self._announce()
            nap = paused = 0.0
            while not self._is_over():
                orders = self._wait(self._patience(nap))
                requests = self._server.pending
                if orders:
                    self._orders.read()
                if requests:
                    self._serve_workers()
                if self._device.pins:
                    self._report_usable()
                moved = self._runner.turn()
                self._reports.report_ended()
                self._reports.note_connections()
                if self._reports.shares_due:  # after the replies: to wake the broker takes a while
                    self._reports.send_shares()
                nap = self._back_off(nap, busy=moved or orders or requests)
                if moved and len(self._runner) and not self._device.pins:
                    paused = self._pause(paused)
        except EOFError:
            _log.warning("the broker is gone: ending")
        except LaneError as error:
            with contextlib.suppress(EOFError, ChannelFull):
                self._link.send(LINK.encode(LaneFailed(error=str(error)[:TEXT_LIMIT])))
            raise
        else:
            self._reports.send_shares()
        finally:
            self._epoll.unregister(self._link)
            self._server.close(linger=LINGER_SECONDS if self._runner.stopping else 0.0)
            self._epoll.close()
            self._link.close()

    def _is_over(self) -> bool:
        return self._runner.stopping and not len(self._runner) and self._device.unpin()

    def _serve_workers(self) -> None:
        """Serve what has come from workers, some of it where it is much."""
        for _ in range(REQUESTS_PER_TURN):
            received = self._server.next_request()
            if received is None:
                return
            if not self._workers.all_bound:  # the order that binds its sender came before it
                self._orders.read()
            self._requests.serve(received)

    # ---------------------------------------------------------------- pace

    def _wait(self, patience: int | None) -> bool:
        """Wait for messages, at most `patience` in milliseconds; return whether orders have come.

        One system call (about 1 µs), however many workers are connected.
        """
        link = self._link
        if link.wants_write != self._link_writes:
            self._link_writes = link.wants_write
            events = select.EPOLLIN | (select.EPOLLOUT if self._link_writes else 0)
            self._epoll.modify(link, events)
        seconds = None if patience is None else patience / 1000
        if link.more or self._server.pending:
            seconds = 0.0
        self._standstill.waits(time.monotonic(), seconds)
        ready = dict(self._epoll.poll(seconds))
        stood_still = self._standstill.woke(time.monotonic())
        if stood_still:
            _log.warning("%s", stood_still)
        if ready:
            self._server.handle_events(ready)
        return link.more or link.fileno() in ready

    def _patience(self, nap: float) -> int | None:
        """Milliseconds to wait for messages; None: for ever, there is nothing to do."""
        if not len(self._runner):
            if self._reports.shares:
                return SHARES_WAIT_MS
            last = self._reported
            is_pinning = last.usable_bytes < self._pool_bytes and not last.error
            return FILLING_MS if is_pinning or self._runner.stopping else None
        return 1 if nap >= LONGEST_NAP else 0

    def _back_off(self, nap: float, *, busy: bool) -> float:
        """Sleep for less than a poll can, where jobs wait for a timeline or for the device."""
        if busy or not len(self._runner):
            return 0.0
        if nap < LONGEST_NAP:
            nap = max(2 * nap, SHORTEST_NAP)
            time.sleep(nap)
        return nap

    def _pause(self, last: float) -> float:
        """Sleep a little if the last pause is a while ago; return when the last one was.

        Stores that this CPU copies without a pause keep those that share the CPU waiting,
        engines first of all that load.
        """
        stores_only = self._runner.last_way is Direction.STORE  # no load could move
        if not stores_only or time.monotonic() - last < PAUSE_EVERY:
            return last
        time.sleep(PAUSE_SECONDS)
        return time.monotonic()

    def _announce(self) -> None:
        self._reported = PoolUsable(usable_bytes=self._device.usable_bytes, error="")
        ready = LaneReady(
            incarnation=self._incarnation,
            pid=os.getpid(),
            endpoint=self._endpoint,
            pins=self._device.pins,
            usable_bytes=self._reported.usable_bytes,
        )
        self._link.send(LINK.encode(ready), (self._lifeline,))
        os.close(self._lifeline)

    def _report_usable(self) -> None:
        """Report how much of the pool can be copied, where that has changed."""
        device, last, bindings = self._device, self._reported, self._orders.bindings
        if (
            device.usable_bytes == last.usable_bytes
            and bindings == last.bindings
            and bool(device.pool_error) == bool(last.error)
        ):
            return
        error = device.pool_error[:TEXT_LIMIT]  # first: usable bytes follow it
        self._reported = PoolUsable(
            usable_bytes=device.usable_bytes, error=error, bindings=bindings
        )
        self._reports.tell_broker(self._reported)


def run(link_fd: int) -> int:
    """Serve until the broker is done; the exit status."""
    return serve_broker(link_fd, LINK, _open, lambda error: LaneFailed(error=error))


def _open(link: Channel, begin: BeginLane, fds: tuple[int, ...]) -> LaneService:
    """Open device and socket.

    Raises:
        KvdError, OSError: that cannot be done now.
    """
    name = f"lane {begin.device}#{begin.incarnation}"
    context = {"lane": begin.device, "incarnation": begin.incarnation}
    configure(begin.log_level, begin.log_style, name, **context)
    _keep_freed_memory()
    pool_fd, pin_lock = map(to_high_number, fds)
    lifeline = open_lifeline()
    lock_pool(pool_fd)
    service = LaneService(
        incarnation=begin.incarnation,
        endpoint=begin.endpoint,
        link=link,
        device=_device(begin, pool_fd, pin_lock),
        pool_bytes=begin.pool_bytes,
        lifeline=lifeline,
        limits=QueueLimits(begin.max_queued_jobs, begin.max_queued_bytes),
    )
    os.close(pool_fd)
    return service


def _keep_freed_memory() -> None:
    """Keep what large jobs free for those that follow.

    The tables of a job of 64,000 runs take some MiB. Given back to the kernel after each job, their
    pages cost a third of the lane's processor time (256 MiB jobs of 4 KiB fragments, both ways).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)


def _device(begin: BeginLane, pool_fd: int, pin_lock: int) -> Device:
    if begin.device == HOST:
        return HostDevice(pool_fd, begin.pool_bytes)
    # The host's lane needs no CUDA; a daemon without cuda-bindings has only that one.
    from kvd.lane.cuda.backend import CudaDevice, show_slice  # noqa: PLC0415

    show_slice(begin.device)
    return CudaDevice(begin.device, pool_fd, begin.pool_bytes, pin_lock=pin_lock)


def open_lifeline() -> int:
    """Return the read end of the pipe by whose end of file workers know that this process is gone.

    Its write end stays open here alone, for life. The kernel lets go of a dying process's
    descriptors from the highest number down (seen by timing it), and a device's driver stops
    its copies when its own descriptors go. So the write end takes the lowest number that is
    free, before a device is opened, and nothing below it may be closed while the process lives.
    End of file then means that nothing of this process moves bytes any more.

    Raises:
        PoolError: no descriptor is left.
    """
    read_end, write_end = os.pipe()
    moved = to_high_number(read_end)
    lower = os.dup(write_end)
    if lower > write_end:
        os.close(lower)
    else:
        os.close(write_end)
    return moved
