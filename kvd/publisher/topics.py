"""What is published under one name, numbered."""

from collections.abc import Callable, Iterable

from kvd.publisher.wire import CLEARED, Message, payloads

EVERYTHING_SECONDS = 1.0


class Topic:
    """One engine's events.

    The sequence begins with the time in microseconds, and goes up by one with each message: that
    is slower than the clock, so it also grows from one process to the next.

    Args:
        name: as subscribers see it.
        clock: unix time in seconds.

    Attributes:
        sequence: of the last message.
        open: an engine stands behind it.
        due: everything is to be published again.
        told_at: when that was last begun, in monotonic seconds.
    """

    def __init__(self, name: bytes, clock: Callable[[], float]) -> None:
        self.name = name
        self._clock = clock
        self.sequence = int(clock() * 1e6)
        self.open = False
        self.due = False
        self.told_at = float("-inf")

    def messages(self, events: Iterable[bytes]) -> list[Message]:
        """Return the messages that publish these encoded events."""
        made = []
        for payload in payloads(events, self._clock()):
            self.sequence += 1
            made.append(Message(self.name, self.sequence, payload))
        return made

    def cleared(self) -> list[Message]:
        """Return the message that takes back everything, in all media."""
        return self.messages([CLEARED])

    def ready(self, now: float) -> bool:
        """Whether everything may be published again: it is due, and was not just done."""
        return self.due and now >= self.told_at + EVERYTHING_SECONDS

    def __repr__(self) -> str:
        return f"<Topic {self.name.decode()} {'open' if self.open else 'closed'} {self.sequence}>"


class Topics:
    """Every topic, by name; of those that are closed the last ones, with their sequences.

    Args:
        clock: unix time in seconds.
    """

    def __init__(self, clock: Callable[[], float], max_closed: int = 1024) -> None:
        self._clock = clock
        self._max_closed = max_closed
        self._all: dict[bytes, Topic] = {}

    def open(self, name: bytes) -> Topic:
        """Open a topic; everything is due on it."""
        topic = self._all.get(name) or Topic(name, self._clock)
        self._all[name] = topic
        topic.open = topic.due = True
        topic.told_at = float("-inf")
        return topic

    def closed(self, topic: Topic) -> None:
        """Note that a topic is closed, all of it taken back."""
        topic.open = topic.due = False
        self._all[topic.name] = self._all.pop(topic.name)  # the newest of them
        shut = [each for each in self._all.values() if not each.open]
        for each in shut[: max(0, len(shut) - self._max_closed)]:
            del self._all[each.name]

    def get(self, name: bytes) -> Topic | None:
        """Return a topic, open or closed."""
        return self._all.get(name)

    def matching(self, prefix: bytes) -> list[Topic]:
        """Return the topics, open or closed, that a subscription is for."""
        return [topic for name, topic in self._all.items() if name.startswith(prefix)]

    @property
    def opened(self) -> list[Topic]:
        """Those that are open."""
        return [topic for topic in self._all.values() if topic.open]

    def __repr__(self) -> str:
        return f"<Topics {len(self.opened)} open of {len(self._all)}>"
