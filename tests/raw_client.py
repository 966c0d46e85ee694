"""A client that speaks the protocol message by message, and may speak it wrongly."""

import os
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Self, TypeVar

from kvd_proto.channel import Channel, close_all
from kvd_proto.codec import WIRE, Header
from kvd_proto.messages import (
    PROTOCOL_VERSION,
    Error,
    ErrorCode,
    Fingerprint,
    Hello,
    HostHandle,
    Join,
    LaneUp,
    Message,
    Ok,
    Register,
)
from tests.layouts import flat_layout
from tests.waiting import PATIENCE

M = TypeVar("M", bound=Message)
Received = tuple[Header, Message, tuple[int, ...]]
"""A message with its header and its descriptors, which are closed with the connection."""


class RawConnection:
    """One connection to the broker or to a lane; `notices` came while a reply was awaited."""

    def __init__(self, path: Path | str) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        try:
            self.sock.settimeout(PATIENCE)
            self.sock.connect(str(path))
            self.channel = Channel(self.sock)
        except BaseException:
            self.sock.close()
            raise
        self.notices: deque[tuple[Message, tuple[int, ...]]] = deque()
        self.request_id = 100
        self._arrived: deque[Received] = deque()
        self._fds: list[int] = []

    def fileno(self) -> int:
        """Return the descriptor, for polling."""
        return self.channel.fileno()

    def send(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        """Send a message of any bytes, in full; EOFError or TimeoutError where that cannot be."""
        end = time.monotonic() + PATIENCE
        self.channel.send(frame, fds)
        while not self.channel.flush():
            self._wait(select.POLLOUT, end)

    def send_bytes(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send bytes that are no message, in full; errors as those of `send`."""
        end = time.monotonic() + PATIENCE
        rest = memoryview(data)
        while rest:
            try:
                sent = socket.send_fds(self.sock, [rest], list(fds), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                self._wait(select.POLLOUT, end)
            except ConnectionError as error:
                raise EOFError("the other end is gone") from error
            else:
                rest, fds = rest[sent:], ()

    def request(self, message: Message, fds: Sequence[int] = ()) -> int:
        """Send a request; return its id."""
        self.request_id += 1
        self.send(WIRE.encode(message, self.request_id), fds)
        return self.request_id

    def receive(self, seconds: float = PATIENCE) -> Received:
        """Return the next message, reply or notice; EOFError where the other end has closed."""
        end = time.monotonic() + seconds
        while not self._arrived:
            received = self.channel.receive()
            if received is not None:
                frame, fds = received
                self._fds += fds
                self._arrived.append((*WIRE.decode(frame), fds))
            elif not self.channel.more:
                self._wait(select.POLLIN, end)
        return self._arrived.popleft()

    def reply(self, seconds: float = PATIENCE) -> tuple[int, Message]:
        """Return request id and message of the next reply; notices before it are kept."""
        while True:
            header, message, fds = self.receive(seconds)
            if header.request_id:
                return header.request_id, message
            self.notices.append((message, fds))

    def ask(self, message: Message, fds: Sequence[int] = (), seconds: float = PATIENCE) -> Message:
        """Send a request; return the next reply, which must be its."""
        request_id = self.request(message, fds)
        replied, reply = self.reply(seconds)
        assert replied == request_id
        return reply

    def notice(self, kind: type[M], seconds: float = PATIENCE) -> tuple[M, tuple[int, ...]]:
        """Return the next notice of a kind with its descriptors; others before it are dropped."""
        while True:
            if self.notices:
                message, fds = self.notices.popleft()
            else:
                header, message, fds = self.receive(seconds)
                assert not header.request_id, message
            if isinstance(message, kind):
                return message, fds

    def hung_up(self, seconds: float = PATIENCE) -> bool:
        """Whether the other end closes the connection; messages before that are kept."""
        end = time.monotonic() + seconds
        arrived: list[Received] = []
        try:
            while True:
                arrived.append(self.receive(end - time.monotonic()))
        except EOFError:
            return True
        except TimeoutError:
            return False
        finally:
            self._arrived.extend(arrived)

    def error_at_the_end(self) -> Error | None:
        """Wait for the end; return the error that says why, None where there is none."""
        assert self.hung_up()
        last = [message for header, message, _ in self._arrived if not header.request_id][-1:]
        return last[0] if last and isinstance(last[0], Error) else None

    def _wait(self, events: int, end: float) -> None:
        poll = select.poll()
        poll.register(self.fileno(), events)
        if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
            raise TimeoutError("the other end is silent")

    def close(self) -> None:
        """Leave. May be called again."""
        self.channel.close()
        close_all(self._fds)
        self._fds.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RawClient(RawConnection):
    """A session with the daemon."""

    def __init__(self, runtime_dir: Path) -> None:
        super().__init__(runtime_dir / "broker.sock")

    def hello(
        self, kind: str = "scheduler", engine: str = "raw", protocol: int = PROTOCOL_VERSION
    ) -> Message:
        """The handshake; return its reply."""
        versions = {"protocol_min": protocol, "protocol_max": protocol}
        hello = Hello(kind=kind, engine=engine, pid=os.getpid(), client="raw", **versions)  # type: ignore[arg-type]
        return self.ask(hello)

    def register(self, message: Register, fds: Sequence[int]) -> Message:
        """Send a registration with its descriptors, which are closed here; return the reply."""
        try:
            return self.ask(message, fds)
        finally:
            close_all(fds)

    def join_lane(self, lane_up: LaneUp) -> RawConnection:
        """Return a connection to a lane for this worker's jobs."""
        lane = RawConnection(lane_up.endpoint.removeprefix("ipc://"))
        assert lane.ask(Join(token=lane_up.token)) == Ok()
        return lane


def code_of(reply: Message | None) -> ErrorCode:
    """The code of an Error."""
    assert isinstance(reply, Error), reply
    assert len(reply.text) > 5
    return reply.code


def text_of(reply: Message | None) -> str:
    """The sentence of an Error."""
    assert isinstance(reply, Error), reply
    return reply.text


def registration() -> Register:
    """Register the only rank of an engine, with two storages of memory."""
    return Register(
        rank=0,
        world_size=1,
        device="host",
        fingerprint=Fingerprint(model="m"),
        layout=flat_layout(4096, 4096, blocks=64, factor=2),
        handles=tuple(HostHandle(fd_index=i + 1) for i in range(2)),
    )
