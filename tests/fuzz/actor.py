"""Sessions with a daemon whose bytes and descriptors are chosen freely."""

import contextlib
import os
import socket
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from kvd_client.memory import sealed_file
from kvd_proto.codec import WIRE
from kvd_proto.errors import DecodeError
from kvd_proto.messages import (
    MAX_DESCRIPTORS,
    TAGS,
    Error,
    ErrorCode,
    Hello,
    LaneUp,
    Message,
    Ping,
    Status,
    Step,
)
from tests.fuzz.script import Act, Finding
from tests.raw_client import RawClient, RawConnection

PROMPT = (Hello, Ping, Status, Step)
"""Requests that are answered before the next one is served."""


class Line:
    """One connection, with what is owed on it; its end is explained if an Error comes before."""

    def __init__(self, connection: RawConnection, *, end_is_explained: bool) -> None:
        self.connection = connection
        self.ended = False
        self._end_is_explained = end_is_explained
        self._owed: list[tuple[int, bool]] = []  # request ids, and whether each is answered in turn
        self._counts = True
        self._times: Counter[int] = Counter()  # that a request id was used
        self._last: Message | None = None

    def send(self, frame: bytes, fds: list[int], *, bare: bool) -> None:
        """Send a message, or bytes."""
        try:
            if bare:
                self._counts = False  # who knows what was asked
                self.connection.send_bytes(frame, fds)
                return
            with contextlib.suppress(DecodeError):
                header = WIRE.decode_header(frame)
                if header.request_id:  # 0 is a notice's
                    self._owed.append((header.request_id, TAGS.get(header.tag) in PROMPT))
                    self._times[header.request_id] += 1
            self.connection.send(frame, fds)
        except EOFError:
            pass  # what was sent before is still received
        except TimeoutError as error:
            raise Finding("the daemon does not read") from error

    def receive(self, seconds: float) -> Message | None:
        """Return the next message, if one comes in time.

        Raises:
            Finding: it is no message, no request is open, one that came before is, it is an
                internal error; or the connection has ended without a word.
        """
        if self.ended:
            return None
        try:
            header, message, _ = self.connection.receive(seconds)
        except TimeoutError:
            return None
        except EOFError:
            self.ended = True
            if self._end_is_explained and not isinstance(self._last, Error):
                raise Finding(f"a session ends without an Error, after {self._last}") from None
            return None
        except DecodeError as error:
            raise Finding(f"an unreadable message: {error}") from error
        self._last = message
        if isinstance(message, Error) and message.code is ErrorCode.INTERNAL:
            raise Finding(f"an internal error: {message.text}")
        if header.request_id and self._counts:
            self._settle(header.request_id, message)
        return message

    def _settle(self, request_id: int, message: Message) -> None:
        place = next((i for i, owed in enumerate(self._owed) if owed[0] == request_id), None)
        if place is None:
            raise Finding(f"an answer too many: {request_id}, {message}")
        _, prompt = self._owed.pop(place)
        if prompt and self._times[request_id] == 1:
            for other, other_prompt in self._owed[:place]:
                if other_prompt and self._times[other] == 1:
                    raise Finding(f"request {request_id} is answered before {other}: {message}")


class Actor:
    """A session, and a connection to a lane once there is one; it may send whatever it likes.

    Raises:
        OSError, EOFError: the daemon lets nobody in now.
    """

    def __init__(self, runtime_dir: Path) -> None:
        self._endpoint = ""
        self._lines = {"broker": Line(RawClient(runtime_dir), end_is_explained=True)}

    def send(self, step: Act, frame: bytes) -> bool:
        """Send what a step says, with descriptors of these kinds; return whether it could."""
        line = self._line(step.where)
        if line is None:
            return False
        with ExitStack() as stack:
            fds = [_open(kind, line.connection.fileno(), stack) for kind in step.fds]
            with contextlib.suppress(OSError):  # too many are under way
                line.send(frame, fds[:MAX_DESCRIPTORS], bare=step.bare)
        return True

    def _line(self, where: str) -> Line | None:
        """The connection, which is made anew to a lane; None where it has ended."""
        line = self._lines.get(where)
        if where == "lane" and self._endpoint and (line is None or line.ended):
            with contextlib.suppress(OSError, EOFError):
                # An earlier connection ends without a word where a later one joins.
                line = Line(RawConnection(self._endpoint), end_is_explained=False)
                self._lines[where] = line
        return None if line is None or line.ended else line

    def receive(self, where: str, seconds: float) -> Message | None:
        """Return the next message from there; see `Line.receive`."""
        line = self._lines.get(where)
        message = None if line is None else line.receive(seconds)
        if isinstance(message, LaneUp):
            self._endpoint = message.endpoint.removeprefix("ipc://")
        return message

    def close(self) -> None:
        """Leave."""
        for line in self._lines.values():
            line.connection.close()


def _open(kind: str, own: int, stack: ExitStack) -> int:
    """One descriptor; what belongs to it is closed with the stack."""
    name, _, size = kind.partition(":")
    match name:
        case "own connection":
            return own
        case "socket":
            pair = socket.socketpair()
            for end in pair:
                stack.enter_context(end)
            return pair[0].fileno()
        case "write-only":
            fd = os.open(tempfile.gettempdir(), os.O_TMPFILE | os.O_WRONLY)
            os.ftruncate(fd, 65536)
        case "pipe":
            fd, other = os.pipe()
            stack.callback(os.close, other)
        case "event":
            fd = os.eventfd(0)
        case "mem":
            fd = sealed_file("fuzz", int(size))
        case "loose":
            fd = os.memfd_create("fuzz")
            os.ftruncate(fd, int(size))
        case _:
            path = {"null": os.devnull, "zero": "/dev/zero", "folder": "/"}[kind]
            fd = os.open(path, os.O_RDONLY)
    stack.callback(os.close, fd)
    return fd
