"""Who came through the control socket and goes at a bad moment."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from kvd.broker.effects import Notify
from kvd.daemon.connections import AT_ONCE, Connections
from kvd.daemon.control_socket import ControlSocket
from kvd.daemon.request_socket import Requests
from kvd_proto.messages import Detached
from tests.broker.brokers import make_broker

MORE_THAN_A_SOCKET_TAKES = 6000  # notices; twice as many are too much to keep


@pytest.fixture
def connections(tmp_path: Path) -> Iterator[Connections]:
    """Nobody is there yet."""
    core = make_broker(devices=[])
    control_socket = ControlSocket(tmp_path / "control.sock")
    requests = Requests(tmp_path / "broker.sock", core)
    connections = Connections(control_socket, core, zmq.Poller(), lambda _: None, requests)
    yield connections
    connections.close()
    requests.close()
    control_socket.close()


def knock(tmp_path: Path) -> socket.socket:
    """A connection to the control socket."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(str(tmp_path / "control.sock"))
    return connection


def test_a_connection_who_has_gone_with_notices_unread_is_shown_out(
    connections: Connections, tmp_path: Path
) -> None:
    """Whoever leaves between two looks of the loop ends nothing but his own session."""
    with knock(tmp_path):
        connections.accept(lambda _: False, lambda _: False)
        (number,) = connections.open
        for _ in range(MORE_THAN_A_SOCKET_TAKES):
            connections.notify(Notify(number, Detached(reason="test")), lambda _: [])
        connections.flush()
        assert connections.open
    connections.flush()
    assert not connections.open


def test_a_crowd_at_the_control_socket_takes_a_bounded_turn(
    connections: Connections, tmp_path: Path
) -> None:
    """Some are let in at a time, all in the end."""
    with ExitStack() as crowd:
        for _ in range(2 * AT_ONCE):
            crowd.enter_context(knock(tmp_path))
        connections.accept(lambda _: False, lambda _: False)
        assert len(connections.open) == AT_ONCE
        connections.accept(lambda _: False, lambda _: False)
        assert len(connections.open) == 2 * AT_ONCE
