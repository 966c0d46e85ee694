"""Decisions about lanes: their messages, liveness, ends and idle time.

A lane's message advances a registration, a chunk or a slot. A lane that is silent for too long is
killed. A lane that has ended writes nowhere: what it alone was writing is given up.

The lane of a CUDA device starts for the device's first worker. If no session has used it for
`lane_idle_seconds`, it is told to end: it finishes its jobs, unpins the pool piece by piece,
answers pings, and takes no workers. It starts again for the next worker. A lane that cannot start
refuses the registrations that wait for it, and those of the next seconds, with its own reason; it
restarts by itself only for workers that were served before.
"""

from kvd.broker.admission import MAX_CUDA_LANES
from kvd.broker.children import EXITED, Lane
from kvd.broker.effects import ChunksReady, DropLane, Effect, KillLane, Notify, ToLane
from kvd.broker.registration import Registration, freed_text
from kvd.broker.sessions import RegisterStep, Session
from kvd.broker.state import BrokerState
from kvd.errors import Refusal
from kvd.wire.link import (
    Imported,
    Importing,
    LaneFailed,
    LanePing,
    LanePong,
    LaneReady,
    PoolUsable,
    Released,
    Revoked,
    ShareDone,
    StopLane,
)
from kvd_proto.messages import MAX_TEXT, Detached, ErrorCode, Message

PING_SECONDS = 0.5
UNPIN_SECONDS_PER_GIB = 0.1
"""The time allowed to unpin. An H200 takes 0.016 to 0.019 s; they take turns and pause as long."""


