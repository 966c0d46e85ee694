"""One direction of a device: a stream, and the transfers on it in the order of their ends."""

import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

from kvd.errors import CudaError
from kvd.lane.devices.cuda import driver
from kvd.lane.devices.cuda.copier import Copier, Runs
from kvd.lane.devices.cuda.driver import Event, Stream, Undo
from kvd.lane.devices.device import Direction, Finished, Transfer


@dataclass(slots=True)
class _Enqueued:
    """A transfer on the stream.

    marked: whether `end` marks its end; otherwise the stream is asked whether it is idle.
    """

    transfer: Transfer
    since: float
    start: Event | None = None
    end: Event | None = None
    marked: bool = False
    run_lists: list[int] = field(default_factory=list)
    error: str = ""

    def fail(self, error: CudaError) -> None:
        self.error = self.error or f"copy failed: {error}"


class Flow:
    """Transfers of one direction; they end in the order in which they were enqueued.

    Args:
        direction: which.
        priority: of its stream.
        copier: shared by both.
        undo: destroys stream and events; nothing may be in flight then.

    Raises:
        CudaError: there is no stream.
    """

    def __init__(self, direction: Direction, priority: int, copier: Copier, undo: Undo) -> None:
        self.direction = direction
        self.stream: Stream = driver.create_stream(priority)
        undo.add(driver.destroy_stream, self.stream)
        self._undo = undo
        self._copier = copier
        self._events: list[Event] = []  # that mark nothing
        self._enqueued: deque[_Enqueued] = deque()
        self._last_end = 0.0
        self.nbytes = 0

    def enqueue(self, transfer: Transfer, runs: Runs) -> None:
        """Start a transfer. What fails of it is reported with its end, when nothing of it moves.

        Raises:
            DeviceLost: the transfer will never be reported.
        """
        entry = _Enqueued(transfer, time.monotonic())
        self._enqueued.append(entry)
        self.nbytes += transfer.nbytes
        try:
            entry.start, entry.end = self._event(), self._event()
            driver.record(entry.start, self.stream)
            try:
                self._copier.enqueue(runs, self.direction, self.stream, entry.run_lists)
            finally:
                # Some of the copies may be on their way even if not all are.
                driver.record(entry.end, self.stream)
                entry.marked = True
        except CudaError as error:
            entry.fail(error)

    def progress(self) -> list[Finished]:
        """The transfers that have ended.

        Raises:
            DeviceLost: nothing will be reported any more.
        """
        ended = []
        while self._enqueued and self._has_ended(self._enqueued[0]):
            ended.append(self._finish(self._enqueued.popleft()))
        return ended

    @property
    def stuck_seconds(self) -> float:
        """For how long the transfer that is next to end has been on the stream."""
        return time.monotonic() - self._enqueued[0].since if self._enqueued else 0.0

    def uses(self, memory: int) -> bool:
        """Whether a transfer of this memory has not ended."""
        return any(entry.transfer.memory == memory for entry in self._enqueued)

    def _event(self) -> Event:
        if self._events:
            return self._events.pop()
        event = driver.create_event()
        self._undo.add(driver.destroy_event, event)
        return event

    def _has_ended(self, entry: _Enqueued) -> bool:
        if entry.end is not None and entry.marked:
            try:
                return driver.is_reached(entry.end)
            except CudaError as error:
                # What an event of unknown state marks is over when the stream is idle.
                entry.marked = False
                entry.fail(error)
        try:
            return driver.is_idle(self.stream)
        except CudaError as error:
            entry.fail(error)
            return False  # asked again; what never ends is noticed by its age

    def _finish(self, entry: _Enqueued) -> Finished:
        self.nbytes -= entry.transfer.nbytes
        took = 0 if entry.error else self._took(entry)
        self._last_end = time.monotonic()
        self._events += [event for event in (entry.start, entry.end) if event is not None]
        self._copier.give_back(entry.run_lists)
        return Finished(entry.transfer, took, entry.error)

    def _took(self, entry: _Enqueued) -> int:
        """Nanoseconds of the device; by this thread's clock where the driver does not report it.

        Its bytes have arrived: not to know the time is no failure.
        """
        if entry.start is not None and entry.end is not None:
            with suppress(CudaError):
                return driver.nanoseconds_between(entry.start, entry.end)
        return int((time.monotonic() - max(entry.since, self._last_end)) * 1e9)

    def __len__(self) -> int:
        return len(self._enqueued)

    def __repr__(self) -> str:
        return f"<Flow {self.direction}: {len(self)} in flight, {self.nbytes} bytes>"
