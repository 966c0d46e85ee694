"""Messages and descriptors over one stream: the decoder of ZMTP, another Channel, libzmq."""

import contextlib
import fcntl
import os
import resource
import select
import socket
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd_proto.channel import READ_BYTES, Channel, ReceivedFrame, close_all
from kvd_proto.errors import BadFrame, DescriptorsLost
from kvd_proto.messages import MAX_DESCRIPTORS
from kvd_proto.zmtp import Decoder, command, frame_header, opening
from tests.descriptors import open_on
from tests.waiting import PATIENCE

LIMIT = 4096
HELLO = opening(b"DEALER")


def message(body: bytes) -> bytes:
    """A message as it is sent."""
    return frame_header(len(body)) + body


def decoded(decoder: Decoder, data: bytes) -> list[bytes]:
    """All messages that are there when these bytes have come, taken as a `Channel` does."""
    only = decoder.only_message(memoryview(data), len(data)) if data else None
    if only is not None:
        return [only]
    decoder.feed(data)
    messages = []
    while (body := decoder.next_message()) is not None:
        messages.append(body)
    return messages


@given(
    bodies=st.lists(st.binary(max_size=700), max_size=12),
    cuts=st.lists(st.integers(0, 300), min_size=1, max_size=20),
)
def test_messages_arrive_whole_and_in_order_however_they_are_cut(
    bodies: list[bytes], cuts: list[int]
) -> None:
    """A cut of 0 is at the end of a frame; then nothing is kept of what came before."""
    stream, ends = HELLO, [len(HELLO)]
    for body in bodies:
        stream += message(body)
        ends.append(len(stream))
    decoder, got, at, turn = Decoder(LIMIT), list[bytes](), 0, 0
    while at < len(stream):
        size = cuts[turn % len(cuts)]
        end = at + size if size else next(end for end in ends if end > at)
        got += decoded(decoder, stream[at:end])
        at, turn = end, turn + 1
        if at in ends:
            assert (len(decoder), decoder.consumed) == (0, at)
    assert got == bodies


@given(junk=st.binary(max_size=400), greeted=st.booleans())
def test_random_bytes_raise_nothing_but_bad_frame(junk: bytes, greeted: bool) -> None:
    """Random bytes, before and after a greeting, never raise anything but BadFrame."""
    decoder = Decoder(LIMIT)
    with contextlib.suppress(BadFrame):
        decoded(decoder, HELLO if greeted else b"")
        decoded(decoder, junk)
    assert len(decoder) <= len(HELLO) + len(junk)


@pytest.mark.parametrize("whole", [False, True])
def test_a_message_above_the_limit_is_refused_before_its_bytes_come(whole: bool) -> None:
    """The length alone is enough, and the error names both figures and the bound."""
    decoder = Decoder(LIMIT)
    assert decoded(decoder, HELLO + message(bytes(LIMIT))) == [bytes(LIMIT)]
    with pytest.raises(BadFrame, match=f"{LIMIT + 1} bytes, the limit is {LIMIT}") as caught:
        decoded(decoder, message(bytes(LIMIT + 1)) if whole else frame_header(LIMIT + 1))
    assert caught.value.limit == "message_bytes"


REFUSED = {
    "HTTP": b"GET / HTTP/1.1",
    "an old ZMTP": b"\xff" + bytes(8) + b"\x7f\x01",
    "an unknown mechanism": HELLO[:12] + b"CURVE".ljust(52),
    "a message before READY": HELLO[:64] + message(b"x"),
    "a command before READY": HELLO[:64] + command(b"PING", b"\0\0"),
    "a message of several parts": HELLO + b"\x01\0\0\0",
    "a large part": HELLO + b"\x03" + (2**40).to_bytes(8, "big"),
    "a flag that has no meaning": HELLO + b"\x08\0",
    "a command of several parts": HELLO + b"\x05\0",
    "an endless command": HELLO + b"\x06" + (2**20).to_bytes(8, "big"),
    "a PING without a time to live": HELLO + command(b"PING", b"\0"),
    "a PING with a long context": HELLO + command(b"PING", bytes(19)),
}


@pytest.mark.parametrize("start", REFUSED.values(), ids=REFUSED)
def test_what_is_no_message_is_refused_at_once(start: bytes) -> None:
    """Other protocols, early traffic, several parts and commands out of bounds."""
    with pytest.raises(BadFrame):
        decoded(Decoder(LIMIT), start)


def test_a_message_that_was_returned_is_not_kept() -> None:
    """Also where the beginning of the next one has come with it."""
    large = 8 * 2**20
    decoder = Decoder(large)
    tracemalloc.start()
    try:
        assert decoded(decoder, HELLO + message(bytes(large)) + b"\0") == [bytes(large)]
        traced_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(decoder) == 1
    assert traced_bytes < large // 8


MIB = 2**20


@contextmanager
def channel_pair() -> Iterator[tuple[Channel, Channel]]:
    """Both ends of one connection."""
    left, right = socket.socketpair()
    channels = Channel(left), Channel(right, b"ROUTER")
    yield channels
    for channel in channels:
        channel.close()


@contextmanager
def raw_peer() -> Iterator[tuple[socket.socket, Channel]]:
    """A socket that has greeted, and the channel at its other end."""
    left, right = socket.socketpair()
    left.sendall(HELLO)
    channel = Channel(right, b"ROUTER")
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


def ride_alone(peer: socket.socket, fd: int) -> None:
    """Behind a message's end, on a PING."""
    peer.sendall(frame_header(1) + b"x")
    socket.send_fds(peer, [command(b"PING", b"\0\0")], [fd])


def ride_on_many(peer: socket.socket, fd: int) -> None:
    """On a PING again and again: each sum is bounded by the one before."""
    for _ in range(5):
        socket.send_fds(peer, [command(b"PING", b"\0\0")], [fd] * 50)


@pytest.mark.parametrize("ride", [ride_alone, ride_on_many])
def test_descriptors_in_the_wrong_place_end_the_connection(
    ride: Callable[[socket.socket, int], None],
) -> None:
    """They are closed with the channel, and messages before them are received."""
    with event() as fd, raw_peer() as (peer, channel):
        ride(peer, fd)
        with pytest.raises(BadFrame, match="descriptors"):
            list(iter(lambda: next_message(channel), None))
        channel.close()


def test_a_process_that_may_open_no_more_files_says_which_message_lost_its_own() -> None:
    """The error has the message; what found room is the caller's, and the channel goes on."""
    with event() as fd, channel_pair() as (left, right):
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
