"""A tool's connection to a running daemon: HELLO, then one request at a time."""

import contextlib
import os
import select
import socket
import struct
import time
from pathlib import Path
from typing import Any, Self, TypeVar

from kvd.errors import AccessDenied, NotRunning, Refused
from kvd.version import VERSION
from kvd_proto.access import explain_denied
from kvd_proto.channel import Channel
from kvd_proto.codec import WIRE
from kvd_proto.errors import BadFrame, DecodeError
from kvd_proto.messages import PROTOCOL_VERSION, Error, Hello, Message, Status, StatusReport
from kvd_proto.printable import printable, printable_tree

M = TypeVar("M", bound=Message)


class Control:
    """One session of kind `tool`.

    Raises:
        NotRunning: no daemon answers in `runtime_dir` within `timeout` seconds, or one does and
            refuses this process or has another protocol version.
        AccessDenied: this process may not reach the daemon's socket; with the remedy.
    """

    def __init__(self, runtime_dir: Path, timeout: float = 5.0) -> None:
        self._runtime_dir = runtime_dir.absolute()
        self._timeout = timeout
        self._request_id = 0
        deadline = time.monotonic() + timeout
        self._channel = Channel(self._connected(deadline), takes_descriptors=False)
        try:
            self._greet(deadline)
        except BaseException:
            self.close()
            raise

    def _connected(self, deadline: float) -> socket.socket:
        """Return a socket that the daemon's own has accepted, or raise why there is none.

        A daemon that accepts nothing is waited for, until the deadline.
        """
        path = self._runtime_dir / "broker.sock"
        left_us = max(1000, int((deadline - time.monotonic()) * 1e6))
        with contextlib.ExitStack() as undo:
            connecting = undo.enter_context(socket.socket(socket.AF_UNIX))
            try:
                # With Python's own timeout, connect would not wait for room in the backlog.
                seconds = struct.pack("@ll", *divmod(left_us, 1_000_000))
                connecting.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
                connecting.connect(str(path))
            except PermissionError as error:
                raise AccessDenied(explain_denied(path) or f"{path}: {error.strerror}") from error
            except BlockingIOError as error:
                raise self._frozen() from error
            except OSError as error:
                raise NotRunning(
                    f"no daemon answers in {self._runtime_dir} ({error.strerror or error}); start"
                    f" one with: kvd serve --runtime-dir {self._runtime_dir}"
                ) from error
            undo.pop_all()
            return connecting

    def _greet(self, deadline: float) -> None:
        hello = Hello(
            kind="tool",
            engine=f"tool-{os.getpid()}",
            pid=os.getpid(),
            protocol_min=PROTOCOL_VERSION,
            protocol_max=PROTOCOL_VERSION,
            client=f"kvd {VERSION}",
        )
        greeted = self._exchange(hello, deadline)
        if greeted is None:
            raise self._frozen()
        if isinstance(greeted, Error):
            raise NotRunning(f"the daemon in {self._runtime_dir} refuses: {greeted.text}")

    def _frozen(self) -> NotRunning:
        return NotRunning(
            f"the daemon in {self._runtime_dir} does not answer within {self._timeout:g} s: it"
            " is frozen or overloaded; look at its log (journalctl -u kvd) and its processes"
        )

    def request(self, message: Message, timeout: float | None = None) -> Message:
        """Send a request; return its reply, or the daemon's ERROR as it is.

        Args:
            message: what to ask.
            timeout: seconds to wait, where that differs from the connection's own.

        Raises:
            NotRunning: no reply in time, or the daemon has closed the connection.
        """
        seconds = self._timeout if timeout is None else timeout
        reply = self._exchange(message, time.monotonic() + seconds)
        if reply is None:
            raise NotRunning(
                f"the daemon in {self._runtime_dir} did not answer {type(message).__name__} within"
                f" {seconds:g} s"
            )
        return reply

    def _exchange(self, message: Message, deadline: float) -> Message | None:
        """Send a request; return its reply, or an Error; None where none comes in time."""
        self._request_id += 1
        channel, poller = self._channel, select.poll()
        with contextlib.suppress(EOFError):  # what the daemon has sent can be received all the same
            channel.send(WIRE.encode(message, self._request_id))
        while (left := deadline - time.monotonic()) > 0:
            poller.register(channel, select.POLLIN | select.POLLOUT * channel.wants_write)
            poller.poll(int(left * 1000) + 1)
            try:
                with contextlib.suppress(EOFError):
                    channel.flush()
                for frame, _ in channel.receive_all():
                    if (reply := self._reply_in(frame)) is not None:
                        return reply
            except EOFError:
                raise NotRunning(
                    f"the daemon in {self._runtime_dir} has closed the connection"
                ) from None
            except (BadFrame, DecodeError) as error:
                raise NotRunning(
                    f"the daemon in {self._runtime_dir} sent what kvd {VERSION} does not understand"
                    f" ({error}); is it of another version?"
                ) from error
        return None

    def _reply_in(self, frame: bytes) -> Message | None:
        """Return the reply to the last request; None where it is that of one that was given up."""
        header, message = WIRE.decode(frame)
        if header.request_id == self._request_id:
            return _showable(message)
        if header.request_id == 0 and isinstance(message, Error):
            text = printable(message.text)
            raise NotRunning(f"the daemon in {self._runtime_dir} refuses: {text}")
        return None

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

    def close(self) -> None:
        """End the session."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _showable(message: Message) -> Message:
    """Return the message with printable text only: it is shown on terminals and in monitors."""
    if isinstance(message, StatusReport):
        return StatusReport(status=printable_tree(message.status))
    if isinstance(message, Error):
        return Error(code=message.code, text=printable(message.text))
    return message
