"""The broker's decisions: one message or event in, a list of effects out.

Nothing outside this package changes the state. Whatever a client sends, it gets
exactly one reply: each handler returns the reply, raises `Refused` (answered
with its code), or leaves a note in the state that a later event answers.
"""

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from kvd.broker.admission import check_descriptors, check_names
from kvd.broker.attachment import attached_notice
from kvd.broker.caching import Caching
from kvd.broker.children import Lane
from kvd.broker.effects import DropEngine, Effect, LogEvent
from kvd.broker.operations import ConfigReload, Handler, Operations
from kvd.broker.registration import Registration, freed_text, refused
from kvd.broker.sessions import Registry, Request, Session
from kvd.broker.state import BackgroundTasks, BrokerState
from kvd.broker.status_report import status_report
from kvd.broker.supervision import LaneSupervisor
from kvd.broker.tiers.tier import Tiers
from kvd.broker.tiers.tiering import Tiering
from kvd.client_names import Peer
from kvd.config.sources import Loaded
from kvd.errors import Refused
from kvd.machine.process import ProcessUsage
from kvd.metrics import schema
from kvd.metrics.counts import EventCounts, LookupCounts
from kvd.metrics.reading import History
from kvd_proto.messages import (
    PROTOCOL_VERSION,
    Error,
    ErrorCode,
    Hello,
    KvEvents,
    Lookups,
    Message,
    Ping,
    Pong,
    Register,
    Status,
    StatusReport,
    Unregister,
    Welcome,
)
from kvd_proto.sizes import format_size

SAMPLE_SECONDS = 10.0
"""Between reports that are kept for a minute, to find conditions that are changes."""


