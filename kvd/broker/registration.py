"""A worker's memory: register, import, attach the engine, and let go again.

A registration is answered once a lane has mapped the memory. It may have to wait for the
pool's size (``auto``), or for a lane that is being restarted; it waits to a deadline and is
then refused with the reason::

    UNCHECKED ──checked──▶ WAITING ──lane serves──▶ IMPORTING ──mapped──▶ registered
                              ▲                         │
                              └───────lane lost─────────┘
"""

from kvd.broker.admission import (
    check_device,
    check_layout,
    check_names,
    check_rank,
    names_of,
)
from kvd.broker.attachment import attach, bind, import_worker, lane_up, tell_served
from kvd.broker.children import Lane
from kvd.broker.effects import DropFds, Effect, LogEvent, Notify, OpenPool, StartLane, ToLane
from kvd.broker.sessions import (
    Engine,
    PendingRegister,
    PendingUnregister,
    RegisterStep,
    Request,
    Session,
)
from kvd.broker.state import BackgroundTasks, BrokerState, Task
from kvd.cache.namespaces import Namespaces
from kvd.config.values import quota_contradictions
from kvd.errors import KvdError, Refused
from kvd.wire.link import Imported, ReleaseWorker
from kvd_proto.errors import LayoutError
from kvd_proto.messages import (
    MAX_TEXT,
    Detached,
    Error,
    ErrorCode,
    Ok,
    Register,
    Registered,
    Unregister,
)

REGISTER_SECONDS = 20.0
AT_ONCE = 1024  # a layout with more tensors and groups is checked in a turn of its own


