"""The listening end of the broker and of lanes: clients take turns, each within bounds."""

import contextlib
import gc
import logging
import os
import resource
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvd.wire import server as server_module
from kvd.wire.server import MAX_UNREAD_BYTES, Received, Server
from kvd_proto.messages import ErrorCode
from kvd_proto.zmtp import command, frame_header
from tests.descriptors import open_on
from tests.raw_client import RawConnection, code_of
from tests.waiting import PATIENCE, eventually

MIB = 2**20
PING = command(b"PING", b"\0\0beat")
PONG = command(b"PONG", b"beat")
TIMEOUT_MS = 5000
Make = Callable[..., Server]
Connect = Callable[[], RawConnection]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes servers at ``tmp_path / "socket"``."""
    with ExitStack() as stack:

        def server(epoll: select.epoll | None = None, **bounds: Any) -> Server:
            path = tmp_path / "socket"
            made = Server(
                path, epoll=epoll, **{"max_bytes": MIB, "takes_descriptors": True, **bounds}
            )
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
    for _ in range(1000):
        assert wait(server)
        server.handle_events()
        if (message := server.next_request()) is not None:
            return message
    raise AssertionError(server)


def until(server: Server, true: Callable[[], bool]) -> None:
    """Serve, without answers, until this holds."""
    while not true():
        assert wait(server), server
        server.handle_events()
        assert server.next_request() is None


def unfinished(nbytes: int, sent: int) -> bytes:
    """The beginning of a message of `nbytes`."""
    return frame_header(nbytes) + bytes(sent)


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
    small.send_bytes(unfinished(1000, 900))
    until(server, lambda: server.buffered_bytes >= 900)
    crowd = [connect() for _ in range(5)]
    for connection in crowd:
        push(server, connection.sock, unfinished(MIB, MIB - 1))
    assert server.limits["kept_bytes"] >= 2
    small.send_bytes(bytes(100))
    assert received(server)[1] == bytes(1000)
    for connection in (small, *crowd):
        connection.close()
    until(server, lambda: not len(server))
    assert server.buffered_bytes == 0


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
        assert server.next_request() is None
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


@contextmanager
def crowd_of_another_process(path: Path, count: int) -> Iterator[None]:
    """A process that has connected so often, and says nothing."""
    code = (
        "import socket, sys\n"
        "crowd = [socket.socket(socket.AF_UNIX) for _ in range(int(sys.argv[2]))]\n"
        "for one in crowd:\n    one.connect(sys.argv[1])\n"
        "print(len(crowd), flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path), str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield


def test_many_connections_of_a_process_displace_its_own(
    make: Make, connect: Connect, tmp_path: Path
) -> None:
    """What another process has sent, and was not read yet, is not lost by it."""
    server, first = make(max_strangers=5), connect()
    first.send(b"said before the crowd came")
    with crowd_of_another_process(tmp_path / "socket", 20):
        while server.limits["connections"] < 16:  # of 21 five stay
            assert wait(server)
            server.handle_events()
        assert received(server)[1] == b"said before the crowd came"
        assert is_served(server, first)


@contextmanager
def few_descriptors(more: int = 0) -> Iterator[None]:
    """This process may open so many descriptors more than it has."""
    gc.collect()  # what earlier tests left is not closed meanwhile
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(each.name) for each in Path("/proc/self/fd").iterdir())
    spare = [os.dup(0)]
    while spare[-1] < highest:  # no gap below the limit
        spare.append(os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare[-1] + 1 + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in spare:
            os.close(fd)


def test_a_message_whose_descriptors_find_no_room_ends_its_client(
    make: Make, connect: Connect
) -> None:
    """It reads the remedy; another is served, and none of the descriptors stays open."""
    server, greedy, other = make(), connect(), connect()
    fd = os.memfd_create("test")
    other.send(b"hello")
    assert received(server)[1] == b"hello"
    greedy.send(b"x", [fd] * 20)
    with few_descriptors(4):
        until(server, lambda: server.limits["open_files"] == 1)
    assert "LimitNOFILE" in str(greedy.error_at_the_end())
    assert is_served(server, other)
    assert open_on(fd) == {fd}
    os.close(fd)


def test_descriptors_wait_for_the_rest_of_their_message_for_a_while_only(
    make: Make, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the client that sends nothing else is told so, and they are closed."""
    monkeypatch.setattr(server_module, "DESCRIPTOR_SECONDS", 0.01)
    server, slow = make(), connect()
    fd = os.memfd_create("test")
    slow.send_bytes(unfinished(1000, 0), [fd])
    while not server.ended:
        wait(server, 0.02)
        server.handle_events()
        assert server.next_request() is None
    assert "not the rest of their message" in str(slow.error_at_the_end())
    assert open_on(fd) == {fd}
    os.close(fd)


