"""The last messages of all topics, for subscribers that have missed some."""

from kvd.errors import IntegrityError
from kvd.publisher.wire import Message

MAX_MESSAGES = 10_000
MAX_BYTES = 64 * 2**20


class ReplayBuffer:
    """Keeps the newest messages, up to a number and a sum of payloads' bytes.

    Messages are numbered in the order in which they were published, those of all topics together:
    `first` is the oldest that is kept, `end` the next to come.
    """

    def __init__(self, max_messages: int = MAX_MESSAGES, max_bytes: int = MAX_BYTES) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._messages: dict[int, Message] = {}
        self._oldest: dict[bytes, list[int]] = {}  # by topic: oldest sequence, number of messages
        self._bytes = 0
        self.first = 0
        self.end = 0

    def add(self, message: Message) -> None:
        """Keep a message; the oldest go."""
        self._messages[self.end] = message
        self.end += 1
        self._bytes += len(message.payload)
        self._oldest.setdefault(message.topic, [message.sequence, 0])[1] += 1
        while len(self._messages) > self._max_messages or self._bytes > self._max_bytes:
            self._drop()

    def _drop(self) -> None:
        gone = self._messages.pop(self.first)
        self.first += 1
        self._bytes -= len(gone.payload)
        kept = self._oldest[gone.topic]
        kept[:] = gone.sequence + 1, kept[1] - 1  # a topic's sequence has no gaps
        if not kept[1]:
            del self._oldest[gone.topic]

    def oldest(self, topic: bytes) -> int | None:
        """Return the sequence number of a topic's oldest message here; None: there is none."""
        kept = self._oldest.get(topic)
        return kept[0] if kept is not None else None

    def message(self, number: int) -> Message:
        """Return the message of a number from `first` to below `end`."""
        return self._messages[number]

    def check_integrity(self) -> None:
        """Raise IntegrityError where the sums are wrong."""
        found: dict[bytes, list[int]] = {}
        for message in self._messages.values():
            found.setdefault(message.topic, [message.sequence, 0])[1] += 1
        total = sum(len(message.payload) for message in self._messages.values())
        numbers = list(range(self.first, self.end))
        if (list(self._messages), total, found) != (numbers, self._bytes, self._oldest):
            raise IntegrityError(f"{self!r} holds something else")

    def __repr__(self) -> str:
        return f"<ReplayBuffer of {len(self._messages)} messages, {self._bytes} bytes>"
