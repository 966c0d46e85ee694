"""Who came through the door, for as long as they stay."""

import logging
import os
import stat
from collections.abc import Callable, Iterable

import zmq

from kvd.broker.door import Door, Visitor
from kvd.core.broker import Broker
from kvd.core.effects import Effect, Event, FdName, Notify
from kvd.core.sessions import Peer
from kvd.errors import BadDatagram, ChannelFull, Refused
from kvd_proto.codec import WIRE
from kvd_proto.errors import DecodeError
from kvd_proto.messages import Error, ErrorCode, Handles

log = logging.getLogger("kvd.broker")


class Visitors:
    """Open connections, by the numbers of their sessions in `open`.

    Args:
        door: where they come from.
        core: who is told of comings, descriptors and goings.
        poller: where their descriptors are registered.
        carry_out: does what the core wants done.

    `on_leave` is told of everybody whose session has ended.
    """

    def __init__(
        self,
        door: Door,
        core: Broker,
        poller: zmq.Poller,
        carry_out: Callable[[list[Effect]], None],
    ) -> None:
        self.open: dict[int, Visitor] = {}
        self._by_fd: dict[int, Visitor] = {}
        self._door = door
        self._core = core
        self._poller = poller
        self._carry_out = carry_out
        self.on_leave: Callable[[Visitor], None] = lambda _visitor: None

    def accept(self, turned_away: Callable[[Visitor], bool], own: Callable[[Peer], bool]) -> None:
        """Let in all who wait at the door.

        Args:
            turned_away: tells a visitor that he may not come in, if so.
            own: whether it is a process of this daemon, for which there is always room.
        """
        while (visitor := self._door.accept()) is not None:
            if turned_away(visitor):
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
        visitor.turn_away(WIRE.encode(error, 0, self._core.state.boot_id))

    def turn(self, ready: Iterable[object], now: float) -> None:
        """Hear those whose descriptors are ready; show out those who have gone or talk nonsense."""
        for fd in ready:
            if isinstance(fd, int) and fd in self._by_fd:
                self._hear(self._by_fd[fd], now)

    def _hear(self, visitor: Visitor, now: float) -> None:
        session = visitor.session
        if session is None or session.number not in self.open:
            return
        try:
            while (received := visitor.channel.recv()) is not None:
                frame, fds = received
                visitor.fds += fds
                _, message = WIRE.decode(frame)
                if not isinstance(message, Handles) or message.count != len(fds):
                    name = type(message).__name__
                    text = f"{name} with {len(fds)} descriptors at the door"
                    raise Refused(ErrorCode.BAD_MESSAGE, text)
                # Whoever sent his own end would be held here after he has gone.
                if any(stat.S_ISSOCK(os.fstat(fd).st_mode) for fd in fds):
                    raise Refused(ErrorCode.BAD_MESSAGE, "a socket at the door; it is no memory")
                effects = self._core.descriptors(session, message.first, message.count, now)
                self._carry_out(effects)
            alive = visitor.pidfd < 0 or not _readable(visitor.pidfd)
        except EOFError:
            alive = False
        except (BadDatagram, DecodeError, Refused) as error:
            who = session.who
            log.warning("%s is shown the door: %s", who, error, extra=who.fields)
            alive = False
        if not alive:
            self._leave(visitor)

    def _leave(self, visitor: Visitor) -> None:
        session = visitor.session
        if session is None or self.open.pop(session.number, None) is None:
            return
        for fd in (visitor.channel.fileno(), visitor.pidfd):
            if fd >= 0:
                del self._by_fd[fd]
                self._poller.unregister(fd)
        self._carry_out(self._core.lost(session))
        self.on_leave(visitor)
        visitor.close()

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
                visitor.channel.flush()

    def close(self) -> None:
        """Close every connection."""
        for visitor in list(self.open.values()):
            visitor.close()

    def __repr__(self) -> str:
        return f"<Visitors {len(self.open)} open>"


def _readable(fd: int) -> bool:
    poller = zmq.Poller()
    poller.register(fd, zmq.POLLIN)
    return bool(poller.poll(0))
