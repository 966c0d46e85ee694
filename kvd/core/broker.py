"""The broker's decisions: one message or event in, a list of effects out.

One writer: nothing else changes the state. Whatever a client sends, it gets
exactly one reply: each handler returns the reply, raises `Refused` (answered
with its code), or leaves a note in the state that a later event answers.
"""

from collections.abc import Callable, Iterable
from typing import Any

from kvd.core.admission import check_leases
from kvd.core.attachment import attached_notice
from kvd.core.demand import lane_ended, lane_failed
from kvd.core.effects import Effect, Event, KillLane, Notify, Reply, ToLane
from kvd.core.handover import Handover, WayOut
from kvd.core.lanes import NOTHING_SAID, Lane, add_counters, arrays
from kvd.core.measures import Surroundings
from kvd.core.operations import Operations
from kvd.core.registration import Registration, in_words
from kvd.core.reloading import Reloading
from kvd.core.scrubbing import Scrubbing
from kvd.core.sessions import Peer, Registry, Session
from kvd.core.state import BrokerState, OpenNamespaces
from kvd.core.status import status_report
from kvd.core.sweeps import Sweep, close_unused
from kvd.errors import Refused
from kvd.link import (
    Imported,
    LaneFailed,
    LanePing,
    LanePong,
    LaneReady,
    PoolUsable,
    Released,
    Revoked,
    ShareDone,
    Wiped,
)
from kvd.settings import Settings
from kvd_proto.arrays import IntArray
from kvd_proto.codec import MAX_MESSAGE_BYTES
from kvd_proto.errors import IllegalTransition
from kvd_proto.messages import (
    MAX_KEYS,
    PROTOCOL_VERSION,
    CompleteLoad,
    CompleteStore,
    Error,
    ErrorCode,
    Greeting,
    Hello,
    LoadCompleted,
    LoadPrepared,
    Message,
    Ping,
    Pong,
    PrepareLoad,
    PrepareStore,
    Register,
    Reset,
    ResetDone,
    Status,
    StatusReport,
    StoreCompleted,
    StorePrepared,
    Touch,
    Touched,
    Unregister,
    Welcome,
)
from kvd_proto.states import SessionEvent, SessionState

PING_SECONDS = 0.5
MAX_DESCRIPTORS = 250


