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
    while waiting.is_alive():  # `ask` gives up in time
        line.receive_all()
    assert got == [StatusReport(status={"ready": True})]


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
    waiting.join(SECONDS)
    assert lost
    assert line.post(Ping()) == 0
    line.receive_all()
    with pytest.raises(DaemonLost):
        ask(line)
    daemon.thaw()
