"""What a line of the log looks like: for people, for journald, or as JSON.

Written here rather than taken from a library: those that were tried cost every process of the
daemon more time at its start than numpy does.
"""

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from kvd.logs.faults import without_bytes
from kvd_proto.printable import printable

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
