"""One connection, used by several threads: each gets its own reply, and none waits for another."""

import threading
import time

import pytest

from kvd_client import Scheduler
from kvd_client.connection import Connection
from kvd_client.errors import DaemonLost
from kvd_proto.codec import WIRE
from kvd_proto.messages import Ping, Pong, Status, StatusReport
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
        line.take_in()
    waiting.join()
    assert got == [StatusReport(status={"ready": True})]


def test_replies_to_posted_requests_are_kept_in_their_order(
    daemon: FakeDaemon, line: Connection
) -> None:
    """Nobody waits for them; a request that waits meanwhile takes them in with its own."""
    daemon.freeze()
    posted = [line.post(Ping()) for _ in range(3)]
    assert line.unanswered == 3
    assert list(line.replies()) == []
    assert line.oldest is not None
    assert line.is_overdue(0.0)
    assert not line.is_overdue(SECONDS)
    daemon.thaw()
    ask(line)
    assert line.unanswered == 0
    assert line.has_replies
    assert not line.is_overdue(0.0)
    replies = list(line.replies())
    assert [number for number, _ in replies] == posted
    assert {type(reply) for _, reply in replies} == {Pong}
    assert not line.has_replies


@pytest.mark.parametrize("wrong", ["request", "boot", "bytes"])
def test_what_is_no_answer_ends_the_connection(
    daemon: FakeDaemon, line: Connection, wrong: str
) -> None:
    """To a request that was not made, of another daemon, or nothing that can be read."""
    frame = WIRE.encode(
        Pong(pid=1),
        12345 if wrong == "request" else 2,
        daemon.boot_id if wrong != "boot" else bytes(16),
        line.token,
    )
    (connection,) = daemon.connections.values()
    sent = frame if wrong != "bytes" else b"nothing"

    def answer(_: Status) -> None:
        daemon._router.send_multipart([connection.identity, sent])

    daemon.replies[Status] = answer
    with pytest.raises(DaemonLost):
        ask(line)
    assert line.failed


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
    line.take_in()
    with pytest.raises(DaemonLost):
        ask(line)
    daemon.thaw()
