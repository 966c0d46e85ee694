"""Lines from records: for people (in colour on a terminal), for journald, as JSON."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import structlog
from structlog.typing import EventDict, WrappedLogger

from kvd_proto.printable import printable

_COLOURS = {"DEBUG": "2", "WARNING": "33", "ERROR": "31", "CRITICAL": "1;31"}
_PRIORITIES = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}  # of sd-daemon(3)


def formatter(style: str, process: str, context: Mapping[str, Any]) -> logging.Formatter:
    """Makes one line, or several where there is a traceback, of a record.

    Args:
        style: plain, colour, journal or json.
        process: what stands before the text for people, such as `lane host#1`.
        context: identifiers of the process itself, for JSON.
    """
    render: dict[str, Callable[[EventDict], str]] = {
        "plain": lambda event: _plain(event, process),
        "colour": lambda event: _colour(event, process),
        "journal": lambda event: _journal(event, process),
    }
    steps: list[Any] = [structlog.processors.format_exc_info]
    if style == "json":
        steps += [_json_fields(context), structlog.processors.JSONRenderer(default=str)]
    else:
        steps.append(lambda _logger, _name, event: render[style](event))
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[structlog.stdlib.ExtraAdder()],
        processors=steps,
    )


def _json_fields(
    context: Mapping[str, Any],
) -> Callable[[WrappedLogger, str, EventDict], EventDict]:
    def fields(logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
        del logger, name
        record = event.pop("_record")
        event.pop("_from_structlog")
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        first = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": event.pop("event"),
        }
        return first | dict(context) | {key: v for key, v in event.items() if v is not None}

    return fields


def _plain(event: EventDict, process: str) -> str:
    record = event["_record"]
    return f"{_clock(record)} {record.levelname:7} {process}: {_text(event)}"


def _colour(event: EventDict, process: str) -> str:
    record = event["_record"]
    text = f"{record.levelname:7} {process}: {_text(event)}"
    colour = _COLOURS.get(record.levelname)
    if colour is not None:
        text = f"\x1b[{colour}m{text}\x1b[0m"
    return f"\x1b[2m{_clock(record)}\x1b[0m {text}"


def _journal(event: EventDict, process: str) -> str:
    prefix = f"<{_PRIORITIES.get(event['_record'].levelname, 6)}>"
    return "\n".join(prefix + line for line in f"{process}: {_text(event)}".split("\n"))


def _clock(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}"


def _text(event: EventDict) -> str:
    # What a client wrote must not become lines of the log, nor control a terminal.
    text = printable(str(event["event"]))
    exception = event.get("exception")
    if not exception:
        return text
    return "\n".join([text, *map(printable, str(exception).split("\n"))])
