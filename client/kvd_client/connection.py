"""One connection to one daemon process: its control socket and its request socket.

Notices and descriptors travel over the control socket. Its end of file means that the daemon is
gone, which the kernel says at once and without fail.

A connection is used under its session's lock, except for `receive`, which is the keeper's. It
never reconnects and ends with the first request that is not answered in time; a new one is made.
"""

import errno
import os
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq

from kvd_client.errors import DaemonLost, Refused, UsageError
from kvd_proto.codec import NO_ID, WIRE, Header
from kvd_proto.errors import DecodeError, Oversize
from kvd_proto.messages import (
    MAX_DESCRIPTORS,
    PROTOCOL_VERSION,
    REPLY_OF,
    Error,
    ErrorCode,
    Greeting,
    Hello,
    Kind,
    Message,
    Welcome,
)

MAX_SOCKET_PATH = 107
MAX_NOTICE_BYTES = 64 * 2**10
SOCKET_BUFFER_BYTES = 2**20
CLIENT_NAME = "kvd_client"
HIGH_WATER_MARK = 10_000
CONNECT_MS = 1000
HANDSHAKE_SECONDS = 10.0  # many short tries would fill the queue of a daemon that stands still


@dataclass(slots=True)
class Notice:
    """One message from the control socket; its descriptors belong to whoever holds it."""

    header: Header
    message: Message
    fds: list[int]

    def close(self) -> None:
        """Close the descriptors that nobody took."""
        while self.fds:
            os.close(self.fds.pop())


def socket_path(runtime_dir: Path, name: str) -> Path:
    """Where a socket of the daemon lies.

    Raises:
        UsageError: the path is longer than the kernel takes for a Unix socket.
    """
    path = runtime_dir / name
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH:
        raise UsageError(
            f"{path} has {length} bytes, a Unix socket's path at most {MAX_SOCKET_PATH};"
            " choose a shorter runtime directory"
        )
    return path


def dealer(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str) -> "zmq.Socket[bytes]":
    """A request socket that forgets at once when closed and never reconnects behind our back."""
    sock = context.socket(zmq.DEALER)
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
    # A new process behind the same path is another daemon: the session must notice.
    sock.setsockopt(zmq.RECONNECT_IVL, -1)
    sock.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    sock.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    sock.connect(endpoint)
    return sock


