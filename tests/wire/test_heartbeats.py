"""Heartbeats of libzmq, at the daemon's sockets."""

import select
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvd.wire.router import Router
from kvd_proto.codec import WIRE
from kvd_proto.messages import Hello, Ping, Pong, Welcome
from tests.conftest import Daemon
from tests.daemon.raw_client import RawClient
from tests.waiting import PATIENCE
from tests.wire.raw_zmtp import connect, message

INTERVAL_MS, TIMEOUT_MS, SILENCE_MS = 50, 5000, 6000  # a busy machine stands still for seconds


@contextmanager
def echoing(path: Path) -> Iterator[Router]:
    """A router that sends every message back, in a thread."""
    router, stop = Router(path, max_bytes=2**20), threading.Event()

    def serve() -> None:
        poller = select.poll()
        poller.register(router, select.POLLIN)
        while not stop.is_set():
            poller.poll(0 if router.pending else 10)
            router.look()
            while (received := router.take()) is not None:
                router.send(*received)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield router
    finally:
        stop.set()
        thread.join()
        router.close()


@contextmanager
def beating(path: Path) -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """A DEALER that sends heartbeats, and the monitor of its lost connections."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.set(zmq.HEARTBEAT_IVL, INTERVAL_MS)
        dealer.set(zmq.HEARTBEAT_TIMEOUT, TIMEOUT_MS)
        dealer.set(zmq.RECONNECT_IVL, 5)
        dealer.set(zmq.RCVTIMEO, int(PATIENCE * 1000))
        with dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
            dealer.connect(f"ipc://{path}")
            yield dealer, monitor
            dealer.disable_monitor()


def lost(monitor: "zmq.Socket[bytes]", wait_ms: int) -> bool:
    """Whether the connection has been lost, or is within so many milliseconds."""
    while monitor.poll(wait_ms):
        if recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED:
            return True
    return False


def test_pipelined_requests_between_silences_keep_their_connection(tmp_path: Path) -> None:
    """A connection on which nothing is asked stays, and every answer comes in order."""
    with echoing(tmp_path / "socket"), beating(tmp_path / "socket") as (dealer, monitor):
        for turn in range(2):
            asked = [f"{turn} {number}".encode() for number in range(200)]
            for one in asked:
                dealer.send(one)
            assert [dealer.recv() for _ in asked] == asked
            assert not lost(monitor, 0 if turn else SILENCE_MS)


def test_a_client_with_heartbeats_comes_back_after_a_restart(tmp_path: Path) -> None:
    """The end of one listener is seen; at the next one the same socket is served."""
    path = tmp_path / "socket"
    with beating(path) as (dealer, monitor):
        with echoing(path):
            dealer.send(b"one")
            assert dealer.recv() == b"one"
        assert lost(monitor, int(PATIENCE * 1000))
        with echoing(path):
            dealer.send(b"two")
            assert dealer.recv() == b"two"
            assert not lost(monitor, 0)


def test_a_daemons_session_outlives_a_silence(daemon: Daemon) -> None:
    """Its token is bound to one connection of one socket, which heartbeats do not end."""
    client = RawClient(daemon.runtime_dir)
    with beating(daemon.runtime_dir / "broker.sock") as (dealer, monitor):

        def ask(number: int, request: Hello | Ping) -> object:
            dealer.send(WIRE.encode(request, number, client.boot_id, client.token))
            return WIRE.decode(dealer.recv())[1]

        hello = Hello(
            kind="scheduler", engine="beats", pid=1, protocol_min=1, protocol_max=1, client="zmq"
        )
        assert isinstance(ask(1, hello), Welcome)
        assert not lost(monitor, SILENCE_MS)
        assert isinstance(ask(2, Ping()), Pong)
    client.close()


PING = b"\x04\x0b\x04PING\0\0beat"


def test_a_flood_of_pings_is_answered_and_delays_nobody(tmp_path: Path) -> None:
    """Others' messages are heard among them, and all PONGs come."""
    router = Router(tmp_path / "socket", max_bytes=2**20)
    poller = select.poll()
    poller.register(router, select.POLLIN)
    with connect(tmp_path / "socket") as flood, connect(tmp_path / "socket") as quiet:
        flood.sendall(PING * 5000)
        turns = 0
        while not router.pending:
            assert poller.poll(PATIENCE * 1000)
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
    router.close()
