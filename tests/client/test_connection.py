"""One connection, used by several threads: each gets its own reply, and none waits for another."""

import threading
import time

import pytest

from kvd_client import Scheduler, connection
from kvd_client.connection import Connection
from kvd_client.errors import DaemonLost, Refused
from kvd_proto.codec import WIRE
from kvd_proto.messages import Error, ErrorCode, Ping, Pong, Status, StatusReport
from tests.client.fake_daemon import SECONDS, FakeDaemon
from tests.waiting import eventually


@pytest.fixture
def line(daemon: FakeDaemon, quiet: Scheduler) -> Connection:
    """A connection that nobody else uses."""
    del daemon
    assert quiet._connection is not None
    return quiet._connection


def ask(line: Connection, seconds: float = SECONDS) -> object:
    """A request that waits for its reply."""
    return line.exchange(Status(), time.monotonic() + seconds)


def test_a_reply_reaches_who_waits_for_it_whoever_takes_it_in(
    daemon: FakeDaemon, line: Connection
) -> None:
    """Another thread may be at the socket when it comes."""
    daemon.freeze()
    got: list[object] = []
    waiting = threading.Thread(target=lambda: got.append(ask(line)))
    waiting.start()
    eventually(lambda: line._awaited)
    daemon.thaw()
    while waiting.is_alive():
        line.receive_all()
    waiting.join()
    assert got == [StatusReport(status={"ready": True})]


def test_replies_to_posted_requests_are_kept_in_their_order(
    daemon: FakeDaemon, line: Connection
) -> None:
    """Nobody waits for them; a request that waits meanwhile takes them in with its own."""
    daemon.freeze()
    posted = [line.post(Ping()) for _ in range(3)]
    assert line.num_unanswered == 3
    assert list(line.take_replies()) == []
    assert line.oldest_posted_at is not None
    assert line.is_overdue(0.0)
    assert not line.is_overdue(SECONDS)
    daemon.thaw()
    ask(line)
    assert line.num_unanswered == 0
    assert line.has_replies
    assert not line.is_overdue(0.0)
    replies = list(line.take_replies())
    assert [number for number, _ in replies] == posted
    assert {type(reply) for _, reply in replies} == {Pong}
    assert not line.has_replies


@pytest.mark.parametrize("wrong", ["request", "bytes"])
def test_what_is_no_answer_ends_the_connection(
    daemon: FakeDaemon, line: Connection, wrong: str
) -> None:
    """To a request that was not made, or nothing that can be read."""
    (session,) = daemon.sessions
    sent = WIRE.encode(Pong(pid=1), 12345) if wrong == "request" else b"nothing"

    def answer(_: Status) -> None:
        daemon._server.send(session.client, sent)

    daemon.replies[Status] = answer
    with pytest.raises(DaemonLost):
        ask(line)
    assert line.failure


def test_a_closed_connection_takes_nothing(daemon: FakeDaemon, line: Connection) -> None:
    """Who waits is told, who posts is told, and nothing is sent under a descriptor's old number."""
    daemon.freeze()
    lost: list[str] = []

    def wait() -> None:
        try:
            ask(line, 3600.0)
        except DaemonLost as error:
            lost.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    eventually(lambda: line._awaited)
    line.close()
    waiting.join()
    assert lost
    assert line.post(Ping()) == 0
    line.receive_all()
    with pytest.raises(DaemonLost):
        ask(line)
    daemon.thaw()


def test_a_notice_that_another_thread_takes_in_wakes_the_keeper(
    daemon: FakeDaemon, quiet: Scheduler, line: Connection
) -> None:
    """While callers are busy with the connection the keeper does not poll for it."""
    stop, busy = threading.Event(), threading.Event()

    def use() -> None:
        while not stop.is_set():
            ask(line)
            busy.set()

    using = threading.Thread(target=use)
    using.start()
    assert busy.wait(SECONDS)
    daemon.attach(quiet)
    stop.set()
    using.join()


def test_replies_to_a_busy_caller_do_not_wake_the_keeper(
    daemon: FakeDaemon, quiet: Scheduler, line: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine posts once a step: its reply costs no switch between threads."""
    monkeypatch.setattr(connection, "BUSY_SECONDS", SECONDS)
    tended = threading.Event()
    monkeypatch.setattr(quiet, "_receive", lambda _: tended.set())
    line.post(Ping())
    assert tended.wait(SECONDS)  # it was waiting for anything that arrives
    tended.clear()
    for _ in range(3):
        line.post(Ping())
    ask(line)  # takes in the replies to these, too
    assert not line.num_unanswered
    assert not tended.is_set()
    daemon.kill()  # which it is to see at once
    assert tended.wait(SECONDS)


def test_a_refusal_is_the_reason_of_all_that_fails(daemon: FakeDaemon, line: Connection) -> None:
    """Of a request that waits, and of those that are made later."""
    daemon.replies[Status] = lambda _: None
    waiting = threading.Thread(
        target=lambda: daemon.notify(Error(code=ErrorCode.LIMIT, text="too much"))
    )
    waiting.start()
    for _ in range(2):
        with pytest.raises(Refused, match="too much"):
            ask(line)
    waiting.join()
