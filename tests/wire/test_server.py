"""The listening end of the broker and of lanes: clients take turns, each within bounds."""

import contextlib
import dataclasses
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvd.wire import server as server_module
from kvd.wire.server import MAX_UNREAD_BYTES, Received, Server
from kvd_proto.channel import close_all
from kvd_proto.messages import ErrorCode
from kvd_proto.zmtp import command, frame_header
from kvd_proto.zmtp import opening as zmtp_opening
from tests.descriptors import open_on
from tests.raw_client import RawConnection, code_of, text_of
from tests.waiting import PATIENCE, eventually

MIB = 2**20
PING = command(b"PING", b"\0\0beat")
PONG = command(b"PONG", b"beat")
TIMEOUT_MS = 2000
Make = Callable[..., Server]
Connect = Callable[[], RawConnection]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes servers at ``tmp_path / "socket"``."""
    with ExitStack() as stack:

        def server(**bounds: Any) -> Server:
            bounds = {"max_bytes": MIB, "takes_descriptors": True} | bounds
            made = Server(tmp_path / "socket", **bounds)
            stack.callback(made.close)
            return made

        yield server


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Connect]:
    """Makes connections to it."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(RawConnection(tmp_path / "socket"))


def wait(server: Server, seconds: float = PATIENCE) -> bool:
    """Wait until there is something to look at; return whether there is."""
    return server.pending or bool(select.select([server], [], [], seconds)[0])


def received(server: Server) -> Received:
    """The next message."""
    while (message := server.next_message()) is None:
        assert wait(server), server
        server.handle_events()
    return message


def until(server: Server, true: Callable[[], bool]) -> None:
    """Serve, without answers, until this holds."""
    while not true():
        assert wait(server), server
        server.handle_events()
        assert server.next_message() is None


def is_served(server: Server, connection: RawConnection) -> bool:
    """Whether the server still reads from it."""
    with contextlib.suppress(EOFError):
        connection.send(b"are you there?")
        return received(server)[1] == b"are you there?"
    return False


def test_a_client_that_sends_much_waits_for_one_that_sends_little(
    make: Make, connect: Connect
) -> None:
    """One message of another comes after one of the flood's, however many of these wait."""
    server, flood, quiet = make(), connect(), connect()
    flood.send_bytes((frame_header(5) + b"flood") * 2000)
    assert received(server)[1] == b"flood"
    quiet.send(b"quiet")
    assert b"quiet" in [received(server)[1] for _ in range(3)]


