"""A worker's memory: register, import, attach the engine, and let go again.

A registration is answered once the lane has mapped the memory. It may have to
wait for the pool's size (``auto``), or for a lane that is being restarted; it
waits to a deadline and is then refused with the reason.
"""

from collections import deque

from kvd.broker.admission import check_layout, check_names, check_rank, names_of, refused
from kvd.broker.attachment import attach, bind, import_worker, lane_up, tell_served
from kvd.broker.demand import check_device, want_lane
from kvd.broker.effects import (
    DropFds,
    Effect,
    Event,
    OpenPool,
    Reply,
    ToLane,
)
from kvd.broker.lanes import Lane
from kvd.broker.sessions import Engine, PendingRegister, Session
from kvd.broker.state import BrokerState
from kvd.config.quota import quota_contradictions
from kvd.errors import KvdError, Refused
from kvd.wire.link import Imported, LaneReady, PoolUsable, Released, ReleaseWorker
from kvd_proto.errors import LayoutError
from kvd_proto.messages import (
    Error,
    ErrorCode,
    Register,
    Registered,
    Unregistered,
)
from kvd_proto.states import SessionEvent, SessionState

REGISTER_SECONDS = 20.0
AT_ONCE = 1024  # tensors and groups of a layout that is looked at in the turn in which it comes


