"""The broker's decisions: one message or event in, a list of effects out.

Only this package changes the broker's state. A client gets exactly one reply to each request: a
handler returns it, raises `Refusal` (answered as ERROR with its code), or records the request in
the state until a later event answers it.
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
from kvd.broker.registration import Registration, freed_text, log_refusal
from kvd.broker.sessions import Engine, Registry, Request, Session, check_kind
from kvd.broker.state import BackgroundTasks, BrokerState
from kvd.broker.status_report import status_report
from kvd.broker.supervision import LaneSupervisor
from kvd.broker.tiers.tier import Tiers
from kvd.broker.tiers.tiering import Tiering
from kvd.client_names import Peer
from kvd.config.sources import LoadedSettings
from kvd.errors import Refusal
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
from kvd_proto.text import format_size

SAMPLE_SECONDS = 10.0
"""Interval of the reports that are kept for a minute: some conditions are changes."""


class Broker:
    """Every decision of the daemon.

    Args:
        loaded: the settings, with the origin of each value.
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
        loaded: LoadedSettings,
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
        """Record that the first `nbytes` of the pool, in `FillOrder`, are allocated."""
        state = self.state
        was_ready, state.allocated_bytes = state.pool_ready, nbytes
        if was_ready or not state.pool_ready:
            return []
        return [LogEvent(f"all {format_size(nbytes)} of the pool are allocated")]

    def stop(self) -> list[Effect]:
        """Begin to stop the daemon: no new stores; lanes finish their jobs, tiers stop."""
        self.state.stopping = True
        lanes, tiers = self.supervision.stop(), self.tiering.stop()
        return [LogEvent("stopping: a signal came"), *lanes, *tiers]

    def record_event(self, event: LogEvent, time: float) -> None:
        """Keep an event for reports, numbered from 1; `time` in unix seconds."""
        events = self.state.events
        number = events[-1].number + 1 if events else 1
        events.append(schema.EventStatus(number, time, event.level, event.text))

    def loop_turned(self, seconds: float) -> None:
        """Record for how long a turn of the daemon's loop kept it from polling."""
        self.state.counts.loop_lag.observe(seconds)
        self._longest_turn = max(self._longest_turn, seconds)

    def messages_dropped(self, frames: int, replies: int) -> None:
        """Record the totals of dropped frames (which were no messages) and dropped replies."""
        self.state.counts.dropped_frames = frames
        self.state.counts.dropped_replies = replies

    def error_sent(self, code: ErrorCode) -> None:
        """Count an ERROR sent to a client."""
        self.state.counts.refusals[code.value] += 1

    # ------------------------------------------------------------- sessions

    def connected(self, token: bytes, peer: Peer, *, is_own_process: bool = False) -> Session:
        """Open a session, or refuse it; the daemon's own processes have no limit."""
        registry = self.state.registry
        if not is_own_process:
            try:
                registry.check_room(peer)
            except Refusal as refusal:
                self.state.reached(refusal.limit)
                raise
        return registry.connect(token, peer)

    def lost(self, session: Session) -> list[Effect]:
        """End a session whose connection is closed.

        1. Let go of its registered memory; its engine is detached.
        2. Give up what a lost scheduler held and was writing.
        3. Remove the session, and its engine with the last one.
        """
        if session.number not in self.state.registry.sessions:
            return []
        identity = session.identity  # while it has its rank
        effects, num_freed = self.registration.session_lost(session)
        engine = session.engine
        if engine is not None and session.kind == "scheduler" and engine.namespace is not None:
            revocations, num_writing = self.state.drop_owner(engine, engine.namespace)
            effects += revocations
            num_freed += num_writing
        if engine is not None:
            effects.append(
                LogEvent(f"{identity} is gone{freed_text(num_freed)}", fields=identity.fields)
            )
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
        """Serve one request, which came with this many descriptors.

        A refusal becomes an ERROR reply.
        """
        self.state.counts.requests[type(message).__name__] += 1
        request = Request(session, request_id, message, now)
        handler = self._handlers.get(type(message))
        try:
            if handler is None:
                raise Refusal(
                    ErrorCode.BAD_STATE,
                    f"{type(message).__name__} is for a lane; connect to the endpoint of LaneUp",
                )
            if not session.kind and type(message) not in (Hello, Ping):
                raise Refusal(
                    ErrorCode.BAD_STATE,
                    f"{type(message).__name__} came before HELLO; send that first",
                )
            if isinstance(message, Register):
                check_kind(request, "worker")
                check_descriptors(message, descriptors)
            return handler(request)
        except Refusal as refusal:
            self.state.reached(refusal.limit)
            effects: list[Effect] = []
            if isinstance(message, Register):
                effects = log_refusal(session, message, str(refusal))
            return [*effects, request.reply(Error.of(refusal.code, str(refusal)))]

    def _hello(self, request: Request[Hello]) -> list[Effect]:
        """Open the protocol: check versions and names, join the engine, reply Welcome."""
        session, message = request.session, request.message
        if session.kind:
            raise Refusal(
                ErrorCode.BAD_STATE,
                f"HELLO has opened this session already, as {session.kind}; connect again for"
                " another one",
            )
        if not message.protocol_min <= PROTOCOL_VERSION <= message.protocol_max:
            raise Refusal(
                ErrorCode.BAD_VERSION,
                f"the client speaks protocol {message.protocol_min}..{message.protocol_max}, this"
                f" daemon {PROTOCOL_VERSION}; update the older of the two",
            )
        names = {"engine": message.engine, "client": message.client}
        check_names(ErrorCode.BAD_MESSAGE, names)
        if message.kind != "tool":
            self.state.registry.join(session, message.engine)
        session.kind = message.kind
        session.hello_at = request.now
        welcome = Welcome(protocol=PROTOCOL_VERSION, daemon=self.version, pid=self.pid)
        effects: list[Effect] = [request.reply(welcome)]
        if (engine := session.engine) is not None:
            effects.append(session.event(f"{session.identity} is here"))
            if engine.served:
                effects.append(attached_notice(self.state, engine, session.number))
        return effects

    def _ping(self, request: Request[Ping]) -> list[Effect]:
        session, ping = request.session, request.message
        engine = session.engine if session.kind == "scheduler" else None
        if engine is not None:
            self._count_totals(session, engine, ping, request.now)
        return [request.reply(Pong(pid=self.pid))]

    def _count_totals(self, session: Session, engine: Engine, ping: Ping, now: float) -> None:
        """Add what a scheduler has counted since its last ping."""
        if ping.lookups is not None:
            new = session.lookups.catch_up(lookup_counts(ping.lookups))
            engine.lookups.add(new)
            self.state.lookups.add(new)
            if engine.namespace is not None and engine.namespace.table.curve is not None:
                tokens = max(0, new.lookup_tokens - new.detached_tokens)
                engine.namespace.table.curve.note_lookups(tokens, new.hit_tokens, now)
        if ping.kv_events is not None:
            published = session.kv_events.catch_up(event_counts(ping.kv_events))
            engine.published.add(published)
            engine.publish_lag.observe(ping.kv_events.lag_us / 1e6, now)
            self.state.kv_events.add(published)
        if ping.prefill_ns is not None:
            engine.prefill_seconds = ping.prefill_ns / 1e9

    def _status(self, request: Request[Status]) -> list[Effect]:
        return [request.reply(StatusReport(status=self._report(request.now)))]

    def _report(self, now: float) -> dict[str, Any]:
        return status_report(self.state, self.pid, self.version, now, self._history.oldest)

    # ----------------------------------------------------------------- time

    def tick(self, now: float) -> list[Effect]:
        """Act on time: expire registrations, leases and stores, take samples, watch lanes."""
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
    """Convert a session's totals: both types have the same fields in the same order."""
    return LookupCounts(*(total or 0 for total in msgspec.structs.astuple(totals)))


def event_counts(totals: KvEvents) -> EventCounts:
    """Convert a session's totals."""
    return EventCounts(totals.published, totals.snapshots, totals.overruns)
