"""The lane's process and its loop: jobs from workers, orders from the broker, turns of the device.

The loop is one thread and never waits for a peer: sends do not block, copies come in pieces of
about a millisecond or less, and the loop polls its sockets between two pieces. In Python that is
faster than a second thread, which would compete for the interpreter's lock. A CUDA device has
threads of its own for calls of the driver that take long without that lock.
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

# A request takes about 50 µs; a GPU moves 32 MiB, half of its bytes in flight, in 580 µs.
REQUESTS_PER_TURN = 8
SHORTEST_NAP_SECONDS = 20e-6
LONGEST_NAP_SECONDS = 1e-3
PAUSE_EVERY_SECONDS = 1e-3
PAUSE_SECONDS = 30e-6
PINNING_POLL_MS = 10
LINGER_SECONDS = 0.5  # at the end, for replies to be read
# Options of glibc's mallopt(3): above how many free bytes memory is returned to the kernel, and
# above which size an allocation gets a mapping of its own.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_RETAINED_BYTES = 32 * 2**20


class LaneService:
    """The service of one lane process.

    Args:
        incarnation: counts the lanes of this device since the broker's start.
        endpoint: where workers send jobs.
        link: to the broker.
        device: the backend that copies.
        pool_bytes: size of the pool, without the trailer.
        lifeline: the read end of this process's lifeline; owned by this object.
        limits: of each engine's queue.
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
        self._last_usable = PoolUsable(usable_bytes=0, error="")
        self._stall_detector = StallDetector("lane")
        self._workers = WorkerTable(device)
        self._runner = Runner(device, limits)
        self._reporter = Reporter(self._server, link, self._runner)
        self._orders = OrderHandler(self._reporter, self._workers, device, pool_bytes)
        self._requests = RequestHandler(self._reporter, self._workers)

    def run(self) -> None:
        """Serve until StopLane or the broker's exit.

        1. After StopLane, finish the queued jobs, then unpin the pool piece by piece; orders and
           pings are answered meanwhile.
        2. After the broker's exit, end at once.

        Raises:
            LaneError: the device is lost or hangs; the broker has been told.
            ChannelFull: the broker does not read; no message to it may be dropped.
        """
        try:
            self._announce()
            nap = last_pause = 0.0
            while not self._has_stopped():
                has_orders = self._wait(self._wait_ms(nap))
                has_requests = self._server.pending
                if has_orders:
                    self._orders.read_orders()
                if has_requests:
                    self._serve_workers()
                if self._device.needs_pinning:
                    self._report_usable()
                moved = self._runner.run_once()
                self._reporter.report_ended()
                self._reporter.forget_ended_connections()
                if self._reporter.shares.due:  # after the replies, since waking the broker is slow
                    self._reporter.send_shares()
                nap = self._back_off(nap, busy=moved or has_orders or has_requests)
                if moved and len(self._runner) and not self._device.needs_pinning:
                    last_pause = self._pause(last_pause)
        except EOFError:
            _log.warning("the broker has exited: ending")
        except LaneError as error:
            with contextlib.suppress(EOFError, ChannelFull):
                self._link.send(LINK.encode(LaneFailed(error=str(error)[:TEXT_LIMIT])))
            raise
        else:
            self._reporter.send_shares()
        finally:
            self._epoll.unregister(self._link)
            self._server.close(linger=LINGER_SECONDS if self._runner.stopping else 0.0)
            self._epoll.close()
            self._link.close()

    def _has_stopped(self) -> bool:
        return self._runner.stopping and not len(self._runner) and self._device.unpin()

    def _serve_workers(self) -> None:
        """Serve the requests that have come, at most `REQUESTS_PER_TURN`."""
        for _ in range(REQUESTS_PER_TURN):
            received = self._server.next_message()
            if received is None:
                return
            if not self._workers.all_bound:  # the order that binds the sender came before it
                self._orders.read_orders()
            self._requests.serve(received)

    # ---------------------------------------------------------------- pace

    def _wait(self, timeout_ms: int | None) -> bool:
        """Wait for messages, at most this long; return whether orders have come.

        This takes one system call (about 1 µs), however many workers are connected.
        """
        link = self._link
        if link.wants_write != self._link_writes:
            self._link_writes = link.wants_write
            events = select.EPOLLIN | (select.EPOLLOUT if self._link_writes else 0)
            self._epoll.modify(link, events)
        seconds = None if timeout_ms is None else timeout_ms / 1000
        if link.more or self._server.pending:
            seconds = 0.0
        self._stall_detector.waits(time.monotonic(), seconds)
        ready = dict(self._epoll.poll(seconds))
        if stall := self._stall_detector.woke(time.monotonic()):
            _log.warning("%s", stall)
        if ready:
            self._server.handle_events(ready)
        return link.more or link.fileno() in ready

    def _wait_ms(self, nap: float) -> int | None:
        """Return how long to wait for messages; None: without limit, since there is no work."""
        if not len(self._runner):
            if self._reporter.shares:
                return SHARES_WAIT_MS
            last = self._last_usable
            is_pinning = last.usable_bytes < self._pool_bytes and not last.error
            return PINNING_POLL_MS if is_pinning or self._runner.stopping else None
        return 1 if nap >= LONGEST_NAP_SECONDS else 0

    def _back_off(self, nap: float, *, busy: bool) -> float:
        """Sleep for less than a poll can if jobs only wait; return for how long, in seconds."""
        if busy or not len(self._runner):
            return 0.0
        if nap < LONGEST_NAP_SECONDS:
            nap = max(2 * nap, SHORTEST_NAP_SECONDS)
            time.sleep(nap)
        return nap

    def _pause(self, last_pause: float) -> float:
        """Between stores, sleep briefly every `PAUSE_EVERY_SECONDS`; return when that last was.

        Storing without a pause would delay processes that share the CPU, above all engines that
        load.
        """
        stored = self._runner.last_direction is Direction.STORE
        if not stored or time.monotonic() - last_pause < PAUSE_EVERY_SECONDS:
            return last_pause
        time.sleep(PAUSE_SECONDS)
        return time.monotonic()

    def _announce(self) -> None:
        self._last_usable = PoolUsable(usable_bytes=self._device.usable_bytes, error="")
        ready = LaneReady(
            incarnation=self._incarnation,
            pid=os.getpid(),
            endpoint=self._endpoint,
            pins=self._device.needs_pinning,
            usable_bytes=self._last_usable.usable_bytes,
        )
        self._link.send(LINK.encode(ready), (self._lifeline,))
        os.close(self._lifeline)

    def _report_usable(self) -> None:
        """Report how much of the pool is usable, if that has changed."""
        device, last, bindings = self._device, self._last_usable, self._orders.num_bindings
        if (
            device.usable_bytes == last.usable_bytes
            and bindings == last.bindings
            and bool(device.pool_error) == bool(last.error)
        ):
            return
        error = device.pool_error[:TEXT_LIMIT]  # read first: a device sets it before usable_bytes
        self._last_usable = PoolUsable(
            usable_bytes=device.usable_bytes, error=error, bindings=bindings
        )
        self._reporter.send_to_broker(self._last_usable)


