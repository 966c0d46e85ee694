"""A tool's connection: what it says where no daemon answers, or one refuses, ends or is another."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvd.errors import NotRunning, SocketAccessDenied
from kvd.wire.server import Client, Server
from kvd.wire.tool import ToolConnection
from kvd_proto.codec import WIRE
from kvd_proto.messages import PROTOCOL_VERSION, Error, ErrorCode, Hello, Ping, Pong, Welcome
from tests.daemon.users import OTHER_UID, as_user, needs_root
from tests.waiting import PATIENCE

SOON = 0.3
REFUSAL = Error(code=ErrorCode.FORBIDDEN, text="not\x1b you")
Serve = Callable[[Server, Client, bytes], None]


@pytest.fixture
def broker_socket(runtime_dir: Path) -> Path:
    """Where a daemon would listen."""
    runtime_dir.mkdir()
    return runtime_dir / "broker.sock"


@contextmanager
def serving(path: Path, serve: Serve, *, refuses: bool = False) -> Iterator[None]:
    """A thread that serves Hello itself, and what follows by `serve`."""
    ending = threading.Event()

    def run() -> None:
        server = Server(path, max_bytes=2**20)
        listening.set()
        while not ending.wait(0.001):
            server.handle_events()
            while server.accepted:
                client = server.accepted.popleft()
                if refuses:
                    server.refuse(client, WIRE.encode(REFUSAL))
            while received := server.next_request():
                client, frame, _ = received
                header, message = WIRE.decode(frame)
                if isinstance(message, Hello):
                    welcome = Welcome(protocol=PROTOCOL_VERSION, daemon="stand-in", pid=1)
                    server.send(client, WIRE.encode(welcome, header.request_id))
                else:
                    serve(server, client, frame)
        server.close()

    listening = threading.Event()
    thread = threading.Thread(target=run)
    thread.start()
    assert listening.wait(PATIENCE)
    try:
        yield
    finally:
        ending.set()
        thread.join(PATIENCE)


def pong(server: Server, client: Client, frame: bytes) -> None:
    """Serve a Ping."""
    server.send(client, WIRE.encode(Pong(pid=1), WIRE.decode_header(frame).request_id))


def of_version_3(server: Server, client: Client, frame: bytes) -> None:
    """Answer as protocol version 3 does, whose headers are longer."""
    reply = WIRE.encode(Pong(pid=1), WIRE.decode_header(frame).request_id)
    server.send(client, reply[:4] + b"\3\0" + reply[6:16] + bytes(32) + reply[16:])


def end(server: Server, client: Client, frame: bytes) -> None:
    """Close the connection."""
    del frame
    server.end(client)


def end_with_a_notice(server: Server, client: Client, frame: bytes) -> None:
    """Close the connection and say why."""
    del frame
    server.refuse(client, WIRE.encode(REFUSAL))


def nothing(server: Server, client: Client, frame: bytes) -> None:
    """Let the client wait."""


@pytest.mark.parametrize(
    ("serve", "why"),
    [
        (of_version_3, "speaks protocol version 3, .* is it of another version"),
        (end, "has closed the connection"),
        (end_with_a_notice, r"refuses: not\\x1b you"),
        (nothing, r"did not answer Ping within 0\.3 s"),
    ],
)
def test_a_request_without_a_reply_names_the_cause(
    broker_socket: Path, serve: Serve, why: str
) -> None:
    """Another version, the end, its reason, or silence."""
    with (
        serving(broker_socket, serve),
        ToolConnection(broker_socket.parent, PATIENCE) as control,
        pytest.raises(NotRunning, match=why),
    ):
        control.request(Ping(), SOON if serve is nothing else None)


def test_an_absent_daemon_is_named_with_the_systems_reason(broker_socket: Path) -> None:
    """No socket, a file that is none, one on which nothing listens, a name that is too long."""
    start = "; start one with: kvd serve"
    with pytest.raises(NotRunning, match=rf"no daemon answers .*\(No such file .*{start}"):
        ToolConnection(broker_socket.parent)
    broker_socket.touch()
    with pytest.raises(NotRunning, match=r"\(Connection refused\)"):
        ToolConnection(broker_socket.parent)
    broker_socket.unlink()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(broker_socket))
        with pytest.raises(NotRunning, match=r"\(Connection refused\)"):
            ToolConnection(broker_socket.parent)
    with pytest.raises(NotRunning, match="path too long"):
        ToolConnection(broker_socket.parent / ("x" * 100))


@pytest.mark.parametrize("accepts", [True, False])
def test_a_frozen_daemon_is_named_in_time(broker_socket: Path, *, accepts: bool) -> None:
    """The system accepts for it and nothing answers, or its backlog is full."""
    with socket.socket(socket.AF_UNIX) as frozen:
        frozen.bind(str(broker_socket))
        frozen.listen(0)
        waiting = []
        while not accepts:
            client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            waiting.append(client)
            if client.connect_ex(str(broker_socket)):
                break
        with pytest.raises(NotRunning, match=r"does not answer within 0\.3 s: it is frozen"):
            ToolConnection(broker_socket.parent, SOON)
        for client in waiting:
            client.close()


@needs_root
def test_a_socket_that_may_not_be_reached_is_explained(broker_socket: Path) -> None:
    """Its mode and its group, with the remedy."""
    broker_socket.parent.parent.chmod(0o711)
    broker_socket.parent.chmod(0o711)
    with serving(broker_socket, pong):
        broker_socket.chmod(0o600)
        with (
            as_user(),
            pytest.raises(SocketAccessDenied, match=f"uid {OTHER_UID} may not connect to"),
        ):
            ToolConnection(broker_socket.parent)
