"""Lines from records: for people (in colour on a terminal), for journald, as JSON."""

import logging
from collections.abc import Mapping
from typing import Any

from structlog.dev import ConsoleRenderer, plain_traceback
from structlog.processors import JSONRenderer, TimeStamper, format_exc_info
from structlog.stdlib import ExtraAdder, ProcessorFormatter, add_log_level, add_logger_name
from structlog.typing import EventDict, WrappedLogger

from kvd_proto.printable import printable

_PRIORITIES = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}  # of sd-daemon(3)


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