class Broker:
    """Every decision of the daemon.

    Args:
        loaded: what the operator chose, with the origin of each value.
        boot_id: 16 bytes, new at every start.
        version: the daemon's name and version, for WELCOME.
        pid: the daemon's process id.
        devices: names of the devices that have a lane from the start.
        started: when the daemon started, in unix seconds.
        usage: reads the time and this process's figures.
        tiers: below the pool, in order.
    """

    def __init__(
        self,
        loaded: Loaded,
        *,
        boot_id: bytes,
        version: str,
        pid: int,
        devices: Iterable[str],
        started: float = 0.0,
        usage: Callable[[], ProcessUsage] = ProcessUsage,
        tiers: Tiers = (),
    ) -> None:
        settings = loaded.settings
        self.state = BrokerState(
            settings,
            boot_id,
            Registry(settings.max_sessions, settings.max_sessions_per_user),
            usage,
            lanes={device: Lane(device) for device in devices},
            started=started,
            tiers=tiers,
        )
        self.version = version
        self._history = History()
        self._next_sample = 0.0
        self._longest_turn = 0.0  # of the loop, in seconds, since the last tick
        self.pid = pid
        self.background = BackgroundTasks(self.state)
        self.registration = Registration(self.state, self.background)
        self.supervision = LaneSupervisor(self.state, self.registration)
        self.tiering = Tiering(self.state)
        self.reloading = ConfigReload(self.state, loaded)
        self._handlers: dict[type[Message], Handler] = {
            Hello: self._hello,
            Register: self.registration.register,
            Unregister: self.registration.unregister,
            Ping: self._ping,
            Status: self._status,
            **Caching(self.state, self.tiering).handlers(),
            **Operations(self.state, self.background, self.tiering).handlers(),
            **self.reloading.handlers(),
        }

    # ----------------------------------------------------------- the daemon

    def pool_allocated(self, nbytes: int) -> list[Effect]:
        """Note how much of the pool is allocated, in the order of `kvd.pool.geometry`."""
        state = self.state
        before, state.allocated = state.pool_ready, nbytes
        if before or not state.pool_ready:
            return []
        return [LogEvent(f"all {format_size(nbytes)} of the pool are allocated")]

    def stop(self) -> list[Effect]:
        """End the daemon: take no new stores, and have lanes finish what they have."""
        self.state.stopping = True
        lanes, tiers = self.supervision.stop(), self.tiering.stop()
        return [LogEvent("stopping: a signal came"), *lanes, *tiers]

    def record_event(self, event: LogEvent, time: float) -> None:
        """Keep an event for reports, numbered from 1 on; `time` in unix seconds."""
        events = self.state.events
        number = events[-1].number + 1 if events else 1
        events.append(schema.EventStatus(number, time, event.level, event.text))

    def loop_turned(self, seconds: float) -> None:
        """Note for how long a turn of the daemon's loop kept it from polling."""
        self.state.counts.loop_lag.observe(seconds)
        self._longest_turn = max(self._longest_turn, seconds)

    def messages_dropped(self, frames: int, replies: int) -> None:
        """Note how many frames that were no messages, and how many replies, were dropped so far."""
        self.state.counts.dropped_frames = frames
        self.state.counts.dropped_replies = replies

    def error_sent(self, code: ErrorCode) -> None:
        """Count an ERROR that a client was sent."""
        self.state.counts.refusals[code.value] += 1

    # ------------------------------------------------------------- sessions

    def connected(self, token: bytes, peer: Peer, *, own: bool = False) -> Session:
        """Open a session, or refuse it; the daemon's `own` processes always have room."""
        registry = self.state.registry
        if not own:
            try:
                registry.check_room(peer)
            except Refused as refusal:
                self.state.reached(refusal.limit)
                raise
        return registry.connect(token, peer)

    def lost(self, session: Session) -> list[Effect]:
        """End a session whose connection is closed: its process is gone."""
        if session.number not in self.state.registry.sessions:
            return []
        who = session.who  # with its rank
        effects, freed = self.registration.session_lost(session)
        engine = session.engine
        if engine is not None and session.kind == "scheduler" and engine.namespace is not None:
            more, given_up = self.state.drop_owner(engine, engine.namespace)
            effects += more
            freed += given_up
        if engine is not None:
            effects.append(LogEvent(f"{who} is gone{freed_text(freed)}", fields=who.fields))
        self.state.registry.remove(session)
        if engine is not None and not engine.sessions:
            effects.append(DropEngine(engine.number))
        return effects

    # ------------------------------------------------------------- requests

    def request(
        self,
        session: Session,
        request_id: int,
        message: Message,
        now: float,
        descriptors: int = 0,
    ) -> list[Effect]:
        """Serve one request, which came with so many descriptors.

        A refusal becomes its ERROR reply.
        """
        self.state.counts.requests[type(message).__name__] += 1
        request = Request(session, request_id, message, now)
        handler = self._handlers.get(type(message))
        try:
            if handler is None:
                raise Refused(
                    ErrorCode.BAD_STATE, f"{type(message).__name__} is no request to the broker"
                )
            if not session.kind and type(message) not in (Hello, Ping):
                raise Refused(ErrorCode.BAD_STATE, "HELLO must come first")
            if isinstance(message, Register):
                check_descriptors(message, descriptors)
            return handler(request)
        except Refused as refusal:
            self.state.reached(refusal.limit)
            line = refused(session, message, str(refusal)) if isinstance(message, Register) else []
            return [*line, request.reply(Error.of(refusal.code, str(refusal)))]

    def _hello(self, request: Request[Hello]) -> list[Effect]:
        session, message = request.session, request.message
        if session.kind:
            raise Refused(ErrorCode.BAD_STATE, f"HELLO in state {session.state}")
        if not message.protocol_min <= PROTOCOL_VERSION <= message.protocol_max:
            raise Refused(
                ErrorCode.BAD_VERSION,
                f"the client speaks protocol {message.protocol_min}..{message.protocol_max}, this"
                f" daemon {PROTOCOL_VERSION}; update the older of the two",
            )
        names = {"engine": message.engine, "client": message.client}
        check_names(ErrorCode.BAD_MESSAGE, names)
        if message.kind != "tool":
            self.state.registry.join(session, message.engine)
        session.kind = message.kind
        session.since = request.now
        welcome = Welcome(protocol=PROTOCOL_VERSION, daemon=self.version, pid=self.pid)
        effects: list[Effect] = [request.reply(welcome)]
        if (engine := session.engine) is not None:
            effects.append(session.event(f"{session.who} is here"))
            if engine.served:
                effects.append(attached_notice(self.state, engine, session.number))
        return effects

    def _ping(self, request: Request[Ping]) -> list[Effect]:
        session, told = request.session, request.message
        engine = session.engine if session.kind == "scheduler" else None
        if told.lookups is not None and engine is not None:
            new = session.lookups.catch_up(lookup_counts(told.lookups))
            engine.lookups.add(new)
            self.state.lookups.add(new)
            if engine.namespace is not None and engine.namespace.table.curve is not None:
                tokens = max(0, new.lookup_tokens - new.detached_tokens)
                engine.namespace.table.curve.note_lookups(tokens, new.hit_tokens, request.now)
        if told.kv_events is not None and engine is not None:
            published = session.kv_events.catch_up(event_counts(told.kv_events))
            engine.published.add(published)
            engine.publish_lag.observe(told.kv_events.lag_us / 1e6, request.now)
            self.state.kv_events.add(published)
        if told.prefill_ns is not None and engine is not None:
            engine.prefill_seconds = told.prefill_ns / 1e9
        return [request.reply(Pong(pid=self.pid))]

    def _status(self, request: Request[Status]) -> list[Effect]:
        return [request.reply(StatusReport(status=self._report(request.now)))]

    def _report(self, now: float) -> dict[str, Any]:
        return status_report(self.state, self.pid, self.version, now, self._history.oldest)

    # ----------------------------------------------------------------- time

    def tick(self, now: float) -> list[Effect]:
        """Do what is due: deadlines of leases, stores and registrations; lanes that are silent."""
        effects = self.registration.expire(now)
        self.background.learn()
        self.state.recent_lag.observe(self._longest_turn, now)
        self._longest_turn = 0.0
        if now >= self._next_sample:
            self._next_sample = now + SAMPLE_SECONDS
            self._history.add(self._report(now))
        if not self.state.pool_usable:
            self.state.progress.record(now, self.state.pinned_bytes)
        if self.state.namespaces is not None:
            self.state.namespaces.pool.trim()
            for namespace in self.state.namespaces.closable():
                if namespace.temporary:
                    self.state.namespaces.close(namespace)
            for namespace in self.state.namespaces:
                expired = namespace.table.expire(now)
                if expired:
                    effects.append(
                        LogEvent(f"{len(expired)} chunks in writing ran out of time", "warning")
                    )
                effects += self.state.revoke(namespace, expired)
        return effects + self.supervision.watch(now)


def lookup_counts(totals: Lookups) -> LookupCounts:
    """Return a session's totals as they are counted: the same fields in the same order."""
    return LookupCounts(*(total or 0 for total in msgspec.structs.astuple(totals)))


def event_counts(totals: KvEvents) -> EventCounts:
    """Return a session's totals as they are counted."""
    return EventCounts(totals.published, totals.snapshots, totals.overruns)
