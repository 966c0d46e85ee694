"""Connections of ZeroMQ's DEALER sockets to one Unix socket, each within bounds.

Everybody who connects gets his turn: one message each, round after round. What is
kept of all of them together, unfinished messages and replies that nobody reads, is
bounded; above that whoever has most kept is shown out. Who does not read his
replies is not read either.

What a peer has sent and nobody has read is lost when its connection is closed, and
it would wait for an answer that never comes. So newcomers do not displace just
anybody who has not shown yet who he is, but one of the process that has most such
connections.
"""

import contextlib
import errno
import logging
import os
import select
import socket
import struct
import time
from collections import Counter, OrderedDict
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from kvd.errors import BadFrame
from kvd.wire.zmtp import MAX_PINGS, Incoming, frame_header, opening

READ_BYTES = 256 * 1024
UNREAD_BYTES = 2**20  # replies that wait for a peer, before it is not read any more
MAX_KEPT_BYTES = 256 * 2**20
MAX_UNPROVEN = 1024
MAX_CONNECTIONS = 8192
AT_ONCE = 32
"""Newcomers that are let in, and peers that are heard without a message, before others' turn."""
FEW = 8
"""Connections without a token that a process may have, before one gives way to a newcomer."""
BACKLOG = 1024
LIMITS = ("message_bytes", "message_parts", "kept_bytes", "connections", "open_files")
"""Bounds above which connections are closed."""
_UCRED = struct.Struct("iII")

log = logging.getLogger("kvd.wire.router")


class Received(NamedTuple):
    """A message, and what to call its sender when it is answered."""

    identity: bytes
    frame: bytes


