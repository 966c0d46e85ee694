"""The lane's loop: jobs from workers, orders from the broker, turns of the device.

One thread, and nothing in it waits for a peer: sends to workers and to the
broker are non-blocking, copies come in pieces of a fraction of a millisecond,
and both sockets are looked at between two pieces.
"""

import logging
import os
import time

from kvd.lane.devices.device import Device
from kvd.lane.orders import Orders
from kvd.lane.queue import Limits
from kvd.lane.reports import TEXT_LIMIT, Reports
from kvd.lane.runner import Runner
from kvd.lane.sockets import FRAMES_PER_TURN, Sockets, Woken
from kvd.lane.worker_requests import Requests
from kvd.lane.workers import Workers
from kvd.machine.standstill import Standstill
from kvd.metrics.counts import LaneCounts
from kvd.wire.link import LINK, LaneReady, PoolUsable

_log = logging.getLogger(__name__)

SHORTEST_NAP = 20e-6
LONGEST_NAP = 1e-3
PAUSE_EVERY = 1e-3
PAUSE_SECONDS = 30e-6
FILLING_MS = 10


class LaneService:
    """One lane process's life.

    Args:
        name: the device's name.
        incarnation: which lane of this device since the broker started.
        endpoint: where workers send jobs.
        sockets: bound there, with the link to the broker.
        device: the backend.
        pool_bytes: size of the pool that the device maps.
        lifeline: the read end of this process's lifeline. Taken over.
        limits: of what an engine may have waiting.
    """

    def __init__(
        self,
        *,
        name: str,
        incarnation: int,
        endpoint: str,
        sockets: Sockets,
        device: Device,
        pool_bytes: int,
        lifeline: int,
        limits: Limits | None = None,
    ) -> None:
        self._name = name
        self._incarnation = incarnation
        self._endpoint = endpoint
        self._sockets = sockets
        self._device = device
        self._pool_bytes = pool_bytes
        self._lifeline = lifeline
        self._usable = 0
        self._standstill = Standstill("lane")
        self._workers = Workers(device)
        counts = LaneCounts()
        self._runner = Runner(device, limits)
        self._reports = Reports(sockets, self._runner, counts)
        self._orders = Orders(
            sockets=sockets,
            workers=self._workers,
            runner=self._runner,
            reports=self._reports,
            counts=counts,
            pool_bytes=pool_bytes,
        )
        self._requests = Requests(
            sockets=sockets,
            workers=self._workers,
            runner=self._runner,
            reports=self._reports,
            counts=counts,
        )

    def run(self) -> None:
        """Serve until StopLane (queued work is finished first) or the end of the broker.

        Raises:
            ChannelFull: the broker does not read what it must know.
        """
        try:
            self._announce()
            nap = paused = 0.0
            while not (self._runner.stopping and not len(self._runner)):
                woken = self._wait(self._patience(nap))
                if self._usable < self._pool_bytes:
                    self._tell_usable()
                if self._reports.shares_due(idle=not woken.workers and not len(self._runner)):
                    self._reports.send_shares()
                if woken.link:
                    self._orders.read()
                if woken.workers:
                    self._serve_workers()
                moved = self._runner.turn()
                self._reports.report_ended()
                nap = self._back_off(nap, busy=moved or woken.link or woken.workers)
                if moved and self._runner.stores_only and not self._device.pins:
                    paused = self._pause(paused)
        except EOFError:
            _log.warning("the broker is gone: ending")
        else:
            self._reports.send_shares()
        finally:
            self._sockets.close(deliver=self._runner.stopping)

    def _serve_workers(self) -> None:
        """Serve what has come from workers, some of it where it is much."""
        for _ in range(FRAMES_PER_TURN):
            received = self._sockets.router.take()
            if received is None:
                return
            if not self._workers.all_bound:  # the order that binds its sender came before it
                self._orders.read()
            self._requests.serve(received)

    # ---------------------------------------------------------------- pace

    def _wait(self, patience: int | None) -> Woken:
        """Messages, or the end of `patience` in milliseconds."""
        seconds = None if patience is None else patience / 1000
        self._standstill.waits(time.monotonic(), seconds)
        woken = self._sockets.wait(patience)
        stood_still = self._standstill.woke(time.monotonic(), time.thread_time())
        if stood_still:
            _log.warning("%s", stood_still)
        return woken

    def _patience(self, nap: float) -> int | None:
        """Milliseconds to wait for messages; None: for ever, there is nothing to do."""
        if self._reports.waiting_shares:
            return 0
        if not len(self._runner):
            return FILLING_MS if self._usable < self._pool_bytes else None
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
        the thread first of all that sends replies to engines that load.
        """
        if time.monotonic() - last < PAUSE_EVERY:
            return last
        time.sleep(PAUSE_SECONDS)
        return time.monotonic()

    def _announce(self) -> None:
        self._usable = self._device.usable_bytes
        ready = LaneReady(
            device=self._name,
            incarnation=self._incarnation,
            pid=os.getpid(),
            endpoint=self._endpoint,
            pins=self._device.pins,
            usable_bytes=self._usable,
        )
        self._sockets.link.send(LINK.encode(ready), (self._lifeline,))
        os.close(self._lifeline)

    def _tell_usable(self) -> None:
        """Report how much of the pool can be copied, whenever that is more than before."""
        error, usable = self._device.pool_error, self._device.usable_bytes
        if error:
            self._reports.tell_broker(PoolUsable(usable_bytes=0, error=error[:TEXT_LIMIT]))
            self._usable = self._pool_bytes  # nothing follows
        elif usable > self._usable:
            self._reports.tell_broker(PoolUsable(usable_bytes=usable, error=""))
            self._usable = usable

    def __repr__(self) -> str:
        return f"<LaneService {self._name}#{self._incarnation} {self._runner!r}>"
