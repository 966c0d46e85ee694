"""The lane's loop: jobs from workers, orders from the broker, turns of the device.

One thread, and nothing in it waits for a peer: sends to workers and to the
broker are non-blocking, copies come in pieces of about a millisecond or less,
and both sockets are looked at between two pieces. In Python that is faster than
a second thread, which would compete for the interpreter's lock; a CUDA device has threads of its
own for calls of the driver that take long without that lock.
"""

import contextlib
import logging
import os
import select
import time
from pathlib import Path

from kvd.errors import LaneError
from kvd.lane.devices.device import Device, Direction
from kvd.lane.orders import Orders, Requests
from kvd.lane.queue import Limits
from kvd.lane.reports import SHARES_WAIT_MS, TEXT_LIMIT, Reports
from kvd.lane.runner import Runner
from kvd.lane.workers import Workers
from kvd.machine.process import StallDetector
from kvd.wire.link import LINK, LaneFailed, LaneReady, PoolUsable
from kvd.wire.server import Server
from kvd_proto.channel import Channel
from kvd_proto.codec import MAX_MESSAGE_BYTES
from kvd_proto.errors import ChannelFull

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
        limits: Limits | None = None,
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
        self._workers = Workers(device)
        self._runner = Runner(device, limits)
        self._reports = Reports(self._server, link, self._runner)
        self._orders = Orders(self._reports, self._workers, device, pool_bytes)
        self._requests = Requests(self._reports, self._workers)

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
