"""One direction of a device: a stream, and the transfers on it in the order of their ends.

A transfer that the driver takes soon is enqueued at once, by the lane's thread. A call for many
copies takes the driver half a microsecond and more a copy, without the interpreter's lock. One that
would keep the lane's thread is given to the direction's own thread, and so are those behind it
while that thread has work: what was submitted first is enqueued first. So the two directions are
fed side by side. How long the driver takes for a run differs by driver and way to copy, so every
transfer is timed.

An event after each transfer marks its end. A transfer's time is the lane's clock: from its
submission, or the end of the one before it, until its end is seen.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvd.errors import CudaDriverError, DeviceLost
from kvd.lane.cuda import driver
from kvd.lane.cuda.copies import Copier, RunSlice
from kvd.lane.cuda.driver import Context, Event, Stream
from kvd.lane.device import CompletedTransfer, Direction, Transfer
from kvd.machine.cuda import Undo

Item = TypeVar("Item")


class EnqueueThread(Generic[Item]):
    """Feeds what it is given, in that order; its thread starts with the first.

    What waits for it is bounded by whoever gives.

    Args:
        name: of the thread.
        context: of the device.
        feed: for each item; does not raise what concerns this item alone.
        fail: for an item when the context cannot be made current, with the error.

    Attributes:
        broken: what `feed` raised all the same; nothing more is fed then.
    """

    def __init__(
        self,
        name: str,
        context: Context,
        feed: Callable[[Item], None],
        fail: Callable[[Item, CudaDriverError], None],
    ) -> None:
        self.broken: BaseException | None = None
        self._name = name
        self._context = context
        self._feed = feed
        self._fail = fail
        self._queue: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._given = self._fed = 0  # each is written by one thread
        self._thread: threading.Thread | None = None

    @property
    def idle(self) -> bool:
        """Whether all that it was given has been fed."""
        return self._given == self._fed

    def give(self, item: Item) -> None:
        """Let it be fed after all that was given before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._given += 1
        self._queue.put(item)

    def stop(self) -> None:
        """End the thread, which is idle."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        current = False
        try:
            while (item := self._queue.get()) is not None:
                if not current:
                    try:
                        driver.use_context(self._context)
                        current = True
                    except CudaDriverError as error:
                        self._fail(item, error)
                if current:
                    self._feed(item)
                self._fed += 1
        except BaseException as error:  # noqa: BLE001  # the lane's thread raises it
            self.broken = error


RUN_NS = 550.0  # what the driver takes for a run of a batch, until it was timed
INLINE_NS = 50_000  # about what it costs to hand a transfer over to another thread
_SLOWER = 1.5  # in one step
_TIMED_RUNS = 64


def run_ns(known: float, runs: int, nanoseconds: int) -> float:
    """What the driver takes for a run, in nanoseconds, after one more transfer.

    Shorter times are believed at once, longer ones by a half each: a thread may have waited for
    the interpreter's lock, or for a processor. Few runs tell nothing: what a call costs by itself
    is most of their time.

    Args:
        known: so far.
        runs: of the transfer.
        nanoseconds: that the driver took for it.
    """
    return min(nanoseconds / runs, known * _SLOWER) if runs >= _TIMED_RUNS else known


@dataclass(slots=True)
class _Enqueued:
    """A transfer on the stream, or on its way there.

    fed: nothing more of it will be enqueued.
    marked: whether `end` marks its end; otherwise the stream is asked whether it is idle.
    """

    transfer: Transfer
    runs: RunSlice
    since: float
    end: Event | None = None
    fed: bool = False
    marked: bool = False
    error: str = ""

    def fail(self, error: CudaDriverError) -> None:
        self.error = self.error or f"copy failed: {error}"


class TransferStream:
    """Transfers of one direction; they end in the order in which they were enqueued.

    Args:
        direction: which.
        priority: of its stream.
        copier: shared by both.
        context: the device's.
        undo: ends the thread, destroys stream and events; nothing may be in flight then.
        inline_runs: transfers of at most so many runs are enqueued by the caller's thread; None:
            those that the driver has taken in INLINE_NS so far.

    Raises:
        CudaDriverError: there is no stream.
    """

    def __init__(
        self,
        direction: Direction,
        priority: int,
        copier: Copier,
        context: Context,
        undo: Undo,
        *,
        inline_runs: int | None = None,
    ) -> None:
        self.direction = direction
        self.stream: Stream = driver.create_stream(priority)
        undo.add(driver.destroy_stream, self.stream)
        self._undo = undo
        self._copier = copier
        self._inline_runs = inline_runs
        self._feeder: EnqueueThread[_Enqueued] = EnqueueThread(
            f"copies-{direction}", context, self._feed, self._refuse
        )
        undo.add(self._feeder.stop)
        self._events: list[Event] = []  # that mark nothing
        self._enqueued: deque[_Enqueued] = deque()
        self._last_end = 0.0
        self._run_ns = RUN_NS
        self.nbytes = 0

    def enqueue(self, transfer: Transfer, runs: RunSlice) -> None:
        """Start a transfer. A failure is reported with its end, when nothing of it moves."""
        entry = _Enqueued(transfer, runs, time.monotonic())
        self._enqueued.append(entry)
        self.nbytes += transfer.nbytes
        try:
            entry.end = self._event()
        except CudaDriverError as error:
            self._refuse(entry, error)
            return
        if self._feeder.idle and self._is_short(len(runs)):
            self._feed(entry)
        else:
            self._feeder.give(entry)

    def progress(self) -> list[CompletedTransfer]:
        """The transfers that have ended.

        Raises:
            DeviceLost: nothing will be reported any more.
        """
        if self._feeder.broken is not None:
            raise self._feeder.broken
        ended = []
        while self._enqueued and self._enqueued[0].fed and self._has_ended(self._enqueued[0]):
            ended.append(self._finish(self._enqueued.popleft()))
        return ended

    @property
    def stuck_seconds(self) -> float:
        """Seconds since the last end or the first submission; 0 where none is in flight."""
        if not self._enqueued:
            return 0.0
        return time.monotonic() - max(self._enqueued[0].since, self._last_end)

    def uses(self, memory: int) -> bool:
        """Whether a transfer of this memory has not ended."""
        return any(entry.transfer.memory == memory for entry in self._enqueued)

    def _is_short(self, runs: int) -> bool:
        """Whether so many runs are not worth handing over to the direction's thread."""
        if self._inline_runs is not None:
            return runs <= self._inline_runs
        return runs * self._run_ns <= INLINE_NS

    def _feed(self, entry: _Enqueued) -> None:
        """Enqueue a transfer's copies, in whichever thread."""
        count, began = len(entry.runs), time.perf_counter_ns()
        try:
            try:
                if count:
                    self._copier.copy(entry.runs, self.direction, self.stream)
                self._run_ns = run_ns(self._run_ns, count, time.perf_counter_ns() - began)
            finally:
                # Some of the copies may be on their way even if not all are.
                if entry.end is not None:
                    driver.record(entry.end, self.stream)
                    entry.marked = True
        except CudaDriverError as error:
            entry.fail(error)
        entry.fed = True

    @staticmethod
    def _refuse(entry: _Enqueued, error: CudaDriverError) -> None:
        """Nothing of a transfer will be enqueued."""
        entry.fail(error)
        entry.fed = True

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
            except CudaDriverError as error:
                # What an event of unknown state marks is over when the stream is idle.
                entry.marked = False
                entry.fail(error)
        try:
            return driver.is_idle(self.stream)
        except CudaDriverError as error:
            entry.fail(error)
            if not driver.is_alive(self.stream):
                raise DeviceLost(entry.error) from error
            return False  # asked again; what never ends is noticed by its age

    def _finish(self, entry: _Enqueued) -> CompletedTransfer:
        self.nbytes -= entry.transfer.nbytes
        now = time.monotonic()
        took = 0 if entry.error else int((now - max(entry.since, self._last_end)) * 1e9)
        self._last_end = now
        if entry.end is not None:
            self._events.append(entry.end)
        return CompletedTransfer(entry.transfer, took, entry.error)

    def __len__(self) -> int:
        return len(self._enqueued)

    def __repr__(self) -> str:
        return f"<Flow {self.direction}: {len(self)} in flight, {self.nbytes} bytes>"
