"""A session's one connection to the broker: requests and replies, notices and their descriptors.

Any thread may make requests. The lock is held to send and to receive, never to wait. The thread
that receives takes every message that has arrived:

- a reply goes to the caller of `exchange`, which checks for it every `LOOK_MS`,
- a reply to a posted request is queued for `replies`,
- a notice is queued for `receive`, and `on_notice` is called.

End of file means that the daemon is gone; messages from before are received first. A connection
ends with the first request that is not answered in time, and never reconnects: the session makes a
new one.
"""

import contextlib
import itertools
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvd_client.errors import AccessDenied, DaemonLost, Refused, UsageError
from kvd_proto.channel import Channel, close_all
from kvd_proto.codec import WIRE, Header
from kvd_proto.errors import (
    BadFrame,
    ChannelFull,
    DecodeError,
    DescriptorsLost,
    Oversize,
    VersionMismatch,
)
from kvd_proto.messages import (
    PROTOCOL_VERSION,
    REPLY_OF,
    Error,
    Hello,
    Kind,
    Message,
    Welcome,
)
from kvd_proto.text import explain_denied

MAX_SOCKET_PATH = 107
CLIENT_NAME = "kvd_client"
HANDSHAKE_SECONDS = 10.0  # many short tries would fill the queue of a daemon that stands still
LOOK_MS = 20  # a reply may have been taken in by another thread
BUSY_SECONDS = 0.1
"""After a posted request its caller is expected to take in what arrives."""


@dataclass(slots=True)
class Notice:
    """One message that answers no request, with its descriptors, for its holder to close."""

    message: Message
    fds: list[int]

    def close(self) -> None:
        """Close the descriptors that were not taken out."""
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


