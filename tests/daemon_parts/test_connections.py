"""Connections to the control socket: many at once, and one that ends at a bad moment."""

import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvd.daemon.allowed import AllowList
from kvd.daemon.connections import AT_ONCE, Connections
from kvd.daemon.request_socket import Requests
from kvd.wire.listener import Listener
from kvd_proto.messages import Detached
from tests.broker.brokers import make_broker

MORE_THAN_A_SOCKET_TAKES = 6000  # notices; twice as many are too much to keep


@pytest.fixture
def poller() -> select.epoll:
    """The loop's."""
    return select.epoll()


@pytest.fixture
def connections(tmp_path: Path, poller: select.epoll) -> Iterator[Connections]:
    """None is there yet."""
    core = make_broker(devices=[])
    requests = Requests(tmp_path / "broker.sock", core, poller)
    made = Connections(
        Listener(tmp_path / "control.sock", socket.SOCK_SEQPACKET),
        core,
        poller,
        lambda _: None,
        requests=requests,
        allowed=AllowList("", ""),
        own=lambda _: False,
    )
    yield made
    made.close()
    requests.close()


def connect(tmp_path: Path) -> socket.socket:
    """A connection to the control socket."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(str(tmp_path / "control.sock"))
    return connection


def test_a_peer_that_is_gone_with_notices_unread_ends_its_session(
    connections: Connections, poller: select.epoll, tmp_path: Path
) -> None:
    """Its end between two turns of the loop ends nothing else."""
    with connect(tmp_path):
        connections.turn(dict(poller.poll(0)), 0.0)
        (number,) = connections.open
        for _ in range(MORE_THAN_A_SOCKET_TAKES):
            connections.notify(number, Detached(reason="test"), [])
        connections.flush()
        assert connections.open
    connections.flush()
    assert not connections.open


def test_many_new_connections_take_a_bounded_turn(
    connections: Connections, poller: select.epoll, tmp_path: Path
) -> None:
    """Some are accepted at a time, all in the end."""
    with ExitStack() as crowd:
        for _ in range(2 * AT_ONCE):
            crowd.enter_context(connect(tmp_path))
        for turn in (1, 2):
            connections.turn(dict(poller.poll(0)), 0.0)
            assert len(connections.open) == turn * AT_ONCE
