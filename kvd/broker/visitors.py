"""Who came through the door, for as long as they stay."""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable

import zmq

from kvd.broker.door import Door, Visitor
from kvd.broker.receiver import Receiver, Taken
from kvd.core.broker import Broker
from kvd.core.effects import Effect, Event, FdName, Notify
from kvd.core.sessions import Peer, Session
from kvd.errors import BadDatagram, ChannelFull, Refused
from kvd.seqpacket import close_all
from kvd_proto.codec import WIRE
from kvd_proto.errors import DecodeError
from kvd_proto.messages import Error, ErrorCode, Handles

log = logging.getLogger("kvd.broker")
AT_ONCE = 32
"""Visitors that are let in before it is others' turn."""


class Visitors:
    """Open connections, by the numbers of their sessions in `open`.

    Args:
        door: where they come from.
        core: who is told of comings, descriptors and goings.
        poller: where their descriptors are registered.
        carry_out: does what the core wants done.
        receiver: receives the descriptors that they send.

    `on_leave` is told of everybody whose session has ended.
    """

    def __init__(
        self,
        door: Door,
        core: Broker,
        poller: zmq.Poller,
        carry_out: Callable[[list[Effect]], None],
        receiver: Receiver,
    ) -> None:
        self._receiver = receiver
        self.open: dict[int, Visitor] = {}
        self._by_fd: dict[int, Visitor] = {}
        self._door = door
        self._core = core
        self._poller = poller
        self._carry_out = carry_out
        self.on_leave: Callable[[Visitor], None] = lambda _visitor: None

    def accept(self, turned_away: Callable[[Visitor], bool], own: Callable[[Peer], bool]) -> None:
        """Let in who waits at the door, some of them where they are many.

        Args:
            turned_away: tells a visitor that he may not come in, if so.
            own: whether it is a process of this daemon, for which there is always room.
        """
        for _ in range(AT_ONCE):
            visitor = self._door.accept()
            if visitor is None:
                break
            if turned_away(visitor):
                self._hang_up(visitor)
                continue
            peer = visitor.peer
            try:
                session, effects = self._core.connected(os.urandom(16), peer, own=own(peer))
            except Refused as refusal:
                self._no_room(visitor, refusal)
                continue
            visitor.session = session
            self.open[session.number] = visitor
            for fd in (visitor.channel.fileno(), visitor.pidfd):
                if fd >= 0:
                    self._by_fd[fd] = visitor
                    self._poller.register(fd, zmq.POLLIN)
            self._carry_out(effects)

        if self._door.turned_away:
            self._core.state.measures.limits["open_files"] += self._door.turned_away
            self._door.turned_away = 0

    def _no_room(self, visitor: Visitor, refusal: Refused) -> None:
        """Tell a process that there is no room for it, and what would make some."""
        pid = visitor.peer.pid
        text = f"connection of pid {pid} refused: {refusal}"
        self._carry_out([Event(text, "warning", {"pid": pid})])
        error = Error.of(refusal.code, str(refusal))
        visitor.tell(WIRE.encode(error, 0, self._core.state.boot_id))
        self._hang_up(visitor)

    def turn(self, ready: Iterable[object]) -> None:
        """Hear those whose descriptors are ready; show out those who have gone or talk nonsense."""
        for fd in ready:
            if isinstance(fd, int) and fd in self._by_fd:
                self._hear(self._by_fd[fd])

    def _hear(self, visitor: Visitor) -> None:
        session = visitor.session
        if session is None or session.number not in self.open:
            return
        try:
            if visitor.pidfd >= 0 and _readable(visitor.pidfd):
                raise EOFError
            if not session.receiving and (frame := visitor.channel.peek()) is not None:
                _handles(frame)
                self._receive(visitor, session)
        except EOFError:
            self._leave(visitor)
        except (BadDatagram, DecodeError, Refused, OSError) as error:
            self._send_away(visitor, session, error)

    def _receive(self, visitor: Visitor, session: Session) -> None:
        """Have the next frame received with its descriptors; until then nothing else is heard."""

        def take(outcome: Taken | Refused) -> None:
            if session.number not in self.open:
                close_all(outcome[1] if isinstance(outcome, tuple) else ())
                return
            session.receiving = False
            self._poller.register(visitor.channel.fileno(), zmq.POLLIN)
            try:
                self._take(visitor, session, outcome)
            except (DecodeError, Refused) as error:
                self._send_away(visitor, session, error)

        self._receiver.read(visitor.channel.fileno(), visitor.peer.uid, take)
        session.receiving = True
        self._poller.unregister(visitor.channel.fileno())

    def _take(self, visitor: Visitor, session: Session, outcome: Taken | Refused) -> None:
        if isinstance(outcome, Refused):
            raise outcome
        frame, fds = outcome
        visitor.fds += fds
        message = _handles(frame)
        if message.count != len(fds):
            text = f"Handles of {message.count} descriptors with {len(fds)}"
            raise Refused(ErrorCode.BAD_MESSAGE, text)
        now = time.monotonic()
        self._carry_out(self._core.descriptors(session, message.first, message.count, now))

    def _send_away(self, visitor: Visitor, session: Session, error: Exception) -> None:
        """End a session for what it has sent, and say why."""
        who = session.who
        log.warning("%s is disconnected: %s", who, error, extra=who.fields)
        if isinstance(error, Refused):
            notice = Error.of(error.code, str(error))
            visitor.tell(WIRE.encode(notice, 0, self._core.state.boot_id, session.token))
        self._leave(visitor)

    def _hang_up(self, visitor: Visitor) -> None:
        """Close a connection; what was sent and not read may be a foreign file system's."""
        self._receiver.drop(visitor.channel.hang_up())
        visitor.close()

    def _leave(self, visitor: Visitor) -> None:
        session = visitor.session
        if session is None or self.open.pop(session.number, None) is None:
            return
        for fd in (visitor.channel.fileno(), visitor.pidfd):
            if fd >= 0:
                del self._by_fd[fd]
                with contextlib.suppress(KeyError):  # what is being received is not polled
                    self._poller.unregister(fd)
        self._carry_out(self._core.lost(session))
        self.on_leave(visitor)
        self._hang_up(visitor)

    def notify(self, effect: Notify, resolve: Callable[[FdName | None], list[int]]) -> None:
        """Send a notice, with the descriptors that are named; whoever does not listen leaves.

        Args:
            effect: what to send to whom.
            resolve: the descriptors of a name.
        """
        visitor = self.open.get(effect.session)
        if visitor is None or visitor.session is None:
            return
        session = visitor.session
        frame = WIRE.encode(effect.message, 0, self._core.state.boot_id, session.token)
        try:
            visitor.channel.send(frame, resolve(effect.fd))
        except (ChannelFull, EOFError, OSError) as error:
            log.warning("%s does not listen (%s)", session.who, error, extra=session.who.fields)
            self._leave(visitor)

    def drop_fds(self, session: int) -> None:
        """Close what a session has sent."""
        visitor = self.open.get(session)
        if visitor is not None:
            visitor.drop_fds()

    def flush(self) -> None:
        """Send on what did not go at once."""
        for visitor in list(self.open.values()):
            if visitor.channel.wants_write:
                try:
                    visitor.channel.flush()
                except EOFError:
                    self._leave(visitor)

    def close(self) -> None:
        """Close every connection."""
        for visitor in list(self.open.values()):
            self._hang_up(visitor)

    def __repr__(self) -> str:
        return f"<Visitors {len(self.open)} open>"


def _handles(frame: bytes) -> Handles:
    """The only message that clients send here.

    Raises:
        DecodeError: it is none.
        Refused: it is another one.
    """
    _, message = WIRE.decode(frame)
    if not isinstance(message, Handles):
        text = f"{type(message).__name__}, which is no message for this socket"
        raise Refused(ErrorCode.BAD_MESSAGE, text)
    return message


def _readable(fd: int) -> bool:
    poller = zmq.Poller()
    poller.register(fd, zmq.POLLIN)
    return bool(poller.poll(0))
