"""Answers to subscribers that have missed messages.

A request has the first sequence number that is wanted, in 8 bytes big-endian, and may have a topic
after it; without one it is for all topics. The answer is every message from that number on that is
still kept, and an end. Where a topic's messages reach back less far, the answer takes back all
that the topic has said, and everything follows among its events.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvd.publisher.replay import ReplayBuffer
from kvd.publisher.topics import Topic, Topics
from kvd.publisher.wire import CLEARED, END, payloads

MAX_ANSWERS = 16
_AT_ONCE = 64
_END_FRAMES = (b"", END, b"")
Send = Callable[[bytes, Sequence[bytes]], bool | None]


@dataclass(slots=True)
class Answer:
    """What one request still is to get.

    head: frames of the topics that are taken back; their own messages are left out.
    number: in the buffer, of the next message.
    """

    identity: bytes
    sequence: int
    topic: bytes | None
    head: list[tuple[bytes, bytes, bytes]]
    left_out: frozenset[bytes]
    number: int


class Answers:
    """Requests that are being answered, a few at a time; of more the oldest is dropped.

    Args:
        buffer: what was published.
        topics: all of them.
        clock: unix time in seconds.
    """

    def __init__(self, buffer: ReplayBuffer, topics: Topics, clock: Callable[[], float]) -> None:
        self._buffer = buffer
        self._topics = topics
        self._clock = clock
        self._open: dict[bytes, Answer] = {}

    def request(self, frames: Sequence[bytes]) -> None:
        """Take a request: identity, an empty frame, a number, and a topic or not."""
        if len(frames) not in (3, 4) or frames[1] or len(frames[2]) != 8:
            return
        identity, sequence = frames[0], int.from_bytes(frames[2], "big")
        named = frames[3] if len(frames) == 4 else None
        found = [self._topics.get(named)] if named is not None else self._topics.matching(b"")
        lost = [each for each in found if each is not None and self._is_lost(each, sequence)]
        for topic in lost:
            topic.due = topic.open
        self._open.pop(identity, None)
        if len(self._open) >= MAX_ANSWERS:
            del self._open[next(iter(self._open))]
        self._open[identity] = Answer(
            identity,
            sequence,
            named,
            [self._taken_back(topic) for topic in lost],
            frozenset(topic.name for topic in lost),
            self._buffer.first,
        )

    def _is_lost(self, topic: Topic, sequence: int) -> bool:
        """Whether messages from this number on are not all kept."""
        oldest = self._buffer.oldest(topic.name)
        return sequence < (topic.sequence + 1 if oldest is None else oldest)

    def _taken_back(self, topic: Topic) -> tuple[bytes, bytes, bytes]:
        (payload,) = payloads([CLEARED], self._clock())
        return topic.name, topic.sequence.to_bytes(8, "big"), payload

    def turn(self, send: Send) -> bool:
        """Go on with every answer, as far as its receiver takes it; whether that was any further.

        Args:
            send: see `Sockets.answer`.
        """
        further = False
        for answer in list(self._open.values()):
            before = len(answer.head), answer.number
            if self._go_on(answer, send):
                del self._open[answer.identity]
            further |= before != (len(answer.head), answer.number)
        return further

    def _go_on(self, answer: Answer, send: Send) -> bool:
        """Whether the answer is done, or its receiver gone."""
        while answer.head:
            taken = send(answer.identity, answer.head[0])
            if not taken:
                return taken is None
            del answer.head[0]
        if answer.number < self._buffer.first:  # overtaken: begin anew, with what is lost by now
            again = [answer.identity, b"", answer.sequence.to_bytes(8, "big")]
            self.request(again if answer.topic is None else [*again, answer.topic])
            return False
        for _ in range(_AT_ONCE):
            if answer.number >= self._buffer.end:
                return send(answer.identity, _END_FRAMES) is not False
            message = self._buffer.message(answer.number)
            wanted = message.sequence >= answer.sequence and message.topic not in answer.left_out
            if wanted and answer.topic in {None, message.topic}:
                taken = send(answer.identity, message.frames)
                if not taken:
                    return taken is None
            answer.number += 1
        return False

    def __repr__(self) -> str:
        return f"<Answers {len(self._open)} open>"
