"""A tool's connection to a running daemon, through libzmq: HELLO, then one request at a time."""

import contextlib
import os
import socket
import struct
import time
from pathlib import Path
from typing import Any, Self, TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvd.errors import NotRunning, Refusal, SocketAccessDenied
from kvd.machine.process import stopped_text
from kvd.version import VERSION
from kvd_proto.codec import WIRE
from kvd_proto.errors import DecodeError
from kvd_proto.messages import PROTOCOL_VERSION, Error, Hello, Message, Status, StatusReport
from kvd_proto.text import explain_denied, printable, printable_tree

M = TypeVar("M", bound=Message)
_UCRED = struct.Struct("3i")  # struct ucred: pid, uid, gid of the process that listens
_NEVER_MS = 2**31 - 1
"""Reconnect interval of libzmq. With -1 (never) it drops messages received before end of file."""


class _ConnectFailed(Exception):
    """The connection was not accepted; libzmq does not report why."""


class ToolConnection:
    """One session of kind `tool`.

    Raises:
        NotRunning: no daemon answers in `runtime_dir` within `timeout` seconds, or it refuses this
            process, or it has another protocol version.
        SocketAccessDenied: this process may not open the daemon's socket; names the remedy.
    """

    def __init__(self, runtime_dir: Path, timeout: float = 5.0) -> None:
        self._runtime_dir = runtime_dir.absolute()
        self._socket_path = self._runtime_dir / "broker.sock"
        self._timeout = timeout
        self._request_id = 0
        try:
            self._open_session()
        except BaseException:
            self.close()
            raise

    def _open_session(self) -> None:
        """Connect and say HELLO; retry until the timeout while no socket listens."""
        hello = Hello(
            kind="tool",
            engine=f"tool-{os.getpid()}",
            pid=os.getpid(),
            protocol_min=PROTOCOL_VERSION,
            protocol_max=PROTOCOL_VERSION,
            client=f"kvd {VERSION}",
        )
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                self._connect()
                reply = self._exchange(hello, deadline)
            except (_ConnectFailed, zmq.ZMQError):
                self.close()
                self._await_socket(deadline)
            else:
                break
        if reply is None:
            raise self._no_answer()
        if isinstance(reply, Error):
            raise NotRunning(f"the daemon in {self._runtime_dir} refuses: {reply.text}")

    def _connect(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.reconnect_ivl = _NEVER_MS
        self._socket.handshake_ivl = 0  # the deadline is `_exchange`'s
        self._socket.sndhwm = 0  # to a frozen daemon, too, `send` does not wait
        # CLOSED: the attempt to connect has failed; DISCONNECTED: the connection has ended.
        self._events = self._socket.get_monitor_socket(zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED)
        self._socket.connect(f"ipc://{self._socket_path}")

    def _await_socket(self, deadline: float) -> None:
        """Return when the socket accepts connections; raise the reason at the deadline.

        Raises:
            SocketAccessDenied, NotRunning: see the class.
        """
        timeout_us = max(1000, int((deadline - time.monotonic()) * 1e6))
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                # With Python's own timeout, connect would not wait for a full backlog.
                timeout = struct.pack("@ll", *divmod(timeout_us, 1_000_000))
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
                probe.connect(str(self._socket_path))
        except PermissionError as error:
            path = self._socket_path
            raise SocketAccessDenied(explain_denied(path) or f"{path}: {error.strerror}") from error
        except BlockingIOError as error:
            raise self._no_answer() from error
        except OSError as error:
            raise NotRunning(
                f"no daemon answers in {self._runtime_dir} ({error.strerror or error}); start one"
                f" with: kvd serve --runtime-dir {self._runtime_dir}"
            ) from error
        if time.monotonic() >= deadline:
            raise self._no_answer()

    def _no_answer(self) -> NotRunning:
        return NotRunning(
            f"the daemon in {self._runtime_dir} does not answer within {self._timeout:g} s:"
            f" {self._silence_cause()}"
        )

    def _silence_cause(self) -> str:
        """Return why the daemon may be silent, and the remedy."""
        pid = 0
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.setblocking(False)
            probe.connect(str(self._socket_path))
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
            pid, *_ = _UCRED.unpack(credentials)
        if stopped := stopped_text(pid):
            return f"{stopped}; let it go on with kill -CONT"
        return "it is frozen or overloaded; look at its log (journalctl -u kvd) and its processes"

    def request(self, message: Message, timeout: float | None = None) -> Message:
        """Send a request; return its reply, which may be an Error.

        Args:
            message: what to ask.
            timeout: seconds to wait; None: the connection's timeout.

        Raises:
            NotRunning: no reply in time, or the daemon has closed the connection.
        """
        seconds = self._timeout if timeout is None else timeout
        reply = self._exchange(message, time.monotonic() + seconds)
        if reply is None:
            raise NotRunning(
                f"the daemon in {self._runtime_dir} did not answer {type(message).__name__} within"
                f" {seconds:g} s: {self._silence_cause()}"
            )
        return reply

    def _exchange(self, message: Message, deadline: float) -> Message | None:
        """Send a request; return its reply, or None if none arrives in time."""
        self._request_id += 1
        self._socket.send(WIRE.encode(message, self._request_id))
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._events, zmq.POLLIN)
        while (remaining := deadline - time.monotonic()) > 0:
            ready = dict(poller.poll(int(remaining * 1000) + 1))
            # Messages received before end of file can still be read after the event.
            if self._socket in ready or (ready and self._socket.poll(0)):
                reply = self._receive()
                if reply is not None:
                    return reply
            elif ready:
                self._raise_disconnected()
        return None

    def _receive(self) -> Message | None:
        """Return the reply to the last request, or None; raise a refusal of the session."""
        try:
            header, message = WIRE.decode(self._socket.recv())
        except DecodeError as error:
            raise NotRunning(
                f"the daemon in {self._runtime_dir} sent what kvd {VERSION} does not understand"
                f" ({error}); is it of another version?"
            ) from error
        if header.request_id == self._request_id:
            return _printable_message(message)
        if header.request_id == 0 and isinstance(message, Error):
            text = printable(message.text)
            raise NotRunning(f"the daemon in {self._runtime_dir} refuses: {text}")
        return None  # a reply that arrived after its timeout

    def _raise_disconnected(self) -> None:
        event = recv_monitor_message(self._events)["event"]
        if event == zmq.EVENT_CLOSED:
            raise _ConnectFailed
        raise NotRunning(f"the daemon in {self._runtime_dir} has closed the connection")

    def ask(self, message: Message, kind: type[M], timeout: float | None = None) -> M:
        """Send a request; return its reply of type `kind`.

        Raises:
            NotRunning: no reply in time, or one of another type.
            Refusal: the daemon answered with an ERROR.
        """
        reply = self.request(message, timeout)
        if isinstance(reply, Error):
            raise Refusal(reply.code, reply.text)
        if not isinstance(reply, kind):
            raise NotRunning(
                f"the daemon in {self._runtime_dir} answered {type(reply).__name__} instead of"
                f" {kind.__name__}; is it of another version than this command, kvd {VERSION}?"
            )
        return reply

    def status(self) -> dict[str, Any]:
        """Return the daemon's report.

        Raises:
            NotRunning: no reply in time, or one of another type.
        """
        try:
            return self.ask(Status(), StatusReport).status
        except Refusal as refusal:
            raise NotRunning(f"the daemon refused ({refusal.code}): {refusal}") from refusal

    def close(self) -> None:
        """End the session."""
        self._context.destroy(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _printable_message(message: Message) -> Message:
    """Return the message with printable text only, since terminals and monitors show it."""
    if isinstance(message, StatusReport):
        return StatusReport(status=printable_tree(message.status))
    if isinstance(message, Error):
        return Error(code=message.code, text=printable(message.text))
    return message
