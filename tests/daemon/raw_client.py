"""A client that speaks the protocol by hand, and may speak it wrongly."""

import os
import socket
from collections.abc import Sequence
from pathlib import Path

import zmq

from kvd_proto.codec import WIRE
from kvd_proto.messages import (
    PROTOCOL_VERSION,
    Error,
    ErrorCode,
    Fingerprint,
    Greeting,
    Hello,
    HostHandle,
    Message,
    Register,
)
from tests.daemon.engines import make_layout
from tests.waiting import PATIENCE


class RawClient:
    """A session spoken by hand."""

    def __init__(self, runtime_dir: Path) -> None:
        self.runtime_dir = runtime_dir
        self.control_socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.control_socket.settimeout(PATIENCE)
            self.control_socket.connect(str(runtime_dir / "control.sock"))
            header, greeting = WIRE.decode(self.control_socket.recv(65536))
            assert isinstance(greeting, Greeting)
        except BaseException:
            self.control_socket.close()
            raise
        self.boot_id, self.token = header.boot_id, header.session
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(f"ipc://{runtime_dir / 'broker.sock'}")
        self.request_id = 100

    def raw(self, frame: bytes) -> tuple[int, Message]:
        """Send a frame; request id and message of the reply."""
        self.socket.send(frame)
        return self.answer()

    def answer(self) -> tuple[int, Message]:
        """Request id and message of the next reply."""
        assert self.socket.poll(int(PATIENCE * 1000)), "no reply"
        header, message = WIRE.decode(self.socket.recv())
        assert header.boot_id == self.boot_id
        return header.request_id, message

    def ask(
        self, message: Message, *, boot_id: bytes | None = None, token: bytes | None = None
    ) -> Message:
        """A request, by default with the right ids."""
        self.request_id += 1
        frame = WIRE.encode(message, self.request_id, boot_id or self.boot_id, token or self.token)
        request_id, reply = self.raw(frame)
        assert request_id == self.request_id
        return reply

    def register(self, message: Message, fds: Sequence[int]) -> Message:
        """Send a registration with its descriptors, which are closed here; the reply."""
        self.send_with(message, fds)
        for fd in fds:
            os.close(fd)
        request_id, reply = self.answer()
        assert request_id == self.request_id
        return reply

    def send_with(self, message: Message, fds: Sequence[int]) -> None:
        """Send a request over the control socket, with descriptors."""
        self.request_id += 1
        frame = WIRE.encode(message, self.request_id, self.boot_id, self.token)
        socket.send_fds(self.control_socket, [frame], list(fds))

    def hello(
        self, kind: str = "scheduler", engine: str = "raw", protocol: int = PROTOCOL_VERSION
    ) -> Message:
        """The handshake."""
        return self.ask(
            Hello(
                kind=kind,  # type: ignore[arg-type]
                engine=engine,
                pid=os.getpid(),
                protocol_min=protocol,
                protocol_max=protocol,
                client="raw",
            )
        )

    def close(self) -> None:
        """Leave."""
        self.control_socket.close()
        self.context.destroy(0)


def code_of(reply: Message) -> ErrorCode:
    """The code of an ERROR."""
    assert isinstance(reply, Error), reply
    assert len(reply.text) > 5
    return reply.code


def text_of(reply: Message) -> str:
    """The sentence of an ERROR."""
    assert isinstance(reply, Error), reply
    return reply.text


def said_at_the_end(client: RawClient) -> str:
    """The error with which the daemon closes a control socket; empty where it gives none."""
    said = ""
    while frame := client.control_socket.recv(65536):
        said = text_of(WIRE.decode(frame)[1])
    return said


def registration() -> Register:
    """Register the only rank of an engine, with two storages of memory."""
    return Register(
        rank=0,
        world_size=1,
        device="host",
        fingerprint=Fingerprint(model="m"),
        layout=make_layout(),
        handles=tuple(HostHandle(fd_index=i + 1) for i in range(2)),
    )
