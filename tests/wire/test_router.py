"""The daemon's request sockets: libzmq's clients are served, each within bounds."""

import gc
import os
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import zmq

from kvd.wire import router as router_module
from kvd.wire.router import AT_ONCE, UNREAD_BYTES, Received, Router
from kvd.wire.zmtp import FRAMES_AT_ONCE
from tests.waiting import PATIENCE, eventually
from tests.wire.raw_zmtp import connect, message, unfinished

MIB = 2**20
PING = b"\x04\x0b\x04PING\0\0beat"
TIMEOUT_MS = 5000
FLOOD = 10_000  # messages of two parts, in one read
Make = Callable[..., Router]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes routers at ``tmp_path / "socket"``."""
    made = []

    def router(epoll: select.epoll | None = None, **bounds: int) -> Router:
        made.append(Router(tmp_path / "socket", epoll=epoll, **{"max_bytes": MIB, **bounds}))
        return made[-1]

    yield router
    for one in made:
        one.close()


def wait(router: Router, seconds: float = PATIENCE) -> bool:
    """Wait until there is something to look at; return whether there is."""
    poller = select.poll()
    poller.register(router, select.POLLIN)
    return bool(poller.poll(seconds * 1000))


def received(router: Router) -> Received:
    """The next message."""
    for _ in range(1000):
        assert router.pending or wait(router)
        router.look()
        found = router.take()
        if found is not None:
            return found
    raise AssertionError(router)


def until(router: Router, true: Callable[[], bool]) -> None:
    """Serve, without answers, until this holds."""
    while not true():
        assert router.pending or wait(router), router
        router.look()
        router.take()


@pytest.mark.parametrize("size", [0, 1, 255, 256, 70_000, MIB])
def test_a_dealers_message_is_received_and_answered(make: Make, tmp_path: Path, size: int) -> None:
    """A message of libzmq's and its answer of the same size arrive whole."""
    router = make()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(f"ipc://{tmp_path / 'socket'}")
        dealer.send(b"x" * size)
        identity, frame = received(router)
        assert frame == b"x" * size
        assert router.send(identity, frame)
        while not dealer.poll(10):
            router.look()
        assert dealer.recv() == frame


def test_a_loop_that_waits_for_other_things_too_hands_over_what_is_ready(
    make: Make, tmp_path: Path
) -> None:
    """The router takes out what is its own, and leaves the rest and the epoll to the loop."""
    epoll, (reading, writing) = select.epoll(), os.pipe()
    epoll.register(reading, select.EPOLLIN)
    router = make(epoll)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(f"ipc://{tmp_path / 'socket'}")
        dealer.send(b"x")
        os.write(writing, b"y")
        found = None
        while found is None:
            ready = dict(epoll.poll(PATIENCE))
            assert ready
            router.look(ready)
            assert ready.keys() <= {reading}
            found = router.take()
        assert found.frame == b"x"
    router.close()
    assert dict(epoll.poll(PATIENCE)) == {reading: select.EPOLLIN}
    epoll.close()
    os.close(reading)
    os.close(writing)


def test_a_peer_that_sends_much_waits_for_one_that_sends_little(make: Make, tmp_path: Path) -> None:
    """One message of another comes after one of the flood's, however many of these wait."""
    router = make()
    with connect(tmp_path / "socket") as flood, connect(tmp_path / "socket") as quiet:
        flood.sendall(message(b"flood") * 2000)
        assert received(router).frame == b"flood"
        quiet.sendall(message(b"quiet"))
        following = [received(router).frame for _ in range(3)]
        assert b"quiet" in following


