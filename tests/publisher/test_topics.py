"""Topics: numbers that only grow, and what a publisher leaves to the next one."""

import fcntl
import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kvd.publisher.note import Note
from kvd.publisher.topics import Topics


@given(st.lists(st.sampled_from(["publish", "close", "restart"]), max_size=40))
def test_numbers_grow_by_one_and_over_restarts(steps: list[str]) -> None:
    """A topic that is opened again goes on; another process begins above all before."""
    now = [1_700_000_000.0]
    topics = Topics(lambda: now[0])
    last = 0
    fresh = True
    for step in steps:
        now[0] += 0.001
        if step == "restart":
            topics, fresh = Topics(lambda: now[0]), True
            continue
        topic = topics.open(b"kv@a@m")
        (message,) = topic.messages([b"\x80"])
        assert message.sequence > last if fresh else message.sequence == last + 1
        last, fresh = message.sequence, False
        if step == "close":
            topics.closed(topic)


def test_topics_that_are_closed_are_forgotten_in_time() -> None:
    """Engines come and go under new names for ever."""
    topics = Topics(lambda: 0.0, max_closed=3)
    kept = topics.open(b"kept")
    for number in range(10):
        topics.closed(topics.open(b"%d" % number))
    assert [topic.name for topic in topics.matching(b"")] == [b"kept", b"7", b"8", b"9"]
    assert topics.opened == [kept]
    assert topics.matching(b"k") == [kept]


def test_everything_is_told_once_a_second_at_most() -> None:
    """However often it is asked for."""
    topic = Topics(lambda: 0.0).open(b"kv@a@m")
    assert topic.ready(5.0)
    topic.due, topic.told_at = False, 5.0
    assert not topic.ready(7.0)
    topic.due = True
    assert not topic.ready(5.9)
    assert topic.ready(6.0)


def test_a_note_tells_the_next_publisher_what_was_not_taken_back(tmp_path: Path) -> None:
    """And it is nobody else's to read."""
    path = tmp_path / "published"
    note = Note(path)
    assert note.left == []
    note.write([b"kv@a@m", "kv@é@m".encode()])
    os.close(note._fd)
    after = Note(path)
    assert after.left == [b"kv@a@m", "kv@é@m".encode()]
    after.write([b"x"])
    assert path.read_bytes() == b"x\n"
    assert path.stat().st_mode & 0o777 == 0o600
    after.write([])
    os.close(after._fd)
    last = Note(path)
    assert last.left == []
    with path.open() as other:
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        else:
            raise AssertionError("the note of a publisher that lives is locked")
    os.close(last._fd)
