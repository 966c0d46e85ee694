"""Heartbeats of libzmq, as clients in Python and in C send them, at the daemon's sockets."""

import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from kvd.wire.router import Router
from kvd_proto.codec import WIRE
from kvd_proto.messages import Hello, Ping, Pong, Welcome
from tests.conftest import Daemon
from tests.daemon.raw_client import RawClient
from tests.waiting import PATIENCE, eventually
from tests.wire.raw_zmtp import connect, message

INTERVAL_MS, TIMEOUT_MS, SILENCE_MS = 50, 5000, 6000  # a busy machine stands still for seconds
HERE = Path(__file__).parent


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


def test_a_program_in_c_keeps_its_connection(tmp_path: Path) -> None:
    """The same with Debian's libzmq: silent for many heartbeats, then a thousand requests."""
    compiler, header = shutil.which("cc"), Path("/usr/include/zmq.h")
    if compiler is None or not header.exists():
        pytest.skip("cc and libzmq3-dev are needed: tests/install-debian.sh")
    program = tmp_path / "heartbeat"
    subprocess.run(
        [compiler, "-Wall", "-Werror", "-o", program, HERE / "heartbeat.c", "-lzmq"], check=True
    )
    with echoing(tmp_path / "socket"):
        done = subprocess.run(
            [program, f"ipc://{tmp_path / 'socket'}", "1000"],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    assert done.returncode == 0, done.stderr


def ping(tenths: int) -> bytes:
    """A PING whose sender wants to be given up after so many tenths of a second of silence."""
    return b"\x04\x0b\x04PING" + struct.pack(">H", tenths) + b"beat"


def test_who_sets_a_time_to_live_is_given_up_after_that_silence(tmp_path: Path) -> None:
    """Who has set one, and says nothing more, is hung up on; who has set none stays."""
    path = tmp_path / "socket"
    with echoing(path) as router, connect(path) as mortal, connect(path) as other:
        for sock, tenths in ((mortal, 3), (other, 0)):
            sock.sendall(ping(tenths))
        while mortal.recv(4096):
            pass
        eventually(lambda: len(router), (1).__eq__)
        other.sendall(message(b"still here"))
        heard = b""
        while not heard.endswith(b"still here"):
            heard += other.recv(4096)
        assert b"\x04\x09\x04PONGbeat" in heard


def test_a_flood_of_pings_is_answered_and_delays_nobody(tmp_path: Path) -> None:
    """Others' messages are heard among them, and all PONGs come."""
    router = Router(tmp_path / "socket", max_bytes=2**20)
    poller = select.poll()
    poller.register(router, select.POLLIN)
    with connect(tmp_path / "socket") as flood, connect(tmp_path / "socket") as quiet:
        flood.sendall(ping(0) * 5000)
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
