"""A tool's connection to a running daemon: control socket, HELLO, one request at a time."""

import os
import socket
import time
from pathlib import Path
from typing import Any, Self, TypeVar

import zmq

from kvd.errors import AccessDenied, NotRunning, Refused
from kvd.machine.access import explain_denied
from kvd.version import VERSION
from kvd_proto.codec import WIRE, Header
from kvd_proto.errors import DecodeError
from kvd_proto.messages import PROTOCOL_VERSION, Error, Hello, Message, Status, StatusReport
from kvd_proto.printable import printable, printable_tree

M = TypeVar("M", bound=Message)
_MAX_NOTICE_BYTES = 64 * 1024


class Control:
    """One session of kind `tool`.

    Raises:
        NotRunning: no daemon answers in `runtime_dir` within `timeout` seconds, or one does and
            refuses this process or has another protocol version.
        AccessDenied: this process may not reach the daemon's sockets; with the remedy.
    """

    def __init__(self, runtime_dir: Path, timeout: float = 5.0) -> None:
        self._runtime_dir = runtime_dir.absolute()
        self._timeout = timeout
        self._request_id = 0
        self._context = zmq.Context()
        self._control_socket = socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC
        )
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        try:
            # A daemon that hangs accepts nothing, and connect waits.
            self._control_socket.settimeout(self._timeout)
            self._control_socket.connect(str(self._runtime_dir / "control.sock"))
            greeting = self._control_socket.recv(_MAX_NOTICE_BYTES)
        except PermissionError as error:
            path = self._runtime_dir / "control.sock"
            raise AccessDenied(explain_denied(path) or f"{path}: {error.strerror}") from error
        except TimeoutError as error:
            raise NotRunning(
                f"the daemon in {self._runtime_dir} does not answer within {self._timeout:g} s: it"
                " is frozen or overloaded; look at its log (journalctl -u kvd) and its processes"
            ) from error
        except OSError as error:
            raise NotRunning(
                f"no daemon answers in {self._runtime_dir} ({error.strerror}); start one with:"
                f" kvd serve --runtime-dir {self._runtime_dir}"
            ) from error
        if not greeting:
            raise NotRunning(f"the daemon in {self._runtime_dir} has closed the connection")
        header, greeted = self._decode(greeting)
        self.boot_id, self._session = header.boot_id, header.session
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(f"ipc://{self._runtime_dir / 'broker.sock'}")
        if not isinstance(greeted, Error):
            greeted = self.request(
                Hello(
                    kind="tool",
                    engine=f"tool-{os.getpid()}",
                    pid=os.getpid(),
                    protocol_min=PROTOCOL_VERSION,
                    protocol_max=PROTOCOL_VERSION,
                    client=f"kvd {VERSION}",
                )
            )
        if isinstance(greeted, Error):
            raise NotRunning(f"the daemon in {self._runtime_dir} refuses: {greeted.text}")

    def request(self, message: Message, timeout: float | None = None) -> Message:
        """Send a request; return its reply, or the daemon's ERROR as it is.

        Args:
            message: what to ask.
            timeout: seconds to wait, where that differs from the connection's own.

        Raises:
            NotRunning: no reply in time, or the daemon has closed the connection.
        """
        seconds = self._timeout if timeout is None else timeout
        self._request_id += 1
        frame = WIRE.encode(message, self._request_id, self.boot_id, self._session)
        self._socket.send(frame)
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._control_socket.fileno(), zmq.POLLIN)
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            ready = dict(poller.poll(int(left * 1000) + 1))
            if self._socket in ready:
                header, reply = self._decode(self._socket.recv())
                if header.request_id == self._request_id:
                    return reply
            elif ready and self._closed():
                raise NotRunning(f"the daemon in {self._runtime_dir} has closed the connection")
        raise NotRunning(
            f"the daemon in {self._runtime_dir} did not answer {type(message).__name__} within"
            f" {seconds:g} s"
        )

    def ask(self, message: Message, kind: type[M], timeout: float | None = None) -> M:
        """Send a request; return its reply, which is of this type.

        Raises:
            NotRunning: no reply in time, or one of another type.
            Refused: the daemon answered with an ERROR.
        """
        reply = self.request(message, timeout)
        if isinstance(reply, Error):
            raise Refused(reply.code, reply.text)
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
        except Refused as refusal:
            raise NotRunning(f"the daemon refused ({refusal.code}): {refusal}") from refusal

    def _decode(self, frame: bytes) -> tuple[Header, Message]:
        try:
            header, message = WIRE.decode(frame)
        except DecodeError as error:
            raise NotRunning(
                f"the daemon in {self._runtime_dir} sent what kvd {VERSION} does not understand"
                f" ({error}); is it of another version?"
            ) from error
        return header, _showable(message)

    def _closed(self) -> bool:
        """Read the control socket: a notice, which tools ignore, or the daemon's end."""
        try:
            return not self._control_socket.recv(_MAX_NOTICE_BYTES)
        except OSError:
            return True

    def close(self) -> None:
        """End the session."""
        self._control_socket.close()
        self._context.destroy(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Control {self._runtime_dir}>"


def _showable(message: Message) -> Message:
    """Return the message with printable text only: it is shown on terminals and in monitors."""
    if isinstance(message, StatusReport):
        return StatusReport(status=printable_tree(message.status))
    if isinstance(message, Error):
        return Error(code=message.code, text=printable(message.text))
    return message
