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

from kvd.logs.lines import LineFormatter
from kvd.logs.queued import QueuedHandler

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
