"""Connections to the control socket: one for the whole life of every session.

A connection says who connected (peer credentials), carries registrations with their
descriptors and notices, and its end of file says that the other process is gone. Where the
peer's pid is visible here a pidfd says so too, which holds even if a forked child of the
engine keeps the socket open.
"""

import array
import contextlib
import logging
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvd.broker.broker import Broker
from kvd.broker.effects import Effect, Event
from kvd.broker.sessions import Peer, Session
from kvd.daemon.allowed import AllowList
from kvd.daemon.descriptors import Receiver, Taken
from kvd.daemon.request_socket import Requests
from kvd.errors import BadDatagram, ChannelFull, KvdError, Refused
from kvd.machine.open_files import is_out_of_files, open_files_remedy
from kvd.wire.listener import Listener, NoDescriptor
from kvd.wire.seqpacket import Channel, close_all
from kvd_proto.codec import WIRE
from kvd_proto.errors import DecodeError
from kvd_proto.messages import TAGS, Error, ErrorCode, Message, Register

log = logging.getLogger("kvd.daemon")
AT_ONCE = 32
"""Connections that are accepted in one turn."""
_UCRED = struct.Struct("iII")
_SO_PEERGROUPS = 59  # asm-generic/socket.h; not in Python's socket
_GROUPS_BYTES = 1024  # four a group; Python's socket asks for no more


@dataclass(slots=True, eq=False)
class Connection:
    """One open connection, and the descriptors of its registration.

    receiving: a frame of it is being received, until which nothing else is read.
    """

    channel: Channel
    session: Session
    pidfd: int = -1
    fds: list[int] = field(default_factory=list)
    receiving: bool = False

    def drop_fds(self) -> None:
        """Close the descriptors of its registration."""
        close_all(self.fds)
        self.fds.clear()

    def __repr__(self) -> str:
        return f"<Connection of {self.session!r}, {len(self.fds)} descriptors>"