class Broker:
    """Every decision of the daemon.

    Args:
        settings: what the operator chose.
        boot_id: 16 bytes, new at every start.
        version: the daemon's name and version, for WELCOME.
        pid: the daemon's process id.
        devices: names of the devices that have a lane from the start.
        open_namespaces, available_bytes, surroundings, kept_bytes: see `BrokerState`.
        way_out: whether another daemon may take over.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        boot_id: bytes,
        version: str,
        pid: int,
        devices: Iterable[str],
        open_namespaces: OpenNamespaces,
        available_bytes: Callable[[], int],
        kept_bytes: Callable[[], int | None] = lambda: None,
        surroundings: Callable[[], Surroundings] = Surroundings,
        way_out: WayOut | None = None,
    ) -> None:
        self.state = BrokerState(
            settings,
            boot_id,
            open_namespaces,
            available_bytes,
            Registry(settings.max_sessions),
            kept_bytes=kept_bytes,
        )
        self.state.surroundings = surroundings
        self.state.lanes = {device: Lane(device) for device in devices}
        if settings.pool_bytes is not None:
            self.state.namespaces = open_namespaces(settings.pool_bytes)
        self.version = version
        self.pid = pid
        self._ticked = 0.0
        self._registration = Registration(self.state)
        self._operations = Operations(self.state)
        self._scrubbing = Scrubbing(self.state)
        self.reloading = Reloading(self.state)
        self.handover = Handover(self.state, self._operations.sweeps, way_out or WayOut())
        self._handlers: dict[type[Message], Callable[[Session, int, Any, float], list[Effect]]] = {
            Hello: self._hello,
            Register: self._registration.register,
            Unregister: lambda s, i, _m, _n: self._registration.unregister(s, i),
            PrepareStore: self._prepare_store,
            CompleteStore: self._complete_store,
            PrepareLoad: self._prepare_load,
            CompleteLoad: self._complete_load,
            Touch: self._touch,
            Reset: self._reset,
            Ping: self._ping,
            Status: self._status,
            **self._operations.handlers(),
            **self.reloading.handlers(),
            **self.handover.handlers(),
        }

    # ------------------------------------------------------------- sessions

    def connected(
        self, token: bytes, peer: Peer, *, own: bool = False
    ) -> tuple[Session | None, list[Effect]]:
        """Somebody came to the door. None where the house is full, save for a child of `own`."""
        registry = self.state.registry
        if len(registry.sessions) >= registry.max_sessions and not own:
            self.state.measures.reached("max_sessions")
            text = f"connection of pid {peer.pid} refused: {registry.full}"
            return None, [Event(text, "warning", {"pid": peer.pid})]
        session = registry.connect(token, peer)
        return session, [Notify(session.number, Greeting(pid=self.pid))]

    def descriptors(self, session: Session, first: int, count: int, now: float) -> list[Effect]:
        """`count` descriptors arrived over the door.

        Raises:
            Refused: out of order or too many.
        """
        last = first + count - 1
        if first != session.descriptors:
            raise Refused(
                ErrorCode.BAD_LAYOUT,
                f"descriptors {first}..{last} after {session.descriptors} others; they must follow"
                " each other",
            )
        if last >= MAX_DESCRIPTORS:
            self.state.measures.reached("descriptors")
            raise Refused(
                ErrorCode.LIMIT,
                f"descriptors {first}..{last}: a session has {MAX_DESCRIPTORS} at most; put"
                " several tensors into one storage",
                limit="descriptors",
            )
        session.descriptors += count
        return self._registration.advance(session, now)

    def lost(self, session: Session) -> list[Effect]:
        """The session's door is closed: its process is gone."""
        if session.number not in self.state.registry.sessions:
            return []
        who = session.who
        effects, freed = self._registration.session_lost(session)
        engine = session.engine
        if engine is not None and session.kind == "scheduler" and engine.namespace is not None:
            dropped = engine.namespace.table.drop_owner(engine.number)
            effects += self.state.revoke(engine.namespace, dropped)
            freed += len(dropped)
        if engine is not None:
            effects.append(Event(f"{who} is gone{in_words(freed)}", fields=who.fields))
        effects += self.handover.lost(session)
        session.machine.fire(SessionEvent.LOST)
        self.state.registry.remove(session)
        return effects

    # ------------------------------------------------------------- requests

    def request(
        self, session: Session, request_id: int, message: Message, now: float
    ) -> list[Effect]:
        """Serve one request; a refusal becomes its ERROR reply."""
        self.state.measures.requests[type(message).__name__] += 1
        handler = self._handlers.get(type(message))
        try:
            if handler is None:
                raise Refused(
                    ErrorCode.BAD_STATE, f"{type(message).__name__} is no request to the broker"
                )
            if session.state is SessionState.CONNECTED and type(message) not in (Hello, Ping):
                raise Refused(ErrorCode.BAD_STATE, "say HELLO first")
            return handler(session, request_id, message, now)
        except Refused as refusal:
            self.state.measures.reached(refusal.limit)
            return [Reply(session.number, request_id, Error.of(refusal.code, str(refusal)))]
        except IllegalTransition as error:
            reply = Error.of(ErrorCode.BAD_STATE, str(error))
            return [Reply(session.number, request_id, reply)]

    def _hello(self, session: Session, request_id: int, message: Hello, now: float) -> list[Effect]:
        if not message.protocol_min <= PROTOCOL_VERSION <= message.protocol_max:
            raise Refused(
                ErrorCode.BAD_VERSION,
                f"the client speaks protocol {message.protocol_min}..{message.protocol_max}, this"
                f" daemon {PROTOCOL_VERSION}; update the older of the two",
            )
        if message.kind != "tool":
            self.state.registry.check_name(session, message.engine)
        session.machine.fire(SessionEvent.HELLO)
        session.kind = message.kind
        session.client = message.client
        session.since = now
        welcome = Welcome(
            protocol=PROTOCOL_VERSION,
            daemon=self.version,
            pid=self.pid,
            max_message_bytes=MAX_MESSAGE_BYTES,
            max_keys=MAX_KEYS,
        )
        effects: list[Effect] = [Reply(session.number, request_id, welcome)]
        if message.kind != "tool":
            engine = self.state.registry.join(session, message.engine)
            who = session.who
            effects.append(Event(f"{who} is here", fields=who.fields))
            if engine.attached:
                effects.append(attached_notice(engine, session.number))
        return effects

    def _prepare_store(
        self, session: Session, request_id: int, message: PrepareStore, now: float
    ) -> list[Effect]:
        self._open_for_work(session, len(message.keys))
        engine, namespace = self.state.attached_namespace(session.engine)
        usable = self.state.storable_bytes(engine)
        decision = namespace.table.prepare_store(message.keys, engine.number, now, usable)
        reply = StorePrepared(
            answers=IntArray.of(decision.answers, "u1"),
            slots=IntArray.of(decision.slots, "u4"),
            generations=IntArray.of(decision.generations, "u8"),
            evicted=tuple(decision.evicted),
        )
        return [Reply(session.number, request_id, reply)]

    def _complete_store(
        self, session: Session, request_id: int, message: CompleteStore, now: float
    ) -> list[Effect]:
        del now
        engine, namespace = self.state.attached_namespace(session.engine)
        summary, slots = namespace.table.complete_store(
            message.keys, engine.number, success=message.success
        )
        reply = StoreCompleted(
            ready=summary.ready, pending=summary.pending, dropped=summary.dropped
        )
        return [Reply(session.number, request_id, reply), *self.state.revoke(namespace, slots)]

    def _prepare_load(
        self, session: Session, request_id: int, message: PrepareLoad, now: float
    ) -> list[Effect]:
        engine, namespace = self.state.attached_namespace(session.engine)
        check_leases(engine, namespace, self.state.settings.max_leases)
        seconds = min(message.lease_ms / 1000, self.state.settings.lease_seconds)
        usable = self.state.usable_bytes(engine)
        decision = namespace.table.prepare_load(message.keys, engine.number, now, seconds, usable)
        reply = LoadPrepared(
            lease=decision.lease_id,
            lease_ms=int(seconds * 1000),
            found=IntArray.of(decision.found, "u1"),
            slots=IntArray.of(decision.slots, "u4"),
            generations=IntArray.of(decision.generations, "u8"),
        )
        return [Reply(session.number, request_id, reply)]

    def _complete_load(
        self, session: Session, request_id: int, message: CompleteLoad, now: float
    ) -> list[Effect]:
        del now
        engine, namespace = self.state.attached_namespace(session.engine)
        released = namespace.table.complete_load(message.lease, engine.number)
        return [Reply(session.number, request_id, LoadCompleted(released=released))]

    def _touch(self, session: Session, request_id: int, message: Touch, now: float) -> list[Effect]:
        del now
        _, namespace = self.state.attached_namespace(session.engine)
        found = namespace.table.touch(message.keys)
        return [Reply(session.number, request_id, Touched(found=found))]

    def _reset(self, session: Session, request_id: int, message: Reset, now: float) -> list[Effect]:
        """In pieces, for a large namespace takes seconds; answered when all of it is gone."""
        del message, now
        _, namespace = self.state.attached_namespace(session.engine)
        sweep = Sweep(
            session.number,
            request_id,
            # That of a self-test is its own affair.
            "" if namespace.temporary else f"{session.who} reset its namespace",
            lambda done: ResetDone(dropped=done.chunks, deferred=done.deferred),
            (namespace,),
            by_engine=True,
            fields=session.who.fields,
        )
        return self._operations.sweeps.start(sweep)

    def _ping(self, session: Session, request_id: int, message: Ping, now: float) -> list[Effect]:
        del now
        engine = session.engine
        if message.lookups is not None and engine is not None and session.kind == "scheduler":
            namespace = engine.namespace
            size = namespace.tokens_per_chunk if namespace is not None else None
            new = session.lookups.news(message.lookups, size)
            engine.lookups.add(new)
            self.state.measures.lookups.add(new)
        return [Reply(session.number, request_id, Pong(pid=self.pid))]

    def _status(
        self, session: Session, request_id: int, message: Status, now: float
    ) -> list[Effect]:
        del message
        report = status_report(self.state, self.pid, self.version, now)
        return [Reply(session.number, request_id, StatusReport(status=report))]

    def _open_for_work(self, session: Session, keys: int) -> None:
        if self.state.draining:
            if session.engine is not None and session.engine.namespace is not None:
                session.engine.namespace.table.turn_away(keys)
            raise Refused(ErrorCode.DRAINING, "the daemon is draining, it takes no new chunks")
        if not self.state.allocated:
            raise Refused(ErrorCode.NOT_READY, "nothing of the pool's memory is there yet")

    # ---------------------------------------------------------------- lanes

    def lane_message(self, device: str, message: Message, now: float) -> list[Effect]:
        """A lane said something."""
        lane = self.state.lanes[device]
        lane.last_seen = now
        match message:
            case LaneReady():
                return self._registration.lane_ready(lane, message, now)
            case PoolUsable():
                return self._registration.pool_usable(lane, message, now)
            case Imported():
                return self._registration.imported(message, now)
            case Released():
                return self._registration.released(message)
            case Revoked():
                free = self.state.revocations.answered(
                    device, message.namespace, message.slots, message.generations
                )
                self._free(message.namespace, free)
                return []
            case ShareDone():
                return self._share_done(message)
            case Wiped():
                self._scrubbing.wiped(message)
                return []
            case LanePong():
                lane.pong = message
                return []
            case LaneFailed():
                return lane_failed(self.state, lane, message, now)
            case _:
                text = f"lane {device} sent {type(message).__name__}"
                return [Event(text, "error", lane.fields)]

    def lane_lost(self, device: str, reason: str) -> list[Effect]:
        """A lane process has ended: all it was writing is lost, nothing else is."""
        lane = self.state.lanes[device]
        served, lane.up = lane.up, False
        lane.restarts += 1
        lane.last_error = lane.failure or reason
        lane.past = add_counters(lane.past, lane.pong.counters)
        lane.pong = NOTHING_SAID
        effects: list[Effect] = []
        freed = 0
        for namespace_id, free in self.state.revocations.lane_lost(device).items():
            self._free(namespace_id, free)
        self._scrubbing.lane_lost(device)
        for engine in self.state.registry.engines.values():
            uses = any(
                w.registration and w.registration.device == device for w in engine.workers.values()
            )
            if uses and engine.namespace is not None:
                slots = engine.namespace.table.drop_owner(engine.number)
                effects += self.state.revoke(engine.namespace, slots)
                freed += len(slots)
        text = f"lane {device} is lost: {lane.last_error}{in_words(freed)}"
        effects.append(Event(text, "error", lane.fields))
        for session in list(self.state.registry.sessions.values()):
            if session.registration is not None and session.registration.device == device:
                session.imported = False
            if session.pending is not None and session.pending.message.device == device:
                session.pending.importing = False
            if session.releasing is not None:  # a dead lane touches nothing
                effects += self._registration.released(Released(session=session.number))
        return effects + lane_ended(self.state, lane, served=served)

    def _share_done(self, message: ShareDone) -> list[Effect]:
        session = self.state.registry.sessions.get(message.session)
        engine = session.engine if session is not None else None
        if engine is None or engine.namespace is None or engine.namespace.id != message.namespace:
            return []  # its engine is gone, and with it these writes
        result = engine.namespace.table.share_done(
            engine.number,
            message.rank,
            message.slots.numpy(),
            message.generations.numpy(),
            message.first.numpy(),
            message.count.numpy(),
            ok=message.ok,
            groups=message.groups.numpy(),
        )
        return self.state.revoke(engine.namespace, result.dropped)

    def _free(self, namespace_id: bytes, slots: list[tuple[int, int]]) -> None:
        namespaces = self.state.namespaces
        namespace = namespaces.get(namespace_id) if namespaces is not None else None
        if namespace is not None and slots:
            namespace.table.revoked(*arrays(slots))

    # ----------------------------------------------------------------- time

    @property
    def busy(self) -> bool:
        """There is `work` to do, with or without news from outside."""
        return self._operations.busy

    def work(self) -> list[Effect]:
        """One piece of what takes too long to be done in one go; a few milliseconds at most."""
        return self._operations.work() + self._scrubbing.work()

    def tick(self, now: float) -> list[Effect]:
        """What is due: deadlines of leases, tickets and registrations; lanes that are silent."""
        effects = self._registration.expire(now)
        if not self.state.pool_usable:
            self.state.progress.tell(now, self.state.pinned_bytes)
        if self.state.namespaces is not None:
            self.state.namespaces.pool.trim()
            effects += close_unused(self.state, self.state.namespaces.over())
            for namespace in self.state.namespaces:
                expired = namespace.table.expire(now)
                if expired:
                    effects.append(
                        Event(f"{len(expired)} chunks in writing ran out of time", "warning")
                    )
                effects += self.state.revoke(namespace, expired)
        timeout = self.state.settings.lane_timeout_seconds
        away = now - self._ticked - timeout / 4  # where this process hung, no lane could be heard
        if away > 0:
            for lane in self.state.lanes.values():
                lane.last_seen = min(now, lane.last_seen + away)
        self._ticked = now
        for lane in self.state.lanes.values():
            silent = now - lane.last_seen
            if not lane.up or lane.killed:
                continue
            if silent > timeout:
                lane.killed = True
                effects.append(KillLane(lane.device, f"silent for {silent:.1f} s"))
            elif now - lane.last_ping > PING_SECONDS:
                lane.pings += 1
                lane.last_ping = now
                effects.append(ToLane(lane.device, LanePing(sequence=lane.pings)))
        return effects

    def __repr__(self) -> str:
        return f"<Broker {self.state.registry!r}, lanes {list(self.state.lanes.values())}>"