def test_a_client_that_reads_no_replies_is_not_read(make: Make, connect: Connect) -> None:
    """Replies wait up to a bound; then its requests wait too, others' do not."""
    server, deaf, other = make(), connect(), connect()
    for _ in range(100):
        deaf.send(b"ask")
    replies = 0
    while server.buffered_bytes <= MAX_UNREAD_BYTES:
        assert server.send(received(server)[0], bytes(MIB // 4))
        replies += 1
    assert replies < 20
    other.send(b"hello")
    assert received(server)[1] == b"hello"
    assert server.buffered_bytes <= MAX_UNREAD_BYTES + MIB
    while not server.pending:  # it reads now, and is heard again
        if deaf.channel.receive() is None and not deaf.channel.more:
            assert wait(server)
        server.handle_events()
    assert received(server)[1] == b"ask"


def test_unfinished_messages_of_all_together_are_bounded(make: Make, connect: Connect) -> None:
    """Above the bound the client with most is disconnected; others finish what they began."""
    server, small = make(max_buffered=3 * MIB), connect()
    small.send_bytes(frame_header(1000) + bytes(900))
    until(server, lambda: server.buffered_bytes >= 900)
    crowd = [connect() for _ in range(5)]
    for connection in crowd:
        push(server, connection.sock, frame_header(MIB) + bytes(MIB - 1))
    assert server.limits["kept_bytes"] >= 2
    small.send_bytes(bytes(100))
    assert received(server)[1] == bytes(1000)
    for connection in (small, *crowd):
        connection.close()
    until(server, lambda: not len(server))
    assert server.buffered_bytes == 0


@contextmanager
def crowd(path: Path, count: int, nbytes: int) -> Iterator[None]:
    """Connections of another process, each with so many bytes of a message that has no end."""
    opening = zmtp_opening(b"DEALER") + frame_header(MIB)
    if not (process := os.fork()):
        sockets = [socket.socket(socket.AF_UNIX) for _ in range(count)]
        for one in sockets:
            one.connect(str(path))
            with contextlib.suppress(OSError):  # it was disconnected
                one.sendall(opening + bytes(nbytes))
        signal.pause()
    try:
        yield
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


@pytest.mark.parametrize("joined", [True, False])
def test_a_crowd_of_small_messages_does_not_displace_a_large_one(
    make: Make, connect: Connect, tmp_path: Path, *, joined: bool
) -> None:
    """The process with the most bytes is charged, and before it connections that belong to none."""
    server, honest = make(max_buffered=3 * MIB, max_bytes=4 * MIB), connect()
    honest.send(b"hello")
    server.adopt(received(server)[0], "honest")
    message = bytes(MIB // 2 if joined else 2 * MIB)  # strangers come first, however few bytes
    push(server, honest.sock, frame_header(len(message)) + message[:-1])
    until(server, lambda: server.buffered_bytes > len(message))
    with crowd(tmp_path / "socket", 40, 100 * 1024):
        while server.limits["kept_bytes"] < 10:
            assert wait(server)
            server.handle_events()
            while joined and server.accepted:
                server.adopt(server.accepted.popleft(), "crowd")
            assert server.next_message() is None
        honest.send_bytes(message[-1:])
        assert received(server)[1] == message


def push(server: Server, sock: socket.socket, data: bytes) -> None:
    """Send all of it while the server reads, or until it hangs up."""
    while data:
        try:
            data = data[sock.send(data) :]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            return
        server.handle_events()
        assert server.next_message() is None
        assert server.buffered_bytes <= 3 * MIB


def test_a_new_connection_displaces_the_oldest_stranger(make: Make, connect: Connect) -> None:
    """Of those of a process the oldest is told why and closed; adopted ones stay."""
    server, adopted = make(max_strangers=2), connect()
    adopted.send(b"hello")
    server.adopt(received(server)[0], "a session")
    strangers = [connect() for _ in range(4)]
    until(server, lambda: server.limits["connections"] == 2)
    assert code_of(strangers[0].error_at_the_end()) is ErrorCode.LIMIT
    assert strangers[1].hung_up()
    assert all(is_served(server, one) for one in (adopted, *strangers[2:]))


def test_many_connections_of_a_process_displace_its_own(
    make: Make, connect: Connect, tmp_path: Path
) -> None:
    """What another process has sent, and was not read yet, is not lost by it."""
    server, first = make(max_strangers=5), connect()
    first.send(b"said before the crowd came")
    if not (crowd := os.fork()):
        sockets = [socket.socket(socket.AF_UNIX) for _ in range(20)]
        for one in sockets:
            one.connect(str(tmp_path / "socket"))
        signal.pause()
    try:
        while server.limits["connections"] < 16:  # of 21 five stay
            assert wait(server)
            server.handle_events()
        assert received(server)[1] == b"said before the crowd came"
        assert is_served(server, first)
    finally:
        os.kill(crowd, signal.SIGKILL)
        os.waitpid(crowd, 0)


def test_descriptors_wait_for_the_rest_of_their_message_for_a_while_only(
    make: Make, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the client that sends nothing else is told so, and they are closed."""
    monkeypatch.setattr("kvd.wire.clients.DESCRIPTOR_SECONDS", 0.01)
    server, slow = make(), connect()
    fd = os.memfd_create("test")
    slow.send_bytes(frame_header(1000), [fd])
    while not server.ended:
        wait(server, 0.02)
        server.handle_events()
        assert server.next_message() is None
    assert "not the rest of their message" in str(slow.error_at_the_end())
    assert open_on(fd) == {fd}
    os.close(fd)


def test_the_bytes_of_a_message_with_descriptors_cost_as_much_as_others(
    make: Make, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free descriptors are counted when some have come, not with each of the bytes that follow."""
    server, slow, fd = make(), connect(), os.memfd_create("test")
    until(server, lambda: bool(server.accepted))
    counts = iter([10_000, 10_000])  # with the descriptor, and with the whole message
    monkeypatch.setattr(server_module, "free_descriptors", lambda: next(counts))
    slow.send_bytes(frame_header(200), [fd])
    for _ in range(199):
        slow.send_bytes(b"x")
        assert wait(server)
        server.handle_events()
        assert server.next_message() is None
    slow.send_bytes(b"x")
    _, frame, fds = received(server)
    assert (frame, len(fds)) == (b"x" * 200, 1)
    close_all([fd, *fds])


def test_descriptors_of_unfinished_messages_are_bounded_by_user(
    make: Make, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the user that exceeds the bound the oldest goes; all others finish their messages."""
    monkeypatch.setattr(server_module, "MAX_DESCRIPTORS_OF_USER", 5)
    server, fds = make(), [os.memfd_create("test") for _ in range(3)]
    names = ("another user's", "oldest", "newest")
    connections = {}
    for name in names:
        connections[name] = connect()
        until(server, lambda: bool(server.accepted))
        client = server.accepted.popleft()
        if name == "another user's":
            client.peer = dataclasses.replace(client.peer, uid=client.peer.uid + 1)
        connections[name].send_bytes(frame_header(100), fds)
        until(server, lambda client=client: client.channel.num_descriptors == 3 or client.closed)  # type: ignore[misc]
    assert server.limits == {"open_files": 1}
    assert "6 descriptors, the limit is 5" in text_of(connections.pop("oldest").error_at_the_end())
    for connection in connections.values():
        connection.send_bytes(b"x" * 100)
        _, frame, received_fds = received(server)
        assert (frame, len(received_fds)) == (b"x" * 100, 3)
        close_all(received_fds)
    close_all(fds)


def test_unread_replies_are_delivered_by_a_close_that_lingers(
    make: Make, connect: Connect, tmp_path: Path
) -> None:
    """A reply that waits for its reader is delivered by a close that lingers."""
    server, client = make(), connect()
    client.send(b"ask")
    assert server.send(received(server)[0], bytes(MIB // 2))
    frames: list[bytes] = []

    def read() -> None:
        while not frames:
            select.select([client], [], [], PATIENCE)
            frames.extend(frame for frame, _ in client.channel.receive_all())

    with ThreadPoolExecutor() as threads:
        reading = threads.submit(read)
        server.close(linger=PATIENCE)
        reading.result(PATIENCE)
    assert frames == [bytes(MIB // 2)]
    assert not (tmp_path / "socket").exists()


def test_heartbeats_of_libzmq_keep_a_silent_connection(make: Make, tmp_path: Path) -> None:
    """Their PINGs are answered: after a silence above their timeout the connection is the same.

    A try in which this process stood still is repeated.
    """
    server = make()

    def connection_lost() -> bool:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.set(zmq.HEARTBEAT_IVL, 50)
            dealer.set(zmq.HEARTBEAT_TIMEOUT, TIMEOUT_MS)
            with dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
                dealer.connect(f"ipc://{tmp_path / 'socket'}")
                end = time.monotonic() + 1.2 * TIMEOUT_MS / 1000
                while time.monotonic() < end:
                    wait(server, 0.01)
                    server.handle_events()
                    assert server.next_message() is None
                dealer.send(b"after")
                assert received(server)[1] == b"after"
                lost = bool(monitor.poll(0))
                dealer.disable_monitor()
        return lost

    eventually(lambda: not connection_lost())


def test_a_zeromq_dealer_reads_a_stream_with_descriptors_as_if_there_were_none(
    make: Make, tmp_path: Path
) -> None:
    """Every second message brings one, which no process keeps; those of the dealer bring none."""
    server, fd = make(), os.memfd_create("test")
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger, dealer.rcvtimeo = 0, int(PATIENCE * 1000)
        dealer.connect(f"ipc://{tmp_path / 'socket'}")
        dealer.send(b"hello")
        client, frame, fds = received(server)
        assert (frame, fds) == (b"hello", ())
        bodies = [b"%d" % number * (number % 400) for number in range(2000)]
        for number, body in enumerate(bodies):
            assert server.send(client, body, [fd] * (number % 2))
            server.handle_events()
            if number % 50 == 49:
                assert [dealer.recv() for _ in range(50)] == bodies[number - 49 : number + 1]
        dealer.send(b"bye")
        assert received(server) == (client, b"bye", ())
    assert open_on(fd) == {fd}
    os.close(fd)


def test_a_flood_of_pings_is_answered_and_delays_no_message(make: Make, connect: Connect) -> None:
    """Messages of others are received among them, and all PONGs come."""
    server, flood, quiet = make(), connect(), connect()
    flood.send_bytes(PING * 5000)
    while not server.pending:
        assert wait(server)
        server.handle_events()
    quiet.send(b"quiet")
    turns = 0
    while (message := server.next_message()) is None:
        turns += 1
        server.handle_events()
    assert message[1] == b"quiet"
    assert turns < 10  # of the 79 turns that the flood takes
    heard, end = b"", time.monotonic() + PATIENCE
    while heard.count(PONG) < 5000 and time.monotonic() < end:
        server.handle_events()
        server.next_message()
        with contextlib.suppress(BlockingIOError):
            heard += flood.sock.recv(MIB)
    assert heard.count(PONG) == 5000


@contextmanager
def endless_close() -> Iterator[int]:
    """A descriptor whose last close waits for a peer that does not read, an hour at most."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
        peer, _ = listener.accept()
        sender.setblocking(False)  # the socket API's own form
        with contextlib.suppress(BlockingIOError):
            while True:
                sender.send(bytes(MIB))
        try:
            yield sender.detach()
        finally:
            peer.close()


@pytest.mark.parametrize(
    ("way", "takes"),
    [*((way, True) for way in ("a message", "out of band", "not read")), ("a message", False)],
)
def test_a_descriptor_that_is_never_closed_holds_up_no_other_client(
    make: Make, connect: Connect, way: str, takes: bool
) -> None:
    """The kernel would close it in the thread that reads, accepts or closes."""
    server = make(takes_descriptors=takes)
    other, hostile = connect(), connect()
    with endless_close() as fd:
        if way == "a message":
            hostile.send(b"x", [fd])
        elif way == "out of band":
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd))]
            hostile.sock.sendmsg([b"\0"], rights, socket.MSG_OOB)
            hostile.send_bytes(b"\0")
        else:
            hostile.send_bytes(b"junk")
            hostile.send(b"x", [fd])
        os.close(fd)
        hostile.close()
        while not server.ended:
            assert wait(server)
            server.handle_events()
            if (message := server.next_message()) is not None:
                server.closer.close(message[2], os.getuid())
        other.send(b"served")
        assert received(server)[1] == b"served"
        server.close()
