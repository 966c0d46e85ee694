"""Messages and descriptors over one Unix stream: with another Channel, and with libzmq."""

import contextlib
import fcntl
import os
import resource
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.wire.server import Received, Server
from kvd_proto.channel import READ_BYTES, Channel, ReceivedFrame, close_all
from kvd_proto.errors import BadFrame, ChannelFull, DescriptorsLost
from kvd_proto.messages import MAX_DESCRIPTORS
from kvd_proto.zmtp import command, frame_header, opening
from tests.descriptors import open_on
from tests.waiting import PATIENCE

Pair = tuple[Channel, Channel]
MIB = 2**20


@contextmanager
def channel_pair(max_bytes: int = MIB) -> Iterator[Pair]:
    """Both ends of one connection; the bound is the receiving, second end's."""
    left, right = socket.socketpair()
    channels = Channel(left), Channel(right, b"ROUTER", max_bytes=max_bytes)
    yield channels
    for channel in channels:
        channel.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Both ends of one connection."""
    with channel_pair() as channels:
        yield channels


@contextmanager
def raw_peer(channel_type: bytes = b"ROUTER") -> Iterator[tuple[socket.socket, Channel]]:
    """A socket that has greeted, and the channel at its other end."""
    left, right = socket.socketpair()
    left.sendall(opening(b"DEALER"))
    channel = Channel(right, channel_type)
    with left:
        yield left, channel
    channel.close()


@contextmanager
def event() -> Iterator[int]:
    """A descriptor that is seen to be open nowhere but here at the end."""
    read, write = os.pipe()
    try:
        yield read
        assert open_on(read) == {read, write}
    finally:
        close_all([read, write])


def next_message(channel: Channel) -> ReceivedFrame:
    """The next message, waited for."""
    end = time.monotonic() + PATIENCE
    while (received := channel.receive()) is None:
        assert channel.more or select.select([channel], [], [], end - time.monotonic())[0]
    return received


def all_messages(channel: Channel) -> list[ReceivedFrame]:
    """What comes until there is an error."""
    messages: list[ReceivedFrame] = []
    while True:
        messages.append(next_message(channel))


def inode(fd: int) -> int:
    """What tells files apart."""
    return os.fstat(fd).st_ino


@settings(deadline=None)
@given(
    sizes=st.lists(
        st.tuples(st.sampled_from([0, 1, 255, 256, 3000, READ_BYTES, 300_000]), st.integers(0, 3)),
        max_size=12,
    ),
    reads=st.lists(st.booleans(), min_size=1, max_size=8),
)
def test_descriptors_come_with_the_message_that_they_were_sent_with(
    sizes: list[tuple[int, int]], reads: list[bool]
) -> None:
    """However much waits when the other end reads, and whatever the socket took at a time."""
    with channel_pair() as (left, right), contextlib.ExitStack() as stack:
        sent, got = [], list[tuple[bytes, list[int]]]()

        def read_all() -> None:
            for frame, fds in right.receive_all():
                assert all(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for fd in fds)
                got.append((frame, [inode(fd) for fd in fds]))
                close_all(fds)

        for at, (nbytes, count) in enumerate(sizes):
            fds = [os.memfd_create("test") for _ in range(count)]
            stack.callback(close_all, fds)
            body = bytes([at]) * nbytes
            left.send(body, fds)
            sent.append((body, [inode(fd) for fd in fds]))
            if reads[at % len(reads)]:
                read_all()
        while len(got) < len(sent):
            left.flush()
            read_all()
        assert got == sent
        assert not left.wants_write
        assert (left.unsent_bytes, right.undecoded_bytes) == (0, 0)


def test_what_waits_to_be_sent_is_bounded() -> None:
    """A peer that never reads makes send raise ChannelFull; nothing of that message is sent."""
    left, right = socket.socketpair()
    channel = Channel(left, max_unsent_bytes=200_000)
    while channel.unsent_bytes <= 200_000:
        channel.send(bytes(50_000))
    with event() as fd:
        before = channel.unsent_bytes
        with pytest.raises(ChannelFull, match="does not read"):
            channel.send(bytes(50_000), [fd])
        assert channel.unsent_bytes == before
    channel.close()
    right.close()


@pytest.mark.parametrize("nbytes", [0, 1000])
def test_a_message_above_the_bound_is_refused(nbytes: int) -> None:
    """With its descriptors, which go with the channel; the messages before it are received."""
    with event() as fd, channel_pair(max_bytes=1000) as (left, right):
        left.send(bytes(nbytes))
        left.send(bytes(1001), [fd])
        assert next_message(right) == (bytes(nbytes), ())
        with pytest.raises(BadFrame, match="1001 bytes, the limit is 1000"):
            next_message(right)


def ride_alone(peer: socket.socket, fd: int) -> None:
    """Behind a message's end, on a PING."""
    peer.sendall(frame_header(1) + b"x")
    socket.send_fds(peer, [command(b"PING", b"\0\0")], [fd])


