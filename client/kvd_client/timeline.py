"""A worker's control page, and its timeline: numbers that say how far the engine's work has come.

CUDA streams write their numbers into the control page themselves. Numbers are reached in order,
whatever streams they are signalled on; the host never waits.
"""

import contextlib
import ctypes
import mmap
import os
import threading
from abc import ABC, abstractmethod
from typing import Any

from kvd_client import cuda_driver
from kvd_client.errors import KvdClientError, UnsupportedMemory, UsageError, shown
from kvd_client.memory import sealed_file
from kvd_proto.jobs import CONTROL_BYTES, ControlWords

_NOT_CLOSED: list[object] = []  # signals whose page a stream may still write to


class ControlPage(ControlWords):
    """A worker's control page, shared with its lanes."""

    nbytes = CONTROL_BYTES

    def __init__(self) -> None:
        self.fd = sealed_file("kvd-control", CONTROL_BYTES)
        super().__init__(mmap.mmap(self.fd, CONTROL_BYTES))

    @property
    def address(self) -> int:
        """The address of word 0 in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def close(self) -> None:
        """Close the descriptor; the page stays mapped here and in lanes. May be called again."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Signals(ABC):
    """Reaches a timeline's numbers when streams have finished their work so far.

    Attributes:
        device: ordinal of the streams' device.
    """

    device: int

    @abstractmethod
    def signal(self, stream: Any, number: int) -> None:
        """Reach `number` when all that is on the stream now has finished.

        Raises:
            UsageError: not a stream of the kind that is needed.
            KvdClientError, RuntimeError: the device failed; the number may never be reached.
        """

    def events_until(self, number: int) -> list[Any] | None:
        """Return the events to wait for until `number` is reached; None: there are none yet."""
        del number
        return None

    @abstractmethod
    def close(self) -> None:
        """Free what it has. Never blocks, never raises."""


class StreamSignals(Signals):
    """Writes a control page's timeline from a device's CUDA streams. For one thread at a time.

    A stream that is not the last one used waits for the last number first, so that no number is
    reached before an earlier one.

    Raises:
        CudaError: the page cannot be registered.
        UnsupportedMemory: streams of this device cannot write to memory, or there is no driver.
    """

    def __init__(self, device: int, page: ControlPage) -> None:
        self.device = device
        self._page = page
        self._stream: int | None = None
        self._is_recorded = True  # the event happens after all writes of streams
        with cuda_driver.beside_captures(), contextlib.ExitStack() as undo:
            if not cuda_driver.streams_can_write(device):
                raise UnsupportedMemory(
                    f"streams of CUDA device {device} cannot write 64 bits to memory, by which"
                    " kvd learns what has finished: a GPU since Volta is needed"
                )
            self._context = cuda_driver.PrimaryContext(device)
            undo.callback(self._context.release)
            with self._context.current():
                self._event = cuda_driver.new_event()
                undo.callback(cuda_driver.destroy_event, self._event)
                self._address = cuda_driver.register_host(page.address, page.nbytes)
            undo.pop_all()

    def signal(self, stream: int, number: int) -> None:
        """Set the timeline to `number` when all that is on the driver's stream now has finished.

        Another thread may capture a graph meanwhile: all these calls put work on a stream, none
        allocates or queries.

        Raises:
            UsageError: not a driver's handle.
            CudaError: the driver failed; the number may never be reached.
        """
        if not isinstance(stream, int) or stream < 0:
            raise UsageError(f"stream={shown(stream)}: the handle of a CUDA stream is needed")
        with self._context.current():
            if not self._is_recorded and self._stream is not None:
                cuda_driver.record(self._event, self._stream)
                self._is_recorded = True
            if stream != self._stream:
                cuda_driver.stream_waits(stream, self._event)
                self._stream = stream
            self._is_recorded = False
            cuda_driver.write_value(stream, self._address, number)
            cuda_driver.record(self._event, stream)
            self._is_recorded = True

    def close(self) -> None:
        """Free the driver's objects. Never blocks, never raises.

        If a stream may still write to the page, they stay until the process ends.
        """
        _NOT_CLOSED.append(self)
        with (
            contextlib.suppress(KvdClientError),
            cuda_driver.beside_captures(),
            self._context.current(),
        ):
            if self._is_recorded and cuda_driver.has_happened(self._event):
                cuda_driver.unregister_host(self._page.address)
                _NOT_CLOSED.remove(self)
                cuda_driver.destroy_event(self._event)
                self._context.release()


class Timeline:
    """Numbers by which an engine orders its own work: a job waits until its number is reached.

    With CPU memory: ``n = timeline.reserve()``; start the work; submit the job with ``after=n``;
    when the work has finished, ``timeline.signal(n)``. With CUDA memory: put the work on a stream,
    then ``n = timeline.signal_on(stream)``. Numbers are reached in order: signal(7) means that all
    work up to 7 has finished. May be used by any thread.
    """

    def __init__(self, page: ControlPage) -> None:
        self._page = page
        self._lock = threading.Lock()
        self._last = 0
        self._signals: Signals | None = None

    @property
    def reached(self) -> int:
        """The highest number that is reached."""
        return self._page.timeline

    @property
    def device(self) -> int | None:
        """The ordinal of the device whose streams signal; None: the host signals."""
        return None if self._signals is None else self._signals.device

    @property
    def reserved(self) -> int:
        """The highest number that is reserved."""
        return self._last

    def reserve(self) -> int:
        """Return the next number."""
        with self._lock:
            self._last += 1
            return self._last

    def signal(self, number: int) -> None:
        """Reach a reserved number: all work up to it has finished. Not if streams signal."""
        if self._signals is not None:
            raise UsageError(
                f"signal({shown(number)}): this worker's memory is CUDA memory, where only streams"
                " know what has finished; call signal_on(stream)"
            )
        if not isinstance(number, int) or not 0 < number <= self._last:
            raise UsageError(
                f"number={shown(number)}: up to {self._last} are reserved; call reserve() first"
            )
        with self._lock:
            self._page.timeline = max(self._page.timeline, number)

    def signal_on(self, stream: Any) -> int:
        """Return the next number, reached when all work on a stream now has finished.

        Args:
            stream: with exported CUDA memory the driver's handle, such as
                `torch.cuda.current_stream().cuda_stream`; if it is not the stream of the last call,
                its later work waits for the last number too. With staging a torch stream.

        Raises:
            UsageError: not a stream, or the registered memory is host memory.
            CudaError: the driver failed.
        """
        with self._lock:
            if self._signals is None:
                raise UsageError(
                    "signal_on: no memory of a GPU is registered by this worker; call reserve() and"
                    " signal()"
                )
            self._last += 1
            try:
                self._signals.signal(stream, self._last)
            except UsageError:  # nothing is on the stream
                self._last -= 1
                raise
            return self._last

    def events_until(self, number: int) -> list[Any] | None:
        """Return the events that streams wait for until `number` is reached.

        Empty: it is reached. None: it is not, and has no event.
        """
        with self._lock:
            if number <= self._page.timeline:
                return []
            return None if self._signals is None else self._signals.events_until(number)

    def set_signals(self, signals: Signals | None) -> None:
        """Let streams signal from now on, or the host (None); close the signals set before."""
        with self._lock:
            replaced, self._signals = self._signals, signals
            if replaced is not None:
                replaced.close()

    def abandon(self) -> None:
        """In a forked child: drop the signals, which are the parent's."""
        self._lock = threading.Lock()
        self._signals = None
