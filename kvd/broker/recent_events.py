"""The recent events, in words for people."""

from collections import deque
from typing import Any

from kvd.broker.effects import Event

MAX_EVENTS = 200


class EventLog:
    """The last events, numbered from 1 in the order in which they came."""

    def __init__(self) -> None:
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._last = 0

    def add(self, event: Event, time: float) -> None:
        """Note an event; `time` in unix seconds."""
        self._last += 1
        self._events.append(
            {"number": self._last, "time": time, "level": event.level, "text": event.text}
        )

    def recent(self) -> list[dict[str, Any]]:
        """The last ones, oldest first, as docs/status.md has them."""
        return list(self._events)

    def __repr__(self) -> str:
        return f"<EventLog of {self._last} events>"
