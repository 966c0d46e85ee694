"""A worker's timeline: numbers that say how far the engine's own work has come.

A CUDA stream writes its number into the control page by itself. Numbers are reached in
order, whatever streams they were asked for on; the host waits for nothing.
"""

import contextlib
import ctypes
import mmap
import os
import threading

from kvd_client import cuda_driver
from kvd_client.errors import KvdClientError, UnsupportedMemory, UsageError, shown
from kvd_client.memory import sealed_file
from kvd_proto.control import CONTROL_BYTES, ControlWords

_KEPT: list[object] = []


class ControlPage(ControlWords):
    """A worker's control page, which only this process and its CUDA streams write."""

    nbytes = CONTROL_BYTES

    def __init__(self) -> None:
        self.fd = sealed_file("kvd-control", CONTROL_BYTES)
        super().__init__(mmap.mmap(self.fd, CONTROL_BYTES))

    @property
    def address(self) -> int:
        """Where word 0 is in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def close(self) -> None:
        """Close the descriptor; a lane that has mapped the page keeps it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class StreamSignals:
    """Raises one control page's timeline from CUDA streams. Used by one thread at a time.

    A stream other than the last one waits for the last number first, else a later number could
    be reached before an earlier one.

    Args:
        device: whose streams they are, by its number in this process.
        page: stays the caller's.

    Raises:
        CudaError: the page cannot be registered.
        UnsupportedMemory: streams of this device cannot write, or there is no driver.
    """

    def __init__(self, device: int, page: ControlPage) -> None:
        self.device = device
        self._page = page
        self._stream: int | None = None
        self._marked = True  # the event is after all that a stream may write
        with cuda_driver.beside_captures(), contextlib.ExitStack() as undo:
            if not cuda_driver.streams_can_write(device):
                raise UnsupportedMemory(
                    f"streams of CUDA device {device} cannot write 64 bits by themselves, by which"
                    " kvd learns what has finished: a GPU since Volta is needed"
                )
            self._context = cuda_driver.PrimaryContext(device)
            undo.callback(self._context.release)
            with self._context.current():
                self._last = cuda_driver.new_event()
                undo.callback(cuda_driver.destroy_event, self._last)
                self._word = cuda_driver.register_host(page.address, page.nbytes)
            undo.pop_all()

    def signal(self, stream: int, number: int) -> None:
        """Set the timeline to `number` when all that is on the stream now has finished.

        Another thread's capture of a graph forbids none of these calls: each is put on a stream,
        and none allocates or asks.

        Raises:
            CudaError: the driver refuses; the number may never be reached.
        """
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
        """Free what the driver holds. Never waits, never raises.

        A page that a stream may still write to stays for ever.
        """
        _KEPT.append(self)
        with (
            contextlib.suppress(KvdClientError),
            cuda_driver.beside_captures(),
            self._context.current(),
        ):
            if self._marked and cuda_driver.has_happened(self._last):
                cuda_driver.unregister_host(self._page.address)
                _KEPT.remove(self)
                cuda_driver.destroy_event(self._last)
                self._context.release()


class Timeline:
    """Numbers for an engine that orders its own work: a job waits for the one that it names.

    ``n = timeline.reserve()``; start the work; submit the job with ``after=n``;
    when the work has finished, ``timeline.signal(n)``. A worker whose memory is
    CUDA memory calls ``n = timeline.signal_on(stream)`` instead, once the work is
    on the stream. Numbers are reached in order: signal(7) means that everything
    up to 7 has finished. May be used by any thread.
    """

    def __init__(self, page: ControlPage) -> None:
        self._page = page
        self._lock = threading.Lock()
        self._last = 0
        self._signals: StreamSignals | None = None

    @property
    def reached(self) -> int:
        """The highest number that has been signalled."""
        return self._page.timeline

    @property
    def device(self) -> int | None:
        """The device whose streams signal, by its number in this process; None: the host does."""
        return None if self._signals is None else self._signals.device

    @property
    def reserved(self) -> int:
        """The highest number that has been given out."""
        return self._last

    def reserve(self) -> int:
        """Return the next number."""
        with self._lock:
            self._last += 1
            return self._last

    def signal(self, number: int) -> None:
        """Reach a reserved number: everything up to it has finished. Not where streams signal."""
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

    def signal_on(self, stream: int) -> int:
        """Return the next number, reached when all that is on a CUDA stream now has finished.

        Args:
            stream: the driver's handle, such as `torch.cuda.current_stream().cuda_stream`. When
                it is another than the last time, its later work waits for the last number too.

        Raises:
            UsageError: not a stream, or the registered memory is not CUDA memory.
            CudaError: the driver refuses.
        """
        if not isinstance(stream, int) or stream < 0:
            raise UsageError(f"stream={shown(stream)}: the handle of a CUDA stream is needed")
        with self._lock:
            if self._signals is None:
                raise UsageError(
                    "signal_on: no CUDA memory is registered by this worker; call reserve() and"
                    " signal()"
                )
            self._last += 1
            self._signals.signal(stream, self._last)
            return self._last

    def set_signals(self, signals: StreamSignals | None) -> None:
        """Let streams signal from now on, or the host (None); close the signals set before."""
        with self._lock:
            replaced, self._signals = self._signals, signals
            if replaced is not None:
                replaced.close()

    def abandon(self) -> None:
        """In a forked child: the driver's things are the parent's."""
        self._lock = threading.Lock()
        self._signals = None