def test_a_peer_that_reads_no_replies_is_not_read(make: Make, tmp_path: Path) -> None:
    """Replies wait up to a bound; then the peer's requests wait too, others' do not."""
    router = make()
    with connect(tmp_path / "socket") as deaf, connect(tmp_path / "socket") as other:
        deaf.sendall(message(b"ask") * 100)
        served = 0
        identity = received(router).identity
        while router.send(identity, bytes(MIB // 4)) and router.kept_bytes <= UNREAD_BYTES:
            served += 1
            identity = received(router).identity
        assert served < 20
        other.sendall(message(b"hello"))
        assert received(router).frame == b"hello"
        assert router.kept_bytes <= UNREAD_BYTES + MIB
        deaf.settimeout(0.0)
        while not router.pending:  # it reads now, and is heard again
            try:
                deaf.recv(MIB)
            except BlockingIOError:
                assert wait(router)
            router.look()
        assert received(router).frame == b"ask"


def test_a_flood_of_what_is_no_message_takes_a_bounded_turn(make: Make, tmp_path: Path) -> None:
    """Messages of several parts are skipped, so many at a time; the one behind them arrives."""
    router = make()
    with connect(tmp_path / "socket") as sock:
        until(router, lambda: len(router) == 1 and not router.pending)
        sock.sendall(b"\x01\0\0\0" * FLOOD + message(b"after"))
        router.look()
        assert router.take() is None
        assert router.pending
        assert 0 < router.dropped <= AT_ONCE * FRAMES_AT_ONCE
        assert received(router).frame == b"after"
        assert router.dropped == FLOOD


def test_what_came_before_a_message_is_counted_and_answered_with_it(
    make: Make, tmp_path: Path
) -> None:
    """A PING and a message of two parts that were read with another message, before this one."""
    router = make()
    with connect(tmp_path / "socket") as sock:
        until(router, lambda: len(router) == 1 and not router.pending)
        sock.sendall(message(b"first") + PING + b"\x01\0\0\0")
        assert received(router).frame == b"first"
        sock.sendall(message(b"second"))
        assert received(router).frame == b"second"
        assert (router.dropped, router.kept_bytes) == (1, 0)
        heard = b""
        while not heard.endswith(b"\x04PONGbeat"):
            heard += sock.recv(1000)


def test_many_new_connections_take_a_bounded_turn(make: Make, tmp_path: Path) -> None:
    """Some are accepted at a time, all in the end."""
    router = make()
    with ExitStack() as crowd:
        for _ in range(3 * AT_ONCE):
            crowd.enter_context(connect(tmp_path / "socket"))
        router.look()
        assert len(router) == AT_ONCE
        until(router, lambda: len(router) == 3 * AT_ONCE)


def test_unfinished_messages_of_all_together_are_bounded(make: Make, tmp_path: Path) -> None:
    """Above the bound the connection with most is closed; the others finish what they began."""
    router = make(max_kept=3 * MIB)
    small = connect(tmp_path / "socket")
    small.sendall(unfinished(1000, 900))
    until(router, lambda: router.kept_bytes >= 900)
    crowd = [connect(tmp_path / "socket") for _ in range(5)]
    for sock in crowd:
        push(router, sock, unfinished(MIB, MIB - 1))
    assert router.limits["kept_bytes"] >= 2
    small.setblocking(True)  # the socket API's own form
    small.sendall(bytes(100))
    assert received(router).frame == bytes(1000)
    for sock in (small, *crowd):
        sock.close()
    until(router, lambda: not len(router))
    assert router.kept_bytes == 0


def test_a_new_connection_displaces_the_oldest_without_a_session(
    make: Make, tmp_path: Path
) -> None:
    """Of those of a process the oldest is closed; those with a session stay."""
    router = make(max_unproven=2)
    proven = connect(tmp_path / "socket")
    proven.sendall(message(b"token"))
    router.prove(received(router).identity)
    unproven = [connect(tmp_path / "socket") for _ in range(4)]
    until(router, lambda: router.limits["connections"] == 2)
    assert [_hung_up(sock) for sock in unproven] == [True, True, False, False]
    proven.sendall(message(b"again"))
    assert received(router).frame == b"again"
    for sock in (proven, *unproven):
        sock.close()


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


def test_many_connections_of_a_process_displace_its_own(make: Make, tmp_path: Path) -> None:
    """What another process has sent, and was not read yet, is not lost by it."""
    router = make(max_unproven=5)
    first = connect(tmp_path / "socket")
    first.sendall(message(b"said before the crowd came"))
    with crowd_of_another_process(tmp_path / "socket", 20):
        while router.limits["connections"] < 16:  # of 21 five stay
            assert wait(router)
            router.look()
        assert received(router).frame == b"said before the crowd came"
        assert not _hung_up(first)
    first.close()


def test_without_descriptors_new_connections_are_refused_and_none_is_displaced(
    make: Make, tmp_path: Path
) -> None:
    """One of a few without a session stays: what it has sent is received."""
    router = make()
    first = connect(tmp_path / "socket")
    first.sendall(message(b"early"))
    assert wait(router)
    router.look()
    second = socket.socket(socket.AF_UNIX)
    with few_descriptors():
        second.connect(str(tmp_path / "socket"))
        router.look()
    assert router.limits["open_files"] == 1
    assert _hung_up(second)
    assert received(router).frame == b"early"
    for sock in (first, second):
        sock.close()


@contextmanager
def few_descriptors() -> Iterator[None]:
    """This process may open no descriptor more than it has."""
    gc.collect()  # what earlier tests left is not closed meanwhile
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(each.name) for each in Path("/proc/self/fd").iterdir())
    spare = [os.dup(0)]
    while spare[-1] < highest:  # no gap below the limit
        spare.append(os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare[-1] + 1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in spare:
            os.close(fd)


def push(router: Router, sock: socket.socket, data: bytes) -> bool:
    """Send all of it while the router reads; false where it hangs up meanwhile."""
    sock.setblocking(False)  # the socket API's own form
    while data:
        try:
            data = data[sock.send(data) :]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            return False
        router.look()
        assert router.take() is None
        assert router.kept_bytes <= 3 * MIB
    return True


def _hung_up(sock: socket.socket) -> bool:
    sock.settimeout(0.05)
    try:
        while sock.recv(4096):
            pass
    except TimeoutError:
        return False
    except ConnectionResetError:
        pass
    return True


def test_no_connection_is_accepted_during_the_end(make: Make, tmp_path: Path) -> None:
    """A client that connects again at once is refused by the kernel."""
    router = make()
    with connect(tmp_path / "socket") as sock:
        sock.sendall(message(b"ask"))
        assert received(router).frame == b"ask"
        seen: list[object] = []
        close = router_module.Router._close

        def come_again(self: Router, connection: router_module._Connection) -> None:
            close(self, connection)
            with socket.socket(socket.AF_UNIX) as again, pytest.raises(ConnectionRefusedError):
                again.connect(str(tmp_path / "socket"))
            seen.append(connection)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(router_module.Router, "_close", come_again)
            router.close()
        assert seen


def test_unread_replies_are_delivered_by_a_close_that_lingers(make: Make, tmp_path: Path) -> None:
    """A reply that waits for its reader is delivered by a close that lingers."""
    router = make()
    with connect(tmp_path / "socket") as sock:
        sock.sendall(message(b"ask"))
        identity = received(router).identity
        assert router.send(identity, bytes(MIB // 2))
        got = 0

        def read() -> None:
            nonlocal got
            while data := sock.recv(MIB):
                got += len(data)

        reader = threading.Thread(target=read)
        reader.start()
        router.close(linger=PATIENCE)
        reader.join(PATIENCE)
    assert got > MIB // 2
    assert not (tmp_path / "socket").exists()


def test_heartbeats_of_libzmq_keep_a_silent_connection(make: Make, tmp_path: Path) -> None:
    """Their PINGs are answered: after a silence above their timeout the connection is the same.

    A try in which this process stood still is repeated.
    """
    router, most = make(), TIMEOUT_MS / 2000
    _, ended = eventually(lambda: _silence(router, tmp_path / "socket"), lambda one: one[0] < most)
    assert not ended


def _silence(router: Router, path: Path) -> tuple[float, bool]:
    """How long the router was not looked at, at most, and whether the connection has ended."""
    longest, looked = 0.0, time.monotonic()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.set(zmq.HEARTBEAT_IVL, 50)
        dealer.set(zmq.HEARTBEAT_TIMEOUT, TIMEOUT_MS)
        with dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
            dealer.connect(f"ipc://{path}")
            end = time.monotonic() + 1.2 * TIMEOUT_MS / 1000
            while time.monotonic() < end:
                wait(router, 0.01)
                router.look()
                assert router.take() is None
                longest, looked = max(longest, time.monotonic() - looked), time.monotonic()
            dealer.send(b"after")
            assert received(router).frame == b"after"
            ended = bool(monitor.poll(0))
            dealer.disable_monitor()
    return max(longest, time.monotonic() - looked), ended


def test_a_flood_of_pings_is_answered_and_delays_no_message(make: Make, tmp_path: Path) -> None:
    """Messages of others are received among them, and all PONGs come."""
    router = make()
    with connect(tmp_path / "socket") as flood, connect(tmp_path / "socket") as quiet:
        flood.sendall(PING * 5000)
        turns = 0
        while not router.pending:
            assert wait(router)
            router.look()
        quiet.sendall(message(b"quiet"))
        while (received := router.take()) is None:
            turns += 1
            router.look()
        assert received.frame == b"quiet"
        assert turns < 10  # of the 79 turns that the flood takes
        heard, end = b"", time.monotonic() + PATIENCE
        while heard.count(b"\x04PONGbeat") < 5000 and time.monotonic() < end:
            router.look()
            router.take()
            if select.select([flood], [], [], 0)[0]:
                heard += flood.recv(2**20)
        assert heard.count(b"\x04PONGbeat") == 5000
