"""Logging: one line per event on stderr, for people, for journald or as JSON; it never blocks.

Modules use the standard library (``logging.getLogger``), identifiers go into ``extra``: engine,
rank, session, job, lane, pid. Each process configures once. Lines are made here rather than by a
library: those that were tried cost every process of the daemon more time at its start than numpy
does.

A terminal that is stopped, a full pipe that nobody reads, a log on a hung disk: each blocks a
write for as long as it likes. So lines are queued, and a thread writes them. What does not fit the
queue is dropped, and so is what cannot be written at all; a line tells how many. What repeats is
left out: the same event from the same place, so many times a minute.

The text of an exception that was not foreseen may hold the key of a chunk, as that of a KeyError
does. Keys are secrets of their namespace (docs/security.md), so the contents of bytes are left out.
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
    """The text with ``b'…'`` for each bytes literal in it."""
    return _BYTES.sub("b'…'", text)


def safe_repr(error: BaseException) -> str:
    """The exception's repr, without the contents of bytes."""
    return without_bytes(repr(error))


def safe_traceback(error: BaseException) -> str:
    """The exception's traceback, without the contents of bytes."""
    return without_bytes("".join(traceback.format_exception(error)))


_PRIORITIES = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}  # of sd-daemon(3)
_RED, _GREEN, _YELLOW, _BOLD, _DIM, _PLAIN = (f"\x1b[{code}m" for code in (31, 32, 33, 1, 2, 0))
_COLOURS = {"DEBUG": _GREEN, "INFO": _GREEN, "WARNING": _YELLOW}
_OF_EVERY_RECORD = frozenset(vars(logging.makeLogRecord({})))


class LineFormatter(logging.Formatter):
    """Makes one line of a record, or several where there is a traceback.

    Args:
        style: plain, colour, journal or json.
        process: what stands before the text for people, such as `lane host#1`.
        context: identifiers of the process itself, for JSON.
    """

    def __init__(self, style: str, process: str, context: Mapping[str, Any]) -> None:
        super().__init__()
        self._process = process
        self._context = context
        self._form = {
            "plain": self._plain,
            "colour": self._coloured,
            "journal": self._journal,
            "json": self._json,
        }[style]

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line, or lines."""
        trace = without_bytes(self.formatException(record.exc_info)) if record.exc_info else ""
        return self._form(record, trace)

    def _plain(self, record: logging.LogRecord, trace: str) -> str:
        first = f"{_local(record)} [{record.levelname.lower():<9}] {self._text(record)}"
        return "\n".join([first, *_printable_lines(trace)])

    def _coloured(self, record: logging.LogRecord, trace: str) -> str:
        colour = _COLOURS.get(record.levelname, _RED)
        level = f"{colour}{_BOLD}{record.levelname.lower():<9}{_PLAIN}"
        text = f"{_BOLD}{self._text(record)}{_PLAIN}"
        first = f"{_DIM}{_local(record)}{_PLAIN} [{level}] {text}"
        return "\n".join([first, *_printable_lines(trace)])

    def _journal(self, record: logging.LogRecord, trace: str) -> str:
        priority = _PRIORITIES.get(record.levelname, 6)
        lines = [self._text(record), *_printable_lines(trace)]
        return "\n".join(f"<{priority}>{line}" for line in lines)

    def _json(self, record: logging.LogRecord, trace: str) -> str:
        told = {
            **self._context,
            "event": record.getMessage(),
            "time": f"{datetime.fromtimestamp(record.created, UTC):%Y-%m-%dT%H:%M:%S.%fZ}",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        if trace:
            told["exception"] = trace
        told |= {key: vars(record)[key] for key in vars(record).keys() - _OF_EVERY_RECORD}
        return json.dumps(told, default=str)

    def _text(self, record: logging.LogRecord) -> str:
        """What a client wrote must not become lines of the log, nor control a terminal."""
        return printable(f"{self._process}: {record.getMessage()}")


def _local(record: logging.LogRecord) -> str:
    when = datetime.fromtimestamp(record.created)  # noqa: DTZ006  # the machine's time, for people
    return f"{when:%Y-%m-%d %H:%M:%S.%f}"


def _printable_lines(trace: str) -> list[str]:
    return [printable(line) for line in trace.split("\n")] if trace else []


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


STDERR = 2
LEVEL_VARIABLE = "KVD_LOG_LEVEL"
FORMAT_VARIABLE = "KVD_LOG_FORMAT"


def configure(level: str, style: str, process: str, **context: Any) -> None:
    """Log to stderr from here on; child processes that `configure_child` do likewise.

    Args:
        level: debug, info, warning or error.
        style: human or json.
        process: which process this is, for people.
        context: identifiers that go with every line of JSON.
    """
    handler = QueuedHandler(STDERR)
    shown = style if style == "json" else _for_people(os.environ)
    handler.setFormatter(
        LineFormatter(shown, process, {"process": process.split(maxsplit=1)[0], **context})
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
    """Log to stderr as the broker does, in a process that it has started."""
    level = os.environ.get(LEVEL_VARIABLE, "info")
    configure(level, os.environ.get(FORMAT_VARIABLE, "human"), process, **context)


def set_level(level: str) -> None:
    """Log from `level` on, here and in child processes that start from now on."""
    logging.getLogger().setLevel(level.upper())
    os.environ[LEVEL_VARIABLE] = level


def _for_people(environment: Mapping[str, str]) -> str:
    with contextlib.suppress(OSError):
        found = os.fstat(STDERR)
        if environment.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}":
            return "journal"
        if os.isatty(STDERR) and not environment.get("NO_COLOR"):
            return "colour"
    return "plain"


def _on_exception(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        logging.getLogger("kvd").critical("a bug in kvd", exc_info=(kind, error, trace))
