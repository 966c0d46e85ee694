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


PING = b"\x04\x0b\x04PING\0\0beat"


def test_a_flood_of_pings_is_answered_and_delays_no_message(tmp_path: Path) -> None:
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
