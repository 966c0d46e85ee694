"""Writes lines to a descriptor without ever making the caller wait.

A terminal that is stopped, a full pipe that nobody reads, a log on a hung
disk: each blocks a write for as long as it likes. So a thread writes, and
callers only queue. What does not fit the queue is counted and dropped, and so
is what cannot be written at all.
"""

import os
import select
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

MOST_LINES = 2000
PAUSE_SECONDS = 5.0
_BATCH_BYTES = 1 << 16
_END = b""


class Sink:
    """A queue of lines and the thread that writes them.

    Args:
        fd: where to; not closed here.
        lost: makes the line that says how many lines were dropped.
        pause: called by the thread every few seconds; more lines.
    """

    def __init__(
        self, fd: int, lost: Callable[[int], bytes], pause: Callable[[], list[bytes]]
    ) -> None:
        self._fd = fd
        self._lost = lost
        self._pause = pause
        self._queue: SimpleQueue[bytes] = SimpleQueue()  # may be put to from a signal's handler
        self._refused = 0  # counted by callers
        self._failed = 0  # these two by the thread
        self._told = 0
        self._thread = threading.Thread(target=self._run, name="kvd-log", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        """Queue a line, with its end; never waits."""
        if self._queue.qsize() < MOST_LINES:
            self._queue.put(line)
        else:
            self._refused += 1

    def close(self, seconds: float) -> None:
        """Write what is queued, for so long at most."""
        self._queue.put(_END)
        self._thread.join(seconds)

    def _run(self) -> None:
        asked = time.monotonic()
        ended = False
        while not ended:
            lines = self._take()
            ended = _END in lines
            if not ended and time.monotonic() >= asked + PAUSE_SECONDS:
                lines += self._pause()
                asked = time.monotonic()
            count = sum(line != _END for line in lines)
            dropped = self.dropped
            if dropped:
                lines.insert(0, self._lost(dropped))
            if self._write(b"".join(lines)):
                self._told += dropped
            else:
                self._failed += count

    def _take(self) -> list[bytes]:
        try:
            lines = [self._queue.get(timeout=PAUSE_SECONDS)]
        except Empty:
            return []
        size = len(lines[0])
        while lines[-1] != _END and size < _BATCH_BYTES and not self._queue.empty():
            lines.append(self._queue.get())
            size += len(lines[-1])
        return lines

    @property
    def dropped(self) -> int:
        """Lines that were lost and that no line has told of yet."""
        return self._refused + self._failed - self._told

    def _write(self, data: bytes) -> bool:
        """Write all of it, however long that takes; false where it cannot be."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._fd, view) :]
            except BlockingIOError:  # whoever shares the descriptor made it non-blocking
                select.select([], [self._fd], [], 1.0)
            except OSError:
                return False
        return True

    def __repr__(self) -> str:
        return f"<Sink {self._fd}, {self._queue.qsize()} lines wait, {self.dropped} dropped>"
