"""Who came through the control socket, for as long as they stay."""

import contextlib
import logging
import os
import time
from collections.abc import Callable

import zmq

from kvd.broker.broker import Broker
from kvd.broker.effects import Effect, Event, FdName, Notify
from kvd.broker.sessions import Peer, Session
from kvd.daemon.control_socket import Connection, ControlSocket
from kvd.daemon.descriptors import Receiver, Taken
from kvd.daemon.request_socket import Requests
from kvd.errors import BadDatagram, ChannelFull, Refused
from kvd.wire.seqpacket import close_all
from kvd_proto.codec import WIRE
from kvd_proto.errors import DecodeError
from kvd_proto.messages import TAGS, Error, ErrorCode, Register

log = logging.getLogger("kvd.daemon")
AT_ONCE = 32
"""Connections that are let in before it is others' turn."""


class Connections:
    """Open connections, by the numbers of their sessions in `open`.

    Args:
        control socket: where they come from.
        core: who is told of comings and goings.
        poller: where their descriptors are registered.
        carry_out: does what the core wants done.
        requests: serves what comes with them, and is told whose session has ended.
    """

    def __init__(
        self,
        control_socket: ControlSocket,
        core: Broker,
        poller: zmq.Poller,
        carry_out: Callable[[list[Effect]], None],
        requests: Requests,
    ) -> None:
        self._requests = requests
        self._receiver = Receiver(poller)
        self.open: dict[int, Connection] = {}
        self._by_fd: dict[int, Connection] = {}
        self._control_socket = control_socket
        self._core = core
        self._poller = poller
        self._carry_out = carry_out

    def accept(
        self, turned_away: Callable[[Connection], bool], own: Callable[[Peer], bool]
    ) -> None:
        """Let in who waits at the control socket, some of them where they are many.

        Args:
            turned_away: tells a connection that he may not come in, if so.
            own: whether it is a process of this daemon, for which there is always room.
        """
        for _ in range(AT_ONCE):
            connection = self._control_socket.accept()
            if connection is None:
                break
            if turned_away(connection):
                self._hang_up(connection)
                continue
            peer = connection.peer
            try:
                session, effects = self._core.connected(os.urandom(16), peer, own=own(peer))
            except Refused as refusal:
                self._no_room(connection, refusal)
                continue
            connection.session = session
            self.open[session.number] = connection
            for fd in (connection.channel.fileno(), connection.pidfd):
                if fd >= 0:
                    self._by_fd[fd] = connection
                    self._poller.register(fd, zmq.POLLIN)
            self._carry_out(effects)

        if self._control_socket.turned_away:
            self._core.limits_reached({"open_files": self._control_socket.turned_away})
            self._control_socket.turned_away = 0

    def _no_room(self, connection: Connection, refusal: Refused) -> None:
        """Tell a process that there is no room for it, and what would make some."""
        pid = connection.peer.pid
        text = f"connection of pid {pid} refused: {refusal}"
        self._carry_out([Event(text, "warning", {"pid": pid})])
        error = Error.of(refusal.code, str(refusal))
        connection.tell(WIRE.encode(error, 0, self._core.state.boot_id))
        self._hang_up(connection)

    def turn(self, ready: dict[object, int], now: float) -> None:
        """Hear those whose descriptors are ready; show out those who have gone or talk nonsense."""
        for fd in ready:
            if isinstance(fd, int) and fd in self._by_fd:
                self._hear(self._by_fd[fd])
        self._receiver.turn(ready, now)

    def _hear(self, connection: Connection) -> None:
        session = connection.session
        if session is None or session.number not in self.open:
            return
        try:
            if connection.pidfd >= 0 and _readable(connection.pidfd):
                raise EOFError
            if not connection.receiving and connection.channel.waiting_bytes():
                self._receive(connection, session)
        except EOFError:
            self._leave(connection)
        except (BadDatagram, DecodeError, Refused, OSError) as error:
            self._send_away(connection, session, error)

    def _receive(self, connection: Connection, session: Session) -> None:
        """Have the next frame received with its descriptors; until then nothing else is heard."""

        def take(outcome: Taken | Refused) -> None:
            if session.number not in self.open:
                close_all(outcome[1] if isinstance(outcome, tuple) else ())
                return
            connection.receiving = False
            self._poller.register(connection.channel.fileno(), zmq.POLLIN)
            try:
                self._take(connection, session, outcome)
            except (DecodeError, Refused) as error:
                self._send_away(connection, session, error)

        self._receiver.read(connection.channel.duplicate(), connection.peer.uid, take)
        connection.receiving = True
        self._poller.unregister(connection.channel.fileno())

    def _take(self, connection: Connection, session: Session, outcome: Taken | Refused) -> None:
        if isinstance(outcome, Refused):
            raise outcome
        frame, fds = outcome
        if connection.fds:  # of a registration that there is, so this one is refused
            close_all(fds)
        else:
            connection.fds = list(fds)
        header = WIRE.decode_header(frame)
        if TAGS.get(header.tag) is not Register:
            text = f"tag 0x{header.tag:02x}, which is no message for this socket"
            raise Refused(ErrorCode.BAD_MESSAGE, text)
        now = time.monotonic()
        self._carry_out(self._requests.serve(session, header, frame, now, len(fds)))
        if not session.holds_memory:
            connection.drop_fds()

    def _send_away(self, connection: Connection, session: Session, error: Exception) -> None:
        """End a session for what it has sent, and say why."""
        who = session.who
        log.warning("%s is disconnected: %s", who, error, extra=who.fields)
        if isinstance(error, Refused):
            notice = Error.of(error.code, str(error))
            connection.tell(WIRE.encode(notice, 0, self._core.state.boot_id, session.token))
        self._leave(connection)

    def _hang_up(self, connection: Connection) -> None:
        """Close a connection; what was sent and not read may be a foreign file system's."""
        self._receiver.drop(connection.channel.hang_up())
        connection.close()

    def _leave(self, connection: Connection) -> None:
        session = connection.session
        if session is None or self.open.pop(session.number, None) is None:
            return
        for fd in (connection.channel.fileno(), connection.pidfd):
            if fd >= 0:
                del self._by_fd[fd]
                with contextlib.suppress(KeyError):  # what is being received is not polled
                    self._poller.unregister(fd)
        self._carry_out(self._core.lost(session))
        self._requests.forget(session)
        self._hang_up(connection)

    def notify(self, effect: Notify, resolve: Callable[[FdName | None], list[int]]) -> None:
        """Send a notice, with the descriptors that are named; whoever does not listen leaves.

        Args:
            effect: what to send to whom.
            resolve: the descriptors of a name.
        """
        connection = self.open.get(effect.session)
        if connection is None or connection.session is None:
            return
        session = connection.session
        frame = WIRE.encode(effect.message, 0, self._core.state.boot_id, session.token)
        try:
            connection.channel.send(frame, resolve(effect.fd))
        except (ChannelFull, EOFError, OSError) as error:
            log.warning("%s does not listen (%s)", session.who, error, extra=session.who.fields)
            self._leave(connection)

    def drop_fds(self, session: int) -> None:
        """Close what a session has sent."""
        connection = self.open.get(session)
        if connection is not None:
            connection.drop_fds()

    def flush(self) -> None:
        """Send on what did not go at once."""
        for connection in list(self.open.values()):
            if connection.channel.wants_write:
                try:
                    connection.channel.flush()
                except EOFError:
                    self._leave(connection)

    def close(self) -> None:
        """Close every connection."""
        for connection in list(self.open.values()):
            self._hang_up(connection)
        self._receiver.close()

    def __repr__(self) -> str:
        return f"<Connections {len(self.open)} open>"


def _readable(fd: int) -> bool:
    poller = zmq.Poller()
    poller.register(fd, zmq.POLLIN)
    return bool(poller.poll(0))