def run(link_fd: int) -> int:
    """Serve until the broker stops the process; return the exit status."""
    return serve_broker(link_fd, LINK, _open, lambda error: LaneFailed(error=error))


def _open(link: Channel, begin: BeginLane, fds: tuple[int, ...]) -> LaneService:
    """Open the device and the workers' socket; return the service.

    Raises:
        KvdError, OSError: one of the two cannot be opened now.
    """
    name = f"lane {begin.device}#{begin.incarnation}"
    context = {"lane": begin.device, "incarnation": begin.incarnation}
    configure(begin.log_level, begin.log_style, name, **context)
    _retain_freed_memory()
    pool_fd, pin_lock = map(to_high_number, fds)
    lifeline = open_lifeline()
    lock_pool(pool_fd)
    service = LaneService(
        incarnation=begin.incarnation,
        endpoint=begin.endpoint,
        link=link,
        device=_open_device(begin, pool_fd, pin_lock),
        pool_bytes=begin.pool_bytes,
        lifeline=lifeline,
        limits=QueueLimits(begin.max_queued_jobs, begin.max_queued_bytes),
    )
    os.close(pool_fd)
    return service


def _retain_freed_memory() -> None:
    """Keep memory that a job frees for the jobs that follow.

    The tables of a job of 64,000 runs take some MiB. Returning them to the kernel after each job
    took a third of the lane's processor time (256 MiB jobs of 4 KiB fragments, both directions).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _RETAINED_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _RETAINED_BYTES)


def _open_device(begin: BeginLane, pool_fd: int, pin_lock: int) -> Device:
    if begin.device == HOST:
        return HostDevice(pool_fd, begin.pool_bytes)
    # Imported here: a daemon without cuda-bindings has a host lane only.
    from kvd.lane.cuda.backend import CudaDevice, show_mig_slice  # noqa: PLC0415

    show_mig_slice(begin.device)
    return CudaDevice(begin.device, pool_fd, begin.pool_bytes, pin_lock=pin_lock)


def open_lifeline() -> int:
    """Return the read end of a pipe whose end of file tells workers that this process is dead.

    End of file also means that the process moves no bytes any more. The write end stays open in
    this process only. The kernel closes a dying process's descriptors from the highest number down
    (found by timing), and a driver stops its copies when its own descriptors are closed. So the
    write end takes the lowest free number, before a device is opened, and nothing below it may be
    closed while the process lives.

    Raises:
        PoolError: no descriptor is left.
    """
    read_end, write_end = os.pipe()
    moved_read_end = to_high_number(read_end)
    lower = os.dup(write_end)
    if lower > write_end:
        os.close(lower)
    else:
        os.close(write_end)
    return moved_read_end
