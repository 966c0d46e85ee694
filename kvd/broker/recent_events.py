"""The recent events, in words for people."""

from collections import deque

from kvd.broker.effects import Event
from kvd.metrics import schema

MAX_EVENTS = 200


class EventLog:
    """The last events, numbered from 1 in the order in which they came."""

    def __init__(self) -> None:
        self._events: deque[schema.Event] = deque(maxlen=MAX_EVENTS)
        self._last = 0

    def add(self, event: Event, time: float) -> None:
        """Note an event; `time` in unix seconds."""
        self._last += 1
        self._events.append(schema.Event(self._last, time, event.level, event.text))

    def recent(self) -> list[schema.Event]:
        """Return the last ones, oldest first."""
        return list(self._events)

    def __repr__(self) -> str:
        return f"<EventLog of {self._last} events>"
