"""Puts logging together, once a process."""

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

from kvd.logs.limit import Limiter
from kvd.logs.render import formatter
from kvd.logs.sink import Sink

STDERR = 2
LEVEL_VARIABLE = "KVD_LOG_LEVEL"
FORMAT_VARIABLE = "KVD_LOG_FORMAT"
_LAST_SECONDS = 1.0  # at the end, for whoever reads stderr


class Handler(logging.Handler):
    """Limits, formats and queues; never waits and never raises."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._limiter = Limiter()
        self._closed = False
        self._sink = Sink(fd, self._lost, self._left_out)

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the record's line, if it is not left out."""
        for admitted in self._limiter.admits(record, time.monotonic()):
            self._sink.put(self._line(admitted))

    def _line(self, record: logging.LogRecord) -> bytes:
        try:
            line = self.format(record)
        except Exception as error:  # noqa: BLE001  # a line that cannot be made ends nothing
            line = f"{record.levelname} {record.msg!r} cannot be formatted: {error!r}"
        return line.encode("utf-8", "backslashreplace") + b"\n"

    def _left_out(self) -> list[bytes]:
        with self._held():
            return [self._line(record) for record in self._limiter.due(time.monotonic())]

    def _lost(self, count: int) -> bytes:
        text = "%d lines before this one are lost: nobody read them in time"
        return self._line(
            logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (count,), None)
        )

    def close(self) -> None:
        """Write what is queued, if somebody reads it."""
        if self._closed:  # logging.shutdown comes after this and holds the lock
            return
        self._closed = True
        with self._held():
            rest = [self._line(record) for record in self._limiter.rest()]
        for line in rest:
            self._sink.put(line)
        self._sink.close(_LAST_SECONDS)
        super().close()

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        self.acquire()
        try:
            yield
        finally:
            self.release()


def configure(level: str, style: str, process: str, **context: Any) -> None:
    """Log to stderr from here on; child processes that `configure_child` do likewise.

    Args:
        level: debug, info, warning or error.
        style: human or json.
        process: which process this is, for people.
        context: identifiers that go with every line of JSON.
    """
    handler = Handler(STDERR)
    shown = style if style == "json" else _for_people(os.environ)
    handler.setFormatter(
        formatter(shown, process, {"process": process.split(maxsplit=1)[0], **context})
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
    """The same in a process that the broker has started, as the broker has it."""
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
