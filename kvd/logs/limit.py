"""Leaves out what repeats: the same event from the same place, so many times a minute."""

import logging
import re
from dataclasses import dataclass

MOST_A_MINUTE = 100  # an engine of 64 ranks comes and goes in full
WINDOW_SECONDS = 60.0
_MOST_KINDS = 1000
_NUMBER = re.compile(r"[0-9a-f]*[0-9][0-9a-f]*")

Kind = tuple[str, int, int, str]


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
