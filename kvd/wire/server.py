"""The listening end: the clients of one Unix socket, served in turn and within bounds.

- Turns: one message per client and round.
- Bytes: unfinished messages and unread replies of all clients share one bound. Above it the largest
  client is disconnected: of the strangers if they have any, of the process with the most bytes.
  A client that does not read its replies is not read.
- Connections: a client is a stranger until `adopt`. Above the bound of strangers, the oldest
  stranger of the process with the most strangers is disconnected.
- Descriptors: `RESERVED_DESCRIPTORS` stay free; a client that would use them up is disconnected.
  Unfinished messages of a user hold `MAX_DESCRIPTORS_OF_USER`; above, the user's client that has
  held some for longest is disconnected.
"""

import contextlib
import logging
import select
import socket
import time
from collections import Counter, OrderedDict, deque
from pathlib import Path

from kvd.machine.process import free_descriptors, open_files_remedy
from kvd.wire.clients import Client, Clients, peer_of
from kvd.wire.listener import MAX_STUCK, DescriptorCloser, Listener, NoDescriptor
from kvd_proto.channel import Channel, ReceivedFrame
from kvd_proto.codec import WIRE
from kvd_proto.errors import BadFrame, ChannelFull, DecodeError, DescriptorsLost, VersionMismatch
from kvd_proto.messages import Error, ErrorCode

READ_BYTES = 256 * 1024
MAX_UNREAD_BYTES = 2**20
"""Bytes of replies that wait for a client; above, the client is not read."""
MAX_UNSENT_DESCRIPTORS = 64
MAX_BUFFERED_BYTES = 256 * 2**20
MAX_CLIENTS = 8192
MAX_STRANGERS = 1024
MAX_PER_TURN = 32
"""Connections accepted, and clients read without a complete message, in one turn."""
MAX_STRANGERS_OF_PROCESS = 8
"""Strangers of one process that stay connected even if no descriptor is left."""
RESERVED_DESCRIPTORS = 256
"""Kept free for the descriptors of one message: the kernel closes those that exceed the limit in
this thread, which may block."""
MAX_DESCRIPTORS_OF_USER = 4096
"""Held by unfinished messages; registrations of 64 ranks with 64 storages each may come at once."""

log = logging.getLogger("kvd.wire")
__all__ = ["Client", "Received", "Server", "decode_error_reply"]

Received = tuple[Client, bytes, tuple[int, ...]]
"""A message's sender, the message, and its descriptors, which the receiver closes."""