class Connection:
    """The connection of one session, welcomed by the daemon.

    `stop` is readable when the session is being closed. `on_notice` is called by the thread that
    has received what `receive` returns. `failed` says why the connection cannot be used any more.

    Raises:
        OSError: no daemon.
        AccessDenied: this process may not connect to its socket.
        Refused: the daemon does not take this session.
        DaemonLost: a daemon that does not do its part.
    """

    def __init__(
        self,
        runtime_dir: Path,
        kind: Kind,
        engine: str,
        stop: int,
        on_notice: Callable[[], None],
    ) -> None:
        end = time.monotonic() + HANDSHAKE_SECONDS
        self.failed = ""
        self._refused = False  # `failed` is the daemon's own reason
        self._on_notice = on_notice
        self._notices: deque[Notice] = deque()
        self._ids = itertools.count(1)
        self._posted: dict[int, float] = {}  # those without an answer, and when they were sent
        self._posted_at = 0.0  # the latest
        self._posted_replies: deque[tuple[Header, bytes]] = deque()  # in the order of arrival
        self._awaited: dict[int, tuple[Header, bytes] | None] = {}  # by those who wait
        self._lock = threading.Lock()
        self._channel = _connect(socket_path(runtime_dir, "broker.sock"))
        self._fd, self._stop = self._channel.fileno(), stop
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
        self.daemon, self.pid = welcome.daemon, welcome.pid

    def fileno(self) -> int:
        """Return the descriptor for polling."""
        return self._fd

    # --------------------------------------------------------------- requests

    def exchange(self, message: Message, end: float, *, fds: Sequence[int] = ()) -> Message:
        """Send a request and wait for its reply, which is of the type that belongs or `Error`.

        Args:
            message: the request.
            end: `time.monotonic()` when to give up.
            fds: descriptors to send with it, numbered from 0.

        Raises:
            Refused: the daemon has ended the connection, and said why.
            DaemonLost: no reply until `end`; the daemon died meanwhile, or answers nonsense; or the
                session is being closed.
        """
        number = next(self._ids)
        frame = WIRE.encode(message, number)
        self._awaited[number] = None
        try:
            self._send(frame, fds)
            answer = self._wait(number, message, end)
        finally:
            with self._lock:  # not while a reply is put there
                del self._awaited[number]
        reply = self._decode(answer)
        if not isinstance(reply, (REPLY_OF[type(message)], Error)):
            raise DaemonLost(f"{type(message).__name__} was answered by {type(reply).__name__}")
        return reply

    def _wait(self, number: int, message: Message, end: float) -> tuple[Header, bytes]:
        closing = False
        while True:
            self.take_in()
            answer = self._awaited[number]
            if answer is not None:
                return answer
            if self.failed:
                raise self.loss
            if closing:
                raise DaemonLost("this session is being closed")
            left = end - time.monotonic()
            if left <= 0:
                raise DaemonLost(f"no answer to {type(message).__name__} within its deadline")
            closing = self.wait_readable(left)

    def wait_readable(self, seconds: float) -> bool:
        """Wait until a reply may have arrived, so many seconds and `LOOK_MS` at most.

        Returns:
            Whether the connection has failed, or the session is being closed.
        """
        poller = select.poll()  # one must not be used by two threads
        poller.register(self._fd, select.POLLIN | (select.POLLOUT * self._channel.wants_write))
        poller.register(self._stop, select.POLLIN)
        ready = poller.poll(min(LOOK_MS, max(0.0, seconds * 1000)))
        return bool(self.failed) or any(fd == self._stop for fd, _ in ready)

    def post(self, message: Message) -> int:
        """Send a request and wait for nothing; `replies` will have its reply.

        Returns:
            Its number; 0 where it could not be sent, and the connection has failed.
        """
        number = next(self._ids)
        try:
            self._send(WIRE.encode(message, number), posted=number)
        except (DaemonLost, Oversize) as error:
            self.failed = self.failed or str(error)
            return 0
        return number

    def _send(self, frame: bytes, fds: Sequence[int] = (), posted: int = 0) -> None:
        with self._lock:
            if self.failed:
                raise self.loss
            if posted:
                self._posted_at = self._posted[posted] = time.monotonic()
            try:
                self._channel.send(frame, fds)
            except EOFError:
                while self._receive():  # the daemon's reason, if it gave one
                    pass
                self.failed = self.failed or "the daemon has closed the connection"
                raise self.loss from None
            except (ChannelFull, OSError) as error:
                raise DaemonLost(f"the daemon takes no requests: {error}") from error

    @property
    def loss(self) -> DaemonLost:
        """The error to raise once `failed`."""
        return Refused(self.failed) if self._refused else DaemonLost(self.failed)

    # ---------------------------------------------------------------- receive

    def take_in(self) -> None:
        """Receive all that has arrived, and send on what waits. Never waits.

        Replies go to their callers, notices to `receive`.
        """
        with self._lock:
            self._receive()

    def _receive(self) -> bool:
        """Return whether messages have arrived. Under the lock."""
        channel, arrived, more = self._channel, False, True
        try:
            if channel.wants_write and not self.failed:
                with contextlib.suppress(EOFError):  # what was sent before is received first
                    channel.flush()
            while more and not self.failed:
                if (received := channel.receive()) is not None:
                    self._keep(*received)
                    arrived = True
                more = channel.more
        except EOFError:
            self.failed = "the daemon has closed the connection"
        except DescriptorsLost:
            self.failed = "a notice lost its descriptors; is the limit of open files reached?"
        except (BadFrame, OSError) as error:
            self.failed = f"the connection broke: {error}"
        return arrived

    def _keep(self, frame: bytes, fds: tuple[int, ...]) -> None:
        """Keep a reply for the request's caller, a notice for the keeper."""
        try:
            header = WIRE.decode_header(frame)
            number = header.request_id
            if not number:
                self._keep_notice(WIRE.decode_body(header, frame), fds)
                return
        except DecodeError as error:
            self._refused = isinstance(error, VersionMismatch)
            self.failed = str(error) if self._refused else f"an unreadable message: {error}"
            close_all(fds)
            return
        close_all(fds)  # a reply has none
        if self._posted.pop(number, None) is not None:
            self._posted_replies.append((header, frame))
        elif number in self._awaited:
            self._awaited[number] = header, frame
        else:
            self.failed = f"an answer to request {number}, which was not made"

    def _keep_notice(self, message: Message, fds: tuple[int, ...]) -> None:
        if isinstance(message, Error):  # the daemon ends the connection
            self.failed, self._refused = message.text or message.code, True
            close_all(fds)
            return
        self._notices.append(Notice(message, list(fds)))
        self._on_notice()

    def receive(self) -> Notice | None:
        """Return the next notice that was taken in, which is the caller's; None without one."""
        return self._notices.popleft() if self._notices else None

    @property
    def has_notices(self) -> bool:
        """Whether `receive` has something to return."""
        return bool(self._notices)

    # ---------------------------------------------------------------- replies

    @property
    def wants_write(self) -> bool:
        """Whether something waits until the connection is writable; `take_in` sends it then."""
        return self._channel.wants_write

    @property
    def awaited(self) -> bool:
        """Whether a caller waits for a reply, and so takes in what arrives."""
        return bool(self._awaited)

    @property
    def busy(self) -> bool:
        """Whether callers take in what arrives: one waits, or has posted a moment ago."""
        return self.awaited or time.monotonic() < self._posted_at + BUSY_SECONDS

    @property
    def unanswered(self) -> int:
        """How many posted requests have no answer yet."""
        return len(self._posted)

    @property
    def oldest(self) -> float | None:
        """When the oldest posted request without an answer was sent, by `time.monotonic()`."""
        if not self._posted:
            return None
        with self._lock:
            return next(iter(self._posted.values()), None)

    def is_overdue(self, seconds: float) -> bool:
        """Whether a posted request has had no answer for so long."""
        oldest = self.oldest
        return oldest is not None and time.monotonic() >= oldest + seconds

    @property
    def has_replies(self) -> bool:
        """Whether replies to posted requests have arrived, or may have, that were not taken."""
        return bool(self._posted or self._posted_replies)

    def replies(self) -> Iterator[tuple[int, Message]]:
        """Take the replies to posted requests that were taken in: request numbers, replies.

        Raises:
            DaemonLost: one is unreadable.
        """
        while self._posted_replies:
            answer = self._posted_replies.popleft()
            yield answer[0].request_id, self._decode(answer)

    @staticmethod
    def _decode(answer: tuple[Header, bytes]) -> Message:
        try:
            return WIRE.decode_body(*answer)
        except VersionMismatch as error:
            raise Refused(str(error)) from error
        except DecodeError as error:
            raise DaemonLost(f"an unreadable reply: {error}") from error

    # -------------------------------------------------------------------- end

    def close(self) -> None:
        """Close the connection; the daemon sees it at once. Callers that wait get an error."""
        with self._lock:
            self._channel.detach()  # a child that was forked may have it
            self._close()

    def _close(self) -> None:
        self.failed = self.failed or "this connection is closed"
        self._channel.close()
        while self._notices:
            self._notices.popleft().close()

    def abandon(self) -> None:
        """Close what a forked child has inherited, without the parent's lock."""
        self._lock = threading.Lock()
        self._close()

    def __repr__(self) -> str:
        return f"<Connection to {self.daemon} pid {self.pid}>"


def _connect(path: Path) -> Channel:
    """Return a connection to the daemon's socket. Never waits: a full queue is an `OSError`."""
    kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    connecting = socket.socket(socket.AF_UNIX, kind)
    try:
        connecting.connect(os.fspath(path))
        return Channel(connecting)
    except BaseException as error:
        connecting.close()
        if isinstance(error, EOFError):
            raise DaemonLost("the daemon has closed the connection") from error
        if isinstance(error, PermissionError) and (denied := explain_denied(path)):
            raise AccessDenied(denied) from error
        raise
