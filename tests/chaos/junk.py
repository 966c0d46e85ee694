"""Clients that talk nonsense: cut, doubled and random bytes at every socket of a daemon."""

import contextlib
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq

from kvd_proto.codec import WIRE
from kvd_proto.errors import DecodeError
from kvd_proto.messages import PROTOCOL_VERSION, CancelDone, Hello, Ping, Reset, Status

MOST_CLIENTS = 8
MOST_FRAMES = 30
PATIENCE = 1.0


def talk(runtime_dir: Path, chance: random.Random) -> int:
    """Some clients say something each, and leave; how many frames were sent."""
    sent = 0
    with zmq.Context() as context:
        for _ in range(chance.randint(1, MOST_CLIENTS)):
            with contextlib.suppress(OSError, DecodeError):  # it may leave without a greeting
                sent += _client(runtime_dir, chance, context)
    return sent


def _client(
    runtime_dir: Path, chance: random.Random, context: "zmq.Context[zmq.Socket[bytes]]"
) -> int:
    lanes = [str(path) for path in runtime_dir.glob("lane-*.sock")]
    target = chance.choice([str(runtime_dir / "broker.sock"), *lanes])
    sent = 0
    with (
        _control_socket(runtime_dir) as (control_socket, boot_id, token),
        context.socket(zmq.DEALER) as dealer,
    ):
        dealer.linger = 0
        dealer.connect(f"ipc://{target}")
        for frame in _frames(chance, boot_id, token):
            sent += 1
            if chance.random() < 0.2:
                with contextlib.suppress(OSError):
                    control_socket.send(frame or b"\0", socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
            else:
                with contextlib.suppress(zmq.Again):
                    dealer.send(frame, zmq.NOBLOCK)
    with socket.socket(socket.AF_UNIX) as raw:  # not even ZeroMQ
        raw.settimeout(PATIENCE)
        raw.connect(target)
        raw.send(chance.randbytes(chance.randint(1, 4096)), socket.MSG_NOSIGNAL)
    return sent + 1


@contextmanager
def _control_socket(runtime_dir: Path) -> Iterator[tuple[socket.socket, bytes, bytes]]:
    """A connection at the control socket, and what the greeting says of it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as control_socket:
        control_socket.settimeout(PATIENCE)
        control_socket.connect(str(runtime_dir / "control.sock"))
        header = WIRE.decode_header(control_socket.recv(65536))
        yield control_socket, header.boot_id, header.session


def _frames(chance: random.Random, boot_id: bytes, token: bytes) -> Iterator[bytes]:
    hello = Hello(
        kind="scheduler",
        engine="junk",
        pid=1,
        protocol_min=PROTOCOL_VERSION,
        protocol_max=PROTOCOL_VERSION,
        client="junk",
    )
    for number in range(1, chance.randint(2, MOST_FRAMES)):
        message = chance.choice([hello, Status(), Ping(), Reset(), CancelDone(stopped=1)])
        frame = WIRE.encode(message, number, boot_id, token)
        way = chance.randrange(4)
        if way == 0:
            frame = frame[: chance.randint(0, len(frame))]
        elif way == 1:
            frame = chance.randbytes(chance.randint(1, 200))
        elif way == 2:
            yield frame
        yield frame
