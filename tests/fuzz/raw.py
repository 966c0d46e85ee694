"""Sessions with a daemon whose bytes and descriptors are chosen freely."""

import contextlib
import os
import socket
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import zmq

from kvd_client.memory import sealed_file
from kvd_proto.codec import WIRE, Header
from kvd_proto.errors import DecodeError
from kvd_proto.messages import MAX_DESCRIPTORS, Error, ErrorCode, LaneUp, Message
from tests.daemon.raw_client import RawClient
from tests.fuzz.script import Marks
from tests.fuzz.target import Finding


class Actor(RawClient):
    """A session with a socket for jobs too; whoever is let in may send what he likes.

    Raises:
        OSError, AssertionError: the daemon lets nobody in now.
    """

    def __init__(self, runtime_dir: Path) -> None:
        super().__init__(runtime_dir)
        self.control_socket.setblocking(False)  # the socket API's own form
        self._sockets = {"broker": self.socket}
        self._owed: Counter[tuple[str, int]] = Counter()  # replies, by socket and request id

    def send(self, where: str, parts: list[bytes]) -> bool:
        """Send to the broker or the lane; whether there was a socket to send to."""
        sock = self._sockets.get(where)
        if sock is None or not parts:
            return False
        with contextlib.suppress(zmq.Again):
            sock.send_multipart(parts, zmq.NOBLOCK)
            with contextlib.suppress(DecodeError):
                self._owed[where, WIRE.decode_header(parts[-1]).request_id] += 1
            return True
        return False

    def receive(self, where: str, wait_ms: int) -> tuple[Header, Message] | None:
        """The next reply from there.

        Raises:
            Finding: it is no message, no request is open, or it is an internal error.
        """
        sock = self._sockets.get(where)
        if sock is None or not sock.poll(wait_ms):
            return None
        frame = sock.recv()
        try:
            header, message = WIRE.decode(frame)
        except DecodeError as error:
            raise Finding(f"an unreadable reply from the {where}: {error}") from error
        if isinstance(message, Error) and message.code is ErrorCode.INTERNAL:
            raise Finding(f"an internal error of the {where}: {message.text}")
        self._owed[where, header.request_id] -= 1
        if self._owed[where, header.request_id] < 0:
            raise Finding(f"an answer of the {where} too many: {header}, {message}")
        return header, message

    def send_datagram(self, frame: bytes, fds: tuple[str, ...]) -> bool:
        """Send a datagram over the control socket; whether its reply may come from the broker."""
        with ExitStack() as stack:
            numbers = [_open(kind, self.control_socket, stack) for kind in fds]
            with contextlib.suppress(OSError, ValueError):
                socket.send_fds(self.control_socket, [frame], numbers[:MAX_DESCRIPTORS])
                with contextlib.suppress(DecodeError):
                    self._owed["broker", WIRE.decode_header(frame).request_id] += 1
                    return True
        return False

    def receive_notices(self, marks: Marks) -> None:
        """Read the notices of the control socket; descriptors that come are closed.

        Raises:
            Finding: a notice is no message.
        """
        while True:
            try:
                frame, fds, _, _ = socket.recv_fds(self.control_socket, 65536, 8)
            except OSError:
                return
            for fd in fds:
                os.close(fd)
            if not frame:
                return
            try:
                _, message = WIRE.decode(frame)
            except DecodeError as error:
                raise Finding(f"an unreadable notice: {error}") from error
            marks.learn(message)
            if isinstance(message, LaneUp) and "lane" not in self._sockets:
                lane = self._sockets["lane"] = self.context.socket(zmq.DEALER)
                lane.connect(message.endpoint)


def _open(kind: str, control_socket: socket.socket, stack: ExitStack) -> int:
    """One descriptor; what belongs to it is closed with the stack."""
    if kind == "own control socket":
        return control_socket.fileno()
    if kind == "socket":
        pair = socket.socketpair()
        for end in pair:
            stack.enter_context(end)
        return pair[0].fileno()
    if kind == "write-only":
        whole, path = tempfile.mkstemp()
        stack.callback(os.close, whole)
        os.ftruncate(whole, 65536)
        fd = os.open(path, os.O_WRONLY)
        Path(path).unlink()
    elif kind == "pipe":
        fd, other = os.pipe()
        stack.callback(os.close, other)
    elif kind == "event":
        fd = os.eventfd(0)
    elif kind.startswith("mem:"):
        fd = sealed_file("fuzz", int(kind.partition(":")[2]))
    elif kind.startswith("loose:"):
        fd = os.memfd_create("fuzz")
        os.ftruncate(fd, int(kind.partition(":")[2]))
    else:
        path = {"null": os.devnull, "zero": "/dev/zero", "folder": "/"}[kind]
        fd = os.open(path, os.O_RDONLY)
    stack.callback(os.close, fd)
    return fd