def ride_twice(peer: socket.socket, fd: int) -> None:
    """On two parts of one message."""
    data = frame_header(100) + bytes(100)
    socket.send_fds(peer, [data[:10]], [fd])
    socket.send_fds(peer, [data[10:20]], [fd])


def ride_on_many(peer: socket.socket, fd: int) -> None:
    """On a PING again and again: each sum is bounded by the one before."""
    for _ in range(5):
        socket.send_fds(peer, [command(b"PING", b"\0\0")], [fd] * 50)


@pytest.mark.parametrize("ride", [ride_alone, ride_twice, ride_on_many])
def test_descriptors_in_the_wrong_place_end_the_connection(
    ride: Callable[[socket.socket, int], None],
) -> None:
    """They are closed with the channel, and messages before them are received."""
    with event() as fd, raw_peer() as (peer, channel):
        ride(peer, fd)
        with pytest.raises(BadFrame, match="descriptors"):
            all_messages(channel)
        channel.close()


def test_a_process_that_may_open_no_more_files_says_which_message_lost_its_own(pair: Pair) -> None:
    """The error has the message; what found room is the caller's, and the channel goes on."""
    left, right = pair
    with event() as fd:
        left.send(b"before")
        left.send(b"lost", [fd] * MAX_DESCRIPTORS)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.dup(fd)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 10, hard))
        try:
            assert next_message(right) == (b"before", ())
            with pytest.raises(DescriptorsLost) as caught:
                next_message(right)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert caught.value.frame == b"lost"
        some = right.take_descriptors()
        assert 0 < len(some) < MAX_DESCRIPTORS
        close_all(some)
        left.send(b"after", [fd])
        frame, fds = next_message(right)
        assert (frame, len(fds)) == (b"after", 1)
        close_all(fds)


# ----------------------------------------------------------------------- libzmq


@contextmanager
def zmq_socket(kind: int) -> Iterator["zmq.Socket[bytes]"]:
    """A socket of libzmq's."""
    with zmq.Context() as context, context.socket(kind) as sock:
        sock.linger = 0
        sock.rcvtimeo = int(PATIENCE * 1000)
        sock.set(zmq.RECONNECT_IVL, -1)
        yield sock


def received_by(server: Server) -> Received:
    """The next message at a server."""
    end = time.monotonic() + PATIENCE
    while (received := server.next_request()) is None:
        if not server.pending:
            assert select.select([server], [], [], end - time.monotonic())[0]
        server.handle_events()
    return received


@pytest.mark.parametrize("nbytes", [0, 255, 256, MIB])
def test_a_zeromq_router_and_a_channel_exchange_messages(tmp_path: Path, nbytes: int) -> None:
    """Of any size."""
    path = tmp_path / "router"
    with zmq_socket(zmq.ROUTER) as router, socket.socket(socket.AF_UNIX) as sock:
        router.bind(f"ipc://{path}")
        sock.connect(str(path))
        channel = Channel(sock)
        while not channel.open:  # libzmq takes nothing before
            assert select.select([channel], [], [], PATIENCE)[0]
            channel.receive()
        channel.send(bytes(nbytes))
        while not channel.flush():
            select.select([], [channel], [], PATIENCE)
        identity, body = router.recv_multipart()
        assert body == bytes(nbytes)
        router.send_multipart([identity, body])
        assert next_message(channel) == (bytes(nbytes), ())


def test_a_zeromq_dealer_reads_a_stream_with_descriptors_as_if_there_were_none(
    tmp_path: Path,
) -> None:
    """Every second message brings one, which no process keeps; those of the dealer bring none."""
    server = Server(tmp_path / "s", max_bytes=MIB, takes_descriptors=True)
    count = 2000
    with event() as fd, zmq_socket(zmq.DEALER) as dealer:
        dealer.connect(f"ipc://{tmp_path / 's'}")
        dealer.send(b"hello")
        client, frame, fds = received_by(server)
        assert (frame, fds) == (b"hello", ())
        bodies = [b"%d" % number * (number % 400) for number in range(count)]
        for number, body in enumerate(bodies):
            assert server.send(client, body, [fd] * (number % 2))
            server.handle_events()
            if number % 50 == 49:
                assert [dealer.recv() for _ in range(50)] == bodies[number - 49 : number + 1]
        dealer.send(b"bye")
        assert received_by(server) == (client, b"bye", ())
    server.close()