class Registration:
    """Decisions about workers' memory over the shared state."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        self._large: deque[tuple[Session, PendingRegister]] = deque()
        self._opening: Engine | None = None  # whose ranks decide the pool's size

    # ---------------------------------------------------------------- pool

    def pool_opened(self, explanation: str) -> list[Effect]:
        """Go on with the registrations that waited for the pool."""
        state, effects = self._state, list[Effect]()
        if self._opening is not None and state.pool_bytes is not None:
            self._opening = None
            wrong = quota_contradictions(state.settings.quotas(state.pool_bytes), state.pool_bytes)
            effects.append(Event(f"cpu_bytes auto: {explanation}"))
            effects += [Event(f"quota: {text}", "warning") for text in wrong]
        for session in state.registry.sessions.values():
            effects += self.advance(session)
        return effects

    def pool_refused(self, refusal: Refused) -> list[Effect]:
        """Refuse the registrations of the engine whose ranks decided the pool's size."""
        engine, self._opening = self._opening, None
        error = Error.of(refusal.code, str(refusal))
        ranks = engine.waiting.values() if engine is not None else ()
        return [effect for rank in ranks for effect in self._refuse_pending(rank, error)]

    # ------------------------------------------------------------ requests

    def register(
        self, session: Session, request_id: int, message: Register, now: float
    ) -> list[Effect]:
        """Check what can be checked at once; the rest happens when it can.

        Raises:
            Refused: with the figures, where it can never be served.
        """
        engine = session.engine
        if engine is None or session.state is not SessionState.WELCOMED:
            raise Refused(ErrorCode.BAD_STATE, f"REGISTER in state {session.state}")
        if session.kind != "worker":
            raise Refused(ErrorCode.BAD_STATE, f"REGISTER by a {session.kind}, only workers may")
        if session.pending is not None or session.releasing is not None:
            raise Refused(ErrorCode.BAD_STATE, "a registration of this session is under way")
        check_names(ErrorCode.BAD_LAYOUT, names_of(message))
        check_device(self._state, message.device, now)
        unsized = self._state.namespaces is None
        check_rank(engine, message, engine.waiting if unsized else engine.workers)
        if unsized and message.temporary:
            raise Refused(
                ErrorCode.BAD_STATE,
                "cpu_bytes is auto and the pool has no size yet, which a temporary engine must not"
                " decide; register another engine first",
            )
        pending = PendingRegister(request_id, message, now + REGISTER_SECONDS, unchecked=True)
        session.pending = pending
        if len(message.layout.tensors) + len(message.layout.groups) > AT_ONCE:
            self._large.append((session, pending))
            return want_lane(self._state, message.device)
        try:
            return self._check(session, engine, pending)
        except Refused:
            session.pending = None
            raise

    @property
    def busy(self) -> bool:
        """There is `work` to do."""
        return bool(self._large)

    def work(self) -> list[Effect]:
        """Go on with one large registration: to decode it was enough for the turn before."""
        if not self._large:
            return []
        session, pending = self._large.popleft()
        engine = session.engine
        if session.pending is not pending or engine is None:
            return []  # it has gone meanwhile
        try:
            return self._check(session, engine, pending)
        except Refused as refusal:
            told = refused(session, pending.message, str(refusal))
            return [*told, *self._refuse_pending(session, self._refused(refusal))]

    def _check(self, session: Session, engine: Engine, pending: PendingRegister) -> list[Effect]:
        """Look at the layout, and move the registration on.

        Raises:
            Refused: it can never be served.
        """
        unsized = self._state.namespaces is None
        others = engine.waiting if unsized else engine.workers
        check_rank(engine, pending.message, others)
        check_layout(pending.message, others, self._state.settings.pool_bytes)
        pending.unchecked = False
        effects = want_lane(self._state, pending.message.device)
        return effects + (self._open_pool(engine) if unsized else self.advance(session))

    def advance(self, session: Session) -> list[Effect]:
        """Move a pending registration on if what it waited for is there."""
        pending = session.pending
        if pending is None or pending.importing or pending.unchecked:
            return []
        if self._state.namespaces is None:
            return []
        lane = self._state.lanes[pending.message.device]
        if not lane.up or not (lane.usable_bytes or lane.pool_error):
            return []
        pending.importing = True
        return [
            lane_up(session, lane),
            import_worker(session, pending.message),
        ]

    def unregister(self, session: Session, request_id: int) -> list[Effect]:
        """Let go of the session's memory; answered when nothing touches it.

        Raises:
            Refused: there is nothing registered.
        """
        registration = session.registration
        if registration is None or session.state is not SessionState.REGISTERED:
            raise Refused(ErrorCode.BAD_STATE, "nothing is registered by this session")
        who = session.who
        effects, freed = self._leave(session, "unregistered")
        effects.append(Event(f"{who} has unregistered{in_words(freed)}", fields=who.fields))
        session.machine.fire(SessionEvent.UNREGISTER)
        session.releasing = request_id, registration.device
        session.imported = False
        lane = self._state.lanes[registration.device]
        if lane.up:  # it has the memory, or was asked to map it
            return [*effects, ToLane(lane.device, ReleaseWorker(session=session.number))]
        return effects + self.released(Released(session=session.number))

    # ---------------------------------------------------------- lane's words

    def imported(self, message: Imported) -> list[Effect]:
        """A lane has mapped a worker's memory, or says why not."""
        session = self._state.registry.sessions.get(message.session)
        if session is None or message.attempt != session.attempt:
            return []
        if session.pending is None or not session.pending.importing:
            return self._reimported(session, message)
        pending = session.pending
        session.pending = None
        if message.error:
            return [
                *refused(session, pending.message, message.error),
                Reply(session.number, pending.request_id, _refusal(message.error)),
                DropFds(session.number),
            ]
        engine = session.engine
        if engine is None:
            return []
        try:  # another session may have taken the rank while the lane was busy
            check_rank(engine, pending.message, engine.workers)
            check_layout(pending.message, engine.workers, self._state.settings.pool_bytes)
        except Refused as refusal:
            return [
                ToLane(pending.message.device, ReleaseWorker(session=session.number)),
                *refused(session, pending.message, str(refusal)),
                Reply(session.number, pending.request_id, Error.of(refusal.code, str(refusal))),
                DropFds(session.number),
            ]
        session.machine.fire(SessionEvent.REGISTER)
        session.registration = pending.message
        session.refusal = ""
        session.imported = True
        engine.workers[pending.message.rank] = session
        lane = self._state.lanes[pending.message.device]
        reply = Registered(
            missing_ranks=engine.missing_ranks, lane=lane.endpoint, incarnation=lane.incarnation
        )
        effects: list[Effect] = [
            Event(
                f"{session.who} registered; missing ranks: {list(engine.missing_ranks) or 'none'}",
                fields=session.who.fields,
            )
        ]
        made: list[Effect] = []
        try:
            attach(self._state, engine, made)
        except (LayoutError, KvdError) as error:
            del engine.workers[pending.message.rank]
            session.machine.fire(SessionEvent.UNREGISTER)
            session.registration = None
            session.imported = False
            return [
                ToLane(lane.device, ReleaseWorker(session=session.number)),
                *refused(session, pending.message, str(error)),
                Reply(session.number, pending.request_id, self._refused(error)),
                DropFds(session.number),
                *made,
            ]
        return [Reply(session.number, pending.request_id, reply), *effects, *made]

    def released(self, message: Released) -> list[Effect]:
        """A lane touches a worker's memory no more."""
        session = self._state.registry.sessions.get(message.session)
        if session is None or session.releasing is None:
            return []
        (request_id, _), session.releasing = session.releasing, None
        return [
            Reply(session.number, request_id, Unregistered()),
            DropFds(session.number),
        ]

    def lane_ready(self, lane: Lane, message: LaneReady, now: float) -> list[Effect]:
        """A lane serves: give it every worker of its device, and tell them where it is."""
        lane.up = True
        lane.pins = message.pins
        lane.killed = False
        lane.pid = message.pid
        lane.endpoint = message.endpoint
        lane.usable_bytes = message.usable_bytes
        lane.pool_error = ""
        lane.incarnation = message.incarnation
        lane.last_seen = now
        effects: list[Effect] = [
            Event(
                f"lane {lane.device} is up (incarnation {lane.incarnation}, pid {lane.pid})",
                fields=lane.fields,
            )
        ]
        for session in self._state.registry.sessions.values():
            registration = session.registration
            if registration is not None and registration.device == lane.device:
                effects.append(lane_up(session, lane))
                effects.append(import_worker(session, registration))
            else:
                effects += self.advance(session)
        return effects

    def pool_usable(self, lane: Lane, message: PoolUsable) -> list[Effect]:
        """A lane can copy more of the pool, or knows that it never will."""
        lane.usable_bytes = message.usable_bytes
        effects: list[Effect] = []
        if message.error:
            lane.pool_error = message.error
            effects.append(Event(f"lane {lane.device}: {message.error}", "error", lane.fields))
        for session in self._state.waiting_for(lane.device):
            effects += self.advance(session)
        return effects

    # ------------------------------------------------------------- departure

    def session_lost(self, session: Session) -> tuple[list[Effect], int]:
        """The session's process is gone: nothing of it may stay pinned or written to.

        Returns:
            What is to be done, and how many chunks in writing were given up.
        """
        effects: list[Effect] = []
        freed = 0
        device = None
        if session.registration is not None:
            device = session.registration.device
            effects, freed = self._leave(session, f"rank {session.registration.rank} is gone")
        elif session.pending is not None and session.pending.importing:
            device = session.pending.message.device
        session.pending = None
        if device is not None and self._state.lanes[device].up:
            effects.append(ToLane(device, ReleaseWorker(session=session.number)))
        effects.append(DropFds(session.number))
        return effects, freed

    def expire(self, now: float) -> list[Effect]:
        """Refuse registrations that have waited too long, saying for what."""
        effects: list[Effect] = []
        for session in self._state.registry.sessions.values():
            pending = session.pending
            if pending is None or now < pending.deadline:
                continue
            if self._state.namespaces is None:
                text = (
                    "cpu_bytes is auto: the pool gets its size when all ranks of an engine ask for"
                    f" registration; missing: {_missing(session)}; try again when they have come"
                )
                code = ErrorCode.NOT_READY
            elif pending.importing:
                text = f"lane {pending.message.device} did not map the memory in time; try again"
                code = ErrorCode.LANE_LOST
            elif not self._state.lanes[pending.message.device].up:
                text = f"lane {pending.message.device} is not up; try again"
                code = ErrorCode.LANE_LOST
            else:
                text = f"lane {pending.message.device} has nothing of the pool yet; try again"
                code = ErrorCode.NOT_READY
            session.pending = None
            effects += refused(session, pending.message, text)
            effects.append(Reply(session.number, pending.request_id, Error.of(code, text)))
            effects.append(DropFds(session.number))
            if pending.importing and self._state.lanes[pending.message.device].up:
                session.attempt += 1
                effects.append(
                    ToLane(pending.message.device, ReleaseWorker(session=session.number))
                )
        return effects

    # --------------------------------------------------------------- helpers

    def _open_pool(self, engine: Engine) -> list[Effect]:
        """With ``auto``, the first engine of which all ranks have come decides the pool's size."""
        ranks = engine.waiting
        if self._opening is not None or any(_missing(session) for session in ranks.values()):
            return []
        self._opening = engine
        said = [ranks[rank].said for rank in sorted(ranks)]
        return [OpenPool(tuple(each.layout for each in said if each is not None))]

    def _refuse_pending(self, session: Session, error: Error) -> list[Effect]:
        """A registration comes to nothing, before its memory was imported."""
        pending, session.pending = session.pending, None
        if pending is None:
            return []
        return [
            Reply(session.number, pending.request_id, error),
            DropFds(session.number),
        ]

    def _reimported(self, session: Session, message: Imported) -> list[Effect]:
        """After a lane's restart."""
        if session.registration is None:
            return []
        if message.error:
            text = f"{session.who}: memory lost to the new lane: {message.error}"
            return [Event(text, "error", session.who.fields)]
        session.imported = True
        engine = session.engine
        if engine is None or not engine.attached:
            return []
        return [bind(session), *tell_served(engine)]

    def _leave(self, session: Session, reason: str) -> tuple[list[Effect], int]:
        engine, registration = session.engine, session.registration
        effects: list[Effect] = []
        freed = 0
        if engine is not None and registration is not None:
            effects, freed = self._state.detach(engine, reason)
            engine.workers.pop(registration.rank, None)
        session.registration = None
        return effects, freed

    def _refused(self, error: Exception) -> Error:
        if isinstance(error, Refused):
            self._state.reached(error.limit)
            return Error.of(error.code, str(error))
        return _refusal(str(error))


def in_words(freed: int) -> str:
    """What an event adds about chunks in writing that were given up; nothing where none was."""
    return f"; {freed} {'chunk' if freed == 1 else 'chunks'} in writing freed" if freed else ""


def _missing(session: Session) -> list[int]:
    """Ranks of a session's engine that have not come, as its pending registration counts them."""
    engine, pending = session.engine, session.pending
    if engine is None or pending is None:
        return []
    waiting = engine.waiting
    return [rank for rank in range(pending.message.world_size) if rank not in waiting]


def _refusal(text: str) -> Error:
    return Error.of(ErrorCode.BAD_LAYOUT, text)
