"""A client's end of a connection to a lane: messages whole and in order, and no call that waits."""

import contextlib
import os
import select
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kvd.wire.router import Router
from kvd_client import dealer
from kvd_client.dealer import Dealer
from kvd_proto.zmtp import opening
from tests.waiting import PATIENCE, eventually

MIB = 2**20
GREETING = opening(b"ROUTER")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a lane listens."""
    return tmp_path / "lane.sock"


@contextlib.contextmanager
def connected(path: Path) -> Iterator[tuple[Dealer, socket.socket]]:
    """A connection to a listener of the test's own, and the listener's end, which is not open."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(path))
        listening.listen()
        client = Dealer(str(path))
        peer, _ = listening.accept()
        with peer:
            yield client, peer
        client.close()


def until_open(client: Dealer) -> None:
    """Take the other end's greeting in."""
    eventually(lambda: (client.receive(), client.open)[1])


def wait(client: Dealer) -> None:
    """For something to read."""
    assert select.select([client], [], [], PATIENCE)[0]


@pytest.mark.parametrize("size", [1, 255, 256, 200_000, 3 * MIB])
def test_a_router_of_libzmq_gets_the_messages_and_answers(path: Path, size: int) -> None:
    """Short and long ones, sent before the connection was answered and after."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.bind(f"ipc://{path}")
        client = Dealer(str(path))
        frames = [bytes([number]) * size for number in range(3)]
        assert client.send(frames[0])
        until_open(client)
        assert all(map(client.send, frames[1:]))
        got: list[bytes] = []
        for frame in frames:
            while not router.poll(1):
                got += client.receive()
            identity, taken = router.recv_multipart()
            assert taken == frame
            router.send_multipart([identity, taken[:2000]])
        while len(got) < len(frames):
            wait(client)
            got += client.receive()
        assert got == [frame[:2000] for frame in frames]
        client.close()


def test_the_lanes_own_end_gets_the_messages_and_answers(path: Path) -> None:
    """That of the daemon speaks the same."""
    router = Router(path, max_bytes=16 * MIB)
    client = Dealer(str(path))

    def look() -> bool:
        router.look()
        client.receive()
        return client.open

    def take() -> bytes | None:
        look()
        received = router.take()
        if received is None:
            return None
        router.send(received.identity, b"yes")
        return received.frame

    eventually(look)
    assert client.send(b"x" * MIB)
    assert eventually(take) == b"x" * MIB
    assert eventually(client.receive) == [b"yes"]
    client.close()
    router.close()


@given(
    st.lists(st.one_of(st.binary(max_size=5), st.integers(250, 300).map(bytes)), max_size=6),
    st.data(),
)
def test_messages_are_whole_however_their_bytes_arrive(
    messages: list[bytes], data: st.DataObject
) -> None:
    """Cut anywhere, in the greeting too, and with commands in between."""
    stream = bytearray(GREETING)
    for message in messages:
        long = len(message) > 255 or data.draw(st.booleans())
        length = len(message).to_bytes(8 if long else 1, "big")
        stream += bytes((2 * long,)) + length + message
        if data.draw(st.booleans()):
            stream += b"\x04\x07\x04PING\x00\x00"
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(stream) - 1)), max_size=8)))
    ours, theirs = socket.socketpair()
    with theirs:
        client = Dealer("/nowhere")
        client._socket, client.closed = ours, False
        ours.setblocking(False)
        got: list[bytes] = []
        for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            theirs.sendall(stream[begin:end])
            got += client.receive()
        assert client.open
        assert got == messages
        client.close()


def test_what_the_lane_does_not_read_is_kept_up_to_a_bound(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then nothing more is taken; when it reads, all of it arrives in order."""
    monkeypatch.setattr(dealer, "MAX_UNSENT_BYTES", MIB)
    with connected(path) as (client, peer):
        peer.sendall(GREETING)
        until_open(client)
        sent = b""
        number = 0
        while client.send(frame := bytes([number % 256]) * 1000):
            sent += b"\x02" + len(frame).to_bytes(8, "big") + frame
            number += 1
        assert client.wants_write
        assert not client.closed
        taken = b""
        peer.settimeout(PATIENCE)
        while len(taken) < len(sent) + len(dealer._OPENING):
            taken += peer.recv(MIB)
            client.receive()
        assert taken == dealer._OPENING + sent
        eventually(lambda: not client.wants_write)
        assert client.send(b"again")


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n".ljust(64, b"\0"),
        GREETING[:10] + b"\x01" + GREETING[11:],
        GREETING + b"\x01\x01x",
        GREETING + b"\x02" + (2**40).to_bytes(8, "big"),
        GREETING + b"\x08\x01x",
    ],
    ids=["no ZMTP", "an old version", "several parts", "too long", "unknown flags"],
)
def test_a_peer_that_speaks_something_else_is_closed(path: Path, said: bytes) -> None:
    """And takes no message from then on."""
    with connected(path) as (client, peer):
        peer.sendall(said)
        wait(client)
        assert client.receive() == []
        assert client.closed
        assert not client.send(b"x")


def test_answers_before_the_end_of_a_connection_are_received(path: Path) -> None:
    """Then it is closed, and its descriptor is gone."""
    with connected(path) as (client, peer):
        descriptor = client.fileno()
        peer.sendall(GREETING + b"\0\x03yes")
        peer.close()
        wait(client)
        assert client.receive() == [b"yes"]
        assert eventually(lambda: (client.receive(), client.closed)[1])
        assert client.fileno() == -1
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_where_nobody_listens_the_connection_is_closed(path: Path) -> None:
    """At once, without an error."""
    client = Dealer(str(path))
    assert client.closed
    assert not client.send(b"x")
    assert client.receive() == []
