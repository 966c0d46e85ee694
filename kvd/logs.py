"""Logging: one line per event on stderr, as text, for journald or as JSON; it never blocks.

Modules use the standard library (``logging.getLogger``); identifiers go into ``extra``: engine,
rank, session, job, lane, pid. Each process configures logging once. kvd formats its lines itself
because logging libraries take longer to import than numpy.

A write to a stopped terminal, a full pipe or a hung disk can block without limit. So lines are
queued, and a thread writes them. Lines that do not fit the queue or cannot be written are dropped;
a later line reports how many. Repeated events of one kind are limited per minute.

The text of an unexpected exception, such as a KeyError, may contain the key of a chunk. Keys are
secrets of their namespace (docs/security.md), so the contents of bytes literals are removed.
"""

import atexit
import contextlib
import json
import logging
import os
import re
import select
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any

from kvd_proto.text import printable

_BYTES = re.compile(r"""\b[bB](?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""")


def without_bytes(text: str) -> str:
    """Return the text with each bytes literal replaced by ``b'…'``."""
    return _BYTES.sub("b'…'", text)


def safe_repr(error: BaseException) -> str:
    """Return the exception's repr, without the contents of bytes literals."""
    return without_bytes(repr(error))


def safe_traceback(error: BaseException) -> str:
    """Return the exception's traceback, without the contents of bytes literals."""
    return without_bytes("".join(traceback.format_exception(error)))


_PRIORITIES = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}  # of sd-daemon(3)
_RED, _GREEN, _YELLOW, _BOLD, _DIM, _PLAIN = (f"\x1b[{code}m" for code in (31, 32, 33, 1, 2, 0))
_COLOURS = {"DEBUG": _GREEN, "INFO": _GREEN, "WARNING": _YELLOW}
_STANDARD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({})))


class LineFormatter(logging.Formatter):
    """Formats a record as one line, or as several if it has a traceback.

    Args:
        style: plain, colour, journal or json.
        process: prefix of the text, such as `lane host#1`.
        context: identifiers of the process, for JSON.
    """

    def __init__(self, style: str, process: str, context: Mapping[str, Any]) -> None:
        super().__init__()
        self._process = process
        self._context = context
        self._render = {
            "plain": self._plain,
            "colour": self._coloured,
            "journal": self._journal,
            "json": self._json,
        }[style]

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line or lines."""
        trace = without_bytes(self.formatException(record.exc_info)) if record.exc_info else ""
        return self._render(record, trace)

    def _plain(self, record: logging.LogRecord, trace: str) -> str:
        first_line = f"{_local(record)} [{record.levelname.lower():<9}] {self._text(record)}"
        return "\n".join([first_line, *_printable_lines(trace)])

    def _coloured(self, record: logging.LogRecord, trace: str) -> str:
        colour = _COLOURS.get(record.levelname, _RED)
        level = f"{colour}{_BOLD}{record.levelname.lower():<9}{_PLAIN}"
        text = f"{_BOLD}{self._text(record)}{_PLAIN}"
        first_line = f"{_DIM}{_local(record)}{_PLAIN} [{level}] {text}"
        return "\n".join([first_line, *_printable_lines(trace)])

    def _journal(self, record: logging.LogRecord, trace: str) -> str:
        priority = _PRIORITIES.get(record.levelname, 6)
        lines = [self._text(record), *_printable_lines(trace)]
        return "\n".join(f"<{priority}>{line}" for line in lines)

    def _json(self, record: logging.LogRecord, trace: str) -> str:
        fields = {
            **self._context,
            "event": record.getMessage(),
            "time": f"{datetime.fromtimestamp(record.created, UTC):%Y-%m-%dT%H:%M:%S.%fZ}",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        if trace:
            fields["exception"] = trace
        fields |= {key: vars(record)[key] for key in vars(record).keys() - _STANDARD_ATTRIBUTES}
        return json.dumps(fields, default=str)

    def _text(self, record: logging.LogRecord) -> str:
        """Return printable text: a client's text must not add log lines or control a terminal."""
        return printable(f"{self._process}: {record.getMessage()}")