class Connections:
    """Open connections, by the numbers of their sessions in `open`.

    For a peer that is a process of this daemon (`own`) there is always room.
    """

    def __init__(
        self,
        listener: Listener,
        core: Broker,
        poller: select.epoll,
        carry_out: Callable[[list[Effect]], None],
        *,
        requests: Requests,
        allowed: AllowList,
        own: Callable[[Peer], bool],
    ) -> None:
        self.open: dict[int, Connection] = {}
        self._by_fd: dict[int, Connection] = {}
        self._listener = listener
        self._core = core
        self._poller = poller
        self._carry_out = carry_out
        self._requests = requests
        self._allowed = allowed
        self._own = own
        self._receiver = Receiver(poller)
        poller.register(listener.fileno(), select.EPOLLIN)

    # ------------------------------------------------------------------ begin

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                sock = self._listener.accept()
            except NoDescriptor:
                self._listener.refuse()
                self._core.state.reached("open_files")
                return
            if sock is None:
                return
            self._begin(Channel(sock), peer_of(sock))

    def _begin(self, channel: Channel, peer: Peer) -> None:
        """Begin a session, or tell the peer why not."""
        try:
            if objection := self._allowed.objection(peer):
                self._core.error_sent(ErrorCode.FORBIDDEN)
                raise Refused(ErrorCode.FORBIDDEN, objection)
            token = os.urandom(16)
            session, effects = self._core.connected(token, peer, own=self._own(peer))
        except Refused as refusal:
            text = f"connection of pid {peer.pid} refused: {refusal}"
            self._carry_out([Event(text, "warning", {"pid": peer.pid})])
            self._say_why(channel, refusal)
            self._receiver.drop(channel.hang_up())
            return
        connection = Connection(channel, session)
        if peer.pid > 0:  # 0: the peer's pid namespace is not visible from here
            with contextlib.suppress(OSError):
                connection.pidfd = os.pidfd_open(peer.pid)
        self.open[session.number] = connection
        for fd in (channel.fileno(), connection.pidfd):
            if fd >= 0:
                self._by_fd[fd] = connection
                self._poller.register(fd, select.EPOLLIN)
        self._carry_out(effects)

    # ---------------------------------------------------------------- receive

    def turn(self, ready: dict[int, int], now: float) -> None:
        """Serve what has arrived, end sessions whose process is gone, accept connections."""
        for fd in ready:
            if fd in self._by_fd:
                self._read(self._by_fd[fd], ready)
        self._receiver.turn(ready, now)
        if self._listener.fileno() in ready:
            self._accept()

    def _read(self, connection: Connection, ready: dict[int, int]) -> None:
        try:
            if connection.pidfd in ready:
                raise EOFError
            if not connection.receiving and connection.channel.waiting_bytes():
                self._receive(connection)
        except EOFError:
            self._end(connection)
        except (BadDatagram, Refused) as error:
            self._disconnect(connection, error)
        except OSError as error:
            if is_out_of_files(error):
                text = f"no file descriptor is left for its registration; {open_files_remedy()}"
                self._disconnect(connection, Refused(ErrorCode.LIMIT, text))
            else:
                self._disconnect(connection, error)

    def _receive(self, connection: Connection) -> None:
        """Have the next frame received with its descriptors; until then nothing else is read."""

        def take(outcome: Taken | Refused) -> None:
            if connection.session.number not in self.open:
                close_all(outcome[1] if isinstance(outcome, tuple) else ())
                return
            connection.receiving = False
            self._poller.register(connection.channel.fileno(), select.EPOLLIN)
            try:
                if isinstance(outcome, Refused):
                    raise outcome
                self._serve(connection, *outcome)
            except (DecodeError, Refused) as error:
                self._disconnect(connection, error)

        self._receiver.read(connection.channel.duplicate(), connection.session.peer.uid, take)
        connection.receiving = True
        self._poller.unregister(connection.channel.fileno())

    def _serve(self, connection: Connection, frame: bytes, fds: tuple[int, ...]) -> None:
        if connection.fds:  # of a registration that there is, so this one is refused
            close_all(fds)
        else:
            connection.fds = list(fds)
        header = WIRE.decode_header(frame)
        if TAGS.get(header.tag) is not Register:
            text = f"tag 0x{header.tag:02x}, which is no message for this socket"
            raise Refused(ErrorCode.BAD_MESSAGE, text)
        now, session = time.monotonic(), connection.session
        self._carry_out(self._requests.serve(session, header, frame, now, len(fds)))
        if not session.holds_memory:
            connection.drop_fds()

    # ------------------------------------------------------------------- send

    def notify(self, number: int, notice: Message, fds: Sequence[int]) -> None:
        """Send a notice to a session; a peer that does not read its notices is disconnected."""
        connection = self.open[number]
        frame = WIRE.encode(notice, 0, self._core.state.boot_id, connection.session.token)
        try:
            connection.channel.send(frame, fds)
        except (ChannelFull, EOFError, OSError) as error:
            self._disconnect(connection, error)

    def flush(self) -> None:
        """Send on what did not go at once."""
        for connection in list(self.open.values()):
            if connection.channel.wants_write:
                try:
                    connection.channel.flush()
                except EOFError:
                    self._end(connection)

    # -------------------------------------------------------------------- end

    def _disconnect(self, connection: Connection, error: Exception) -> None:
        """End a session, and say why in the log and to its process."""
        who = connection.session.who
        log.warning("%s is disconnected: %s", who, error, extra=who.fields)
        if isinstance(error, Refused):
            self._say_why(connection.channel, error, connection.session.token)
        self._end(connection)

    def _say_why(self, channel: Channel, refusal: Refused, *token: bytes) -> None:
        notice = Error.of(refusal.code, str(refusal))
        with contextlib.suppress(KvdError, EOFError, OSError):  # a peer that reads nothing
            channel.send(WIRE.encode(notice, 0, self._core.state.boot_id, *token))

    def _end(self, connection: Connection) -> None:
        session = connection.session
        if self.open.pop(session.number, None) is None:
            return
        for fd in (connection.channel.fileno(), connection.pidfd):
            if fd >= 0:
                del self._by_fd[fd]
                with contextlib.suppress(FileNotFoundError):  # what is being received is not polled
                    self._poller.unregister(fd)
        self._carry_out(self._core.lost(session))
        self._requests.forget(session)
        self._close(connection)

    def _close(self, connection: Connection) -> None:
        """Close it; what was sent and not read may be of a foreign file system."""
        self._receiver.drop(connection.channel.hang_up())
        connection.drop_fds()
        if connection.pidfd >= 0:
            os.close(connection.pidfd)

    def close(self) -> None:
        """Close every connection, and the control socket."""
        for connection in list(self.open.values()):
            self._close(connection)
        self._listener.close()
        self._receiver.close()

    def __repr__(self) -> str:
        return f"<Connections {len(self.open)} open>"


def peer_of(sock: socket.socket) -> Peer:
    """Return the process that connected, with its groups as they were then."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, gid = _UCRED.unpack(credentials)
    groups = array.array("I")
    with contextlib.suppress(OSError):  # of more groups than fit none counts
        groups.frombytes(sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES))
    return Peer(pid, uid, gid, tuple(groups))
