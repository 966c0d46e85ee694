"""One connection to one daemon process: its control socket and its request socket.

Notices and descriptors travel over the control socket. Its end of file means that the daemon is
gone, which the kernel says at once and without fail.

Any thread may make requests, and none waits for another one's: the lock of the request socket is
held to send and to take in what has arrived, never to wait. Replies go by the number of their
request. Who waits for one takes in those of others too, and looks for its own every few
milliseconds, as others do the same. A request may also be posted, and its reply is kept.
Notices are the keeper's alone.

A connection never reconnects and ends with the first request that is not answered in time; a new
one is made.
"""

import errno
import itertools
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvd_client.access import explain_denied
from kvd_client.dealer import Dealer
from kvd_client.errors import AccessDenied, DaemonLost, Refused, UsageError
from kvd_proto.codec import NO_ID, WIRE, Header
from kvd_proto.errors import DecodeError, Oversize, VersionMismatch
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
CONNECT_SECONDS = 1.0
HANDSHAKE_SECONDS = 10.0  # many short tries would fill the queue of a daemon that stands still
LOOK_MS = 20  # a reply may have been taken in by another thread


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


class Connection:
    """Control socket and request socket of one session, greeted and welcomed.

    Args:
        runtime_dir: the daemon's.
        kind, engine: who we are.
        stop: descriptor that becomes readable when the session is being closed.

    Attributes:
        failed: why the connection cannot be used any more; empty while it can.

    Raises:
        OSError: no daemon.
        AccessDenied: this process may not connect to its sockets.
        DaemonLost: a daemon that does not do its part.
    """

    def __init__(
        self,
        runtime_dir: Path,
        kind: Kind,
        engine: str,
        stop: int,
    ) -> None:
        end = time.monotonic() + HANDSHAKE_SECONDS
        self.failed = ""
        self._ids = itertools.count(1)
        self._posted: dict[int, float] = {}  # those without an answer, and when they were sent
        self._kept: deque[tuple[Header, bytes]] = deque()  # answers to them, in their order
        self._awaited: dict[int, tuple[Header, bytes] | None] = {}  # by those who wait
        self._lock = threading.Lock()
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
            self._dealer = Dealer(os.fspath(socket_path(runtime_dir, "broker.sock")))
        except BaseException:
            self._control.close()
            raise
        self._fd, self._others = self._dealer.fileno(), (self.fileno(), stop)
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
            Refused: the daemon speaks another protocol version.
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
            if isinstance(error, VersionMismatch):
                raise Refused(str(error)) from error
            raise DaemonLost(f"an unreadable notice: {error}") from error
        return Notice(header, message, list(fds))

    def _open_control_socket(self, path: Path) -> None:
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
        self._control.settimeout(CONNECT_SECONDS)
        try:
            self._control.connect(os.fspath(path))
        except PermissionError as error:
            if denied := explain_denied(path):
                raise AccessDenied(denied) from error
            raise
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
        number = next(self._ids)
        try:
            frame = self._encode(message, number)
            self._awaited[number] = None
            if fds:
                self._send_with_descriptors(frame, fds, end)
            else:
                self._send(frame)
            answer = self._wait(number, message, end)
        except Oversize as error:
            return Error.of(ErrorCode.BAD_LAYOUT, str(error))
        finally:
            self._awaited.pop(number, None)
        reply = self._decode(answer)
        if not isinstance(reply, (REPLY_OF[type(message)], Error)):
            raise DaemonLost(f"{type(message).__name__} was answered by {type(reply).__name__}")
        return reply

    def _wait(self, number: int, message: Message, end: float) -> tuple[Header, bytes]:
        gone = False
        while True:
            self.take_in()
            answer = self._awaited[number]
            if answer is not None:
                return answer
            if self.failed or gone:
                raise DaemonLost(
                    self.failed or "the daemon is gone, or this session is being closed"
                )
            left = end - time.monotonic()
            if left <= 0:
                raise DaemonLost(f"no answer to {type(message).__name__} within its deadline")
            gone = self.wait_readable(left)

    def wait_readable(self, seconds: float) -> bool:
        """Wait until a reply may have arrived, so many seconds and `LOOK_MS` at most.

        Returns:
            Whether the daemon is gone, or the session is being closed.
        """
        poller = select.poll()  # one must not be used by two threads
        poller.register(self._fd, select.POLLIN | (select.POLLOUT * self._dealer.wants_write))
        control, stop = self._others
        poller.register(control, 0)  # only the hang-up: what can be read there is the keeper's
        poller.register(stop, select.POLLIN)
        ready = poller.poll(min(LOOK_MS, max(0.0, seconds * 1000)))
        return any(fd != self._fd for fd, _ in ready)

    def post(self, message: Message) -> int:
        """Send a request and wait for nothing; `replies` will have its reply.

        Returns:
            Its number; 0 where it could not be sent, and the connection has failed.
        """
        number = next(self._ids)
        try:
            frame = self._encode(message, number)
            self._send(frame, posted=number)
        except (DaemonLost, Oversize) as error:
            self.failed = self.failed or str(error)
            return 0
        return number

    def _encode(self, message: Message, number: int) -> bytes:
        boot_id = NO_ID if isinstance(message, Hello) else self.boot_id
        return WIRE.encode(message, number, boot_id, self.token)

    def _send(self, frame: bytes, posted: int = 0) -> None:
        with self._lock:
            if posted:
                self._posted[posted] = time.monotonic()
            if not self._dealer.send(frame):
                raise DaemonLost(self.failed or "the daemon takes no requests")

    # ---------------------------------------------------------------- replies

    def take_in(self) -> None:
        """Take in all replies that have arrived. Never waits."""
        with self._lock:
            for frame in self._dealer.receive():
                self._keep(frame)
            if self._dealer.closed:
                self.failed = self.failed or "the daemon has closed the connection"

    def _keep(self, frame: bytes) -> None:
        """Keep a reply for whoever has made the request."""
        try:
            header = WIRE.decode_header(frame)
        except DecodeError as error:
            self.failed = f"an unreadable reply: {error}"
            return
        number = header.request_id
        if header.boot_id != self.boot_id:
            self.failed = "another daemon answers: it has restarted"
        elif self._posted.pop(number, None) is not None:
            self._kept.append((header, frame))
        elif number in self._awaited:
            self._awaited[number] = header, frame
        else:
            self.failed = f"an answer to request {number}, which was not made"

    @property
    def unsent_fd(self) -> int:
        """The descriptor that takes more when it is writable; -1 where nothing waits for that.

        `take_in` sends it then.
        """
        return self._fd if self._dealer.wants_write else -1

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
        return bool(self._posted or self._kept)

    def replies(self) -> Iterator[tuple[int, Message]]:
        """Take the replies to posted requests that were taken in: request numbers, replies.

        Raises:
            DaemonLost: one is unreadable.
        """
        while self._kept:
            answer = self._kept.popleft()
            yield answer[0].request_id, self._decode(answer)

    @staticmethod
    def _decode(answer: tuple[Header, bytes]) -> Message:
        try:
            return WIRE.decode_body(*answer)
        except DecodeError as error:
            raise DaemonLost(f"an unreadable reply: {error}") from error

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

    # -------------------------------------------------------------------- end

    def close(self) -> None:
        """Close both sockets; the daemon sees it at once. Who waits for a reply is told."""
        with self._lock:
            self.failed = self.failed or "this connection is closed"
            self._control.close()
            self._dealer.close()

    def abandon(self) -> None:
        """Close what a forked child has inherited, without the parent's lock."""
        self._lock = threading.Lock()
        self.close()

    def __repr__(self) -> str:
        return f"<Connection to {self.daemon} pid {self.pid}, boot {self.boot_id.hex()[:8]}>"
