"""The listening end: the clients of one Unix socket, served in turn and within bounds.

- Turns: one message of each client, round after round.
- Bytes: unfinished messages and unread replies of all clients have a bound together. Above it the
  client with the most is disconnected. A client that does not read its replies is not read.
- Connections: a client is a stranger until `adopt`. Above the bound of strangers the process with
  the most of them loses its oldest.
- Descriptors: `RESERVED_DESCRIPTORS` stay free; a client that would take them is disconnected.
"""

import array
import contextlib
import logging
import select
import socket
import struct
import time
from collections import Counter, OrderedDict, deque
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

from kvd.client_names import Peer
from kvd.machine.process import free_descriptors, open_files_remedy
from kvd.wire.listener import MAX_STUCK, DescriptorCloser, Listener, NoDescriptor
from kvd_proto.channel import Channel, ReceivedFrame
from kvd_proto.codec import WIRE
from kvd_proto.errors import BadFrame, ChannelFull, DecodeError, DescriptorsLost, VersionMismatch
from kvd_proto.messages import Error, ErrorCode

READ_BYTES = 256 * 1024
UNREAD_BYTES = 2**20
"""Replies that wait for a client, before it is not read any more."""
MAX_UNSENT_DESCRIPTORS = 64
MAX_KEPT_BYTES = 256 * 2**20
MAX_CLIENTS = 8192
MAX_STRANGERS = 1024
AT_ONCE = 32
"""Connections that are accepted, and clients that are read without a message, in one turn."""
FEW = 8
"""Strangers that a process may have before one is disconnected for want of descriptors."""
RESERVED_DESCRIPTORS = 256
"""Kept free for the descriptors of one message: the kernel closes here, in this thread, what has no
room."""
DESCRIPTOR_SECONDS = 10.0
"""How long descriptors may wait for the rest of their message."""
_UCRED = struct.Struct("iII")
_SO_PEERGROUPS = 59  # asm-generic/socket.h; not in Python's socket
_GROUPS_BYTES = 1024  # four a group; Python's socket asks for no more

log = logging.getLogger("kvd.wire")


class Client:
    """One connection.

    Attributes:
        peer: the process that connected.
        owner: what the server's owner keeps of it; None for a stranger.
        closed: it has ended; nothing is sent to it any more.
    """

    __slots__ = ("channel", "closed", "events", "fd", "kept_bytes", "owner", "peer", "refusal")

    def __init__(self, channel: Channel, peer: Peer) -> None:
        self.channel = channel
        self.fd = channel.fileno()
        self.peer = peer
        self.owner: Any = None
        self.refusal = b""  # what it is told, and no more, once it has greeted
        self.closed = False
        self.kept_bytes = 0  # as counted in the server's sum
        self.events = select.EPOLLIN  # that epoll reports of it


Received = tuple[Client, bytes, tuple[int, ...]]
"""A message's sender, the message, and its descriptors, which are the taker's."""


