"""The request socket: frames in, exactly one reply each out."""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import zmq

from kvd.broker.door import Visitor
from kvd.core.broker import Broker
from kvd.core.effects import Effect, Reply
from kvd_proto.codec import MAX_MESSAGE_BYTES, NO_ID, WIRE, Header
from kvd_proto.errors import DecodeError, Oversize, VersionMismatch
from kvd_proto.messages import Error, ErrorCode, Message

log = logging.getLogger("kvd.broker")
_BATCH = 64
HANDSHAKE_MS = 5000  # whoever says nothing that makes sense for so long is disconnected


class Requests:
    """The broker's ROUTER.

    Args:
        path: where to bind, as an ipc endpoint.
        core: who decides.
        visitors: open sessions by number; each learns its socket identity here.
    """

    def __init__(self, path: Path, core: Broker, visitors: Mapping[int, Visitor]) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.maxmsgsize = MAX_MESSAGE_BYTES
        self.socket.sndhwm = 4096
        self.socket.rcvhwm = 4096
        self.socket.handshake_ivl = HANDSHAKE_MS
        self.socket.bind(f"ipc://{path}")
        path.chmod(0o660)
        # libzmq accepts by itself: this tells that it has.
        self.arrivals = self.socket.get_monitor_socket(zmq.EVENT_ACCEPTED)
        self._core = core
        self._visitors = visitors
        self.dropped = 0

    def hear_arrivals(self) -> None:
        """Take in what is told of new connections."""
        with contextlib.suppress(zmq.Again):
            while True:
                self.arrivals.recv_multipart(zmq.NOBLOCK)

    def receive(self, now: float) -> Iterator[list[Effect]]:
        """Serve what has arrived, a batch at most; the effects of each request."""
        for _ in range(_BATCH):
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                header = WIRE.decode_header(parts[1]) if len(parts) == 2 else None
            except DecodeError:
                header = None
            if header is None:  # nobody to answer: not even a request id
                self.dropped += 1
                if self.dropped & (self.dropped - 1) == 0:
                    log.warning("%d frames dropped that are no kvd messages", self.dropped)
                continue
            yield self._serve(parts[0], header, parts[1], now)

    def _serve(self, identity: bytes, header: Header, frame: bytes, now: float) -> list[Effect]:
        boot_id = self._core.state.boot_id
        if header.boot_id not in (boot_id, NO_ID):
            return self._refuse(
                identity, header, ErrorCode.STALE_BOOT, "the daemon has restarted; reconnect"
            )
        session = self._core.state.registry.by_token.get(header.session)
        visitor = self._visitors.get(session.number) if session is not None else None
        if session is None or visitor is None or visitor.identity not in (b"", identity):
            return self._refuse(
                identity,
                header,
                ErrorCode.BAD_SESSION,
                "no such session; connect at the door first",
            )
        visitor.identity = identity
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

    def forbid(self, visitor: Visitor, text: str) -> None:
        """Turn somebody away at the door who may not come in: one error, one line of the log."""
        peer = visitor.peer
        log.warning("pid %d is turned away: %s", peer.pid, text, extra={"pid": peer.pid})
        self._core.state.measures.refusals[ErrorCode.FORBIDDEN.value] += 1
        error = Error.of(ErrorCode.FORBIDDEN, text)
        visitor.turn_away(WIRE.encode(error, 0, self._core.state.boot_id))

    def reply(self, effect: Reply) -> None:
        """Send a reply to a session, if it is still here."""
        visitor = self._visitors.get(effect.session)
        if visitor is not None and visitor.session is not None:
            token = visitor.session.token
            self._send(visitor.identity, effect.message, effect.request_id, token)

    def _send(self, identity: bytes, message: Message, request_id: int, token: bytes) -> None:
        if isinstance(message, Error):
            self._core.state.measures.refusals[message.code.value] += 1
        try:
            frame = WIRE.encode(message, request_id, self._core.state.boot_id, token)
        except Oversize as error:
            frame = WIRE.encode(
                Error(code=ErrorCode.LIMIT, text=f"the reply is too large: {error}"),
                request_id,
                self._core.state.boot_id,
                token,
            )
        try:
            self.socket.send_multipart([identity, frame], zmq.NOBLOCK)
        except zmq.ZMQError:  # a peer that does not read loses its replies, nobody else does
            self.dropped += 1

    def close(self) -> None:
        """Close the socket and its context."""
        self.socket.disable_monitor()
        self.arrivals.close(0)
        self.socket.close(0)
        self._context.term()

    def __repr__(self) -> str:
        return f"<Requests, {self.dropped} dropped>"