def _local(record: logging.LogRecord) -> str:
    local_time = datetime.fromtimestamp(record.created)  # noqa: DTZ006  # the machine's time, for people
    return f"{local_time:%Y-%m-%d %H:%M:%S.%f}"


def _printable_lines(trace: str) -> list[str]:
    return [printable(line) for line in trace.split("\n")] if trace else []


MAX_PER_MINUTE = 100  # an engine of 64 ranks attaches and detaches within it
WINDOW_SECONDS = 60.0
_MAX_KINDS = 1000
_NUMBER = re.compile(r"[0-9a-f]*[0-9][0-9a-f]*")

Kind = tuple[str, int, int, str]

MAX_QUEUED_LINES = 2000
_IDLE_SECONDS = 5.0
_CLOSE_SECONDS = 1.0  # to write the queued lines at exit


class QueuedHandler(logging.Handler):
    """Rate-limits, formats and queues records; never waits and never raises.

    Args:
        fd: the descriptor that lines are written to; not closed here.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._limiter = RateLimiter()
        self._lines: SimpleQueue[str | None] = SimpleQueue()  # None ends the thread
        self._num_dropped = 0  # the queue was full; written by logging threads
        self._num_failed = 0  # write errors; written by the writer thread
        self._num_reported_lost = 0
        self._ended = False
        self._thread = threading.Thread(target=self._write_all, name="kvd-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the record's line unless its kind is over the rate limit."""
        self._queue(self._limiter.records_to_write(record, time.monotonic()))

    def _queue(self, records: list[logging.LogRecord]) -> None:
        """Queue lines, preceded by a notice of lost ones; drop lines that do not fit the queue."""
        for record in records:
            if self._lines.qsize() >= MAX_QUEUED_LINES:
                self._num_dropped += 1
                continue
            num_lost = self._num_dropped + self._num_failed - self._num_reported_lost
            if num_lost:
                self._num_reported_lost += num_lost
                text = "%d lines before this one are lost: stderr was not read in time"
                notice = logging.LogRecord(
                    __name__, logging.WARNING, __file__, 0, text, (num_lost,), None
                )
                self._lines.put(self.format(notice))
            self._lines.put(self.format(record))

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line; for a record that cannot be formatted, its raw message."""
        try:
            return super().format(record)
        except Exception as error:  # noqa: BLE001  # a wrong log call must not raise
            return f"{record.levelname} {record.msg!r} cannot be formatted: {error!r}"

    def close(self) -> None:
        """Write the queued lines, for at most a second."""
        if not self._ended:  # logging.shutdown calls it again
            self._ended = True
            self._report_suppressed(float("inf"))
            self._lines.put(None)
            self._thread.join(_CLOSE_SECONDS)
            super().close()

    def _report_suppressed(self, now: float) -> None:
        """Queue notices of how many lines were suppressed in windows that have ended."""
        self.acquire()
        try:
            self._queue(self._limiter.expire(now))
        finally:
            self.release()

    def _write_all(self) -> None:
        """Writer thread: write queued lines; while idle, report suppressed ones."""
        while True:
            try:
                line = self._lines.get(timeout=_IDLE_SECONDS)
            except Empty:
                self._report_suppressed(time.monotonic())
                continue
            if line is None:
                return
            data = memoryview(line.encode("utf-8", "backslashreplace") + b"\n")
            while data:
                try:
                    data = data[os.write(self._fd, data) :]
                except BlockingIOError:  # another process set the shared descriptor non-blocking
                    select.select([], [self._fd], [], 1.0)
                except OSError:
                    self._num_failed += 1
                    break


@dataclass(slots=True)
class _Window:
    begin: float
    first: logging.LogRecord
    count: int = 0


class RateLimiter:
    """Admits at most `MAX_PER_MINUTE` records of one kind per minute.

    A kind is a record's source line, its level, and its text without numbers and without the
    engine's name, so that a flood of engines with different names counts as one kind.
    """

    def __init__(self) -> None:
        self._windows: dict[Kind, _Window] = {}  # the oldest first

    def records_to_write(self, record: logging.LogRecord, now: float) -> list[logging.LogRecord]:
        """Return the records to write now.

        A notice for each ended window that suppressed records, then `record` if its kind is within
        the limit.

        Args:
            record: the new record.
            now: seconds of a monotonic clock.
        """
        records = self.expire(now)
        window = self._windows.setdefault(_kind(record), _Window(now, record))
        window.count += 1
        return [*records, record] if window.count <= MAX_PER_MINUTE else records

    def expire(self, now: float) -> list[logging.LogRecord]:
        """Remove windows that have ended; return notices of the records suppressed in them."""
        notices = []
        while self._windows:
            kind, window = next(iter(self._windows.items()))
            if now < window.begin + WINDOW_SECONDS and len(self._windows) < _MAX_KINDS:
                break
            del self._windows[kind]
            num_suppressed = window.count - MAX_PER_MINUTE
            if num_suppressed > 0:
                notices.append(_notice(window.first, num_suppressed))
        return notices


def _notice(like: logging.LogRecord, num_suppressed: int) -> logging.LogRecord:
    text, arguments = "left out %d more lines like: %s", (num_suppressed, like.getMessage())
    return logging.LogRecord(
        like.name, like.levelno, like.pathname, like.lineno, text, arguments, None
    )


def _kind(record: logging.LogRecord) -> Kind:
    text = str(record.msg)
    if not record.args:  # a text without arguments, such as that of the broker's events
        engine = getattr(record, "engine", None)
        if engine:
            text = text.replace(str(engine), "*")
        text = _NUMBER.sub("#", text)
    return record.pathname, record.lineno, record.levelno, text


STDERR = 2
LEVEL_VARIABLE = "KVD_LOG_LEVEL"
FORMAT_VARIABLE = "KVD_LOG_FORMAT"


def configure(level: str, style: str, process: str, **context: Any) -> None:
    """Log to stderr from now on; child processes that call `configure_child` use the same settings.

    Args:
        level: debug, info, warning or error.
        style: human or json.
        process: prefix of each line's text.
        context: identifiers added to every line of JSON.
    """
    handler = QueuedHandler(STDERR)
    line_style = style if style == "json" else _text_style(os.environ)
    handler.setFormatter(
        LineFormatter(line_style, process, {"process": process.split(maxsplit=1)[0], **context})
    )
    logging.basicConfig(handlers=[handler], force=True)
    logging.captureWarnings(capture=True)
    set_level(level)
    os.environ[FORMAT_VARIABLE] = style
    sys.excepthook = _on_exception
    threading.excepthook = lambda args: _on_exception(
        args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback
    )
    atexit.register(handler.close)


def configure_child(process: str, **context: Any) -> None:
    """Log to stderr with the broker's settings, in a process that the broker has started."""
    level = os.environ.get(LEVEL_VARIABLE, "info")
    configure(level, os.environ.get(FORMAT_VARIABLE, "human"), process, **context)


def set_level(level: str) -> None:
    """Log from `level` on, in this process and in child processes started later."""
    logging.getLogger().setLevel(level.upper())
    os.environ[LEVEL_VARIABLE] = level


def _text_style(environment: Mapping[str, str]) -> str:
    with contextlib.suppress(OSError):
        status = os.fstat(STDERR)
        if environment.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}":
            return "journal"
        if os.isatty(STDERR) and not environment.get("NO_COLOR"):
            return "colour"
    return "plain"


def _on_exception(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        logging.getLogger("kvd").critical("a bug in kvd", exc_info=(kind, error, trace))
