"""A session's one connection to the broker: requests and replies, notices and their descriptors.

Any thread may make requests. The lock is held to send and to receive, never to wait. A thread that
receives takes every message that has arrived:

- a reply is for the caller of `exchange`, which checks for it every `CHECK_MS`,
- a reply to a posted request is queued for `take_replies`,
- a notice is queued for `next_notice`, and `on_notice` is called.

End of file means that the daemon is gone; messages sent before are received first. A connection
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
HANDSHAKE_SECONDS = 10.0  # many short tries would fill the queue of a daemon that is stopped
CHECK_MS = 20  # another thread may have received the reply
BUSY_SECONDS = 0.1  # after a posted request, in which its caller receives what arrives


@dataclass(slots=True)
class Notice:
    """A message that answers no request, and its descriptors, which the receiver closes."""

    message: Message
    fds: list[int]

    def close(self) -> None:
        """Close the descriptors that were not taken from `fds`."""
        while self.fds:
            os.close(self.fds.pop())


def socket_path(runtime_dir: Path, name: str) -> Path:
    """Return the path of a socket of the daemon.

    Raises:
        UsageError: the path is longer than the kernel allows for a Unix socket.
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

    `stop_fd` is readable when the session is being closed. The thread that has received a notice
    calls `on_notice`. `failure` says why the connection cannot be used any more.

    Raises:
        OSError: there is no daemon.
        AccessDenied: this process may not connect to its socket.
        Refused: the daemon refuses this session.
        DaemonLost: the daemon's answer is invalid, or does not come.
    """

    def __init__(
        self,
        runtime_dir: Path,
        kind: Kind,
        engine: str,
        stop_fd: int,
        on_notice: Callable[[], None],
    ) -> None:
        end = time.monotonic() + HANDSHAKE_SECONDS
        self.failure = ""
        self._is_refused = False  # `failure` is the daemon's own reason
        self._on_notice = on_notice
        self._notices: deque[Notice] = deque()
        self._ids = itertools.count(1)
        self._posted: dict[int, float] = {}  # unanswered requests, and when they were sent
        self._last_posted_at = 0.0
        self._posted_replies: deque[tuple[Header, bytes]] = deque()  # as they arrived
        self._awaited: dict[int, tuple[Header, bytes] | None] = {}  # by callers of `exchange`
        self._lock = threading.Lock()
        self._channel = _connect(socket_path(runtime_dir, "broker.sock"))
        self._fd, self._stop_fd = self._channel.fileno(), stop_fd
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
                raise DaemonLost(f"Hello was answered by {type(welcome).__name__}")
        except BaseException:
            self.close()
            raise
        self.daemon, self.pid = welcome.daemon, welcome.pid

    def fileno(self) -> int:
        """Return the descriptor for polling."""
        return self._fd

    # --------------------------------------------------------------- requests

    def exchange(self, message: Message, end: float, *, fds: Sequence[int] = ()) -> Message:
        """Send a request and wait for its reply, which is of the request's reply type or `Error`.

        Args:
            message: the request.
            end: `time.monotonic()` when to give up.
            fds: descriptors to send with it, numbered from 0.

        Raises:
            Refused: the daemon has ended the connection with a reason.
            DaemonLost: no reply until `end`, an invalid one, the daemon died meanwhile, or the
                session is being closed.
        """
        request_id = next(self._ids)
        frame = WIRE.encode(message, request_id)
        self._awaited[request_id] = None
        try:
            self._send(frame, fds)
            answer = self._wait(request_id, message, end)
        finally:
            with self._lock:  # another thread may be storing the reply
                del self._awaited[request_id]
        reply = self._decode(answer)
        if not isinstance(reply, (REPLY_OF[type(message)], Error)):
            raise DaemonLost(f"{type(message).__name__} was answered by {type(reply).__name__}")
        return reply

    def _wait(self, request_id: int, message: Message, end: float) -> tuple[Header, bytes]:
        is_closing = False
        while True:
            self.receive_all()
            answer = self._awaited[request_id]
            if answer is not None:
                return answer
            if self.failure:
                raise self.error
            if is_closing:
                raise DaemonLost("this session is being closed")
            left_s = end - time.monotonic()
            if left_s <= 0:
                raise DaemonLost(f"no answer to {type(message).__name__} within its deadline")
            is_closing = self.wait_or_fail(left_s)

    def wait_or_fail(self, seconds: float) -> bool:
        """Wait until a reply may have arrived, for `seconds` and `CHECK_MS` at most.

        Return whether the connection has failed, or the session is being closed.
        """
        poller = select.poll()  # one must not be used by two threads
        write_event = select.POLLOUT if self._channel.wants_write else 0
        poller.register(self._fd, select.POLLIN | write_event)
        poller.register(self._stop_fd, select.POLLIN)
        ready = poller.poll(min(CHECK_MS, max(0.0, seconds * 1000)))
        return bool(self.failure) or any(fd == self._stop_fd for fd, _ in ready)

    def post(self, message: Message) -> int:
        """Send a request whose reply `take_replies` returns later; return its id.

        0: it could not be sent, and the connection has failed.
        """
        request_id = next(self._ids)
        try:
            self._send(WIRE.encode(message, request_id), posted_id=request_id)
        except (DaemonLost, Oversize) as error:
            self.failure = self.failure or str(error)
            return 0
        return request_id

    def _send(self, frame: bytes, fds: Sequence[int] = (), posted_id: int = 0) -> None:
        with self._lock:
            if self.failure:
                raise self.error
            if posted_id:
                self._last_posted_at = self._posted[posted_id] = time.monotonic()
            try:
                self._channel.send(frame, fds)
            except EOFError:
                while self._receive():  # the daemon's reason, if it sent one
                    pass
                self.failure = self.failure or "the daemon has closed the connection"
                raise self.error from None
            except (ChannelFull, OSError) as error:
                raise DaemonLost(f"the daemon does not read requests: {error}") from error

    @property
    def error(self) -> DaemonLost:
        """The error to raise for a `failure`."""
        return Refused(self.failure) if self._is_refused else DaemonLost(self.failure)

    # ---------------------------------------------------------------- receive

    def receive_all(self) -> None:
        """Receive all that has arrived, and send what waits to be sent. Never blocks."""
        with self._lock:
            self._receive()

    def _receive(self) -> bool:
        """Receive under the lock; return whether messages have arrived."""
        channel, has_arrived, more = self._channel, False, True
        try:
            if channel.wants_write and not self.failure:
                with contextlib.suppress(EOFError):  # first receive what the daemon sent before
                    channel.flush()
            while more and not self.failure:
                if (received := channel.receive()) is not None:
                    self._dispatch(*received)
                    has_arrived = True
                more = channel.more
        except EOFError:
            self.failure = "the daemon has closed the connection"
        except DescriptorsLost:
            self.failure = "a notice lost its descriptors; is the limit of open files reached?"
        except (BadFrame, OSError) as error:
            self.failure = f"the connection broke: {error}"
        return has_arrived

    def _dispatch(self, frame: bytes, fds: tuple[int, ...]) -> None:
        """Store a reply for the request's caller, or queue a notice for the keeper."""
        try:
            header = WIRE.decode_header(frame)
            request_id = header.request_id
            if not request_id:
                self._queue_notice(WIRE.decode_body(header, frame), fds)
                return
        except DecodeError as error:
            self._is_refused = isinstance(error, VersionMismatch)
            self.failure = str(error) if self._is_refused else f"an unreadable message: {error}"
            close_all(fds)
            return
        close_all(fds)  # a reply has none
        if self._posted.pop(request_id, None) is not None:
            self._posted_replies.append((header, frame))
        elif request_id in self._awaited:
            self._awaited[request_id] = header, frame
        else:
            self.failure = f"an answer to request {request_id}, which was not made"

    def _queue_notice(self, message: Message, fds: tuple[int, ...]) -> None:
        if isinstance(message, Error):  # the daemon ends the connection
            self.failure, self._is_refused = message.text or message.code, True
            close_all(fds)
            return
        self._notices.append(Notice(message, list(fds)))
        self._on_notice()

    def next_notice(self) -> Notice | None:
        """Return the next notice received, for the caller to close; None: there is none."""
        return self._notices.popleft() if self._notices else None

    @property
    def has_notices(self) -> bool:
        """Whether `next_notice` has a notice to return."""
        return bool(self._notices)

    # ---------------------------------------------------------------- replies

    @property
    def wants_write(self) -> bool:
        """Whether data waits until the connection is writable; `receive_all` sends it then."""
        return self._channel.wants_write

    @property
    def is_awaited(self) -> bool:
        """Whether a caller waits for a reply, and so receives what arrives."""
        return bool(self._awaited)

    @property
    def is_busy(self) -> bool:
        """Whether callers receive what arrives: one waits, or posted within `BUSY_SECONDS`."""
        return self.is_awaited or time.monotonic() < self._last_posted_at + BUSY_SECONDS

    @property
    def num_unanswered(self) -> int:
        """How many posted requests have no answer yet."""
        return len(self._posted)

    @property
    def oldest_posted_at(self) -> float | None:
        """`time.monotonic()` when the oldest unanswered posted request was sent; None: no such."""
        if not self._posted:
            return None
        with self._lock:
            return next(iter(self._posted.values()), None)

    def is_overdue(self, seconds: float) -> bool:
        """Return whether a posted request has had no answer for so many seconds."""
        posted_at = self.oldest_posted_at
        return posted_at is not None and time.monotonic() >= posted_at + seconds

    @property
    def has_replies(self) -> bool:
        """Whether `take_replies` has replies to return, or may have after `receive_all`."""
        return bool(self._posted or self._posted_replies)

    def take_replies(self) -> Iterator[tuple[int, Message]]:
        """Yield request id and reply of each posted request whose reply was received.

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
        """Close the connection; the daemon sees it at once. Callers that wait raise an error."""
        with self._lock:
            self._channel.detach()  # a forked child may have a copy of the descriptor
            self._close()

    def _close(self) -> None:
        self.failure = self.failure or "this connection is closed"
        self._channel.close()
        while self._notices:
            self._notices.popleft().close()

    def abandon(self) -> None:
        """Close what a forked child has inherited, without the parent's lock."""
        self._lock = threading.Lock()
        self._close()


def _connect(path: Path) -> Channel:
    """Connect without blocking, and return the channel.

    Raises:
        AccessDenied: this user may not connect.
        OSError: nothing listens there, or the backlog is full.
    """
    kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    connecting = socket.socket(socket.AF_UNIX, kind)
    try:
        connecting.connect(os.fspath(path))
        return Channel(connecting)
    except BaseException as error:
        connecting.close()
        if isinstance(error, PermissionError) and (denied := explain_denied(path)):
            raise AccessDenied(denied) from error
        raise
