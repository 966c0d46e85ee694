"""Connections of ZeroMQ's DEALER sockets to one Unix socket, each within bounds.

Clients may use libzmq. This end does not: libzmq has no bound for a message of many parts (see
`zmtp`), and reads in a thread of its own; here bytes are read by the loop that serves them.

Connections take turns: one message each, round after round. What is buffered for all of
them together, unfinished messages and unread replies, is bounded; above that the
connection with most of it is closed. A peer that does not read its replies is not read.

What a peer has sent and was not read is lost when its connection is closed. So a new
connection displaces none but an unproven one (without a session yet) of the process that
has most of these.
"""

import contextlib
import logging
import select
import socket
import struct
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from kvd.errors import BadFrame
from kvd.metrics.counts import CONNECTION_LIMITS
from kvd.wire.listener import Listener, NoDescriptor
from kvd.wire.zmtp import MAX_PINGS, Incoming
from kvd_proto.zmtp import frame_header, opening

READ_BYTES = 256 * 1024
UNREAD_BYTES = 2**20  # replies that wait for a peer, before it is not read any more
MAX_KEPT_BYTES = 256 * 2**20
MAX_UNPROVEN = 1024
MAX_CONNECTIONS = 8192
AT_ONCE = 32
"""Connections that are accepted, and peers that are read without a message, in one turn."""
FEW = 8
"""Unproven connections that a process may have before one is closed for want of descriptors."""
_UCRED = struct.Struct("iII")

log = logging.getLogger("kvd.router")


class Received(NamedTuple):
    """A message, and its sender's identity, for the reply."""

    identity: bytes
    frame: bytes


@dataclass(eq=False, slots=True)
class _Connection:
    """One peer: its socket, the message it has begun to send, and the replies it has not read.

    pid, uid: of the process that connected; pid is 0 where it cannot be seen from here.
    """

    identity: bytes
    sock: socket.socket
    incoming: Incoming
    pid: int
    uid: int
    outgoing: list[memoryview] = field(default_factory=list)
    unread: int = 0  # bytes of replies in `outgoing`
    kept: int = 0  # bytes that are counted as buffered for it
    proven: bool = False  # it belongs to a session

    @property
    def closed(self) -> bool:
        return self.sock.fileno() < 0

    def __repr__(self) -> str:
        return f"<_Connection of pid {self.pid}, {self.kept} bytes kept>"