class Server:
    """The clients of one socket. One thread.

    Args:
        path: where to listen; a file there is replaced.
        max_bytes: of a message.
        max_kept: bytes of unfinished messages and unread replies, all clients together.
        max_clients: of all; more are closed.
        max_strangers: clients that were not adopted; above, one of them is disconnected.
        takes_descriptors: messages may bring descriptors; else that ends the connection.
        epoll: of the owner's loop, which passes the events to `handle_events`; None: the server
            makes one.
        closer: of descriptors that clients send.

    Attributes:
        accepted: clients that have connected; the owner takes them out.
        ended: clients whose connection has ended; the owner takes them out.
        limits: clients that were disconnected, by the bound that they were above. The owner may
            have them counted elsewhere.
        dropped: clients that were disconnected because they speak no ZMTP.

    Raises:
        ConfigError: the address cannot be had.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int,
        max_kept: int = MAX_KEPT_BYTES,
        max_strangers: int = MAX_STRANGERS,
        takes_descriptors: bool = False,
        max_clients: int = MAX_CLIENTS,
        epoll: select.epoll | None = None,
        closer: DescriptorCloser | None = None,
    ) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._max_kept = max_kept
        self._max_strangers = max_strangers
        self._max_clients = max_clients
        self._takes_descriptors = takes_descriptors
        path.unlink(missing_ok=True)
        self._listener = Listener(path)
        self._inode = path.stat().st_ino
        self._epoll = epoll or select.epoll()
        self._shares_epoll = epoll is not None
        self._closed = False
        self._epoll.register(self._listener, select.EPOLLIN)
        self._by_fd: dict[int, Client] = {}
        self._strangers: OrderedDict[int, Client] = OrderedDict()  # by descriptor, oldest first
        self._strangers_of: Counter[int] = Counter()  # how many of these, by pid
        self._readable: OrderedDict[int, Client] = OrderedDict()  # by descriptor, in turn
        self._awaiting: dict[Client, float] = {}  # who sent descriptors early, and until when
        self._kept = 0
        self._scratch = memoryview(bytearray(READ_BYTES))
        self.closer = closer or DescriptorCloser()
        self.accepted: deque[Client] = deque()
        self.ended: deque[Client] = deque()
        self.dropped = 0
        self.limits: dict[str, int] = Counter()

    def fileno(self) -> int:
        """Return a descriptor for polling: readable where `handle_events` has something to do."""
        return self._epoll.fileno()

    @property
    def pending(self) -> bool:
        """Whether some clients are still to be read, which polling may not report."""
        return bool(self._readable)

    @property
    def kept_bytes(self) -> int:
        """Bytes of unfinished messages and of replies that were not read."""
        return self._kept

    def __len__(self) -> int:
        return len(self._by_fd)

    def handle_events(self, ready: dict[int, int] | None = None) -> None:
        """Accept connections, send on what waited, and note which clients can be read.

        Args:
            ready: events by descriptor, as epoll has reported them; those that are looked at here
                are taken out. None: epoll is asked here.
        """
        events_by_fd = self._epoll.poll(0) if ready is None else list(ready.items())
        for fd, events in events_by_fd:
            client = self._by_fd.get(fd)
            if client is None:
                if fd != self._listener.fileno():
                    continue
                self._accept()
            else:
                if events & select.EPOLLOUT:
                    self._flush(client)
                if events & ~select.EPOLLOUT and not client.closed:
                    self._readable[fd] = client
            if ready is not None:
                del ready[fd]
        if self._awaiting:
            self._check_descriptors(time.monotonic())

    def next_request(self) -> Received | None:
        """Return the next message; clients take turns.

        None where a few of them had none; the others are `pending`.
        """
        for _ in range(AT_ONCE):
            if not self._readable:
                break
            _, client = self._readable.popitem(last=False)
            try:
                received = self._next_message(client)
            except BadFrame as error:
                self.disconnect(client, str(error), error.limit)
            except DescriptorsLost as error:
                self.disconnect(client, f"{error}; {open_files_remedy()}", "open_files")
            except EOFError:
                self.end(client)
            else:
                if received is not None and self._takes(received):
                    return received
        return None

    def _takes(self, received: Received) -> bool:
        """Return whether a message's descriptors may come; else its sender is disconnected."""
        client, _, fds = received
        if not fds:
            return True
        if free_descriptors() < RESERVED_DESCRIPTORS:
            self._disconnect_for_want_of_files(client)
        elif not self._takes_descriptors:
            self.disconnect(client, "descriptors came with a message that takes none")
        else:
            return True
        self.closer.close(fds, client.peer.uid)
        return False

    def adopt(self, client: Client, owner: object) -> None:
        """Make it no stranger: other clients do not displace it. `owner` None undoes that."""
        if owner is None and client.owner is not None and not client.closed:
            self._add_stranger(client)
        elif owner is not None:
            self._remove_stranger(client)
        client.owner = owner

    def send(self, client: Client, frame: bytes, fds: tuple[int, ...] | list[int] = ()) -> bool:
        """Send a message; return False where the client is gone, or reads nothing."""
        if client.closed:
            return False
        channel = client.channel
        try:
            channel.send(frame, fds)
        except (ChannelFull, EOFError):  # what it has sent before is still read
            return False
        if channel.wants_write:
            self._count_kept(client)
            self._watch(client)
        return not client.closed

    def disconnect(self, client: Client, why: str, limit: str = "") -> None:
        """End a client's connection for what it did: tell it why, and the log."""
        if client.closed:
            return
        code = ErrorCode.LIMIT if limit else ErrorCode.BAD_MESSAGE
        with contextlib.suppress(ChannelFull, EOFError):
            client.channel.send(WIRE.encode(Error.of(code, why)))
        if limit:
            self.limits[limit] += 1
        else:
            self.dropped += 1
        text = "a connection of pid %d (uid %d) is closed: %s"
        log.warning(text, client.peer.pid, client.peer.uid, why)
        self.end(client)

    def _disconnect_for_want_of_files(self, client: Client) -> None:
        text = f"too few files are left that can be opened; {open_files_remedy()}"
        self.disconnect(client, text, "open_files")

    def refuse(self, client: Client, frame: bytes) -> None:
        """Send a client this message and end its connection, once it has greeted.

        libzmq drops a message that comes before its own READY has left, and the connection.
        """
        client.refusal = frame
        if client.channel.open and not client.closed:
            self._refuse_now(client, None)

    def end(self, client: Client) -> None:
        """End a client's connection; it is among `ended` then. May be called again."""
        if client.closed:
            return
        client.closed = True
        fd = client.fd
        self._epoll.unregister(fd)
        del self._by_fd[fd]
        self._remove_stranger(client)
        self._readable.pop(fd, None)
        self._awaiting.pop(client, None)
        self._kept -= client.kept_bytes
        self.closer.close(client.channel.take_descriptors(), client.peer.uid)
        self.closer.close_socket(client.channel.detach(), client.peer.uid)
        self.ended.append(client)

    def close(self, linger: float = 0.0) -> None:
        """Close everything; replies get so many seconds to leave. May be called again."""
        if self._closed:
            return
        self._closed = True
        end = time.monotonic() + linger
        self._epoll.unregister(self._listener)
        self._listener.close()  # first: a client that is disconnected connects again at once
        while any(client.channel.wants_write for client in self._by_fd.values()):
            left = end - time.monotonic()
            if left <= 0:
                break
            for fd, events in self._epoll.poll(left):
                client = self._by_fd.get(fd)
                if client is None:
                    continue
                if events & select.EPOLLOUT:
                    self._flush(client)
                elif events & (select.EPOLLHUP | select.EPOLLERR):
                    self.end(client)
                else:  # requests are not read any more
                    self._epoll.modify(fd, select.EPOLLOUT * client.channel.wants_write)
        for client in list(self._by_fd.values()):
            self.end(client)
        if not self._shares_epoll:
            self._epoll.close()
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:  # another daemon may listen there by now
                self._path.unlink()

    # ---------------------------------------------------------------- clients

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                sock = self._listener.accept()
            except NoDescriptor:
                if not self._make_room("open_files", few=FEW):
                    self.limits["open_files"] += 1
                    self._listener.refuse(lambda sock: self.closer.close_socket(sock, -1))
                return
            if sock is None:
                return
            self._add(sock)
            if len(self._strangers) > self._max_strangers:
                self._make_room("connections", few=0)

    def _add(self, sock: socket.socket) -> None:
        peer = peer_of(sock)
        if len(self._by_fd) >= self._max_clients:
            self.limits["connections"] += 1
            self.closer.close_socket(sock, peer.uid)
            return
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)  # else a read drops descriptors
        channel = Channel(
            sock,
            b"ROUTER",
            max_bytes=self._max_bytes,
            max_unsent_descriptors=MAX_UNSENT_DESCRIPTORS,
            scratch=self._scratch,
        )
        client = Client(channel, peer)
        self._by_fd[client.fd] = client
        self._add_stranger(client)
        self._epoll.register(client.fd, select.EPOLLIN)
        if self.closer.is_stuck(peer.uid):
            text = (
                f"{MAX_STUCK} threads wait for files of uid {peer.uid} to be closed, which its"
                " processes have sent: no other process of this user is served until then"
            )
            self.disconnect(client, text, "connections")
        elif free_descriptors() < RESERVED_DESCRIPTORS:
            self._disconnect_for_want_of_files(client)
        else:
            self.accepted.append(client)

    def _add_stranger(self, client: Client) -> None:
        self._strangers[client.fd] = client
        self._strangers_of[client.peer.pid] += 1

    def _remove_stranger(self, client: Client) -> None:
        if self._strangers.pop(client.fd, None) is not None:
            pid = client.peer.pid
            self._strangers_of[pid] -= 1
            if not self._strangers_of[pid]:
                del self._strangers_of[pid]

    def _make_room(self, limit: str, *, few: int) -> bool:
        """Disconnect the oldest stranger of the process with most of them.

        Returns:
            False where no process has more than a few.
        """
        pid, count = max(self._strangers_of.items(), key=itemgetter(1), default=(0, 0))
        if count <= few:
            return False
        oldest = next(one for one in self._strangers.values() if one.peer.pid == pid)
        self.disconnect(oldest, "it belongs to no session, and others want its place", limit)
        return True

    # ---------------------------------------------------------------- reading

    def _next_message(self, client: Client) -> Received | None:
        """Return the client's next message, if it has arrived; read the socket once for it."""
        channel = client.channel
        message = channel.receive()
        if client.refusal and channel.open:
            self._refuse_now(client, message)
            return None
        if channel.more:
            self._readable[client.fd] = client
        if channel.undecoded_bytes or channel.unsent_bytes or client.kept_bytes:
            self._note_kept(client)
        if message is None:
            return None
        if client.closed:
            self.closer.close(message[1], client.peer.uid)
            return None
        return client, *message

    def _refuse_now(self, client: Client, message: ReceivedFrame | None) -> None:
        if message is not None:
            self.closer.close(message[1], client.peer.uid)
        self.send(client, client.refusal)
        self.end(client)

    def _note_kept(self, client: Client) -> None:
        if client.channel.holds_descriptors:
            if free_descriptors() < RESERVED_DESCRIPTORS:
                self._disconnect_for_want_of_files(client)
                return
            self._awaiting.setdefault(client, time.monotonic() + DESCRIPTOR_SECONDS)
        else:
            self._awaiting.pop(client, None)
        self._count_kept(client)
        self._watch(client)

    def _check_descriptors(self, now: float) -> None:
        """Disconnect clients that keep descriptors of a message that they do not complete."""
        for client in [client for client, until in self._awaiting.items() if now >= until]:
            self.disconnect(client, "descriptors came, and not the rest of their message")

    # ---------------------------------------------------------------- writing

    def _flush(self, client: Client) -> None:
        with contextlib.suppress(EOFError):  # what it has sent is still read
            client.channel.flush()
        if client.channel.undecoded_bytes:  # perhaps not read because of what it had not read
            self._readable[client.fd] = client
        self._count_kept(client)
        self._watch(client)

    def _watch(self, client: Client) -> None:
        """Have epoll report what the client is waited for now."""
        if client.closed:
            return
        channel = client.channel
        events = 0 if channel.unsent_bytes > UNREAD_BYTES else select.EPOLLIN
        if channel.wants_write:
            events |= select.EPOLLOUT
        if events != client.events:
            client.events = events
            self._epoll.modify(client.fd, events)
        if not events & select.EPOLLIN:
            self._readable.pop(client.fd, None)

    # ----------------------------------------------------------------- bounds

    def _count_kept(self, client: Client) -> None:
        """Count what waits for a client; above the bound the one with most is disconnected."""
        if client.closed:
            return
        kept = client.channel.undecoded_bytes + client.channel.unsent_bytes
        self._kept += kept - client.kept_bytes
        client.kept_bytes = kept
        while self._kept > self._max_kept:
            most = max(self._by_fd.values(), key=attrgetter("kept_bytes"))
            text = f"it has {most.kept_bytes} bytes of {self._kept} that are kept of all"
            self.disconnect(most, text, "kept_bytes")


def decode_error_reply(error: DecodeError) -> Error:
    """Return the reply to a request whose body cannot be decoded."""
    mismatch = isinstance(error, VersionMismatch)
    return Error.of(ErrorCode.BAD_VERSION if mismatch else ErrorCode.BAD_MESSAGE, str(error))


def peer_of(sock: socket.socket) -> Peer:
    """Return the process that connected, with its groups as they were then."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, gid = _UCRED.unpack(credentials)
    groups = array.array("I")
    with contextlib.suppress(OSError):  # of more groups than fit none counts
        groups.frombytes(sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES))
    return Peer(pid, uid, gid, tuple(groups))