class Connection:
    """Control socket and request socket of one session, greeted and welcomed.

    Args:
        context: the session's ZeroMQ context.
        runtime_dir: the daemon's.
        kind, engine: who we are.
        stop: descriptor that becomes readable when the session is being closed.

    Raises:
        OSError: no daemon.
        DaemonLost: a daemon that does not do its part.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        runtime_dir: Path,
        kind: Kind,
        engine: str,
        stop: int,
    ) -> None:
        end = time.monotonic() + HANDSHAKE_SECONDS
        self._ids = 0
        self.owed: deque[Message] = deque()  # requests that the keeper is to make
        self._control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self._open_control_socket(socket_path(runtime_dir, "control.sock"))
            greeting = self._greeting(end, stop)
            greeting.close()
            if isinstance(greeting.message, Error):
                raise Refused(greeting.message.text)
            if not isinstance(greeting.message, Greeting):
                raise DaemonLost(f"{type(greeting.message).__name__} in place of a greeting")
            self.boot_id = greeting.header.boot_id
            self.token = greeting.header.session
            self.pid = greeting.message.pid
            self._dealer = dealer(context, f"ipc://{socket_path(runtime_dir, 'broker.sock')}")
        except BaseException:
            self._control.close()
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._dealer, zmq.POLLIN)
        # Only the hang-up: what can be read there is the keeper's.
        self._poller.register(self.fileno(), zmq.POLLERR)
        self._poller.register(stop, zmq.POLLIN)
        try:
            hello = Hello(
                kind=kind,
                engine=engine,
                pid=os.getpid(),
                protocol_min=PROTOCOL_VERSION,
                protocol_max=PROTOCOL_VERSION,
                client=CLIENT_NAME,
            )
            welcome = self.exchange(hello, end)
            if not isinstance(welcome, Welcome):
                if isinstance(welcome, Error):
                    raise Refused(welcome.text)
                raise DaemonLost(f"not welcome: {type(welcome).__name__}")
        except BaseException:
            self.close()
            raise
        self.daemon = welcome.daemon

    # ---------------------------------------------------------------- notices

    def fileno(self) -> int:
        """Return the control socket's descriptor, for polling."""
        return self._control.fileno()

    def receive(self) -> Notice | None:
        """Return the next notice, or None where there is none yet. Never waits.

        Raises:
            DaemonLost: end of file, or something that is no notice.
        """
        try:
            frame, fds, flags, _ = socket.recv_fds(
                self._control, MAX_NOTICE_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except OSError as error:
            raise DaemonLost(f"the control socket broke: {error}") from error
        try:
            if not frame:
                raise DaemonLost("the daemon has closed the control socket")
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise DaemonLost("a notice arrived cut off; is the limit of open files reached?")
            header, message = WIRE.decode(frame)
        except (DaemonLost, DecodeError) as error:
            for fd in fds:
                os.close(fd)
            if isinstance(error, DaemonLost):
                raise
            raise DaemonLost(f"an unreadable notice: {error}") from error
        return Notice(header, message, list(fds))

    def _open_control_socket(self, path: Path) -> None:
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
        self._control.settimeout(CONNECT_MS / 1000)
        self._control.connect(os.fspath(path))
        self._control.setblocking(False)

    def _greeting(self, end: float, stop: int) -> Notice:
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        poller.register(stop, select.POLLIN)
        while (notice := self.receive()) is None:
            ready = poller.poll(max(0.0, end - time.monotonic()) * 1000)
            if not ready:
                raise DaemonLost("no greeting")
            if stop in dict(ready):
                raise DaemonLost("this session is being closed")
        return notice

    # --------------------------------------------------------------- requests

    def exchange(self, message: Message, end: float, *, fds: Sequence[int] = ()) -> Message:
        """Send a request and wait for its reply, which is of the type that belongs or `Error`.

        Args:
            message: the request.
            end: `time.monotonic()` when to give up.
            fds: descriptors to send with it, over the control socket, numbered from 0.

        Raises:
            DaemonLost: no reply until `end`; the daemon died meanwhile, has restarted, or answers
                nonsense; or the session is being closed.
        """
        try:
            request_id = self._send(message, fds, end)
        except Oversize as error:
            return Error.of(ErrorCode.BAD_LAYOUT, str(error))
        while True:
            ready = dict(self._poller.poll(max(0, round((end - time.monotonic()) * 1000))))
            if self._dealer in ready:
                reply = self._receive(request_id)
                if not isinstance(reply, (REPLY_OF[type(message)], Error)):
                    raise DaemonLost(
                        f"{type(message).__name__} was answered by {type(reply).__name__}"
                    )
                return reply
            if ready:
                raise DaemonLost("the daemon is gone, or this session is being closed")
            if time.monotonic() >= end:
                raise DaemonLost(f"no answer to {type(message).__name__} within its deadline")

    def _send(self, message: Message, fds: Sequence[int], end: float) -> int:
        self._ids += 1
        boot_id = NO_ID if isinstance(message, Hello) else self.boot_id
        frame = WIRE.encode(message, self._ids, boot_id, self.token)
        if fds:
            self._send_with_descriptors(frame, fds, end)
            return self._ids
        try:
            self._dealer.send(frame, zmq.NOBLOCK)
        except zmq.Again as error:
            raise DaemonLost("the daemon takes no requests") from error
        return self._ids

    def _send_with_descriptors(self, frame: bytes, fds: Sequence[int], end: float) -> None:
        poller = select.poll()
        poller.register(self._control, select.POLLOUT)
        while True:
            try:
                socket.send_fds(self._control, [frame], list(fds), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                if not poller.poll(max(0.0, end - time.monotonic()) * 1000):
                    raise DaemonLost("the control socket is not read") from None
            except OSError as error:
                if error.errno == errno.EMSGSIZE:
                    raise Oversize(
                        f"{len(frame)} bytes do not fit one datagram here; put tensors into fewer"
                        " storages or groups, or raise the sysctl net.core.wmem_max"
                    ) from error
                raise DaemonLost(f"the control socket broke: {error}") from error
            else:
                return

    def _receive(self, request_id: int) -> Message:
        frame = self._dealer.recv()
        try:
            header = WIRE.decode_header(frame)
            if header.boot_id != self.boot_id:
                raise DaemonLost("another daemon answers: it has restarted")
            if header.request_id != request_id:
                raise DaemonLost(f"an answer to request {header.request_id}, {request_id} was made")
            return WIRE.decode_body(header, frame)
        except DecodeError as error:
            raise DaemonLost(f"an unreadable reply: {error}") from error

    def close(self) -> None:
        """Close both sockets; the daemon sees it at once."""
        self._control.close()
        self._dealer.close(linger=0)

    def __repr__(self) -> str:
        return f"<Connection to {self.daemon} pid {self.pid}, boot {self.boot_id.hex()[:8]}>"
