"""One direction of a device: a stream, and the transfers on it, in order.

The lane's thread enqueues a transfer itself if the driver takes it quickly. A call for many copies
takes the driver half a microsecond or more a copy, without the interpreter's lock. The direction's
own thread enqueues such a transfer, and those submitted after it while that thread is busy: what
was submitted first is enqueued first. So the two directions are fed side by side. The time that the
driver takes for a run depends on driver and way to copy, so every transfer is timed.

An event after each transfer marks its end. A transfer's time is by the lane's clock: from its
submission or the end of the one before it, whichever was later, until its end is seen.
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
    """A thread that processes items in order; it starts with the first item.

    It calls `process` for each item, or `fail` if the context cannot be made current. An exception
    of `process` ends the thread, and is kept as `exception`. The caller bounds the number of items.
    """

    def __init__(
        self,
        name: str,
        context: Context,
        process: Callable[[Item], None],
        fail: Callable[[Item, CudaDriverError], None],
    ) -> None:
        self.exception: BaseException | None = None
        self._name = name
        self._context = context
        self._process = process
        self._fail = fail
        self._queue: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._num_queued = self._num_processed = 0  # each is written by one thread
        self._thread: threading.Thread | None = None

    @property
    def idle(self) -> bool:
        """Whether all items have been processed."""
        return self._num_queued == self._num_processed

    def put(self, item: Item) -> None:
        """Queue an item."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._num_queued += 1
        self._queue.put(item)

    def stop(self) -> None:
        """End the thread, which must be idle."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        has_context = False
        try:
            while (item := self._queue.get()) is not None:
                if not has_context:
                    try:
                        driver.use_context(self._context)
                        has_context = True
                    except CudaDriverError as error:
                        self._fail(item, error)
                if has_context:
                    self._process(item)
                self._num_processed += 1
        except BaseException as error:  # noqa: BLE001  # the lane's thread raises it
            self.exception = error


RUN_NS = 550.0  # the driver's time for a run of a batch, before the first measurement
INLINE_NS = 50_000  # about the cost of handing a transfer over to another thread
_MAX_GROWTH = 1.5
_MIN_TIMED_RUNS = 64


def updated_run_ns(run_ns: float, num_runs: int, nanoseconds: int) -> float:
    """Return the driver's time for a run, in nanoseconds, after one more transfer.

    A shorter time counts at once. A longer one raises the estimate by a half at most, since the
    thread may have waited for the interpreter's lock or a processor. A transfer of few runs does
    not count: the fixed cost of the call is most of its time.
    """
    if num_runs < _MIN_TIMED_RUNS:
        return run_ns
    return min(nanoseconds / num_runs, run_ns * _MAX_GROWTH)


@dataclass(slots=True)
class StreamTransfer:
    """A transfer on the stream, or queued for it.

    Attributes:
        since: when it was submitted, in monotonic seconds.
        end: the event after it.
        is_enqueued: nothing more of it will be enqueued.
        is_marked: `end` marks its end; otherwise it has ended once the stream is idle.
    """

    transfer: Transfer
    runs: RunSlice
    since: float
    end: Event | None = None
    is_enqueued: bool = False
    is_marked: bool = False
    error: str = ""

    def fail(self, error: CudaDriverError) -> None:
        """Set the error, unless there is one."""
        self.error = self.error or f"copy failed: {error}"


class TransferStream:
    """The transfers of one direction; they end in the order of their submission.

    Args:
        direction, priority, copier, context: of the stream's transfers.
        undo: gets the calls that end the thread and destroy stream and events; they are legal once
            nothing is in flight.
        inline_runs: the caller's thread enqueues transfers of at most this many runs; None: those
            that the driver is expected to take within INLINE_NS.

    Raises:
        CudaDriverError: the stream cannot be created.
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
        self._thread: EnqueueThread[StreamTransfer] = EnqueueThread(
            f"copies-{direction}", context, self._enqueue_copies, self._refuse
        )
        undo.add(self._thread.stop)
        self._free_events: list[Event] = []
        self._transfers: deque[StreamTransfer] = deque()
        self._last_end = 0.0
        self._run_ns = RUN_NS
        self.nbytes = 0

    def enqueue(self, transfer: Transfer, runs: RunSlice) -> None:
        """Start a transfer. `progress` reports a failure with its end, when nothing of it moves."""
        entry = StreamTransfer(transfer, runs, time.monotonic())
        self._transfers.append(entry)
        self.nbytes += transfer.nbytes
        try:
            entry.end = self._take_event()
        except CudaDriverError as error:
            self._refuse(entry, error)
            return
        if self._thread.idle and self._is_short(len(runs)):
            self._enqueue_copies(entry)
        else:
            self._thread.put(entry)

    def progress(self) -> list[CompletedTransfer]:
        """Return the transfers that have ended.

        Raises:
            DeviceLost: the context does not answer.
        """
        if self._thread.exception is not None:
            raise self._thread.exception
        transfers, completed = self._transfers, []
        while transfers and transfers[0].is_enqueued and self._has_ended(transfers[0]):
            completed.append(self._complete(transfers.popleft()))
        return completed

    @property
    def stuck_seconds(self) -> float:
        """Seconds since the last end or the first submission; 0 if none is in flight."""
        if not self._transfers:
            return 0.0
        return time.monotonic() - max(self._transfers[0].since, self._last_end)

    def uses(self, memory: int) -> bool:
        """Return whether a transfer of this memory has not ended."""
        return any(entry.transfer.memory == memory for entry in self._transfers)

    def _is_short(self, num_runs: int) -> bool:
        """Return whether the driver takes so many runs quickly enough for the caller's thread."""
        if self._inline_runs is not None:
            return num_runs <= self._inline_runs
        return num_runs * self._run_ns <= INLINE_NS

    def _enqueue_copies(self, entry: StreamTransfer) -> None:
        """Enqueue a transfer's copies, then its event. Called by either thread."""
        num_runs, start = len(entry.runs), time.perf_counter_ns()
        try:
            try:
                if num_runs:
                    self._copier.copy(entry.runs, self.direction, self.stream)
                nanoseconds = time.perf_counter_ns() - start
                self._run_ns = updated_run_ns(self._run_ns, num_runs, nanoseconds)
            finally:
                # After an error, too: some of the copies may have been enqueued.
                if entry.end is not None:
                    driver.record(entry.end, self.stream)
                    entry.is_marked = True
        except CudaDriverError as error:
            entry.fail(error)
        entry.is_enqueued = True

    @staticmethod
    def _refuse(entry: StreamTransfer, error: CudaDriverError) -> None:
        """Mark a transfer as failed; nothing of it will be enqueued."""
        entry.fail(error)
        entry.is_enqueued = True

    def _take_event(self) -> Event:
        if self._free_events:
            return self._free_events.pop()
        event = driver.create_event()
        self._undo.add(driver.destroy_event, event)
        return event

    def _has_ended(self, entry: StreamTransfer) -> bool:
        if entry.end is not None and entry.is_marked:
            try:
                return driver.is_reached(entry.end)
            except CudaDriverError as error:
                # The event's state is unknown: wait until the stream is idle.
                entry.is_marked = False
                entry.fail(error)
        try:
            return driver.is_idle(self.stream)
        except CudaDriverError as error:
            entry.fail(error)
            if not driver.is_alive(self.stream):
                raise DeviceLost(entry.error) from error
            return False  # polled again; see `stuck_seconds`

    def _complete(self, entry: StreamTransfer) -> CompletedTransfer:
        self.nbytes -= entry.transfer.nbytes
        now = time.monotonic()
        nanoseconds = 0 if entry.error else int((now - max(entry.since, self._last_end)) * 1e9)
        self._last_end = now
        if entry.end is not None:
            self._free_events.append(entry.end)
        return CompletedTransfer(entry.transfer, nanoseconds, entry.error)

    def __len__(self) -> int:
        return len(self._transfers)

    def __repr__(self) -> str:
        return f"<TransferStream {self.direction}: {len(self)} in flight, {self.nbytes} bytes>"
