"""A handler that queues lines, and the thread that writes them: logging never blocks.

A terminal that is stopped, a full pipe that nobody reads, a log on a hung disk: each blocks a
write for as long as it likes. What does not fit the queue is dropped, and so is what cannot be
written at all; a line tells how many. What repeats is left out: the same event from the same
place, so many times a minute.
"""

import logging
import os
import re
import select
import threading
import time
from dataclasses import dataclass
from queue import Empty, SimpleQueue

MOST_A_MINUTE = 100  # an engine of 64 ranks comes and goes in full
WINDOW_SECONDS = 60.0
_MOST_KINDS = 1000
_NUMBER = re.compile(r"[0-9a-f]*[0-9][0-9a-f]*")

Kind = tuple[str, int, int, str]

MOST_LINES = 2000
_PAUSE_SECONDS = 5.0
_LAST_SECONDS = 1.0  # at the end, for whoever reads stderr


class QueuedHandler(logging.Handler):
    """Limits, formats and queues; never waits and never raises.

    Args:
        fd: where lines are written; not closed here.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._limiter = Limiter()
        self._lines: SimpleQueue[str | None] = SimpleQueue()  # None ends the thread
        self._dropped = 0  # for want of room, by whoever logs
        self._failed = 0  # by the thread
        self._told = 0
        self._ended = False
        self._thread = threading.Thread(target=self._write_all, name="kvd-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the record's line, if it is not left out."""
        self._queue(self._limiter.admits(record, time.monotonic()))

    def _queue(self, records: list[logging.LogRecord]) -> None:
        """Queue lines, and before them how many were lost; drop them where the queue is full."""
        for record in records:
            if self._lines.qsize() >= MOST_LINES:
                self._dropped += 1
                continue
            lost = self._dropped + self._failed - self._told
            if lost:
                self._told += lost
                text = "%d lines before this one are lost: stderr was not read in time"
                told = logging.LogRecord(
                    __name__, logging.WARNING, __file__, 0, text, (lost,), None
                )
                self._lines.put(self.format(told))
            self._lines.put(self.format(record))

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line, also of one that cannot be formatted."""
        try:
            return super().format(record)
        except Exception as error:  # noqa: BLE001  # a mistake in a call of the log ends nothing
            return f"{record.levelname} {record.msg!r} cannot be formatted: {error!r}"

    def close(self) -> None:
        """Write what is queued, if it can be written within a second."""
        if not self._ended:  # logging.shutdown calls it once more
            self._ended = True
            self._tell_left_out(float("inf"))
            self._lines.put(None)
            self._thread.join(_LAST_SECONDS)
            super().close()

    def _tell_left_out(self, now: float) -> None:
        """Queue what says how many lines were left out in windows that are over."""
        self.acquire()
        try:
            self._queue(self._limiter.due(now))
        finally:
            self.release()

    def _write_all(self) -> None:
        """Write lines, however long that takes; while there is none, look what was left out."""
        while True:
            try:
                line = self._lines.get(timeout=_PAUSE_SECONDS)
            except Empty:
                self._tell_left_out(time.monotonic())
                continue
            if line is None:
                return
            data = memoryview(line.encode("utf-8", "backslashreplace") + b"\n")
            while data:
                try:
                    data = data[os.write(self._fd, data) :]
                except BlockingIOError:  # whoever shares the descriptor made it non-blocking
                    select.select([], [self._fd], [], 1.0)
                except OSError:
                    self._failed += 1
                    break


@dataclass(slots=True)
class _Window:
    begin: float
    first: logging.LogRecord
    count: int = 0


class Limiter:
    """Counts records of one kind in windows of a minute.

    A kind is where the record comes from, its level, and its text without
    numbers and without the engine's name in its `extra` (so that a flood of
    engines with ever new names is one kind).
    """

    def __init__(self) -> None:
        self._windows: dict[Kind, _Window] = {}  # the oldest first

    def admits(self, record: logging.LogRecord, now: float) -> list[logging.LogRecord]:
        """Return what is to be written now: the record, if it is within the limit, and `due`.

        Args:
            record: what happened.
            now: seconds of a monotonic clock.
        """
        records = self.due(now)
        window = self._windows.setdefault(_kind(record), _Window(now, record))
        window.count += 1
        return [*records, record] if window.count <= MOST_A_MINUTE else records

    def due(self, now: float) -> list[logging.LogRecord]:
        """End the windows that are over, and return records that say what was left out in them."""
        notices = []
        while self._windows:
            kind, window = next(iter(self._windows.items()))
            if now < window.begin + WINDOW_SECONDS and len(self._windows) < _MOST_KINDS:
                break
            del self._windows[kind]
            left_out = window.count - MOST_A_MINUTE
            if left_out > 0:
                notices.append(_notice(window.first, left_out))
        return notices

    def __repr__(self) -> str:
        return f"<Limiter of {len(self._windows)} kinds>"


def _notice(like: logging.LogRecord, left_out: int) -> logging.LogRecord:
    text, arguments = "left out %d more lines like: %s", (left_out, like.getMessage())
    return logging.LogRecord(
        like.name, like.levelno, like.pathname, like.lineno, text, arguments, None
    )


def _kind(record: logging.LogRecord) -> Kind:
    text = str(record.msg)
    if not record.args:  # a text that is complete already, such as that of the core's events
        engine = getattr(record, "engine", None)
        if engine:
            text = text.replace(str(engine), "*")
        text = _NUMBER.sub("#", text)
    return record.pathname, record.lineno, record.levelno, text
