"""Sets up logging, once a process: what a line looks like, and where lines go."""

import atexit
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from structlog.dev import ConsoleRenderer, plain_traceback
from structlog.processors import JSONRenderer, TimeStamper, format_exc_info
from structlog.stdlib import ExtraAdder, ProcessorFormatter, add_log_level, add_logger_name
from structlog.typing import EventDict, WrappedLogger

from kvd.logs.queued import QueuedHandler
from kvd_proto.printable import printable

STDERR = 2
LEVEL_VARIABLE = "KVD_LOG_LEVEL"
FORMAT_VARIABLE = "KVD_LOG_FORMAT"
_PRIORITIES = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}  # of sd-daemon(3)


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


def formatter(style: str, process: str, context: Mapping[str, Any]) -> logging.Formatter:
    """Return what makes one line, or several where there is a traceback, of a record.

    Args:
        style: plain, colour, journal or json.
        process: what stands before the text for people, such as `lane host#1`.
        context: identifiers of the process itself, for JSON.
    """

    def add_context(_logger: WrappedLogger, _name: str, event: EventDict) -> EventDict:
        return {**context, **event}

    def for_people(_logger: WrappedLogger, _name: str, event: EventDict) -> EventDict:
        # What a client wrote must not become lines of the log, nor control a terminal.
        event["event"] = printable(f"{process}: {event['event']}")
        if "exception" in event:
            event["exception"] = "\n".join(map(printable, event["exception"].split("\n")))
        return event

    steps: list[Any] = [format_exc_info]
    if style == "json":
        steps += [
            *(TimeStamper("iso", key="time"), add_log_level, add_logger_name, ExtraAdder()),
            *(add_context, ProcessorFormatter.remove_processors_meta, JSONRenderer(default=str)),
        ]
    elif style == "journal":
        steps += [for_people, _journal]
    else:
        colours = style == "colour"
        steps += [
            *(TimeStamper("%Y-%m-%d %H:%M:%S.%f", utc=False), add_log_level, for_people),
            ProcessorFormatter.remove_processors_meta,
            ConsoleRenderer(0, colors=colours, exception_formatter=plain_traceback),
        ]
    return ProcessorFormatter(processors=steps)


def _journal(_logger: WrappedLogger, _name: str, event: EventDict) -> str:
    priority = _PRIORITIES.get(event["_record"].levelname, 6)
    lines = [event["event"], *event.get("exception", "").splitlines()]
    return "\n".join(f"<{priority}>{line}" for line in lines)
