"""The request socket: frames in, exactly one reply each out."""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvd.broker.broker import Broker
from kvd.broker.effects import Effect, Reply
from kvd.daemon.control_socket import Connection
from kvd.daemon.runtime_dir import no_socket
from kvd.wire.router import LIMITS, Router
from kvd_proto.codec import MAX_MESSAGE_BYTES, NO_ID, WIRE, Header
from kvd_proto.errors import DecodeError, Oversize, VersionMismatch
from kvd_proto.messages import Error, ErrorCode, Message

log = logging.getLogger("kvd.daemon")
_BATCH = 64


class Requests:
    """The broker's socket for requests.

    Args:
        path: where to listen.
        core: who decides.
        connections: open sessions by number; each learns its socket identity here.
    """

    def __init__(self, path: Path, core: Broker, connections: Mapping[int, Connection]) -> None:
        try:
            self.router = Router(path, max_bytes=MAX_MESSAGE_BYTES)
        except OSError as error:
            raise no_socket(path, error) from error
        self._core = core
        core.limits_reached(dict.fromkeys(LIMITS, 0))
        self._connections = connections
        self._dropped = 0
        self._warned = 0

    @property
    def dropped(self) -> int:
        """Frames that were no messages, and replies that nobody read."""
        return self._dropped + self.router.dropped

    def receive(self, now: float) -> Iterator[list[Effect]]:
        """Serve what has arrived, a batch at most; the effects of each request."""
        self.router.look()
        for _ in range(_BATCH):
            received = self.router.take()
            if received is None:
                break
            try:
                header = WIRE.decode_header(received.frame)
            except DecodeError:  # nobody to answer: not even a request id
                self._dropped += 1
                continue
            yield self._serve(received.identity, header, received.frame, now)
        self._account()

    def _account(self) -> None:
        """Count who was shown out for which bound, and say how much is dropped."""
        self._core.limits_reached(self.router.limits)
        self.router.limits.clear()
        if self.dropped >= 2 * self._warned + 1:
            self._warned = self.dropped
            log.warning("%d frames dropped that are no kvd messages", self.dropped)

    def forget(self, connection: Connection) -> None:
        """The session has ended: its socket gives way to newcomers like any other."""
        if connection.identity:
            self.router.disown(connection.identity)

    def _serve(self, identity: bytes, header: Header, frame: bytes, now: float) -> list[Effect]:
        boot_id = self._core.state.boot_id
        if header.boot_id not in (boot_id, NO_ID):
            return self._refuse(
                identity, header, ErrorCode.STALE_BOOT, "the daemon has restarted; reconnect"
            )
        session = self._core.state.registry.by_token.get(header.session)
        connection = self._connections.get(session.number) if session is not None else None
        if session is None or connection is None or connection.identity not in (b"", identity):
            return self._refuse(
                identity,
                header,
                ErrorCode.BAD_SESSION,
                "no such session; connect at the control socket first",
            )
        if not connection.identity:
            connection.identity = identity
            self.router.prove(identity)
        try:
            message = WIRE.decode_body(header, frame)
        except DecodeError as error:
            code = ErrorCode.BAD_MESSAGE
            if isinstance(error, VersionMismatch):
                code = ErrorCode.BAD_VERSION
            return self._refuse(identity, header, code, str(error))
        try:
            return self._core.request(session, header.request_id, message, now)
        except Exception:
            name, who = type(message).__name__, session.who
            log.exception("%s: %s could not be served", who, name, extra=who.fields)
            text = f"{type(message).__name__} hit a bug in kvd; its log has the details"
            return self._refuse(identity, header, ErrorCode.INTERNAL, text)

    def _refuse(self, identity: bytes, header: Header, code: ErrorCode, text: str) -> list[Effect]:
        self._send(identity, Error.of(code, text), header.request_id, header.session)
        return []

    def forbid(self, connection: Connection, text: str) -> None:
        """Refuse a connection: one error to the peer, one line of the log."""
        peer = connection.peer
        log.warning("pid %d is turned away: %s", peer.pid, text, extra={"pid": peer.pid})
        self._core.error_sent(ErrorCode.FORBIDDEN)
        error = Error.of(ErrorCode.FORBIDDEN, text)
        connection.tell(WIRE.encode(error, 0, self._core.state.boot_id))

    def reply(self, effect: Reply) -> None:
        """Send a reply to a session, if it is still here."""
        connection = self._connections.get(effect.session)
        if connection is not None and connection.session is not None:
            token = connection.session.token
            self._send(connection.identity, effect.message, effect.request_id, token)

    def _send(self, identity: bytes, message: Message, request_id: int, token: bytes) -> None:
        if isinstance(message, Error):
            self._core.error_sent(message.code)
        try:
            frame = WIRE.encode(message, request_id, self._core.state.boot_id, token)
        except Oversize as error:
            frame = WIRE.encode(
                Error(code=ErrorCode.LIMIT, text=f"the reply is too large: {error}"),
                request_id,
                self._core.state.boot_id,
                token,
            )
        if not self.router.send(identity, frame):
            self._dropped += 1  # who does not read loses its replies, nobody else does

    def close(self) -> None:
        """Close the socket."""
        self.router.close()

    def __repr__(self) -> str:
        return f"<Requests, {self.dropped} dropped>"
