"""A handler that queues lines, and the thread that writes them: logging never blocks.

A terminal that is stopped, a full pipe that nobody reads, a log on a hung disk: each blocks a
write for as long as it likes. What does not fit the queue is dropped, and so is what cannot be
written at all; a line tells how many.
"""

import logging
import os
import select
import time
from logging.handlers import QueueHandler, QueueListener
from queue import Empty, SimpleQueue
from typing import Any

from kvd.logs.limit import Limiter

MOST_LINES = 2000
_PAUSE_SECONDS = 5.0
_LAST_SECONDS = 1.0  # at the end, for whoever reads stderr


class QueuedHandler(QueueHandler):
    """Limits, formats and queues; never waits and never raises.

    Args:
        fd: where lines are written; not closed here.
    """

    def __init__(self, fd: int) -> None:
        self._lines: SimpleQueue[Any] = SimpleQueue()  # may be put to from a signal's handler
        super().__init__(self._lines)
        self._limiter = Limiter()
        self._dropped = 0
        self._told = 0
        self._closed = False
        self._writer = _Writer(fd, self._lines, self)
        self._writer.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the record's line, if it is not left out."""
        for admitted in self._limiter.admits(record, time.monotonic()):
            self.enqueue(self.prepare(admitted))

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue a record, and before it how many were lost; drop it where the queue is full."""
        if self._lines.qsize() >= MOST_LINES:
            self._dropped += 1
            return
        lost = self._dropped + self._writer.failed - self._told
        if lost:
            self._told += lost
            text = "%d lines before this one are lost: stderr was not read in time"
            told = logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (lost,), None)
            self._lines.put(self.prepare(told))
        self._lines.put(record)

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line, also of one that cannot be formatted."""
        try:
            return super().format(record)
        except Exception as error:  # noqa: BLE001  # a mistake in a call of the log ends nothing
            return f"{record.levelname} {record.msg!r} cannot be formatted: {error!r}"

    def tell_left_out(self, now: float) -> None:
        """Queue what says how many lines were left out in windows that are over."""
        self.acquire()
        try:
            for record in self._limiter.due(now):
                self.enqueue(self.prepare(record))
        finally:
            self.release()

    def close(self) -> None:
        """Write what is queued, if it can be written within a second."""
        if not self._closed:  # logging.shutdown calls it once more
            self._closed = True
            self.tell_left_out(float("inf"))
            self._writer.stop()
            super().close()


class _Writer(QueueListener):
    """The thread that writes lines to a descriptor, however long that takes."""

    def __init__(self, fd: int, lines: SimpleQueue[Any], handler: QueuedHandler) -> None:
        super().__init__(lines)
        self._fd = fd
        self._lines = lines
        self._handler = handler
        self.failed = 0

    def dequeue(self, block: bool) -> logging.LogRecord:
        """Return the next record; while there is none, look what was left out."""
        while True:
            try:
                record: logging.LogRecord = self._lines.get(block, _PAUSE_SECONDS)
            except Empty:
                self._handler.tell_left_out(time.monotonic())
            else:
                return record

    def handle(self, record: logging.LogRecord) -> None:
        """Write one line."""
        data = memoryview(str(record.msg).encode("utf-8", "backslashreplace") + b"\n")
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # whoever shares the descriptor made it non-blocking
                select.select([], [self._fd], [], 1.0)
            except OSError:
                self.failed += 1
                return

    def stop(self) -> None:
        """Let the thread write what is queued, for a second at most."""
        self.enqueue_sentinel()
        if self._thread is not None:
            self._thread.join(_LAST_SECONDS)