class LaneSupervisor:
    """Decisions about lanes; `registration` continues registrations."""

    def __init__(self, state: BrokerState, registration: Registration) -> None:
        self._state = state
        self._registration = registration

    def received(self, device: str, message: Message, now: float) -> list[Effect]:
        """Process a message from a lane."""
        lane = self._state.lanes[device]
        lane.child.heard(now)
        match message:
            case LaneReady():
                return self._ready(lane, message)
            case PoolUsable():
                return self._pool_usable(lane, message)
            case Importing():
                lane.importing = message.session
            case Imported():
                lane.importing = 0
                return self._registration.imported(message)
            case Released():
                session = self._state.registry.sessions.get(message.session)
                return self._registration.released(session) if session is not None else []
            case Revoked():
                if (namespace := self._state.namespace(message.namespace)) is not None:
                    slots, generations = message.slots.tolist(), message.generations.tolist()
                    namespace.table.slots.writes_ended(device, slots, generations)
            case ShareDone():
                return self._share_done(message)
            case LanePong():
                lane.reported(message)
            case LaneFailed():
                return self._failed(lane, message, now)
            case _:
                return [lane.event(f"lane {device} sent {type(message).__name__}", "error")]
        return []

    def _ready(self, lane: Lane, message: LaneReady) -> list[Effect]:
        lane.child.began_serving(message.pid)
        lane.pins = message.pins
        lane.endpoint = message.endpoint
        lane.reported_bytes = message.usable_bytes
        lane.pool_error = ""
        lane.last_used = lane.child.heard_at
        lane.incarnation = message.incarnation
        text = f"lane {lane.device} is up (incarnation {lane.incarnation}, pid {message.pid})"
        return [lane.event(text), *self._registration.lane_started(lane)]

    def _pool_usable(self, lane: Lane, message: PoolUsable) -> list[Effect]:
        """Record how much of the pool the lane can copy.

        With an error the lane will never copy all of it: its engines are detached and their memory
        is released, for the next process to map. This process refuses to map any.
        """
        lane.reported_bytes, lane.bindings_done = message.usable_bytes, message.bindings
        if message.error in {"", lane.pool_error}:
            return []
        lane.pool_error = message.error
        text = f"lane {lane.device}: {message.error}"
        effects, num_freed = self._give_up_writes(lane, text)
        releases = self._registration.release_all(lane)
        return [lane.event(f"{text}{freed_text(num_freed)}", "error"), *effects, *releases]

    def _failed(self, lane: Lane, message: LaneFailed, now: float) -> list[Effect]:
        """Kill a lane that reports that it cannot serve; `lost` follows with its end."""
        lane.failure = message.error
        if lane.up:  # the next process may serve
            return [KillLane(lane.device, message.error)]
        failed = self._state.failed_lanes
        failed.pop(lane.device, None)
        failed[lane.device] = (now, message.error)
        if len(failed) > MAX_CUDA_LANES:
            del failed[next(iter(failed))]  # the oldest
        return [KillLane(lane.device, message.error)]

    def _share_done(self, message: ShareDone) -> list[Effect]:
        """Record shares that a rank has stored, or could not store.

        Chunks that became READY wake the scheduler; the engine loses those that are given up.
        """
        session = self._state.registry.sessions.get(message.session)
        engine = session.engine if session is not None else None
        if engine is None or engine.namespace is None or engine.namespace.id != message.namespace:
            return []  # the engine has left this namespace; its writes were given up then
        ready, given_up = engine.namespace.table.stores.share_done(
            engine.number,
            message.rank,
            message.slots.tolist(),
            message.generations.tolist(),
            message.first.tolist(),
            message.count.tolist(),
            message.groups.tolist(),
            ok=message.ok,
        )
        effects = self._state.revoke(engine.namespace, given_up)
        return [*effects, ChunksReady(engine.number)] if ready else effects

    # ------------------------------------------------------------------ end

    def lost(self, device: str, reason: str) -> list[Effect]:
        """Process the end of a lane's process.

        1. Reset the lane's state; slots stop waiting for it.
        2. Give up the writes of its engines and notify them.
        3. Log the end, unless the refused registrations of step 5 give its reason.
        4. Registrations that it was mapping wait again; pending Unregisters are answered.
        5. If it never served, refuse the registrations that wait for it.
        6. Drop it if it was started on demand and no worker is left.
        """
        state = self._state
        lane = state.lanes[device]
        served, failure = lane.up, lane.failure
        as_told = lane.ending and (reason == EXITED or not served)
        importing = None if as_told else state.registry.sessions.get(lane.importing)
        error = "" if as_told else failure or reason
        lane.process_ended(error)
        for namespace in state.open_namespaces:
            namespace.table.slots.writer_lost(device)
        if as_told:
            notice = f"lane {device} has ended: the daemon stops"
        else:
            notice = f"lane {device} is lost ({error}), until another one serves"
        effects, num_freed = self._give_up_writes(lane, notice)
        waiting = self._waiting_for(device)
        if as_told:
            effects += self._log_idle_end(lane)
        elif served or not failure or not waiting:
            during = f" while it mapped the memory of {importing.identity}" if importing else ""
            text = f"lane {device} is lost{during}: {error}{freed_text(num_freed)}"
            effects.append(lane.event(text, "error"))
        effects += self._unmap(device)
        if importing is not None:
            effects += self._registration.lane_ended_importing(importing, lane)
        if lane.on_demand and not served and not as_told:
            text = f"lane {device} did not start: {error}; the daemon's log says more"
            code = ErrorCode.BAD_LAYOUT if failure else ErrorCode.LANE_LOST
            for session in waiting:
                effects += self._registration.give_up(session, Refusal(code, failure or text))
        if lane.on_demand and not state.workers_of(device) and not self._waiting_for(device):
            effects.append(self._drop(lane))
        return effects

    def _log_idle_end(self, lane: Lane) -> list[Effect]:
        """Return the log line on a lane that ended for lack of use; none while stopping."""
        if self._state.stopping:
            return []
        seconds = self._state.settings.lane_idle_seconds
        text = f"lane {lane.device} has ended: no engine for {seconds:g} s"
        if lane.pool_error:
            text += ", for it could not pin the pool; the next one tries again"
        return [lane.event(text)]

    def _unmap(self, device: str) -> list[Effect]:
        """Mark the device's memory as unmapped: the next process of the lane maps it again."""
        effects: list[Effect] = []
        for session in self._waiting_for(device):
            if session.pending is not None and session.pending.step is RegisterStep.IMPORTING:
                session.pending.step = RegisterStep.WAITING
        for session in list(self._state.registry.sessions.values()):
            if session.registration is not None and session.registration.device == device:
                session.imported = False
            if session.releasing is not None and session.releasing.device == device:
                effects += self._registration.released(session)
        return effects

    def _give_up_writes(self, lane: Lane, reason: str) -> tuple[list[Effect], int]:
        """Give up what engines of this lane hold and were writing; notify the served ones.

        Returns:
            The effects, and the number of chunks in writing that were given up.
        """
        effects: list[Effect] = []
        num_freed = 0
        for engine in self._state.registry.engines.values():
            devices = {w.registration.device for w in engine.workers.values() if w.registration}
            if engine.namespace is None or lane.device not in devices:
                continue
            if engine.served:
                notice = Detached(reason=reason[:MAX_TEXT])
                effects += [Notify(number, notice) for number in engine.sessions]
            revocations, num_writing = self._state.drop_owner(engine, engine.namespace)
            effects += revocations
            num_freed += num_writing
        return effects, num_freed

    def _drop(self, lane: Lane) -> Effect:
        del self._state.lanes[lane.device]
        self._state.gone_lanes.add(lane.past)
        return DropLane(lane.device)

    def _waiting_for(self, device: str) -> list[Session]:
        """Return the sessions whose registration on `device` is under way."""
        return [
            session
            for session in self._state.registry.sessions.values()
            if session.pending is not None and session.pending.device == device
        ]

    # ----------------------------------------------------------------- stop

    def stop(self) -> list[Effect]:
        """Have every lane finish its jobs and exit."""
        return [effect for lane in self._state.lanes.values() for effect in self._end(lane)]

    @property
    def unpin_seconds(self) -> float:
        """Seconds that the lanes may take from their last job to their exit."""
        pinned = sum(lane.pong.pinned_bytes for lane in self._state.lanes.values())
        return UNPIN_SECONDS_PER_GIB * pinned / 2**30 + 10.0

    def end_drain(self) -> list[Effect]:
        """Kill the lanes that still have jobs, so that the others can unpin."""
        effects: list[Effect] = []
        for lane in self._state.lanes.values():
            if lane.up and lane.has_jobs and not lane.child.killed:
                lane.child.killed = True
                drain_seconds = self._state.settings.drain_seconds
                reason = f"not drained after {drain_seconds:g} s{lane.child.cause}"
                text = (
                    f"lane {lane.device} is killed: {reason}, {lane.pong.queued_jobs} jobs queued"
                )
                effects += [lane.event(text, "warning"), KillLane(lane.device, reason)]
        return effects

    @staticmethod
    def _end(lane: Lane) -> list[Effect]:
        """Tell a lane to finish its jobs and exit, once."""
        if lane.ending:
            return []
        lane.ending = True
        return [ToLane(lane.device, StopLane())]

    # ---------------------------------------------------------------- watch

    def watch(self, now: float) -> list[Effect]:
        """Ping lanes, kill silent ones, and end unused ones that were started on demand.

        A lane that cannot pin the pool counts as unused: the next process tries again.
        """
        effects: list[Effect] = []
        devices_in_use = self._devices_in_use()
        timeout = self._state.settings.lane_timeout_seconds
        for lane in self._state.lanes.values():
            if not lane.up or lane.child.killed:
                continue
            if reason := lane.child.check(now, timeout):
                text = f"lane {lane.device} is killed: {reason}"
                effects += [lane.event(text, "error"), KillLane(lane.device, reason)]
            elif lane.child.ping_due(now, PING_SECONDS):
                effects.append(ToLane(lane.device, LanePing()))
            if lane.device in devices_in_use and not lane.pool_error:
                lane.last_used = now
            elif lane.on_demand and now > lane.last_used + self._state.settings.lane_idle_seconds:
                effects += self._end(lane)
        return effects

    def _devices_in_use(self) -> set[str]:
        """The devices on which sessions have memory, register some, or release some."""
        return {
            use.device
            for session in self._state.registry.sessions.values()
            for use in (session.registration, session.pending, session.releasing)
            if use is not None
        }