class Registration:
    """Decisions about workers' memory; `background` checks large layouts."""

    def __init__(self, state: BrokerState, background: BackgroundTasks) -> None:
        self._state = state
        self._background = background
        self._opening: Engine | None = None  # whose ranks decide the pool's size

    # ---------------------------------------------------------------- pool

    def pool_opened(self, namespaces: Namespaces, explanation: str = "") -> list[Effect]:
        """Go on with a pool that is open; its memory is being allocated.

        Args:
            namespaces: over the pool.
            explanation: of the size, where `OpenPool` asked for it.
        """
        state, effects = self._state, list[Effect]()
        state.namespaces, nbytes = namespaces, namespaces.cpu_bytes
        if self._opening is not None:
            self._opening = None
            wrong = quota_contradictions(state.settings.quotas(nbytes), nbytes)
            effects.append(LogEvent(f"cpu_bytes auto: {explanation}"))
            effects += [LogEvent(f"quota: {text}", "warning") for text in wrong]
        for session in state.registry.sessions.values():
            effects += self.advance(session)
        return effects

    def pool_refused(self, refusal: Refused) -> list[Effect]:
        """Refuse who waits for the pool that `OpenPool` asked for: it cannot be had."""
        engine, self._opening = self._opening, None
        ranks = engine.waiting.values() if engine is not None else ()
        return [effect for rank in ranks for effect in self.give_up(rank, refusal)]

    def _open_pool(self, engine: Engine) -> list[Effect]:
        """With ``auto``, the first engine of which all ranks have come decides the pool's size."""
        if self._opening is not None or _missing(engine):
            return []
        self._opening = engine
        ranks = sorted(engine.waiting.items())
        stated = [session.stated for _, session in ranks if session.stated is not None]
        return [OpenPool(tuple(s.layout for s in stated), tuple(s.device for s in stated))]

    # ------------------------------------------------------------ requests

    def register(self, request: Request[Register]) -> list[Effect]:
        """Check what can be checked at once, or refuse; the rest happens when it can."""
        session, message, state = request.session, request.message, self._state
        engine = session.engine
        if engine is None or session.registration is not None:
            raise Refused(ErrorCode.BAD_STATE, f"REGISTER in state {session.state}")
        if session.kind != "worker":
            raise Refused(ErrorCode.BAD_STATE, f"REGISTER by a {session.kind}, only workers may")
        if session.pending is not None or session.releasing is not None:
            raise Refused(ErrorCode.BAD_STATE, "a registration of this session is under way")
        check_names(ErrorCode.BAD_LAYOUT, names_of(message))
        if fatal := state.fatal_imports.refusal(session, message, request.now):
            raise Refused(ErrorCode.BAD_LAYOUT, fatal)
        check_device(state, message.device, request.now)
        if state.namespaces is None and message.temporary:
            raise Refused(
                ErrorCode.BAD_STATE,
                "cpu_bytes is auto and the pool has no size yet, which a temporary engine must not"
                " decide; register another engine first",
            )
        pending = session.pending = PendingRegister(request, request.now + REGISTER_SECONDS)
        if len(message.layout.tensors) + len(message.layout.groups) > AT_ONCE:
            self._background.start("registrations", self._check(session, engine, pending))
            return self._want_lane(message.device)
        return next(self._check(session, engine, pending))

    def _check(self, session: Session, engine: Engine, pending: PendingRegister) -> Task:
        """Check the layout, and move the registration on.

        A large layout comes here in the next turn: to decode it was enough for its own.
        """
        if session.pending is not pending:
            return
        others, unsized = self._others(engine), self._state.namespaces is None
        try:
            check_rank(engine, pending.message, others)
            check_layout(pending.message, others, self._state.settings.pool_bytes)
        except Refused as refusal:
            yield self.give_up(session, refusal)
            return
        pending.step = RegisterStep.WAITING
        effects = self._want_lane(pending.device)
        yield effects + (self._open_pool(engine) if unsized else self.advance(session))

    def _others(self, engine: Engine) -> dict[int, Session]:
        """Return the ranks that a new one is held against."""
        return engine.waiting if self._state.namespaces is None else engine.workers

    def _want_lane(self, device: str) -> list[Effect]:
        """Have a lane for `device`, which `check_device` has passed."""
        if device in self._state.lanes:
            return []
        lane = self._state.lanes[device] = Lane(device, on_demand=True)
        if device in self._state.failed_lanes:  # it was logged before
            return [StartLane(device)]
        return [lane.event(f"lane {device} is wanted"), StartLane(device)]

    def advance(self, session: Session) -> list[Effect]:
        """Move a pending registration on if what it waited for is there."""
        pending = session.pending
        if pending is None or pending.step is not RegisterStep.WAITING:
            return []
        lane = self._state.lanes[pending.device]
        if self._state.namespaces is None or not lane.serves:
            return []
        pending.step = RegisterStep.IMPORTING
        return [import_worker(session, pending.message)]

    def unregister(self, request: Request[Unregister]) -> list[Effect]:
        """Let go of the session's memory; answered when nothing touches it."""
        session = request.session
        registration = session.registration
        if registration is None:
            raise Refused(ErrorCode.BAD_STATE, "nothing is registered by this session")
        who = session.who
        effects, freed = self._leave(session, "unregistered")
        effects.append(LogEvent(f"{who} has unregistered{freed_text(freed)}", fields=who.fields))
        session.releasing = PendingUnregister(request, registration.device)
        release = self._release(session, registration.device)
        return effects + (release or self.released(session))

    # --------------------------------------------------------------- lanes

    def lane_serves(self, lane: Lane) -> list[Effect]:
        """Give a new lane every worker of its device."""
        effects: list[Effect] = []
        for session in self._state.registry.sessions.values():
            registration = session.registration
            if registration is None or registration.device != lane.device:
                effects += self.advance(session)
            elif not self._state.fatal_imports.refusal(session, registration, lane.child.heard_at):
                effects.append(import_worker(session, registration))
        return effects

    def lane_ended_importing(self, session: Session, lane: Lane) -> list[Effect]:
        """A lane's process ended while it mapped this session's memory: it may be tried once more.

        After that the registration is refused. One that holds, and that the lane was to map again
        after its restart, stays without a lane, and its engine detached.
        """
        fatal, message, engine = self._state.fatal_imports, session.stated, session.engine
        if message is None or engine is None:
            return []
        fatal.lane_ended(session, lane.child.last_error, lane.child.heard_at)
        text = fatal.refusal(session, message, lane.child.heard_at)
        if not text:
            return []
        if session.pending is not None:
            return self.give_up(session, Refused(ErrorCode.BAD_LAYOUT, text))
        notice = Detached(reason=text[:MAX_TEXT])
        notices = [Notify(number, notice) for number in engine.sessions]
        return [session.event(f"{session.who}: {text}", "error"), *notices]

    def release_all(self, lane: Lane) -> list[Effect]:
        """Have a lane let go of every worker's memory; what is registered holds for the next."""
        workers = self._state.workers_of(lane.device)
        return [effect for worker in workers for effect in self._release(worker, lane.device)]

    def imported(self, message: Imported) -> list[Effect]:
        """A lane has mapped a worker's memory, or could not."""
        session = self._state.registry.sessions.get(message.session)
        if session is None or message.attempt != session.attempt:
            return []
        self._state.fatal_imports.answered(session)
        pending, engine = session.pending, session.engine
        if pending is None or engine is None or pending.step is not RegisterStep.IMPORTING:
            return self._imported_again(session, message)
        if message.error:
            code = ErrorCode.LIMIT if message.out_of_files else ErrorCode.BAD_LAYOUT
            return self.give_up(session, Refused(code, message.error))
        try:  # another session may have taken the rank while the lane was busy
            check_rank(engine, pending.message, engine.workers)
            check_layout(pending.message, engine.workers, self._state.settings.pool_bytes)
            session.registration = pending.message
            session.imported = True
            engine.workers[pending.message.rank] = session
            attached = attach(self._state, engine)
        except (LayoutError, KvdError) as error:
            if session.registration is not None:
                del engine.workers[pending.message.rank]
                session.registration = None
            refusal = error if isinstance(error, Refused) else None
            refusal = refusal or Refused(ErrorCode.BAD_LAYOUT, str(error))
            release = self._release(session, pending.device)
            return [*release, *self.give_up(session, refusal)]
        session.pending = None
        session.refusal = ""
        missing = engine.missing_ranks
        text = f"{session.who} registered; missing ranks: {list(missing) or 'none'}"
        return [
            lane_up(session, self._state.lanes[pending.device]),
            pending.request.reply(Registered(missing_ranks=missing)),
            session.event(text),
            *attached,
        ]

    def _imported_again(self, session: Session, message: Imported) -> list[Effect]:
        """After a lane's restart."""
        if session.registration is None:
            return []
        if message.error:
            text = f"{session.who}: memory lost to the new lane: {message.error}"
            return [session.event(text, "error")]
        session.imported = True
        effects: list[Effect] = [lane_up(session, self._state.lanes[session.registration.device])]
        engine = session.engine
        if engine is not None and engine.attached:
            effects += [bind(self._state, session), *tell_served(self._state, engine)]
        return effects

    @staticmethod
    def released(session: Session) -> list[Effect]:
        """A lane touches a worker's memory no more: nobody has it once the worker is told."""
        releasing, session.releasing = session.releasing, None
        if releasing is None:
            return []
        return [DropFds(session.number), releasing.request.reply(Ok())]

    # ------------------------------------------------------------- departure

    def session_lost(self, session: Session) -> tuple[list[Effect], int]:
        """Let go of the memory of a session whose process is gone.

        Returns:
            What is to be done, and how many chunks in writing were given up.
        """
        effects: list[Effect] = []
        freed = 0
        registration, pending = session.registration, session.pending
        session.pending = None
        if registration is not None:
            effects, freed = self._leave(session, f"rank {registration.rank} is gone")
            effects += self._release(session, registration.device)
        elif pending is not None and pending.step is RegisterStep.IMPORTING:
            effects += self._release(session, pending.device)
        return effects, freed

    def expire(self, now: float) -> list[Effect]:
        """Refuse registrations that have waited too long, saying for what."""
        effects: list[Effect] = []
        for session in self._state.registry.sessions.values():
            pending = session.pending
            if pending is None or now < pending.deadline:
                continue
            lane = self._state.lanes[pending.device]
            code = ErrorCode.LANE_LOST
            if self._state.namespaces is None and session.engine is not None:
                code = ErrorCode.NOT_READY
                text = (
                    "cpu_bytes is auto: the pool gets its size when all ranks of an engine ask for"
                    f" registration; missing: {_missing(session.engine)}; try again when they have"
                    " come"
                )
            elif pending.step is RegisterStep.IMPORTING:
                text = f"lane {lane.device} did not map the memory in time; try again"
                effects += self._release(session, lane.device)
                session.attempt += 1
            else:
                text = f"lane {lane.device} is {lane.state}; try again"
            effects += self.give_up(session, Refused(code, text))
        return effects

    def give_up(self, session: Session, refusal: Refused) -> list[Effect]:
        """A pending registration comes to nothing; what a lane has mapped of it is released."""
        pending, session.pending = session.pending, None
        if pending is None:
            return []
        self._state.reached(refusal.limit)
        return [
            *refused(session, pending.message, str(refusal)),
            pending.request.reply(Error.of(refusal.code, str(refusal))),
            DropFds(session.number),
        ]

    def _release(self, session: Session, device: str) -> list[Effect]:
        """Have a lane that may have mapped the session's memory let go of it."""
        session.imported = False
        if not self._state.lanes[device].up:
            return []
        return [ToLane(device, ReleaseWorker(session=session.number))]

    def _leave(self, session: Session, reason: str) -> tuple[list[Effect], int]:
        engine, registration = session.engine, session.registration
        if engine is None or registration is None:
            return [], 0
        effects, freed = self._state.detach(engine, reason)
        engine.workers.pop(registration.rank, None)
        session.registration = None
        return effects, freed


def refused(session: Session, message: Register, text: str) -> list[Effect]:
    """Return the log's line on a registration that is refused: one, however often it is tried."""
    if session.refusal == text:
        return []
    session.refusal = text
    what = f"rank {message.rank} on {message.device!r} is refused: {text}"
    return [session.event(f"{session.who}: {what}", "warning")]


def freed_text(freed: int) -> str:
    """Return what an event adds about chunks in writing that were given up, if any were."""
    return f"; {freed} {'chunk' if freed == 1 else 'chunks'} in writing freed" if freed else ""


def _missing(engine: Engine) -> list[int]:
    """Return the ranks that have not asked for registration, as those that have count them."""
    waiting = engine.waiting
    world_size = max(
        (s.stated.world_size for s in waiting.values() if s.stated is not None),
        default=0,
    )
    return [rank for rank in range(world_size) if rank not in waiting]