def _peer(sock: socket.socket) -> tuple[int, int]:
    """Pid and uid of the process that connected; its pid is 0 where it cannot be seen from here."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


def _has_something_to_say(sock: socket.socket) -> bool:
    """Whether there is anything to read; the end of the connection is not."""
    try:
        return bool(sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except OSError:
        return False


class _Connection:
    """One peer: its socket, what it has begun to say, and what it has not read."""

    __slots__ = (
        "deadline",
        "incoming",
        "kept",
        "number",
        "outgoing",
        "pid",
        "proven",
        "sock",
        "uid",
        "unread",
    )

    def __init__(self, number: int, sock: socket.socket, max_bytes: int) -> None:
        self.number = number
        self.sock = sock
        self.pid, self.uid = _peer(sock)
        self.incoming = Incoming(max_bytes)
        self.outgoing: list[memoryview] = []
        self.unread = 0
        self.kept = 0
        self.proven = False
        self.deadline = 0.0  # when it is given up if nothing comes; 0: never

    @property
    def identity(self) -> bytes:
        return self.number.to_bytes(8, "little")

    def __repr__(self) -> str:
        return f"<_Connection {self.number}, {self.kept} bytes kept>"


class Router:
    """The listening end. One thread.

    Args:
        path: where to listen; a file there is replaced.
        max_bytes: of a message.
        max_kept: bytes of unfinished messages and unread replies, all peers together.
        max_unproven: connections that have not been called proven; above, one of them goes.

    Raises:
        OSError: the address cannot be had.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int,
        max_kept: int = MAX_KEPT_BYTES,
        max_unproven: int = MAX_UNPROVEN,
    ) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._max_kept = max_kept
        self._max_unproven = max_unproven
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._listener.setblocking(False)  # the socket API's own form
        path.unlink(missing_ok=True)
        self._listener.bind(str(path))
        path.chmod(0o660)
        self._inode = path.stat().st_ino
        self._listener.listen(BACKLOG)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        # Given up to close a connection that no descriptor is left for.
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._by_fd: dict[int, _Connection] = {}
        self._by_identity: dict[bytes, _Connection] = {}
        self._unproven: OrderedDict[int, _Connection] = OrderedDict()
        self._strangers: Counter[int] = Counter()  # how many of these, by their process
        self._hot: OrderedDict[int, _Connection] = OrderedDict()
        self._mortal: dict[int, _Connection] = {}  # those with a deadline
        self._kept = 0
        self._next = 1
        self._opening = opening(b"ROUTER")
        self._scratch = memoryview(bytearray(READ_BYTES))
        self.dropped = 0
        """Messages of several parts."""
        self.limits: Counter[str] = Counter(dict.fromkeys(LIMITS, 0))
        """Connections that were closed, by the bound that they were above."""

    def fileno(self) -> int:
        """For polling: readable where `look` has something to do."""
        return self._epoll.fileno()

    @property
    def pending(self) -> bool:
        """Some peers are still to be heard, of whom polling may know nothing."""
        return bool(self._hot)

    @property
    def kept_bytes(self) -> int:
        """Bytes of unfinished messages and of replies that were not read."""
        return self._kept

    def __len__(self) -> int:
        return len(self._by_fd)

    def look(self) -> None:
        """Let in who has come, send on what waited, and see who has something to say."""
        for fd, events in self._epoll.poll(0):
            connection = self._by_fd.get(fd)
            if connection is None:
                if fd == self._listener.fileno():
                    self._accept()
                continue
            if events & select.EPOLLOUT:
                self._flush(connection)
            if events & ~select.EPOLLOUT and connection.sock.fileno() >= 0:
                self._hot[connection.number] = connection
        if self._mortal:
            self._bury()

    def take(self) -> Received | None:
        """The next message of those who have something to say, who take turns.

        None where a few of them had none; the others are `pending`.
        """
        for _ in range(AT_ONCE):
            if not self._hot:
                break
            _, connection = self._hot.popitem(last=False)
            try:
                frame = connection.incoming.take()
                if (
                    frame is None
                    and not connection.incoming.more
                    and len(connection.incoming.pongs) < MAX_PINGS
                    and self._read(connection)
                ):
                    frame = connection.incoming.take()
                self._weigh(connection)
            except BadFrame as error:
                self._give_up(connection, str(error), error.limit)
                continue
            pinged = bool(connection.incoming.pongs)
            if pinged and connection.sock.fileno() >= 0:
                self._answer_pings(connection)
            if connection.incoming.dropped:
                self.dropped += connection.incoming.dropped
                connection.incoming.dropped = 0
            if (
                (pinged or connection.incoming.more or frame is not None)
                and len(connection.incoming)
                and connection.unread <= UNREAD_BYTES
                and connection.sock.fileno() >= 0
            ):
                self._hot[connection.number] = connection
            if frame is not None:
                return Received(connection.identity, frame)
        return None

    def prove(self, identity: bytes) -> None:
        """This peer has shown who it is: it does not give way to newcomers."""
        connection = self._by_identity.get(identity)
        if connection is not None and not connection.proven:
            connection.proven = True
            self._know(connection)

    def disown(self, identity: bytes) -> None:
        """Undo `prove`."""
        connection = self._by_identity.get(identity)
        if connection is not None and connection.proven:
            connection.proven = False
            self._meet(connection)

    def send(self, identity: bytes, frame: bytes) -> bool:
        """Send a message of one part; false where the peer is gone, or reads nothing."""
        connection = self._by_identity.get(identity)
        if connection is None or connection.unread > UNREAD_BYTES + self._max_bytes:
            return False
        return self._send(connection, frame_header(len(frame)), frame)

    def close(self, linger: float = 0.0) -> None:
        """Close everything; replies get so many seconds to leave. May be called again."""
        if self._epoll.closed:
            return
        end = time.monotonic() + linger
        self._epoll.unregister(self._listener)
        self._listener.close()  # first: whoever is hung up on comes again at once
        while any(c.outgoing for c in self._by_fd.values()):
            left = end - time.monotonic()
            if left <= 0:
                break
            for fd, events in self._epoll.poll(left):
                connection = self._by_fd.get(fd)
                if connection is None:
                    continue
                if events & select.EPOLLOUT:
                    self._flush(connection)
                elif events & (select.EPOLLHUP | select.EPOLLERR):
                    self._close(connection)
                else:  # what it says is not heard any more
                    self._epoll.modify(fd, select.EPOLLOUT)
        for connection in list(self._by_fd.values()):
            self._close(connection)
        self._epoll.close()
        if self._spare >= 0:
            os.close(self._spare)
        try:
            if self._path.stat().st_ino == self._inode:  # another daemon may listen there by now
                self._path.unlink()
        except FileNotFoundError:
            pass

    # ------------------------------------------------------------ connections

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                if not self._make_room("open_files", few=FEW):
                    self._refuse_one()
                return
            if len(self._by_fd) >= MAX_CONNECTIONS:
                self.limits["connections"] += 1
                sock.close()
                continue
            self._welcome(sock)
            if len(self._unproven) > self._max_unproven:
                self._make_room("connections", few=0)

    def _welcome(self, sock: socket.socket) -> None:
        sock.setblocking(False)  # the socket API's own form
        try:
            sock.send(self._opening, socket.MSG_NOSIGNAL)  # a new socket has room for 100 bytes
        except OSError:
            sock.close()
            return
        connection = _Connection(self._next, sock, self._max_bytes)
        self._next += 1
        self._by_fd[sock.fileno()] = self._by_identity[connection.identity] = connection
        self._meet(connection)
        self._epoll.register(sock, select.EPOLLIN)

    def _meet(self, connection: _Connection) -> None:
        self._unproven[connection.number] = connection
        self._strangers[connection.pid] += 1

    def _know(self, connection: _Connection) -> None:
        if self._unproven.pop(connection.number, None) is not None:
            self._strangers[connection.pid] -= 1
            if not self._strangers[connection.pid]:
                del self._strangers[connection.pid]

    def _make_room(self, limit: str, *, few: int) -> bool:
        """Show out the oldest stranger of the process with most of them; whether one had to go.

        Nobody goes where no process has more than a few.
        """
        pid, count = max(self._strangers.items(), key=itemgetter(1), default=(0, 0))
        if count <= few:
            return False
        oldest = next(one for one in self._unproven.values() if one.pid == pid)
        self._give_up(oldest, "others want its place, and it has shown no token", limit)
        return True

    def _refuse_one(self) -> None:
        self.limits["open_files"] += 1
        log.error("no file descriptor is left for a connection; raise LimitNOFILE")
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        with contextlib.suppress(OSError):
            self._listener.accept()[0].close()
        with contextlib.suppress(OSError):  # somebody else was faster; then without one
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _read(self, connection: _Connection) -> bool:
        """Read once; whether anything has come. Whoever has hung up is forgotten."""
        try:
            count = connection.sock.recv_into(self._scratch)
        except BlockingIOError:
            return False
        except OSError:
            count = 0
        if not count:
            self._close(connection)
            return False
        connection.incoming.feed(self._scratch[:count])
        if connection.number in self._mortal:
            self._await(connection)
        if count == READ_BYTES:  # else epoll tells of what comes later
            self._hot[connection.number] = connection
        return True

    def _send(self, connection: _Connection, *parts: bytes) -> bool:
        """Send now what the socket takes, the rest later; false where the peer is gone."""
        sent = 0
        if not connection.outgoing:
            try:
                sent = connection.sock.sendmsg(parts, [], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                pass
            except OSError:
                self._close(connection)
                return False
        rest = sum(map(len, parts)) - sent
        if rest:
            connection.outgoing.append(memoryview(b"".join(parts))[sent:])
            self._waits(connection, rest)
            self._weigh(connection)
        return True

    def _answer_pings(self, connection: _Connection) -> None:
        """Send the PONGs, and note how long the peer wants to be waited for."""
        pongs, connection.incoming.pongs = connection.incoming.pongs, []
        self._await(connection)
        self._send(connection, *pongs)

    def _await(self, connection: _Connection) -> None:
        """Something has come: the time to wait for more starts anew, where the peer has set one."""
        ttl = connection.incoming.ttl
        if ttl:
            connection.deadline = time.monotonic() + ttl
            self._mortal[connection.number] = connection
        else:
            self._mortal.pop(connection.number, None)

    def _bury(self) -> None:
        """Close the connections of those that were silent for as long as they said themselves."""
        now = time.monotonic()
        for connection in [one for one in self._mortal.values() if one.deadline < now]:
            if _has_something_to_say(connection.sock):
                self._await(connection)
                continue
            text = "a connection of pid %d (uid %d) is closed: nothing came for %g s, its own limit"
            log.info(text, connection.pid, connection.uid, connection.incoming.ttl)
            self._close(connection)

    def _flush(self, connection: _Connection) -> None:
        while connection.outgoing:
            head = connection.outgoing[0]
            try:
                sent = connection.sock.send(head, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError:
                self._close(connection)
                return
            if sent < len(head):
                connection.outgoing[0] = head[sent:]
            else:
                del connection.outgoing[0]
            self._waits(connection, -sent)
            self._weigh(connection)

    def _waits(self, connection: _Connection, change: int) -> None:
        """So many bytes more wait for the peer to read."""
        connection.unread += change
        events = 0 if connection.unread > UNREAD_BYTES else select.EPOLLIN
        if connection.unread:
            events |= select.EPOLLOUT
        self._epoll.modify(connection.sock, events)
        if not events & select.EPOLLIN:
            self._hot.pop(connection.number, None)
        elif len(connection.incoming):
            self._hot[connection.number] = connection

    def _weigh(self, connection: _Connection) -> None:
        """Count what is kept of a peer; above the bound whoever has most kept goes."""
        if connection.sock.fileno() < 0:
            return
        kept = len(connection.incoming) + connection.unread
        self._kept += kept - connection.kept
        connection.kept = kept
        while self._kept > self._max_kept:
            most = max(self._by_fd.values(), key=lambda other: other.kept)
            text = f"it has {most.kept} bytes of {self._kept} that are kept of all"
            self._give_up(most, text, "kept_bytes")

    def _give_up(self, connection: _Connection, why: str, limit: str) -> None:
        if limit:
            self.limits[limit] += 1
        else:
            self.dropped += 1
        text = "a connection of pid %d (uid %d) is closed: %s"
        log.warning(text, connection.pid, connection.uid, why)
        self._close(connection)

    def _close(self, connection: _Connection) -> None:
        fd = connection.sock.fileno()
        if fd < 0:
            return
        self._epoll.unregister(fd)
        del self._by_fd[fd]
        del self._by_identity[connection.identity]
        self._know(connection)
        self._hot.pop(connection.number, None)
        self._mortal.pop(connection.number, None)
        self._kept -= connection.kept
        connection.sock.close()

    def __repr__(self) -> str:
        return f"<Router {self._path}, {len(self)} connections, {self._kept} bytes kept>"
