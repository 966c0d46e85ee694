"""The request socket: frames in, exactly one reply each out."""

import logging
import select
from collections.abc import Iterator
from pathlib import Path

from kvd.broker.broker import Broker
from kvd.broker.effects import Effect, Reply
from kvd.broker.sessions import Session
from kvd.wire.router import Router
from kvd_proto.codec import MAX_MESSAGE_BYTES, NO_ID, REQUESTS, WIRE, Header
from kvd_proto.errors import DecodeError, Oversize, VersionMismatch
from kvd_proto.messages import Error, ErrorCode, Message

log = logging.getLogger("kvd.daemon")
_BATCH = 64


class Requests:
    """The broker's socket for requests, at `path`; `epoll` is its loop's."""

    def __init__(self, path: Path, core: Broker, epoll: select.epoll) -> None:
        self.router = Router(path, max_bytes=MAX_MESSAGE_BYTES, epoll=epoll)
        self._core = core
        self._boot_id = core.state.boot_id
        self._identities: dict[int, bytes] = {}  # of the sessions' sockets
        self._sessions: dict[bytes, Session] = {}  # the first of each socket
        self._dropped_frames = 0  # that were no messages
        self._dropped_replies = 0  # whose client does not read, or is gone

    def receive(self, now: float) -> Iterator[list[Effect]]:
        """Serve what has arrived, a batch at most; yield the effects of each request."""
        for _ in range(_BATCH):
            received = self.router.take()
            if received is None:
                break
            try:
                header = REQUESTS.decode_header(received.frame)
            except DecodeError as error:  # without a header there is no id to answer to
                self._dropped_frames += 1
                self._log_unreadable(
                    received.identity, self._sessions.get(received.identity), error
                )
                continue
            yield self._received(received.identity, header, received.frame, now)
        self.count()

    def count(self) -> None:
        """Pass on what was dropped, and which limits were reached."""
        if limits := self.router.limits:
            for limit, times in limits.items():
                self._core.state.reached(limit, times)
            limits.clear()
        frames = self._dropped_frames + self.router.dropped
        self._core.messages_dropped(frames, self._dropped_replies)

    def _log_unreadable(self, identity: bytes, session: Session | None, error: DecodeError) -> None:
        text = "a message of %s, uid %d, cannot be read: %s"
        if session is not None:
            who, uid = session.who, session.peer.uid
            log.warning(text, who, uid, error, extra=who.fields)
        else:
            pid, uid = self.router.peer(identity)
            log.warning(text, f"pid {pid}", uid, error, extra={"pid": pid})

    def forget(self, session: Session) -> None:
        """The session has ended: new connections may displace its socket."""
        identity = self._identities.pop(session.number, None)
        if identity is not None:
            if self._sessions.get(identity) is session:
                del self._sessions[identity]
            self.router.unprove(identity)

    def _received(self, identity: bytes, header: Header, frame: bytes, now: float) -> list[Effect]:
        session = self._sessions.get(identity)
        if (
            session is not None
            and session.token == header.session
            and header.boot_id == self._boot_id
        ):
            return self.serve(session, header, frame, now)
        if header.boot_id not in (self._boot_id, NO_ID):
            return self._refuse(
                identity, header, ErrorCode.STALE_BOOT, "the daemon has restarted; reconnect"
            )
        session = self._core.state.registry.by_token.get(header.session)
        if session is None or self._identities.get(session.number, identity) != identity:
            return self._refuse(
                identity,
                header,
                ErrorCode.BAD_SESSION,
                "no such session; connect at the control socket first",
            )
        if session.number not in self._identities:
            self._identities[session.number] = identity
            self._sessions.setdefault(identity, session)
            self.router.prove(identity)
        return self.serve(session, header, frame, now)

    def serve(
        self, session: Session, header: Header, frame: bytes, now: float, descriptors: int = 0
    ) -> list[Effect]:
        """Serve one request, a frame with so many descriptors; return the effects."""
        identity = self._identities.get(session.number, b"")
        try:
            message = REQUESTS.decode_body(header, frame)
        except DecodeError as error:
            code = ErrorCode.BAD_MESSAGE
            if isinstance(error, VersionMismatch):
                code = ErrorCode.BAD_VERSION
            self._log_unreadable(identity, session, error)
            return self._refuse(identity, header, code, str(error))
        try:
            return self._core.request(session, header.request_id, message, now, descriptors)
        except Exception:
            name, who = type(message).__name__, session.who
            log.exception("%s: %s could not be served", who, name, extra=who.fields)
            text = f"{type(message).__name__} hit a bug in kvd; its log has the details"
            return self._refuse(identity, header, ErrorCode.INTERNAL, text)

    def _refuse(self, identity: bytes, header: Header, code: ErrorCode, text: str) -> list[Effect]:
        self._send(identity, Error.of(code, text), header.request_id, header.session)
        return []

    def reply(self, effect: Reply) -> None:
        """Send a reply to a session, if it has not ended."""
        session = self._core.state.registry.sessions.get(effect.session)
        if session is not None:
            identity = self._identities.get(session.number, b"")
            self._send(identity, effect.message, effect.request_id, session.token)

    def _send(self, identity: bytes, message: Message, request_id: int, token: bytes) -> None:
        if isinstance(message, Error):
            self._core.error_sent(message.code)
        try:
            frame = WIRE.encode(message, request_id, self._boot_id, token)
        except Oversize as error:
            frame = WIRE.encode(
                Error(code=ErrorCode.LIMIT, text=f"the reply is too large: {error}"),
                request_id,
                self._boot_id,
                token,
            )
        if not self.router.send(identity, frame):
            self._dropped_replies += 1  # a peer that does not read loses its own replies only

    def close(self) -> None:
        """Close the socket."""
        self.router.close()

    def __repr__(self) -> str:
        return f"<Requests at {self.router!r}>"
