"""What operators tell a running daemon: drain and resume, clear and evict, check.

File rights and the settings allow_users and allow_groups decide who may come here at
all; of those that do, only sessions of kind `tool` may say these things, so that an engine
cannot by mistake. Each becomes a line of the log with the peer's uid and pid.
"""

from collections.abc import Callable
from typing import Any, NoReturn

from kvd.broker.checking import Checking
from kvd.broker.effects import Effect, Event, Reply
from kvd.broker.sessions import Peer, Session
from kvd.broker.state import BrokerState, OperatorDrain
from kvd.broker.sweeps import Sweep, Sweeps
from kvd.cache.namespaces import Namespace
from kvd.errors import Refused
from kvd.metrics import schema
from kvd_proto.durations import format_duration
from kvd_proto.messages import (
    Check,
    Clear,
    Cleared,
    Drain,
    Drained,
    ErrorCode,
    EvictOlderThan,
    Message,
    OlderEvicted,
    Resume,
    Resumed,
)

Handler = Callable[[Session, int, Any, float], list[Effect]]


class Operations:
    """Decisions about operators' requests over the shared state."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        self.sweeps = Sweeps(state)
        self.checking = Checking(state)

    def handlers(self) -> dict[type[Message], Handler]:
        """Who serves which request; each refuses sessions that are no tools."""
        return {
            Drain: for_tools(self._drain),
            Resume: for_tools(self._resume),
            Clear: for_tools(self._clear),
            EvictOlderThan: for_tools(self._evict),
            Check: for_tools(self._check),
        }

    def _drain(self, session: Session, request_id: int, message: Drain, now: float) -> list[Effect]:
        """No new stores. Loads go on: what is cached is of use until the daemon stops."""
        del message
        state = self._state
        if state.stopping:
            raise Refused(ErrorCode.DRAINING, "the daemon is stopping and takes no stores already")
        effects: list[Effect] = []
        if state.drain is None:
            state.drain = OperatorDrain(session.peer, now)
            text = f"drained by {by(session.peer)}: no new stores until resumed"
            effects.append(Event(text, fields=session.who.fields))
        stores, leases = in_flight(state, state.drain.since)
        return [Reply(session.number, request_id, Drained(stores=stores, leases=leases)), *effects]

    def _resume(
        self, session: Session, request_id: int, message: Resume, now: float
    ) -> list[Effect]:
        state = self._state
        del message
        if state.stopping:
            raise Refused(
                ErrorCode.DRAINING,
                "the daemon is stopping, which cannot be undone; start it again instead",
            )
        drain, state.drain = state.drain, None
        effects: list[Effect] = [
            Reply(session.number, request_id, Resumed(was_draining=drain is not None))
        ]
        if drain is not None:
            lasted = format_duration(now - drain.since)
            text = f"resumed by {by(session.peer)} after {lasted} of drain"
            effects.append(Event(text, fields=session.who.fields))
        return effects

    def _clear(self, session: Session, request_id: int, message: Clear, now: float) -> list[Effect]:
        del now
        namespaces, which = self._named(message.namespace)
        return self.sweeps.start(
            Sweep(
                session.number,
                request_id,
                f"{which} cleared by {by(session.peer)}",
                lambda done: Cleared(chunks=done.chunks, bytes=done.bytes, deferred=done.deferred),
                namespaces,
            )
        )

    def _evict(
        self, session: Session, request_id: int, message: EvictOlderThan, now: float
    ) -> list[Effect]:
        namespaces, which = self._named(message.namespace)
        for namespace in namespaces:
            namespace.table.ages.set_time(now)
        age = format_duration(message.seconds)
        return self.sweeps.start(
            Sweep(
                session.number,
                request_id,
                f"{which} rid of what was not used for {age} by {by(session.peer)}",
                lambda done: OlderEvicted(chunks=done.chunks, bytes=done.bytes),
                namespaces,
                unused_for=message.seconds,
            )
        )

    def _check(self, session: Session, request_id: int, message: Check, now: float) -> list[Effect]:
        """Answered when it has ended; see kvd.broker.checking."""
        del message, now
        self.checking.start(session.number, request_id)
        return []

    @property
    def busy(self) -> bool:
        """Something is under way that goes on in pieces."""
        return self.sweeps.busy or bool(self.checking)

    def work(self) -> list[Effect]:
        """A piece of it."""
        return self.sweeps.work() + self.checking.work()

    def _named(self, ns_id: bytes | None) -> tuple[tuple[Namespace, ...], str]:
        """The namespaces that are meant, and what logs call them."""
        namespaces = self._state.namespaces
        if ns_id is None:
            return tuple(namespaces or ()), "all namespaces"
        namespace = namespaces.get(ns_id) if namespaces is not None else None
        if namespace is None:
            raise Refused(
                ErrorCode.BAD_STATE,
                f"no namespace {ns_id.hex()} is open; `kvd namespaces` lists those that are",
            )
        return (namespace,), f"namespace {ns_id.hex()[:8]} ({namespace.label})"


def by(peer: Peer) -> str:
    """How logs name whoever gave an order."""
    return f"uid {peer.uid} pid {peer.pid}"


def in_flight(state: BrokerState, since: float) -> tuple[int, int]:
    """What began before a drain and has not ended: chunks being written, and leases.

    Leases that were taken later do not count: loads go on in a drain, so that with
    them it would never end.
    """
    stores = leases = 0
    for namespace in state.namespaces or ():
        counts = namespace.table.slots.stats()
        stores += counts["writing"] + counts["draining"]
        leases += namespace.table.slots.leases.count_until(since)
    return stores, leases


def drain_report(state: BrokerState, now: float) -> schema.Drain | None:
    """Return the operator's drain as the status reports it; None where there is none."""
    if state.drain is None:
        return None
    stores, leases = in_flight(state, state.drain.since)
    peer = state.drain.by
    return schema.Drain(
        uid=peer.uid,
        pid=peer.pid,
        seconds=round(now - state.drain.since, 3),
        stores_in_flight=stores,
        leases_in_flight=leases,
    )


def for_tools(handler: Handler) -> Handler:
    """The same, but refused to sessions that are no tools."""

    def guarded(session: Session, request_id: int, message: Any, now: float) -> list[Effect]:
        if session.kind != "tool":
            _refuse(session, message)
        return handler(session, request_id, message, now)

    return guarded


def _refuse(session: Session, message: Message) -> NoReturn:
    raise Refused(
        ErrorCode.BAD_STATE,
        f"{type(message).__name__} by a {session.kind}: this is for operators' tools only,"
        " such as the kvd command",
    )
