"""How the work on CUDA streams raises a worker's timeline: without a wait on the host.

A stream writes the number into the control page by itself. Where streams cannot
write, a thread waits for an event of each number and writes it instead. Both
reach numbers in order, whatever streams they were asked for on.
"""

import contextlib
import logging
import queue
import threading
from abc import ABC, abstractmethod

from kvd_client import cuda_driver
from kvd_client.control import ControlPage
from kvd_client.errors import KvdClientError

log = logging.getLogger("kvd_client")
_KEPT: list[object] = []


class StreamSignals(ABC):
    """Raises one control page's timeline from streams. The caller calls from one thread at a time.

    Args:
        device: whose streams they are.
        page: stays the caller's.
    """

    def __init__(self, device: int, page: ControlPage) -> None:
        self._context = cuda_driver.PrimaryContext(device)
        self._page = page

    @abstractmethod
    def signal(self, stream: int, number: int) -> None:
        """Set the timeline to `number` when all that is on the stream now has finished.

        Raises:
            CudaError: the driver refuses; the number may never be reached.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of what the driver holds. Never waits, never raises."""


class StreamWrites(StreamSignals):
    """Streams that write.

    A stream other than the last one waits for the last number first, else a later number could
    be reached before an earlier one.

    Raises:
        CudaError: the page cannot be registered.
    """

    def __init__(self, device: int, page: ControlPage) -> None:
        super().__init__(device, page)
        self._stream: int | None = None
        self._marked = True  # the event is after all that a stream may write
        with contextlib.ExitStack() as undo:
            undo.callback(self._context.release)
            with self._context.current():
                self._last = cuda_driver.new_event()
                undo.callback(cuda_driver.destroy_event, self._last)
                self._word = cuda_driver.register_host(page.address, page.nbytes)
            undo.pop_all()

    def signal(self, stream: int, number: int) -> None:
        """See StreamSignals."""
        with self._context.current():
            if not self._marked and self._stream is not None:
                cuda_driver.record(self._last, self._stream)
                self._marked = True
            if stream != self._stream:
                cuda_driver.stream_waits(stream, self._last)
                self._stream = stream
            self._marked = False
            cuda_driver.write_value(stream, self._word, number)
            cuda_driver.record(self._last, stream)
            self._marked = True

    def close(self) -> None:
        """See StreamSignals. A page that a stream may still write to stays for ever."""
        _KEPT.append(self)
        with contextlib.suppress(KvdClientError), self._context.current():
            if self._marked and cuda_driver.has_happened(self._last):
                cuda_driver.unregister_host(self._page.address)
                _KEPT.remove(self)
                cuda_driver.destroy_event(self._last)
                self._context.release()


class EventWatch(StreamSignals):
    """A thread that waits for one event after the other and writes their numbers."""

    def __init__(self, device: int, page: ControlPage) -> None:
        super().__init__(device, page)
        self._events: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name="kvd-timeline", daemon=True)
        self._thread.start()

    def signal(self, stream: int, number: int) -> None:
        """See StreamSignals."""
        with self._context.current():
            event = cuda_driver.new_event()
            cuda_driver.record(event, stream)
        self._events.put((event, number))

    def close(self) -> None:
        """See StreamSignals. The thread ends after the last event."""
        self._events.put(None)

    def _watch(self) -> None:
        try:
            with self._context.current():
                while (item := self._events.get()) is not None:
                    event, number = item
                    cuda_driver.wait_for(event)
                    self._page.timeline = number
                    cuda_driver.destroy_event(event)
            self._context.release()
        except KvdClientError as error:
            log.error("%s; numbers of the timeline are not reached any more", error)  # noqa: TRY400


def stream_signals(device: int, page: ControlPage) -> StreamSignals:
    """The way that this device has.

    Raises:
        CudaError: the driver refuses.
        UnsupportedMemory: there is no driver.
    """
    if cuda_driver.streams_can_write(device):
        return StreamWrites(device, page)
    return EventWatch(device, page)
