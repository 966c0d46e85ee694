import fcntl
import os
import socket
from collections.abc import Iterator

import pytest

from kvd.errors import BadDatagram, ChannelFull
from kvd.wire.seqpacket import MAX_DATAGRAM_BYTES, Channel, close_all
from kvd_proto.messages import MAX_DESCRIPTORS
from tests.descriptors import open_on

Pair = tuple[Channel, Channel]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Both ends of one connection."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channels = Channel(left), Channel(right)
    yield channels
    for channel in channels:
        channel.close()


def test_frames_keep_their_boundaries(pair: Pair) -> None:
    """One frame sent is one frame received, in order, and None when there is none."""
    left, right = pair
    left.send(b"one")
    left.send(b"two" * 1000)
    assert right.recv() == (b"one", ())
    assert right.recv() == (b"two" * 1000, ())
    assert right.recv() is None


def test_descriptors_arrive_close_on_exec(pair: Pair) -> None:
    """A received descriptor reads the same file and is not inherited by programs started here."""
    left, right = pair
    read_end, write_end = os.pipe()
    left.send(b"pipe", [read_end])
    os.close(read_end)
    received = right.recv()
    assert received is not None
    (fd,) = received[1]
    assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    os.write(write_end, b"x")
    assert os.read(fd, 1) == b"x"
    close_all([fd, write_end])


def test_a_full_socket_queues_and_flush_sends_the_rest(pair: Pair) -> None:
    """Frames that had to wait arrive in order, with descriptors the caller has closed since."""
    left, right = pair
    read_end, write_end = os.pipe()
    sent = 0
    while left.flush():
        left.send(bytes([sent % 256]) * 50_000, [read_end])
        sent += 1
    os.close(read_end)
    assert not left.flush()
    got: list[int] = []
    while len(got) < sent:
        left.flush()
        item = right.recv()
        assert item is not None
        frame, fds = item
        assert len(fds) == 1
        close_all(fds)
        got.append(frame[0])
    assert got == [index % 256 for index in range(sent)]
    assert left.flush()
    assert not left.wants_write
    os.close(write_end)


def test_the_queue_is_bounded() -> None:
    """A peer that never reads makes send raise ChannelFull instead of growing without end."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(left, max_queued_bytes=200_000)
    while not channel.wants_write:
        channel.send(bytes(50_000))
    for _ in range(3):
        channel.send(bytes(50_000))
    with pytest.raises(ChannelFull, match="does not read"):
        channel.send(bytes(50_000))
    channel.close()
    right.close()


def test_end_of_file_raises_after_what_was_sent(pair: Pair) -> None:
    """What a peer sent before it went is still received; then EOFError, and sending raises too.

    Also where the peer had not read everything.
    """
    left, right = pair
    right.send(b"not read")
    left.send(b"last words")
    left.close()
    assert right.recv() == (b"last words", ())
    with pytest.raises(EOFError):
        right.recv()
    with pytest.raises(EOFError):
        right.send(b"anyone?")


@pytest.mark.parametrize(
    ("frame", "fds"),
    [(b"", 0), (bytes(MAX_DATAGRAM_BYTES + 1), 0), (b"x", MAX_DESCRIPTORS + 1)],
)
def test_what_cannot_be_one_datagram_is_refused(pair: Pair, frame: bytes, fds: int) -> None:
    """Empty frames, too large ones and too many descriptors raise BadDatagram."""
    with pytest.raises(BadDatagram):
        pair[0].send(frame, [0] * fds)


def test_a_stream_socket_is_refused() -> None:
    """A channel over a socket without message boundaries is an error of the caller."""
    left, right = socket.socketpair()
    with left, right, pytest.raises(ValueError, match="SEQPACKET"):
        Channel(left)


def test_the_size_of_the_next_frame_is_known_before_it_is_received(
    pair: tuple[Channel, Channel],
) -> None:
    """It stays where it is, with its descriptors; the end of the other side is seen so, too."""
    near, far = pair
    read, write = os.pipe()
    assert not far.waiting_bytes()
    near.send(b"frame", [read, write])
    assert far.waiting_bytes() == far.waiting_bytes() == 5
    assert open_on(read, write) == {read, write}
    received = far.recv()
    assert received is not None
    assert received[0] == b"frame"
    assert open_on(read, write) == {read, write, *received[1]}
    for fd in (read, write, *received[1]):
        os.close(fd)
    near.close()
    with pytest.raises(EOFError):
        far.waiting_bytes()