class Router:
    """The listening end. One thread.

    Args:
        path: where to listen; a file there is replaced.
        max_bytes: of a message.
        max_kept: bytes of unfinished messages and unread replies, all peers together.
        max_unproven: connections without a session; above, one of them is closed.
        epoll: that of a loop which waits for other things too, and gives `look` what is ready;
            without one there is one here.

    Raises:
        ConfigError: the address cannot be had.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int,
        max_kept: int = MAX_KEPT_BYTES,
        max_unproven: int = MAX_UNPROVEN,
        epoll: select.epoll | None = None,
    ) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._max_kept = max_kept
        self._max_unproven = max_unproven
        path.unlink(missing_ok=True)
        self._listener = Listener(path)
        self._inode = path.stat().st_ino
        self._epoll = epoll or select.epoll()
        self._shares_epoll = epoll is not None
        self._closed = False
        self._epoll.register(self._listener, select.EPOLLIN)
        self._by_fd: dict[int, _Connection] = {}
        self._by_identity: dict[bytes, _Connection] = {}
        self._unproven: OrderedDict[bytes, _Connection] = OrderedDict()  # the oldest first
        self._unproven_of: Counter[int] = Counter()  # how many of these, by pid
        self._readable: OrderedDict[bytes, _Connection] = OrderedDict()  # in the order of turns
        self._kept = 0
        self._next = 1
        self._opening = opening(b"ROUTER")
        self._scratch = memoryview(bytearray(READ_BYTES))
        self.dropped = 0
        """Messages of several parts, and what is no ZMTP."""
        self.limits: Counter[str] = Counter(dict.fromkeys(CONNECTION_LIMITS, 0))
        """Connections that were closed, by the bound that they were above."""

    def fileno(self) -> int:
        """Return a descriptor for polling: readable where `look` has something to do."""
        return self._epoll.fileno()

    @property
    def pending(self) -> bool:
        """Whether some peers are still to be read, of which polling may know nothing."""
        return bool(self._readable)

    @property
    def kept_bytes(self) -> int:
        """Bytes of unfinished messages and of replies that were not read."""
        return self._kept

    def __len__(self) -> int:
        return len(self._by_fd)

    def look(self, ready: dict[int, int] | None = None) -> None:
        """Accept connections, send on what waited, and note which peers can be read.

        Args:
            ready: events by descriptor, as epoll has reported them; those that are looked at here
                are taken out. None: epoll is asked here.
        """
        found = self._epoll.poll(0) if ready is None else list(ready.items())
        for fd, events in found:
            connection = self._by_fd.get(fd)
            if connection is None:
                if fd != self._listener.fileno():
                    continue
                self._accept()
            else:
                if events & select.EPOLLOUT:
                    self._flush(connection)
                if events & ~select.EPOLLOUT and not connection.closed:
                    self._readable[connection.identity] = connection
            if ready is not None:
                del ready[fd]

    def take(self) -> Received | None:
        """Return the next message; peers take turns.

        None where a few of them had none; the others are `pending`.
        """
        for _ in range(AT_ONCE):
            if not self._readable:
                break
            _, connection = self._readable.popitem(last=False)
            try:
                frame = self._next_frame(connection)
            except BadFrame as error:
                self._disconnect(connection, str(error), error.limit)
                continue
            if frame is not None:
                return Received(connection.identity, frame)
        return None

    def peer(self, identity: bytes) -> tuple[int, int]:
        """Return pid and uid of the process that connected; -1 each where it has gone."""
        connection = self._by_identity.get(identity)
        return (connection.pid, connection.uid) if connection is not None else (-1, -1)

    def prove(self, identity: bytes) -> None:
        """This connection belongs to a session: new connections do not displace it."""
        connection = self._by_identity.get(identity)
        if connection is not None and not connection.proven:
            connection.proven = True
            self._remove_unproven(connection)

    def unprove(self, identity: bytes) -> None:
        """Undo `prove`: its session has ended."""
        connection = self._by_identity.get(identity)
        if connection is not None and connection.proven:
            connection.proven = False
            self._add_unproven(connection)

    def send(self, identity: bytes, frame: bytes) -> bool:
        """Send a message of one part; return False where the peer is gone, or reads nothing."""
        connection = self._by_identity.get(identity)
        if connection is None or connection.unread > UNREAD_BYTES + self._max_bytes:
            return False
        return self._send(connection, frame_header(len(frame)) + frame)

    def close(self, linger: float = 0.0) -> None:
        """Close everything; replies get so many seconds to leave. May be called again."""
        if self._closed:
            return
        self._closed = True
        end = time.monotonic() + linger
        self._epoll.unregister(self._listener)
        self._listener.close()  # first: a peer that is disconnected connects again at once
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
                else:  # requests are not read any more
                    self._epoll.modify(fd, select.EPOLLOUT)
        for connection in list(self._by_fd.values()):
            self._close(connection)
        if not self._shares_epoll:
            self._epoll.close()
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:  # another daemon may listen there by now
                self._path.unlink()

    # ------------------------------------------------------------ connections

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                sock = self._listener.accept()
            except NoDescriptor:
                if not self._make_room("open_files", few=FEW):
                    self.limits["open_files"] += 1
                    self._listener.refuse()
                return
            if sock is None:
                return
            if len(self._by_fd) >= MAX_CONNECTIONS:
                self.limits["connections"] += 1
                sock.close()
                continue
            self._add(sock)
            if len(self._unproven) > self._max_unproven:
                self._make_room("connections", few=0)

    def _add(self, sock: socket.socket) -> None:
        sock.setblocking(False)  # the socket API's own form
        try:
            sock.send(self._opening, socket.MSG_NOSIGNAL)  # a new socket has room for 100 bytes
        except OSError:
            sock.close()
            return
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        pid, uid, _ = _UCRED.unpack(credentials)
        name = self._next.to_bytes(8, "little")
        connection = _Connection(name, sock, Incoming(self._max_bytes), pid, uid)
        self._next += 1
        self._by_fd[sock.fileno()] = self._by_identity[connection.identity] = connection
        self._add_unproven(connection)
        self._epoll.register(sock, select.EPOLLIN)

    def _add_unproven(self, connection: _Connection) -> None:
        self._unproven[connection.identity] = connection
        self._unproven_of[connection.pid] += 1

    def _remove_unproven(self, connection: _Connection) -> None:
        if self._unproven.pop(connection.identity, None) is not None:
            self._unproven_of[connection.pid] -= 1
            if not self._unproven_of[connection.pid]:
                del self._unproven_of[connection.pid]

    def _make_room(self, limit: str, *, few: int) -> bool:
        """Close the oldest unproven connection of the process with most of them.

        Returns:
            False where no process has more than a few.
        """
        pid, count = max(self._unproven_of.items(), key=itemgetter(1), default=(0, 0))
        if count <= few:
            return False
        oldest = next(one for one in self._unproven.values() if one.pid == pid)
        self._disconnect(oldest, "it has no session, and others want its place", limit)
        return True

    # ---------------------------------------------------------------- reading

    def _next_frame(self, connection: _Connection) -> bytes | None:
        """Return the peer's next message, if it has arrived; read the socket once for it.

        Raises:
            BadFrame: it is no ZMTP, or above a bound.
        """
        incoming = connection.incoming
        frame, may_read = None, True
        begun = len(incoming)
        if begun:
            frame = incoming.take()
            may_read = frame is None and not incoming.more and len(incoming.pongs) < MAX_PINGS
        if may_read and (data := self._read(connection)) is not None:
            # What was taken in before is still to be counted and answered.
            if not begun and (frame := incoming.only(data)) is not None:
                return frame
            incoming.feed(data)
            frame = incoming.take()
        self._count_kept(connection)
        pongs, incoming.pongs = incoming.pongs, []
        if pongs and not connection.closed:
            self._send(connection, b"".join(pongs))
        if incoming.dropped:
            text = "a message of pid %d, uid %d, cannot be read: it has several parts"
            log.warning(text, connection.pid, connection.uid)
            self.dropped += incoming.dropped
            incoming.dropped = 0
        if (
            (pongs or incoming.more or frame is not None)
            and len(incoming)
            and connection.unread <= UNREAD_BYTES
            and not connection.closed
        ):
            self._readable[connection.identity] = connection
        return frame

    def _read(self, connection: _Connection) -> memoryview | None:
        """Read once; what has come, until the next read. At its end the connection is closed."""
        try:
            count = connection.sock.recv_into(self._scratch)
        except BlockingIOError:
            return None
        except OSError:
            count = 0
        if not count:
            self._close(connection)
            return None
        if count == READ_BYTES:  # else epoll tells of what comes later
            self._readable[connection.identity] = connection
        return self._scratch[:count]

    # ---------------------------------------------------------------- writing

    def _send(self, connection: _Connection, data: bytes) -> bool:
        """Send now what the socket takes, the rest later; return False where the peer is gone."""
        sent = 0
        if not connection.outgoing:
            try:
                sent = connection.sock.send(data, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                pass
            except OSError:
                self._close(connection)
                return False
        rest = len(data) - sent
        if rest:
            connection.outgoing.append(memoryview(data)[sent:])
            self._count_unread(connection, rest)
        return True

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
            self._count_unread(connection, -sent)

    # ----------------------------------------------------------------- bounds

    def _count_unread(self, connection: _Connection, change: int) -> None:
        """So many bytes more wait for the peer to read."""
        connection.unread += change
        events = 0 if connection.unread > UNREAD_BYTES else select.EPOLLIN
        if connection.unread:
            events |= select.EPOLLOUT
        self._epoll.modify(connection.sock, events)
        if not events & select.EPOLLIN:
            self._readable.pop(connection.identity, None)
        elif len(connection.incoming):
            self._readable[connection.identity] = connection
        self._count_kept(connection)

    def _count_kept(self, connection: _Connection) -> None:
        """Count what is buffered for a peer; above the bound the one with most is disconnected."""
        if connection.closed:
            return
        kept = len(connection.incoming) + connection.unread
        self._kept += kept - connection.kept
        connection.kept = kept
        while self._kept > self._max_kept:
            most = max(self._by_fd.values(), key=lambda other: other.kept)
            text = f"it has {most.kept} bytes of {self._kept} that are kept of all"
            self._disconnect(most, text, "kept_bytes")

    def _disconnect(self, connection: _Connection, why: str, limit: str) -> None:
        if limit:
            self.limits[limit] += 1
        else:
            self.dropped += 1
        text = "a connection of pid %d (uid %d) is closed: %s"
        log.warning(text, connection.pid, connection.uid, why)
        self._close(connection)

    def _close(self, connection: _Connection) -> None:
        if connection.closed:
            return
        fd = connection.sock.fileno()
        self._epoll.unregister(fd)
        del self._by_fd[fd]
        del self._by_identity[connection.identity]
        self._remove_unproven(connection)
        self._readable.pop(connection.identity, None)
        self._kept -= connection.kept
        connection.sock.close()

    def __repr__(self) -> str:
        return f"<Router {self._path}, {len(self)} connections, {self._kept} bytes kept>"
