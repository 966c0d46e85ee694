"""Messages that are kept, and answers to subscribers that have missed some."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.publisher.answers import MAX_ANSWERS, Answers
from kvd.publisher.replay import ReplayBuffer
from kvd.publisher.topics import Topics
from kvd.publisher.wire import CLEARED, END, Message, payloads

NAMES = (b"kv@a@m", b"kv@b@m")
ASKED = b"asked by"


class Published:
    """Topics, and what of them is kept."""

    def __init__(self, kept: int = 100) -> None:
        self.now = 1000.0
        self.topics = Topics(lambda: self.now)
        self.buffer = ReplayBuffer(kept)
        self.answers = Answers(self.buffer, self.topics, lambda: self.now)
        self.all: list[Message] = []
        for name in NAMES:
            self.topics.open(name).due = False

    def publish(self, name: bytes, count: int = 1) -> None:
        """Publish messages on a topic."""
        topic = self.topics.get(name)
        assert topic is not None
        for at in range(count):
            for message in topic.messages([b"\xa1" + bytes((at % 256,))]):
                self.buffer.add(message)
                self.all.append(message)

    def ask(self, sequence: int, *more: bytes, room: int = 10**6) -> list[tuple[bytes, ...]]:
        """What is answered, to a receiver that takes so many frames a turn."""
        self.answers.request([ASKED, b"", sequence.to_bytes(8, "big"), *more])
        answer: list[tuple[bytes, ...]] = []
        left = [0]

        def send(identity: bytes, frames: Sequence[bytes]) -> bool:
            assert identity == ASKED
            if not left[0]:
                return False
            left[0] -= 1
            answer.append(tuple(frames))
            return True

        while not answer or answer[-1][1] != END:
            left[0] = room
            self.answers.turn(send)
        return answer[:-1]


@given(
    st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 40)), max_size=60),
    st.integers(1, 10),
    st.integers(1, 100),
)
def test_the_newest_messages_are_kept(
    published: list[tuple[bytes, int]], most: int, max_bytes: int
) -> None:
    """As many as both bounds allow, and the oldest of each topic is known."""
    buffer, numbers = ReplayBuffer(most, max_bytes), dict.fromkeys(NAMES, 0)
    sent = []
    for name, size in published:
        numbers[name] += 1
        sent.append(Message(name, numbers[name], bytes(size)))
        buffer.add(sent[-1])
        buffer.check_integrity()
    kept = [buffer.message(number) for number in range(buffer.first, buffer.end)]
    assert kept == sent[len(sent) - len(kept) :]
    assert len(kept) <= most
    assert sum(len(message.payload) for message in kept) <= max_bytes
    one_more = sent[len(sent) - len(kept) - 1 :]
    if len(kept) < len(sent):
        assert len(one_more) > most or sum(len(m.payload) for m in one_more) > max_bytes
    for name in NAMES:
        first = next((message.sequence for message in kept if message.topic == name), None)
        assert buffer.oldest(name) == first


@pytest.mark.parametrize("room", [1, 3, 10**6])
def test_all_from_a_number_on_is_answered(room: int) -> None:
    """Of one topic or of all, however slowly it is taken."""
    published = Published()
    for _ in range(20):
        published.publish(NAMES[0])
        published.publish(NAMES[1])
    middle = published.all[20].sequence
    wanted = [m.frames for m in published.all if m.topic == NAMES[0] and m.sequence >= middle]
    assert published.ask(middle, NAMES[0], room=room) == wanted
    both = [message.frames for message in published.all if message.sequence >= middle]
    assert published.ask(middle, room=room) == both
    assert len(wanted) < len(both)
    assert published.ask(published.all[-1].sequence + 1, NAMES[1]) == []


def test_what_is_kept_no_more_begins_anew() -> None:
    """The topic is taken back, under its last number, and everything is due on it."""
    published = Published(kept=10)
    published.publish(NAMES[0], 30)
    first = published.all[0].sequence
    (cleared,) = payloads([CLEARED], published.now)
    last = published.all[-1].sequence.to_bytes(8, "big")
    assert published.ask(first, NAMES[0]) == [(NAMES[0], last, cleared)]
    topic, other = map(published.topics.get, NAMES)
    assert topic is not None
    assert topic.due
    assert other is not None
    assert not other.due
    topic.due = False
    published.topics.closed(topic)
    assert published.ask(first, NAMES[0]) == [(NAMES[0], last, cleared)]
    assert not topic.due


def test_an_answer_that_is_overtaken_begins_anew() -> None:
    """A receiver so slow that its messages are dropped meanwhile is told so."""
    published = Published(kept=10)
    published.publish(NAMES[0], 10)
    answers, taken = published.answers, list[tuple[bytes, ...]]()
    answers.request([ASKED, b"", published.all[0].sequence.to_bytes(8, "big"), NAMES[0]])

    def one(_identity: bytes, frames: Sequence[bytes]) -> bool:
        if len(taken) % 2:
            taken.append(())
            return False
        taken.append(tuple(frames))
        return True

    answers.turn(one)
    assert taken[0] == published.all[0].frames
    published.publish(NAMES[0], 30)
    while not taken[-1] or taken[-1][1] != END:
        answers.turn(one)
    sent = [frames for frames in taken if frames]
    assert sent[1][1] == published.all[-1].sequence.to_bytes(8, "big")
    assert sent[1][2] == next(payloads([CLEARED], published.now))
    assert sent[-1][1] == END


@pytest.mark.parametrize(
    "frames",
    [[], [ASKED], [ASKED, b""], [ASKED, b"", b"7"], [ASKED, b"x", bytes(8)], [ASKED, *[b""] * 4]],
)
def test_what_is_no_request_is_not_answered(frames: list[bytes]) -> None:
    """Whatever its frames are."""
    published = Published()
    published.answers.request(frames)
    assert not published.answers.turn(lambda *_: pytest.fail("answered"))


def test_who_does_not_read_or_is_gone_costs_little() -> None:
    """So many answers wait at most, of one receiver one; who is gone is forgotten."""
    published = Published()
    published.publish(NAMES[0])
    for number in range(3 * MAX_ANSWERS):
        for _ in range(2):
            published.answers.request([bytes((number,)), b"", bytes(8)])
    asked: list[bytes] = []

    def full(identity: bytes, _frames: Sequence[bytes]) -> bool:
        asked.append(identity)
        return False

    assert not published.answers.turn(full)
    assert asked == [bytes((n,)) for n in range(2 * MAX_ANSWERS, 3 * MAX_ANSWERS)]
    published.answers.turn(lambda *_: None)
    assert not published.answers.turn(lambda *_: pytest.fail("still there"))
