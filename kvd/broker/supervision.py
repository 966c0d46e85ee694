"""What becomes of it when a lane speaks, falls silent or ends.

A lane's word moves a registration, a chunk or a slot on. One that is silent for too long is
killed, and one that has ended writes nowhere: what it alone was writing is given up.
"""

from kvd.broker.demand import lane_ended, lane_failed
from kvd.broker.effects import ChunksReady, Effect, Event, KillLane, Notify, ToLane
from kvd.broker.lanes import NOTHING_SAID, arrays
from kvd.broker.registration import Registration, in_words
from kvd.broker.state import BrokerState
from kvd.wire.link import (
    Imported,
    LaneFailed,
    LanePing,
    LanePong,
    LaneReady,
    PoolUsable,
    Released,
    Revoked,
    ShareDone,
)
from kvd_proto.messages import MAX_TEXT, Detached, Message

PING_SECONDS = 0.5


class Supervision:
    """Decisions about lanes over the shared state.

    Args:
        state: shared.
        registration: goes on with what lanes have done.
    """

    def __init__(self, state: BrokerState, registration: Registration) -> None:
        self._state = state
        self._registration = registration
        self._watched = 0.0

    def heard(self, device: str, message: Message, now: float) -> list[Effect]:
        """A lane said something."""
        lane = self._state.lanes[device]
        lane.last_seen = now
        match message:
            case LaneReady():
                return self._registration.lane_ready(lane, message, now)
            case PoolUsable():
                return self._registration.pool_usable(lane, message)
            case Imported():
                return self._registration.imported(message)
            case Released():
                return self._registration.released(message)
            case Revoked():
                free = self._state.revocations.answered(
                    device, message.namespace, message.slots, message.generations
                )
                self._free(message.namespace, free)
                return []
            case ShareDone():
                return self._share_done(message)
            case LanePong():
                lane.pong = message
                return []
            case LaneFailed():
                return lane_failed(self._state, lane, message, now)
            case _:
                text = f"lane {device} sent {type(message).__name__}"
                return [Event(text, "error", lane.fields)]

    def lost(self, device: str, reason: str) -> list[Effect]:
        """A lane process has ended: all it was writing is lost, nothing else is."""
        lane = self._state.lanes[device]
        served, lane.up = lane.up, False
        lane.last_error = lane.failure or reason
        lane.past.add(lane.pong.counters)
        lane.past.restarts += 1
        lane.pong = NOTHING_SAID
        effects: list[Effect] = []
        freed = 0
        for namespace_id, free in self._state.revocations.lane_lost(device).items():
            self._free(namespace_id, free)
        for engine in self._state.registry.engines.values():
            uses = any(
                w.registration and w.registration.device == device for w in engine.workers.values()
            )
            if uses and engine.namespace is not None:
                if engine.served:  # what is found could not be loaded
                    reason = f"lane {device} is lost ({lane.last_error}), until another one serves"
                    notice = Detached(reason=reason[:MAX_TEXT])
                    effects += [Notify(number, notice) for number in engine.sessions]
                slots = engine.namespace.table.drop_owner(engine.number)
                effects += self._state.revoke(engine.namespace, slots)
                freed += len(slots)
        if served or not lane.failure or not self._state.waiting_for(device):
            text = f"lane {device} is lost: {lane.last_error}{in_words(freed)}"
            effects.append(Event(text, "error", lane.fields))
        # Else the registrations that are refused for it say why it could not start.
        for session in list(self._state.registry.sessions.values()):
            if session.registration is not None and session.registration.device == device:
                session.imported = False
            if session.pending is not None and session.pending.message.device == device:
                session.pending.importing = False
            # A dead lane touches nothing.
            if session.releasing is not None and session.releasing[1] == device:
                effects += self._registration.released(Released(session=session.number))
        return effects + lane_ended(self._state, lane, served=served)

    def _share_done(self, message: ShareDone) -> list[Effect]:
        session = self._state.registry.sessions.get(message.session)
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
        effects = self._state.revoke(engine.namespace, result.dropped)
        return [*effects, ChunksReady(engine.number)] if result.ready else effects

    def _free(self, namespace_id: bytes, slots: list[tuple[int, int]]) -> None:
        namespaces = self._state.namespaces
        namespace = namespaces.get(namespace_id) if namespaces is not None else None
        if namespace is not None and slots:
            namespace.table.revoked(*arrays(slots))

    def watch(self, now: float) -> list[Effect]:
        """Ask lanes whether they are alive; kill those that have not answered for too long."""
        effects: list[Effect] = []
        timeout = self._state.settings.lane_timeout_seconds
        away = now - self._watched - timeout / 4  # where this process hung, no lane could be heard
        if away > 0:
            for lane in self._state.lanes.values():
                lane.last_seen = min(now, lane.last_seen + away)
        self._watched = now
        for lane in self._state.lanes.values():
            silent = now - lane.last_seen
            if not lane.up or lane.killed:
                continue
            if silent > timeout:
                lane.killed = True
                text = f"lane {lane.device} is killed: silent for {silent:.1f} s"
                effects += [Event(text, "error", lane.fields), KillLane(lane.device)]
            elif now - lane.last_ping > PING_SECONDS:
                lane.pings += 1
                lane.last_ping = now
                effects.append(ToLane(lane.device, LanePing(sequence=lane.pings)))
        return effects

    def __repr__(self) -> str:
        return f"<Supervision of {list(self._state.lanes.values())}>"
