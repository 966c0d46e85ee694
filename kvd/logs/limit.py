"""Leaves out what repeats: the same event from the same place, so many times a minute."""

import logging
import re
from dataclasses import dataclass

MOST_A_MINUTE = 100  # an engine of 64 ranks comes and goes in full
WINDOW_SECONDS = 60.0
_MOST_KEYS = 1000
_NUMBER = re.compile(r"[0-9a-f]*[0-9][0-9a-f]*")

Key = tuple[str, int, int, str]


@dataclass(slots=True)
class _Window:
    begin: float
    count: int
    first: logging.LogRecord


class Limiter:
    """Counts records of one kind in windows of a minute.

    A kind is where the record comes from, its level, and its text without
    numbers and without the names in its `extra` (so that a flood of engines
    with ever new names is one kind).
    """

    def __init__(self) -> None:
        self._windows: dict[Key, _Window] = {}

    def admits(self, record: logging.LogRecord, now: float) -> list[logging.LogRecord]:
        """What is to be written now: the record, nothing, or also what was left out before it.

        Args:
            record: what happened.
            now: seconds of a monotonic clock.
        """
        key = _kind(record)
        window = self._windows.get(key)
        if window is not None and now < window.begin + WINDOW_SECONDS:
            window.count += 1
            return [record] if window.count <= MOST_A_MINUTE else []
        before = self._close(key)
        if len(self._windows) >= _MOST_KEYS:
            before += self._close(next(iter(self._windows)))
        self._windows[key] = _Window(now, 1, record)
        return [*before, record]

    def due(self, now: float) -> list[logging.LogRecord]:
        """Records that say what was left out in windows that have ended."""
        ended = [k for k, w in self._windows.items() if now >= w.begin + WINDOW_SECONDS]
        return [record for key in ended for record in self._close(key)]

    def rest(self) -> list[logging.LogRecord]:
        """The same for windows that still run; for the end of the process."""
        return [record for key in list(self._windows) for record in self._close(key)]

    def _close(self, key: Key) -> list[logging.LogRecord]:
        window = self._windows.pop(key, None)
        left_out = window.count - MOST_A_MINUTE if window is not None else 0
        if window is None or left_out <= 0:
            return []
        first = window.first
        return [
            logging.LogRecord(
                first.name,
                first.levelno,
                first.pathname,
                first.lineno,
                "left out %d more lines like: %s",
                (left_out, first.getMessage()),
                None,
            )
        ]

    def __repr__(self) -> str:
        return f"<Limiter of {len(self._windows)} kinds>"


def _kind(record: logging.LogRecord) -> Key:
    text = str(record.msg)
    if not record.args:  # a text that is complete already, such as that of the core's events
        engine = getattr(record, "engine", None)
        if engine:
            text = text.replace(str(engine), "*")
        text = _NUMBER.sub("#", text)
    return record.pathname, record.lineno, record.levelno, text
