"""A worker's control page, written by this process and its CUDA streams alone, and its timeline."""

import ctypes
import mmap
import os
import threading
from typing import Protocol

from kvd_client.arguments import shown
from kvd_client.errors import UsageError
from kvd_client.memory import sealed_file
from kvd_proto.control import CONTROL_BYTES, CONTROL_WORDS, TIMELINE_WORD, ControlWords


class ControlPage(ControlWords):
    """A new control page of this process; all words are 0."""

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


class StoreWords:
    """Which words of a control page are free for stores. Not for several threads at once."""

    def __init__(self, page: ControlPage) -> None:
        self._page = page
        self._free = list(range(CONTROL_WORDS - 1, TIMELINE_WORD, -1))

    @property
    def next(self) -> tuple[int, int]:
        """The word that the next store gets and its epoch; word 0 where none is free."""
        word = self._free[-1] if self._free else 0
        return word, self._page.epoch(word)

    def take(self) -> None:
        """A store was sent with `next`."""
        self._free.pop()

    def end(self, word: int) -> None:
        """The store of this word is over. Whatever a lane may still do for it is void."""
        self._page.next_epoch(word)
        self._free.append(word)

    def are_free_but(self, taken: set[int]) -> bool:
        """Whether exactly these words are taken."""
        return sorted([*self._free, *taken]) == list(range(1, CONTROL_WORDS))

    def __repr__(self) -> str:
        return f"<StoreWords {len(self._free)} free>"


class Signals(Protocol):
    """Raises the timeline when work on CUDA streams has finished."""

    def signal(self, stream: int, number: int) -> None:
        """Set the timeline to `number` when all that is on the stream now has finished."""

    def close(self) -> None:
        """Let go of what the driver holds."""


class Timeline:
    """Numbers for an engine that orders its own work: a job waits for the one that it names.

    ``n = timeline.reserve()``; start the work; submit the job with ``after=n``;
    when the work has finished, ``timeline.signal(n)``. A worker whose memory is
    CUDA memory says ``n = timeline.signal_on(stream)`` instead, once the work is
    on the stream. Numbers count as happened in order: signal(7) says that
    everything up to 7 has. May be used by any thread.
    """

    def __init__(self, page: ControlPage) -> None:
        if not isinstance(page, ControlPage):
            raise UsageError(f"page={shown(page)}: take a worker's own, worker.timeline")
        self._page = page
        self._lock = threading.Lock()
        self._last = 0
        self._signals: Signals | None = None

    @property
    def reached(self) -> int:
        """The highest number that has been signalled."""
        return self._page.timeline

    @property
    def reserved(self) -> int:
        """The highest number that has been given out."""
        return self._last

    def reserve(self) -> int:
        """The next number."""
        with self._lock:
            self._last += 1
            return self._last

    def signal(self, number: int) -> None:
        """Everything up to `number` has happened.

        Raises:
            UsageError: a number that was not reserved; or streams signal here.
        """
        if self._signals is not None:
            raise UsageError(
                f"signal({shown(number)}): this worker's memory is CUDA memory, where only streams"
                " know what has finished; call signal_on(stream)"
            )
        if not isinstance(number, int) or not 0 < number <= self._last:
            raise UsageError(
                f"signal({shown(number)}): numbers up to {self._last} are reserved; call reserve()"
                " first"
            )
        with self._lock:
            self._page.timeline = max(self._page.timeline, number)

    def signal_on(self, stream: int) -> int:
        """The next number; it is reached when all that is on a CUDA stream now has finished.

        Args:
            stream: the driver's handle, such as `torch.cuda.current_stream().cuda_stream`. When
                it is another than the last time, its later work waits for the last number too.

        Raises:
            UsageError: no stream, or the registered memory is not CUDA memory.
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

    def follow(self, signals: Signals | None) -> None:
        """From now on streams signal here, or, with None, the host again; ends what was before."""
        with self._lock:
            before, self._signals = self._signals, signals
            if before is not None:
                before.close()

    def abandon(self) -> None:
        """In a forked child: the driver's things are the parent's."""
        self._lock = threading.Lock()
        self._signals = None

    def __repr__(self) -> str:
        return f"<Timeline reached {self.reached}, reserved {self.reserved}>"