class Server:
    """The clients of one socket. One thread.

    Args:
        path: of the socket; an existing file is replaced.
        max_bytes: of a message.
        max_buffered: bytes of unfinished messages and unread replies of all clients.
        max_clients: further connections are closed.
        max_strangers: clients that are not adopted; above, one of them is disconnected.
        takes_descriptors: whether messages may carry descriptors; if not, they end the connection.
        epoll: of the owner's loop, which passes the events to `handle_events`; None: the server
            makes one.
        closer: closes the descriptors that clients send.

    Attributes:
        accepted: clients that have connected; the owner removes them.
        ended: clients whose connection has ended; the owner removes them.
        limits: number of disconnected clients by the exceeded bound; the owner may replace it.
        num_invalid: clients disconnected for invalid ZMTP.

    Raises:
        ConfigError: the socket cannot be bound.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int,
        max_buffered: int = MAX_BUFFERED_BYTES,
        max_strangers: int = MAX_STRANGERS,
        takes_descriptors: bool = False,
        max_clients: int = MAX_CLIENTS,
        epoll: select.epoll | None = None,
        closer: DescriptorCloser | None = None,
    ) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._max_buffered = max_buffered
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
        self._clients = Clients()
        self._readable: OrderedDict[int, Client] = OrderedDict()  # by descriptor, in turn
        self._scratch = memoryview(bytearray(READ_BYTES))
        self.closer = closer or DescriptorCloser()
        self.accepted: deque[Client] = deque()
        self.ended: deque[Client] = deque()
        self.num_invalid = 0
        self.limits: dict[str, int] = Counter()

    def fileno(self) -> int:
        """Return a descriptor for polling: readable if `handle_events` has work."""
        return self._epoll.fileno()

    @property
    def pending(self) -> bool:
        """Whether clients may have messages that polling does not report."""
        return bool(self._readable)

    @property
    def buffered_bytes(self) -> int:
        """Bytes of unfinished messages and unread replies."""
        return self._clients.total_bytes

    def __len__(self) -> int:
        return len(self._clients.by_fd)

    def handle_events(self, ready: dict[int, int] | None = None) -> None:
        """Accept connections, send pending bytes, and note which clients are readable.

        Args:
            ready: epoll's events by descriptor; those handled here are removed. None: poll here.
        """
        events_by_fd = self._epoll.poll(0) if ready is None else list(ready.items())
        for fd, events in events_by_fd:
            client = self._clients.by_fd.get(fd)
            if client is None:
                if fd != self._listener.fileno():
                    continue
                self._accept()
            else:
                if events & select.EPOLLOUT:
                    self._flush(client)
                if events & select.EPOLLHUP:
                    client.gone, client.paused = True, False
                if events & ~select.EPOLLOUT and not client.closed:
                    self._readable[fd] = client
            if ready is not None:
                del ready[fd]
        for client in self._clients.late():
            self.disconnect(client, "its descriptors arrived, but not the rest of their message")

    def next_message(self) -> Received | None:
        """Read clients in turn until one has a complete message, and return it.

        Clients that break a rule, or have closed their end, are disconnected. None if no readable
        client is left, or after `MAX_PER_TURN` reads without a message: then `pending` is true if
        clients are left to read.
        """
        for _ in range(MAX_PER_TURN):
            if not self._readable:
                break
            _, client = self._readable.popitem(last=False)
            try:
                received = self._read_message(client)
            except BadFrame as error:
                self.disconnect(client, str(error), error.limit)
            except DescriptorsLost as error:
                self.disconnect(client, f"{error}; {open_files_remedy()}", "open_files")
            except EOFError:
                self.end(client)
            else:
                if received is not None and self._admits_descriptors(received):
                    return received
        return None

    def _admits_descriptors(self, received: Received) -> bool:
        """Return whether a message's descriptors are allowed; if not, disconnect its sender."""
        client, _, fds = received
        if not fds:
            return True
        if free_descriptors() < RESERVED_DESCRIPTORS:
            self._disconnect_out_of_files(client)
        elif not self._takes_descriptors:
            self.disconnect(client, "descriptors came with a message that takes none")
        else:
            return True
        self.closer.close(fds, client.peer.uid)
        return False

    def adopt(self, client: Client, owner: object) -> None:
        """Set a client's owner, so that it is no stranger; None makes it a stranger again."""
        if owner is None and client.owner is not None and not client.closed:
            self._clients.add_stranger(client)
        elif owner is not None:
            self._clients.remove_stranger(client)
        client.owner = owner

    def pause(self, client: Client) -> None:
        """Do not read a client until `resume`, or until its peer has gone."""
        client.paused = not client.gone
        self._update_events(client)

    def resume(self, client: Client) -> None:
        """Read a client again. Idempotent."""
        if client.paused and not client.closed:
            client.paused = False
            self._readable[client.fd] = client  # messages may have been read before
            self._update_events(client)

    def send(self, client: Client, frame: bytes, fds: tuple[int, ...] | list[int] = ()) -> bool:
        """Send a message; return False if the client has gone or its queue is full."""
        if client.closed:
            return False
        channel = client.channel
        try:
            channel.send(frame, fds)
        except (ChannelFull, EOFError):  # messages that it sent before are still read
            return False
        if channel.wants_write:
            self._count_buffered(client)
            self._update_events(client)
        return not client.closed

    def disconnect(self, client: Client, reason: str, limit: str = "") -> None:
        """End a client's connection; send it the reason, and log it."""
        if client.closed:
            return
        code = ErrorCode.LIMIT if limit else ErrorCode.BAD_MESSAGE
        with contextlib.suppress(ChannelFull, EOFError):
            client.channel.send(WIRE.encode(Error.of(code, reason)))
        if limit:
            self.limits[limit] += 1
        else:
            self.num_invalid += 1
        text = "a connection of pid %d (uid %d) is closed: %s"
        log.warning(text, client.peer.pid, client.peer.uid, reason)
        self.end(client)

    def _disconnect_out_of_files(self, client: Client) -> None:
        text = f"too few files are left that can be opened; {open_files_remedy()}"
        self.disconnect(client, text, "open_files")

    def refuse(self, client: Client, frame: bytes) -> None:
        """Send a client this message after its handshake, then end its connection.

        libzmq drops a message that arrives before it has sent its own READY.
        """
        client.refusal = frame
        if client.channel.open and not client.closed:
            self._refuse_now(client, None)

    def end(self, client: Client) -> None:
        """End a client's connection and add it to `ended`. Idempotent."""
        if client.closed:
            return
        client.closed = True
        fd = client.fd
        self._epoll.unregister(fd)
        self._clients.remove(client)
        self._readable.pop(fd, None)
        self.closer.close(client.channel.take_descriptors(), client.peer.uid)
        self.closer.close_socket(client.channel.detach(), client.peer.uid)
        self.ended.append(client)

    def close(self, linger: float = 0.0) -> None:
        """Close all connections; pending replies are sent for at most `linger` s. Idempotent."""
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + linger
        self._epoll.unregister(self._listener)
        self._listener.close()  # first: disconnected clients reconnect at once
        while any(client.channel.wants_write for client in self._clients.by_fd.values()):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                break
            for fd, events in self._epoll.poll(remaining):
                client = self._clients.by_fd.get(fd)
                if client is None:
                    continue
                if events & select.EPOLLOUT:
                    self._flush(client)
                elif events & (select.EPOLLHUP | select.EPOLLERR):
                    self.end(client)
                else:  # requests are no longer read
                    self._epoll.modify(fd, select.EPOLLOUT if client.channel.wants_write else 0)
        for client in list(self._clients.by_fd.values()):
            self.end(client)
        if not self._shares_epoll:
            self._epoll.close()
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:  # another daemon may listen there now
                self._path.unlink()

    # ---------------------------------------------------------------- clients

    def _accept(self) -> None:
        for _ in range(MAX_PER_TURN):
            try:
                sock = self._listener.accept()
            except NoDescriptor:
                if not self._disconnect_stranger("open_files", allowance=MAX_STRANGERS_OF_PROCESS):
                    self.limits["open_files"] += 1
                    self._listener.refuse(lambda sock: self.closer.close_socket(sock, -1))
                return
            if sock is None:
                return
            self._add(sock)
            if len(self._clients.strangers) > self._max_strangers:
                self._disconnect_stranger("connections", allowance=0)

    def _add(self, sock: socket.socket) -> None:
        """Add a new connection; close it at once if limits or descriptors are exhausted."""
        peer = peer_of(sock)
        if len(self._clients.by_fd) >= self._max_clients:
            self.limits["connections"] += 1
            self.closer.close_socket(sock, peer.uid)
            return
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)  # else reads drop descriptors
        channel = Channel(
            sock,
            b"ROUTER",
            max_bytes=self._max_bytes,
            max_unsent_descriptors=MAX_UNSENT_DESCRIPTORS,
            scratch=self._scratch,
        )
        client = Client(channel, peer)
        self._clients.add(client)
        self._epoll.register(client.fd, select.EPOLLIN)
        if self.closer.is_stuck(peer.uid):
            text = (
                f"{MAX_STUCK} threads wait to close files that processes of uid {peer.uid} have"
                " sent: no other process of this user is served until they are closed"
            )
            self.disconnect(client, text, "connections")
        elif free_descriptors() < RESERVED_DESCRIPTORS:
            self._disconnect_out_of_files(client)
        else:
            self.accepted.append(client)

    def _disconnect_stranger(self, limit: str, *, allowance: int) -> bool:
        """Disconnect the oldest stranger of the process with the most strangers.

        Returns:
            False if no process has more than `allowance`.
        """
        oldest = self._clients.crowding_stranger(allowance)
        if oldest is None:
            return False
        self.disconnect(oldest, "it belongs to no session, and others need its place", limit)
        return True

    # ---------------------------------------------------------------- reading

    def _read_message(self, client: Client) -> Received | None:
        """Return the client's next message, or None; read its socket at most once."""
        channel = client.channel
        message = channel.receive()
        if client.refusal and channel.open:
            self._refuse_now(client, message)
            return None
        if channel.more:
            self._readable[client.fd] = client
        if channel.undecoded_bytes or channel.unsent_bytes or client.buffered_bytes:
            self._check_bounds(client)
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

    def _check_bounds(self, client: Client) -> None:
        if self._clients.count_descriptors(client):
            self._check_descriptors(client)
        self._count_buffered(client)
        self._update_events(client)

    def _check_descriptors(self, client: Client) -> None:
        """Disconnect a client if the descriptors that have just come exceed a bound."""
        uid = client.peer.uid
        if free_descriptors() < RESERVED_DESCRIPTORS:
            self._disconnect_out_of_files(client)
        elif (num_descriptors := self._clients.descriptors_of(uid)) > MAX_DESCRIPTORS_OF_USER:
            oldest = self._clients.oldest_with_descriptors(uid)
            text = (
                f"unfinished messages of uid {uid} have {num_descriptors} descriptors, the limit"
                f" is {MAX_DESCRIPTORS_OF_USER}"
            )
            self.disconnect(oldest, text, "open_files")

    # ---------------------------------------------------------------- writing

    def _flush(self, client: Client) -> None:
        with contextlib.suppress(EOFError):  # messages that it sent before are still read
            client.channel.flush()
        if client.channel.undecoded_bytes:  # it may not have been read because its replies waited
            self._readable[client.fd] = client
        self._count_buffered(client)
        self._update_events(client)

    def _update_events(self, client: Client) -> None:
        """Register the events that the client's state needs."""
        if client.closed:
            return
        channel = client.channel
        is_read = not client.paused and channel.unsent_bytes <= MAX_UNREAD_BYTES
        events = select.EPOLLIN if is_read else 0
        if channel.wants_write:
            events |= select.EPOLLOUT
        if events != client.events:
            client.events = events
            self._epoll.modify(client.fd, events)
        if not events & select.EPOLLIN:
            self._readable.pop(client.fd, None)

    # ----------------------------------------------------------------- bounds

    def _count_buffered(self, client: Client) -> None:
        """Update the buffered bytes; above the bound disconnect clients, the largest first."""
        if client.closed:
            return
        clients = self._clients
        clients.count_bytes(client)
        while clients.total_bytes > self._max_buffered:
            largest, process_bytes = clients.largest()
            text = (
                f"it has {largest.buffered_bytes} and its process {process_bytes} of the"
                f" {clients.total_bytes} bytes kept for all"
            )
            self.disconnect(largest, text, "kept_bytes")


def decode_error_reply(error: DecodeError) -> Error:
    """Return the error reply to a request that cannot be decoded."""
    mismatch = isinstance(error, VersionMismatch)
    return Error.of(ErrorCode.BAD_VERSION if mismatch else ErrorCode.BAD_MESSAGE, str(error))
