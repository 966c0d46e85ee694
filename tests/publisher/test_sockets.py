"""The publisher's sockets: no subscriber holds anything up, or costs more than its bound."""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from kvd.publisher.sockets import QUEUED_MESSAGES, Sockets
from kvd.publisher.wire import MAX_BATCH_BYTES, Message
from kvd.wire.publishing import BeginPublisher
from tests.waiting import PATIENCE, eventually

Connect = Callable[..., "zmq.Socket[bytes]"]


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Connect]:
    """Makes sockets of a kind that are connected, and closes them."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    open_ones: list[zmq.Socket[bytes]] = []

    def make(kind: int, name: str, hwm: int = 0) -> zmq.Socket[bytes]:
        made = context.socket(kind)
        made.setsockopt(zmq.RCVHWM, hwm)
        made.connect(f"ipc://{tmp_path / name}")
        open_ones.append(made)
        return made

    yield make
    for each in open_ones:
        each.close(0)
    context.term()


@pytest.fixture
def sockets(tmp_path: Path) -> Iterator[Sockets]:
    """Both sockets, listening at events.sock and replay.sock."""
    fds, endpoints = [], []
    for name in ("events.sock", "replay.sock"):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / name))
        listener.listen()
        fds.append(listener.detach())
        endpoints.append(f"ipc://{tmp_path / name}")
    begin = BeginPublisher(
        events=endpoints[0], connects=False, replay=endpoints[1], note="", locality=None
    )
    made = Sockets(begin, fds)
    for each in (made.events, made.replay):
        assert each is not None
        each.setsockopt(zmq.LINGER, 0)
    yield made
    made.close()


def subscriber(connect: Connect, prefix: bytes, hwm: int = 0) -> zmq.Socket[bytes]:
    """A subscriber with a queue of so many messages of its own."""
    made = connect(zmq.SUB, "events.sock", hwm)
    made.subscribe(prefix)
    return made


def test_subscriptions_are_told_each_and_counted(sockets: Sockets, connect: Connect) -> None:
    """Also the second of the same topic; those that have ended are none."""
    told: list[bytes] = []

    def count() -> int:
        told.extend(sockets.subscribed())
        return sockets.subscriptions

    first = subscriber(connect, b"kv@a")
    eventually(count, lambda found: found == 1)
    second = subscriber(connect, b"kv@a")
    eventually(count, lambda found: found == 2)
    assert told == [b"kv@a"] * 2
    first.close()
    eventually(count, lambda found: found == 1)
    second.close()
    eventually(count, lambda found: found == 0)


def test_a_subscriber_that_never_reads_costs_a_bounded_amount(
    sockets: Sockets, connect: Connect
) -> None:
    """What is above its queue is lost to it, and to nobody else; nothing waits."""
    subscriber(connect, b"kv@deaf", hwm=1)
    reader = subscriber(connect, b"kv@")
    eventually(lambda: [*sockets.subscribed(), sockets.subscriptions][-1], lambda n: n == 2)
    before = psutil.Process().memory_info().rss
    count = 2 * QUEUED_MESSAGES
    for number in range(count):
        sockets.send(Message(b"kv@deaf", number, bytes(MAX_BATCH_BYTES)))
        if number % 64 == 63:
            for _ in range(64):
                assert reader.poll(int(PATIENCE * 1000))
                reader.recv_multipart()
    grown = psutil.Process().memory_info().rss - before
    assert grown < 1.25 * QUEUED_MESSAGES * MAX_BATCH_BYTES


def test_bytes_that_no_subscriber_sends_end_nothing(
    sockets: Sockets, connect: Connect, tmp_path: Path
) -> None:
    """Messages in place of subscriptions, large ones, no ZeroMQ at all, requests of any shape."""
    strange = connect(zmq.XSUB, "events.sock")
    for message in (b"", b"\2what", b"hello", b"\1" * 10_000):
        strange.send(message)
    asking = connect(zmq.DEALER, "replay.sock")
    for frames in ([b""], [b"", b"x"], [b"a"] * 20):
        asking.send_multipart(frames)
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(str(tmp_path / "events.sock"))
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
    good = subscriber(connect, b"kv@good")
    told: list[bytes] = []

    def heard() -> list[bytes]:
        told.extend(sockets.subscribed())
        return told

    eventually(heard, lambda found: b"kv@good" in found)
    requests: list[list[bytes]] = []

    def asked() -> int:
        requests.extend(sockets.requests())
        return len(requests)

    eventually(asked, lambda found: found == 3)
    sockets.send(Message(b"kv@good", 7, b"payload"))
    assert good.poll(int(PATIENCE * 1000))
    assert good.recv_multipart() == [b"kv@good", b"\0" * 7 + b"\7", b"payload"]
    assert sockets.answer(requests[0][0], (b"", b"", b"")) is True
    assert sockets.answer(b"nobody", (b"", b"", b"")) is None
