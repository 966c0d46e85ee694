"""Sessions: one connection to the broker's socket each, from accept to end of file.

1. accept: the peer is admitted as a session, or gets an Error notice that says why not.
2. Its requests are served in order; replies and notices leave in the order of effects.
3. Its end of file, or the end of its process, ends the session. What it has sent before is served.

Descriptors come with a Register alone. What else a client sends with descriptors, and a descriptor
that is no memory, ends the session.
"""

import contextlib
import logging
import os
import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvd.broker.broker import Broker
from kvd.broker.effects import Effect, LogEvent, Reply
from kvd.broker.sessions import Session
from kvd.client_names import Peer
from kvd.errors import Refusal
from kvd.machine.process import SEALED_MEMFD_RECIPE, open_files_remedy
from kvd.server.runtime_dir import AllowList
from kvd.wire.listener import closes_at_once
from kvd.wire.server import Client, Server, decode_error_reply
from kvd_proto.channel import close_all
from kvd_proto.codec import MAX_MESSAGE_BYTES, REQUESTS, WIRE, Header
from kvd_proto.errors import DecodeError, Oversize
from kvd_proto.messages import TAGS, Error, ErrorCode, Message, Register

log = logging.getLogger("kvd.daemon")
MAX_CLIENTS = 2**17  # above what the settings allow, which refuse with a reason
_BATCH = 64
"""Requests that are served in one turn."""


@dataclass(slots=True, eq=False)
class SessionConnection:
    """A session's connection.

    Attributes:
        pidfd: readable when the process has ended, even if a child of it keeps the socket open;
            -1 where the process cannot be seen from here.
        fds: the descriptors of its registration, or of what is left of one.
    """

    client: Client
    session: Session
    pidfd: int = -1
    fds: list[int] = field(default_factory=list)

    def drop_fds(self) -> None:
        """Close the descriptors of its registration."""
        close_all(self.fds)
        self.fds.clear()


