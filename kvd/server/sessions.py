"""Sessions: one connection to the broker's socket each, from accept to end of file.

1. accept: the peer becomes a session, or gets an Error notice with the reason.
2. Its requests are served in order; replies and notices are sent in the order of effects.
3. The session ends at end of file or when its process exits; requests received before are served,
   but for questions, whose answers nothing would read.

Only Register may carry descriptors. Descriptors with another message, or one that is no memory,
end the session.
"""

import contextlib
import logging
import math
import os
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

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
from kvd_proto.codec import MAX_MESSAGE_BYTES, REQUESTS, WIRE, Header, with_request_id
from kvd_proto.errors import DecodeError, Oversize
from kvd_proto.messages import (
    TAGS,
    Check,
    Error,
    ErrorCode,
    Explain,
    Message,
    Register,
    ShowConfig,
    Status,
)

log = logging.getLogger("kvd.daemon")
MAX_CLIENTS = 2**17  # above the limits of the settings, whose refusals name the reason
TURN_SECONDS = 0.004
_MAX_REQUESTS_PER_TURN = 64
_MAX_ANSWERS_PER_TURN = 32  # a report has some 34 KB
QUESTIONS = (Status, Check, Explain, ShowConfig)
"""Requests that change nothing; their answers take long, or are long."""
QUESTION_SECONDS = 0.1
_FIRST_QUESTION_ID = 2**64  # the request ids of clients have 64 bits


@dataclass(slots=True, eq=False)
class SessionConnection:
    """A session's connection.

    Attributes:
        pidfd: readable when the process has exited, even if a child of it keeps the socket open;
            -1 if the process is not visible from here.
        fds: the descriptors of the session's registration.
    """

    client: Client
    session: Session
    pidfd: int = -1
    fds: list[int] = field(default_factory=list)

    def drop_fds(self) -> None:
        """Close the descriptors of the registration."""
        close_all(self.fds)
        self.fds.clear()


_Topic: TypeAlias = tuple[str, Message]
"""A question, and the kind of the sessions that ask it: the broker may refuse others."""
_Asker: TypeAlias = tuple[SessionConnection, int]
"""A session that waits for an answer, and its request's id."""


class Questions:
    """Questions that wait for their turn or their answer.

    1. A question is put to the broker when `QUESTION_SECONDS` have passed since it was put last.
    2. The one answer goes to all sessions of a kind that have asked it by then.

    So an answer is made after each request that it answers, and shows what was changed before.
    """

    def __init__(self) -> None:
        self._waiting: dict[_Topic, list[_Asker]] = {}
        self._next_at: dict[_Topic, float] = {}  # in order of time
        self._put: dict[int, list[_Asker]] = {}  # by the broker's request id
        self._next_id = _FIRST_QUESTION_ID

    def add(self, question: Message, connection: SessionConnection, request_id: int) -> None:
        """Add a session that asks a question."""
        topic = (connection.session.kind, question)
        self._waiting.setdefault(topic, []).append((connection, request_id))

    def due(self) -> float:
        """Return when the next question may be put, in monotonic seconds; infinity: none waits."""
        if not self._waiting:
            return math.inf
        return min(self._next_at.get(topic, 0.0) for topic in self._waiting)

    def take_due(self, now: float) -> list[tuple[Session, int, Message, int]]:
        """Return the questions to put now.

        Each with one of the sessions that ask it, a request id, and the number of these sessions.
        Peers that have gone ask no more.
        """
        if not self._waiting:
            return []
        while self._next_at and next(iter(self._next_at.values())) <= now:
            del self._next_at[next(iter(self._next_at))]
        due = []
        for topic in [topic for topic in self._waiting if topic not in self._next_at]:
            askers = [asker for asker in self._waiting.pop(topic) if asker[0].client.reads]
            if askers:
                self._next_at[topic] = now + QUESTION_SECONDS
                self._put[self._next_id] = askers
                due.append((askers[0][0].session, self._next_id, topic[1], len(askers)))
                self._next_id += 1
        return due

    def take_askers(self, request_id: int) -> list[_Asker]:
        """Return the sessions that wait for the answer to a question, and forget them."""
        return self._put.pop(request_id)