@pytest.mark.parametrize(
    ("data", "why"), [(b"\x01\0\0\0", "several parts"), (unfinished(MIB + 1, 0), "the limit is")]
)
def test_a_client_that_breaks_the_rules_is_told_why_and_named_in_the_log(
    make: Make, connect: Connect, caplog: pytest.LogCaptureFixture, data: bytes, why: str
) -> None:
    """Its connection ends with an Error; what it sent before was received, and others go on."""
    server, bad, good = make(), connect(), connect()
    bad.send(b"before")
    bad.send_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert received(server)[1] == b"before"
        until(server, lambda: bool(server.ended))
    error = bad.error_at_the_end()
    assert why in str(error)
    assert sum(server.limits.values()) == 1
    assert f"of pid {os.getpid()} (uid {os.getuid()}) is closed: " in caplog.text
    assert is_served(server, good)


def test_unread_replies_are_delivered_by_a_close_that_lingers(
    make: Make, connect: Connect, tmp_path: Path
) -> None:
    """A reply that waits for its reader is delivered by a close that lingers."""
    server, client = make(), connect()
    client.send(b"ask")
    assert server.send(received(server)[0], bytes(MIB // 2))
    got: list[bytes] = []

    def read() -> None:
        while not got:
            select.select([client], [], [], PATIENCE)
            got.extend(frame for frame, _ in client.channel.receive_all())

    reader = threading.Thread(target=read)
    reader.start()
    server.close(linger=PATIENCE)
    reader.join(PATIENCE)
    assert got == [bytes(MIB // 2)]
    assert not (tmp_path / "socket").exists()


def test_heartbeats_of_libzmq_keep_a_silent_connection(make: Make, tmp_path: Path) -> None:
    """Their PINGs are answered: after a silence above their timeout the connection is the same.

    A try in which this process stood still is repeated.
    """
    server, most = make(), TIMEOUT_MS / 2000
    _, ended = eventually(lambda: _silence(server, tmp_path / "socket"), lambda one: one[0] < most)
    assert not ended


def _silence(server: Server, path: Path) -> tuple[float, bool]:
    """How long the server was not looked at, at most, and whether the connection has ended."""
    longest, looked = 0.0, time.monotonic()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.set(zmq.HEARTBEAT_IVL, 50)
        dealer.set(zmq.HEARTBEAT_TIMEOUT, TIMEOUT_MS)
        with dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
            dealer.connect(f"ipc://{path}")
            end = time.monotonic() + 1.2 * TIMEOUT_MS / 1000
            while time.monotonic() < end:
                wait(server, 0.01)
                server.handle_events()
                assert server.next_request() is None
                longest, looked = max(longest, time.monotonic() - looked), time.monotonic()
            dealer.send(b"after")
            assert received(server)[1] == b"after"
            ended = bool(monitor.poll(0))
            dealer.disable_monitor()
    return max(longest, time.monotonic() - looked), ended


def test_a_flood_of_pings_is_answered_and_delays_no_message(make: Make, connect: Connect) -> None:
    """Messages of others are received among them, and all PONGs come."""
    server, flood, quiet = make(), connect(), connect()
    flood.send_bytes(PING * 5000)
    while not server.pending:
        assert wait(server)
        server.handle_events()
    quiet.send(b"quiet")
    turns = 0
    while (message := server.next_request()) is None:
        turns += 1
        server.handle_events()
    assert message[1] == b"quiet"
    assert turns < 10  # of the 79 turns that the flood takes
    heard, end = b"", time.monotonic() + PATIENCE
    while heard.count(PONG) < 5000 and time.monotonic() < end:
        server.handle_events()
        server.next_request()
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
            if (message := server.next_request()) is not None:
                server.closer.close(message[2], os.getuid())
        other.send(b"served")
        assert received(server)[1] == b"served"
        server.close()