class SessionServer:
    """All connections to the broker's socket.

    Args:
        path: of the socket.
        core: decides.
        epoll: of the loop, which gives `handle_events` what is ready.
        carry_out: executes effects; replies and notices come back to `reply` and `notify`.
        allowed: who may connect.
        own: whether a peer is a process of this daemon, for which there is always room.
    """

    def __init__(
        self,
        path: Path,
        core: Broker,
        epoll: select.epoll,
        carry_out: Callable[[list[Effect]], None],
        *,
        allowed: AllowList,
        own: Callable[[Peer], bool],
    ) -> None:
        self._server = Server(
            path,
            max_bytes=MAX_MESSAGE_BYTES,
            max_clients=MAX_CLIENTS,
            takes_descriptors=True,
            epoll=epoll,
        )
        self._server.limits = core.state.counts.limits
        self._core = core
        self._epoll = epoll
        self._carry_out = carry_out
        self._allowed = allowed
        self._own = own
        self._open: dict[int, SessionConnection] = {}  # by session number
        self._by_pidfd: dict[int, SessionConnection] = {}
        self._dropped_frames = 0  # that were no messages
        self._dropped_replies = 0  # whose client does not read, or is gone

    def __len__(self) -> int:
        return len(self._open)

    @property
    def pending(self) -> bool:
        """Whether `serve` has something to do, which polling may not report."""
        server = self._server
        return server.pending or bool(server.accepted) or bool(server.ended)

    def handle_events(self, ready: dict[int, int]) -> None:
        """Note which sessions can be read; take what was looked at out of `ready`."""
        self._server.handle_events(ready)
        for fd in ready.keys() & self._by_pidfd.keys():
            del ready[fd]
            connection = self._by_pidfd[fd]
            self._close_pidfd(connection)
            connection.client.channel.detach()  # what is there is still read, to the end of file

    def serve(self, now: float) -> None:
        """Admit peers, serve a batch of requests at most, end sessions."""
        self._admit_accepted()
        for _ in range(_BATCH):
            received = self._server.next_request()
            self._end_sessions()  # first: the request may be for what a session held that is gone
            if received is None:
                break
            self._serve(*received, now)
        self._end_sessions()
        self.count()

    def count(self) -> None:
        """Report what was dropped."""
        dropped_frames = self._dropped_frames + self._server.dropped
        self._core.messages_dropped(dropped_frames, self._dropped_replies)

    # -------------------------------------------------------- begin and end

    def _admit_accepted(self) -> None:
        accepted = self._server.accepted
        while accepted:
            client = accepted.popleft()
            if client.closed:
                continue
            peer = client.peer
            try:
                session = self._admit(peer)
            except Refusal as refusal:
                text = f"connection of pid {peer.pid} refused: {refusal}"
                self._carry_out([LogEvent(text, "warning", {"pid": peer.pid})])
                self._core.error_sent(refusal.code)
                self._server.refuse(client, _notice_of(refusal))
                continue
            connection = SessionConnection(client, session)
            if peer.pid > 0:  # 0: the peer's pid namespace is not visible from here
                with contextlib.suppress(OSError):
                    connection.pidfd = os.pidfd_open(peer.pid)
            if connection.pidfd >= 0:
                self._by_pidfd[connection.pidfd] = connection
                self._epoll.register(connection.pidfd, select.EPOLLIN)
            self._open[session.number] = connection
            self._server.adopt(client, connection)

    def _admit(self, peer: Peer) -> Session:
        """Return a peer's new session, or refuse it."""
        if objection := self._allowed.objection(peer):
            raise Refusal(ErrorCode.FORBIDDEN, objection)
        return self._core.connected(os.urandom(16), peer, own=self._own(peer))

    def _disconnect(self, connection: SessionConnection, refusal: Refusal) -> None:
        """Close a session's connection, with the reason; it ends in `serve`, not among effects."""
        who = connection.session.identity
        log.warning("%s is disconnected: %s", who, refusal, extra=who.fields)
        self._core.error_sent(refusal.code)
        self._server.send(connection.client, _notice_of(refusal))
        self._server.end(connection.client)

    def _end_sessions(self) -> None:
        ended = self._server.ended
        while ended:
            connection: SessionConnection | None = ended.popleft().owner
            if connection is not None:  # else it was refused
                del self._open[connection.session.number]
                self._close_pidfd(connection)
                self._carry_out(self._core.lost(connection.session))
                connection.drop_fds()

    def _close_pidfd(self, connection: SessionConnection) -> None:
        if connection.pidfd >= 0:
            del self._by_pidfd[connection.pidfd]
            self._epoll.unregister(connection.pidfd)
            os.close(connection.pidfd)
            connection.pidfd = -1

    # ------------------------------------------------------------- requests

    def _serve(self, client: Client, frame: bytes, fds: tuple[int, ...], now: float) -> None:
        connection: SessionConnection = client.owner
        session = connection.session
        if client.closed:  # since the message was taken, for want of room
            self._server.closer.close(fds, client.peer.uid)
            return
        if fds:
            try:
                _check_descriptors(frame, fds)
            except Refusal as refusal:
                self._server.closer.close(fds, client.peer.uid)
                self._disconnect(connection, refusal)
                return
            if session.holds_memory:  # so this registration is refused
                close_all(fds)
            else:
                connection.fds = list(fds)
        try:
            header = REQUESTS.decode_header(frame)
        except DecodeError as error:  # without a header there is no id to answer to
            self._dropped_frames += 1
            _log_unreadable(session, error)
            return
        self._carry_out(self._request(session, header, frame, now, len(fds)))
        if fds and not session.holds_memory:
            connection.drop_fds()

    def _request(
        self, session: Session, header: Header, frame: bytes, now: float, descriptors: int
    ) -> list[Effect]:
        """Return the effects of one request."""
        try:
            message = REQUESTS.decode_body(header, frame)
        except DecodeError as error:
            _log_unreadable(session, error)
            return [Reply(session.number, header.request_id, decode_error_reply(error))]
        try:
            return self._core.request(session, header.request_id, message, now, descriptors)
        except Exception:
            name, who = type(message).__name__, session.identity
            log.exception("%s: %s could not be served", who, name, extra=who.fields)
            text = f"{name} hit a bug in kvd; its log has the details"
            return [Reply(session.number, header.request_id, Error.of(ErrorCode.INTERNAL, text))]

    # -------------------------------------------------------------- effects

    def reply(self, effect: Reply) -> None:
        """Send a reply, if the session has not ended."""
        connection = self._open.get(effect.session)
        if connection is None:
            return
        message = effect.message
        if isinstance(message, Error):
            self._core.error_sent(message.code)
        try:
            frame = WIRE.encode(message, effect.request_id)
        except Oversize as error:
            too_large = Error(code=ErrorCode.LIMIT, text=f"the reply is too large: {error}")
            frame = WIRE.encode(too_large, effect.request_id)
        if not self._server.send(connection.client, frame):
            self._dropped_replies += 1  # a peer that does not read loses its own replies only

    def notify(self, number: int, notice: Message, fds: Sequence[int]) -> None:
        """Send a notice to a session; a peer that does not take its notices is disconnected."""
        connection = self._open.get(number)
        if connection is None:
            return
        client = connection.client
        try:
            sent = self._server.send(client, WIRE.encode(notice), list(fds))
        except OSError as error:  # of descriptors that wait with it
            text = f"a notice cannot be sent: {error}; {open_files_remedy()}"
            self._disconnect(connection, Refusal(ErrorCode.LIMIT, text))
            return
        if not sent and client.channel.wants_write:  # else it is gone, and its end comes in turn
            self._disconnect(connection, Refusal(ErrorCode.LIMIT, "it does not read its notices"))

    def fds(self, number: int) -> list[int]:
        """Return the descriptors of a session's registration, which stay this object's."""
        return self._open[number].fds

    def drop_fds(self, number: int) -> None:
        """Close the descriptors of a session's registration."""
        if connection := self._open.get(number):
            connection.drop_fds()

    def close(self) -> None:
        """Close every connection, and the socket."""
        self._server.close()
        for connection in self._open.values():
            self._close_pidfd(connection)
            connection.drop_fds()
        self._open.clear()


def _notice_of(refusal: Refusal) -> bytes:
    return WIRE.encode(Error.of(refusal.code, str(refusal)))


def _check_descriptors(frame: bytes, fds: Sequence[int]) -> None:
    """Refuse descriptors that come with no Register, and files of a file system."""
    try:
        kind = TAGS.get(WIRE.decode_header(frame).tag)
    except DecodeError:
        kind = None
    if kind is not Register:
        text = "descriptors came with a message that is no Register; only that takes them"
        raise Refusal(ErrorCode.BAD_MESSAGE, text)
    for number, fd in enumerate(fds):
        if not closes_at_once(fd):
            raise Refusal(
                ErrorCode.BAD_LAYOUT,
                f"descriptor {number} of those that were sent is neither a memory file nor a"
                f" device; make memory with {SEALED_MEMFD_RECIPE}",
            )


def _log_unreadable(session: Session, error: DecodeError) -> None:
    who, uid = session.identity, session.peer.uid
    log.warning("a message of %s, uid %d, cannot be read: %s", who, uid, error, extra=who.fields)