class SessionServer:
    """All connections to the broker's socket.

    Args:
        path: of the socket.
        core: the broker's decisions.
        epoll: of the loop, which passes the events to `handle_events`.
        execute: executes effects; for replies and notices it calls `reply` and `notify`.
        allowed: the users and groups that may connect.
        is_own_process: whether a peer is a process of this daemon; the session limit does not apply
            to it.
    """

    def __init__(
        self,
        path: Path,
        core: Broker,
        epoll: select.epoll,
        execute: Callable[[list[Effect]], None],
        *,
        allowed: AllowList,
        is_own_process: Callable[[Peer], bool],
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
        self._execute = execute
        self._allowed = allowed
        self._is_own_process = is_own_process
        self._connections: dict[int, SessionConnection] = {}  # by session number
        self._by_pidfd: dict[int, SessionConnection] = {}
        self._questions = Questions()
        self._answers: deque[tuple[_Asker, bytes]] = deque()  # to be sent
        self._num_dropped_frames = 0  # frames that could not be decoded
        self._num_dropped_replies = 0  # replies whose client does not read or has gone

    def __len__(self) -> int:
        return len(self._connections)

    def due(self) -> float:
        """Return when `serve` has work that the poller does not report, in monotonic seconds."""
        server = self._server
        if server.pending or server.accepted or server.ended or self._answers:
            return 0.0
        return self._questions.due()

    def handle_events(self, ready: dict[int, int]) -> None:
        """Note which sessions are readable; remove the handled descriptors from `ready`."""
        self._server.handle_events(ready)
        for fd in ready.keys() & self._by_pidfd.keys():
            del ready[fd]
            connection = self._by_pidfd[fd]
            self._close_pidfd(connection)
            connection.client.channel.detach()  # bytes sent before are still read

    def serve(self, now: float) -> None:
        """Admit peers, serve requests, put and answer questions, end sessions.

        A turn ends after `_MAX_REQUESTS_PER_TURN` requests, or with the one during which
        `TURN_SECONDS` have passed.
        """
        self._admit_accepted()
        end = time.monotonic() + TURN_SECONDS
        for _ in range(_MAX_REQUESTS_PER_TURN):
            received = self._server.next_message()
            self._end_sessions()  # first: the request may need what an ended session held
            if received is None:
                break
            self._serve(*received, now)
            if time.monotonic() >= end:
                break
        for session, request_id, question, num_askers in self._questions.take_due(now):
            self._core.state.counts.requests[type(question).__name__] += num_askers - 1
            self._execute(self._decide(session, request_id, question, now))
        if self._answers:
            self._send_answers()
        self._end_sessions()
        self.report_drops()

    def report_drops(self) -> None:
        """Report dropped frames and replies to the broker."""
        num_dropped_frames = self._num_dropped_frames + self._server.num_invalid
        self._core.messages_dropped(num_dropped_frames, self._num_dropped_replies)

    # -------------------------------------------------------- begin and end

    def _admit_accepted(self) -> None:
        """Open a session for each new connection, or refuse it with the reason."""
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
                self._execute([LogEvent(text, "warning", {"pid": peer.pid})])
                self._core.error_sent(refusal.code)
                self._server.refuse(client, _error_notice(refusal))
                continue
            connection = SessionConnection(client, session)
            if peer.pid > 0:  # 0: the peer's pid namespace is not visible from here
                with contextlib.suppress(OSError):
                    connection.pidfd = os.pidfd_open(peer.pid)
            if connection.pidfd >= 0:
                self._by_pidfd[connection.pidfd] = connection
                self._epoll.register(connection.pidfd, select.EPOLLIN)
            self._connections[session.number] = connection
            self._server.adopt(client, connection)

    def _admit(self, peer: Peer) -> Session:
        """Return a new session for the peer; raise `Refusal` if it may not have one."""
        if objection := self._allowed.objection(peer):
            raise Refusal(ErrorCode.FORBIDDEN, objection)
        return self._core.connected(os.urandom(16), peer, is_own_process=self._is_own_process(peer))

    def _disconnect(self, connection: SessionConnection, refusal: Refusal) -> None:
        """Close a session's connection with a reason; `serve` ends the session later."""
        identity = connection.session.identity
        log.warning("%s is disconnected: %s", identity, refusal, extra=identity.fields)
        self._core.error_sent(refusal.code)
        self._server.send(connection.client, _error_notice(refusal))
        self._server.end(connection.client)

    def _end_sessions(self) -> None:
        ended = self._server.ended
        while ended:
            connection: SessionConnection | None = ended.popleft().owner
            if connection is not None:  # None: the peer was refused
                del self._connections[connection.session.number]
                self._close_pidfd(connection)
                self._execute(self._core.lost(connection.session))
                connection.drop_fds()

    def _close_pidfd(self, connection: SessionConnection) -> None:
        if connection.pidfd >= 0:
            del self._by_pidfd[connection.pidfd]
            self._epoll.unregister(connection.pidfd)
            os.close(connection.pidfd)
            connection.pidfd = -1

    # ------------------------------------------------------------- requests

    def _serve(self, client: Client, frame: bytes, fds: tuple[int, ...], now: float) -> None:
        """Serve one message: check and keep its descriptors, decode it, execute its effects."""
        connection: SessionConnection = client.owner
        session = connection.session
        if client.closed:  # it was disconnected after the message was received
            self._server.closer.close(fds, client.peer.uid)
            return
        if fds:
            try:
                _check_descriptors(frame, fds)
            except Refusal as refusal:
                self._server.closer.close(fds, client.peer.uid)
                self._disconnect(connection, refusal)
                return
            if session.holds_memory:  # the broker refuses this registration
                close_all(fds)
            else:
                connection.fds = list(fds)
        try:
            header = REQUESTS.decode_header(frame)
        except DecodeError as error:  # without a header there is no request id to reply to
            self._num_dropped_frames += 1
            _log_undecodable(session, error)
            return
        if not client.reads and TAGS.get(header.tag) in QUESTIONS:
            self._num_dropped_replies += 1
            return
        self._execute(self._request(connection, header, frame, now, len(fds)))
        if fds and not session.holds_memory:
            connection.drop_fds()

    def _request(
        self, connection: SessionConnection, header: Header, frame: bytes, now: float, num_fds: int
    ) -> list[Effect]:
        """Return the effects of one request; have a question wait, and its session not be read."""
        session, request_id = connection.session, header.request_id
        try:
            message = REQUESTS.decode_body(header, frame)
        except DecodeError as error:
            _log_undecodable(session, error)
            return [Reply(session.number, request_id, decode_error_reply(error))]
        if isinstance(message, QUESTIONS):
            self._questions.add(message, connection, request_id)
            self._server.pause(connection.client)
            return []
        return self._decide(session, request_id, message, now, num_fds)

    def _decide(
        self, session: Session, request_id: int, message: Message, now: float, num_fds: int = 0
    ) -> list[Effect]:
        """Return the effects of one request by the broker's decisions; a bug there is a reply."""
        try:
            return self._core.request(session, request_id, message, now, num_fds)
        except Exception:
            name, identity = type(message).__name__, session.identity
            log.exception("%s: %s could not be served", identity, name, extra=identity.fields)
            text = f"{name} hit a bug in kvd; its log has the details"
            return [Reply(session.number, request_id, Error.of(ErrorCode.INTERNAL, text))]

    # -------------------------------------------------------------- effects

    def reply(self, effect: Reply) -> None:
        """Send a reply, if its reader has not gone; `serve` sends the answers to questions."""
        message = effect.message
        if effect.request_id >= _FIRST_QUESTION_ID:
            frame = _encode_reply(message, 0)
            for asker in self._questions.take_askers(effect.request_id):
                self._answers.append((asker, frame))
                if isinstance(message, Error):
                    self._core.error_sent(message.code)
            return
        connection = self._connections.get(effect.session)
        if connection is None:
            return
        if isinstance(message, Error):
            self._core.error_sent(message.code)
        client = connection.client
        if not client.reads or not self._server.send(
            client, _encode_reply(message, effect.request_id)
        ):
            self._num_dropped_replies += 1

    def _send_answers(self) -> None:
        """Send answers to questions, at most `_MAX_ANSWERS_PER_TURN`; read these sessions again."""
        for _ in range(min(len(self._answers), _MAX_ANSWERS_PER_TURN)):
            (connection, request_id), frame = self._answers.popleft()
            if not self._server.send(connection.client, with_request_id(frame, request_id)):
                self._num_dropped_replies += 1
            self._server.resume(connection.client)

    def notify(self, number: int, notice: Message, fds: Sequence[int]) -> None:
        """Send a notice to a session; disconnect a peer that does not read its notices."""
        connection = self._connections.get(number)
        if connection is None:
            return
        client = connection.client
        try:
            sent = self._server.send(client, WIRE.encode(notice), list(fds))
        except OSError as error:  # duplicating descriptors that wait failed
            text = f"a notice cannot be sent: {error}; {open_files_remedy()}"
            self._disconnect(connection, Refusal(ErrorCode.LIMIT, text))
            return
        if not sent and client.channel.wants_write:  # else it has gone, and `serve` ends it
            self._disconnect(connection, Refusal(ErrorCode.LIMIT, "it does not read its notices"))

    def end(self, number: int, reason: str) -> None:
        """Disconnect a session, and tell it why."""
        if connection := self._connections.get(number):
            self._disconnect(connection, Refusal(ErrorCode.LANE_LOST, reason))

    def fds(self, number: int) -> list[int]:
        """Return the descriptors of a session's registration; they stay open here."""
        return self._connections[number].fds

    def drop_fds(self, number: int) -> None:
        """Close the descriptors of a session's registration."""
        if connection := self._connections.get(number):
            connection.drop_fds()

    def close(self) -> None:
        """Close all connections and the socket."""
        self._server.close()
        for connection in self._connections.values():
            self._close_pidfd(connection)
            connection.drop_fds()
        self._connections.clear()


def _encode_reply(message: Message, request_id: int) -> bytes:
    """Return the frame of a reply, or of an Error if it is too large."""
    try:
        return WIRE.encode(message, request_id)
    except Oversize as error:
        too_large = Error(code=ErrorCode.LIMIT, text=f"the reply is too large: {error}")
        return WIRE.encode(too_large, request_id)


def _error_notice(refusal: Refusal) -> bytes:
    return WIRE.encode(Error.of(refusal.code, str(refusal)))


def _check_descriptors(frame: bytes, fds: Sequence[int]) -> None:
    """Raise `Refusal` for descriptors without a Register and for files of a file system."""
    try:
        kind = TAGS.get(WIRE.decode_header(frame).tag)
    except DecodeError:
        kind = None
    if kind is not Register:
        text = "descriptors came with a message other than Register; only Register carries them"
        raise Refusal(ErrorCode.BAD_MESSAGE, text)
    for index, fd in enumerate(fds):
        if not closes_at_once(fd):
            raise Refusal(
                ErrorCode.BAD_LAYOUT,
                f"descriptor {index} of the message is neither a memory file nor a device; create"
                f" memory with {SEALED_MEMFD_RECIPE}",
            )


def _log_undecodable(session: Session, error: DecodeError) -> None:
    identity, uid = session.identity, session.peer.uid
    log.warning(
        "a message of %s, uid %d, cannot be read: %s", identity, uid, error, extra=identity.fields
    )
