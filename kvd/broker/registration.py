"""Registration of a worker's memory: check, import, attach the engine, release.

A registration is answered once a lane has mapped the memory. Until then it may wait for the pool's
size (``auto``) or for a lane that is being restarted; at its deadline it is refused::

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
from kvd.broker.attachment import attach, bind, import_worker, lane_up, notify_attached
from kvd.broker.children import Lane
from kvd.broker.effects import (
    DropFds,
    Effect,
    EndSession,
    LogEvent,
    Notify,
    OpenPool,
    StartLane,
    ToLane,
)
from kvd.broker.sessions import (
    Engine,
    PendingRegister,
    PendingUnregister,
    RegisterStep,
    Request,
    Session,
    check_kind,
)
from kvd.broker.state import BackgroundTasks, BrokerState, Task
from kvd.cache.namespaces import Namespaces
from kvd.config.values import quota_contradictions
from kvd.errors import KvdError, Refusal
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
MAX_CHECKED_AT_ONCE = 1024  # tensors and groups; a larger layout is checked in the next turn


class Registration:
    """Decisions about workers' memory; `background` checks large layouts."""

    def __init__(self, state: BrokerState, background: BackgroundTasks) -> None:
        self._state = state
        self._background = background
        self._sizing_engine: Engine | None = None  # its ranks decide the size of the opening pool

    # ---------------------------------------------------------------- pool

    def pool_opened(self, namespaces: Namespaces, explanation: str = "") -> list[Effect]:
        """Store the opened pool's namespaces in the state, and advance all registrations.

        The pool's memory may not be allocated yet.

        Args:
            namespaces: the pool's namespaces, empty or recovered.
            explanation: how an automatic size was chosen; empty if the size was configured.
        """
        state = self._state
        effects: list[Effect] = []
        state.namespaces, nbytes = namespaces, namespaces.cpu_bytes
        if self._sizing_engine is not None:
            self._sizing_engine = None
            contradictions = quota_contradictions(state.settings.quotas(nbytes), nbytes)
            effects.append(LogEvent(f"cpu_bytes auto: {explanation}"))
            effects += [LogEvent(f"quota: {text}", "warning") for text in contradictions]
        for session in state.registry.sessions.values():
            effects += self.advance(session)
        return effects

    def pool_refused(self, refusal: Refusal) -> list[Effect]:
        """Refuse the registrations that wait for the pool that `OpenPool` could not open."""
        engine, self._sizing_engine = self._sizing_engine, None
        sessions = engine.waiting.values() if engine is not None else ()
        return [effect for session in sessions for effect in self.give_up(session, refusal)]

    def _open_pool(self, engine: Engine) -> list[Effect]:
        """Open a pool sized for the first engine whose ranks have all come (``auto``)."""
        if self._sizing_engine is not None or _missing_ranks(engine):
            return []
        self._sizing_engine = engine
        messages = _waiting_messages(engine)
        return [OpenPool(tuple(m.layout for m in messages), tuple(m.device for m in messages))]

    # ------------------------------------------------------------ requests

    def register(self, request: Request[Register]) -> list[Effect]:
        """Check a worker's registration, then have a lane map its memory.

        A refusal of its layout is answered by `give_up`, at once if the layout is small; the rest
        is answered later, by `imported`, `expire` or `give_up`.
        """
        session, message, state = request.session, request.message, self._state
        if session.registration is not None:
            raise Refusal(
                ErrorCode.BAD_STATE,
                "this session has registered its memory; send Unregister before another Register",
            )
        if session.pending is not None or session.releasing is not None:
            name = "Register" if session.pending is not None else "Unregister"
            raise Refusal(
                ErrorCode.BAD_STATE, f"this session's {name} is under way; wait for its reply"
            )
        check_names(ErrorCode.BAD_LAYOUT, names_of(message))
        if fatal := state.fatal_imports.refusal(session, message, request.now):
            raise Refusal(ErrorCode.BAD_LAYOUT, fatal)
        check_device(state, message.device, request.now)
        if state.namespaces is None and message.temporary:
            raise Refusal(
                ErrorCode.BAD_STATE,
                "cpu_bytes is auto and the pool has no size yet, which a temporary engine must not"
                " decide; register another engine first",
            )
        pending = session.pending = PendingRegister(request, request.now + REGISTER_SECONDS)
        if len(message.layout.tensors) + len(message.layout.groups) > MAX_CHECKED_AT_ONCE:
            self._background.start("registrations", self._check_and_advance(session, pending))
            return self._ensure_lane(message.device)
        # A small layout is checked now: the task's first piece is its only one.
        return next(self._check_and_advance(session, pending))

    def _check_and_advance(self, session: Session, pending: PendingRegister) -> Task:
        """Check the layout, then advance the registration.

        A large layout is checked in the turn after the one that decoded it.
        """
        engine = session.engine
        if session.pending is not pending or engine is None:
            return
        has_size = self._state.namespaces is not None
        others = engine.workers if has_size else engine.waiting
        try:
            check_rank(engine, pending.message, others)
            check_layout(pending.message, others, self._state.settings.pool_bytes)
        except Refusal as refusal:
            yield self.give_up(session, refusal)
            return
        pending.step = RegisterStep.WAITING
        effects = self._ensure_lane(pending.device)
        yield effects + (self.advance(session) if has_size else self._open_pool(engine))

    def _ensure_lane(self, device: str) -> list[Effect]:
        """Start a lane for `device`, which `check_device` has passed, if there is none."""
        if device in self._state.lanes:
            return []
        lane = self._state.lanes[device] = Lane(device, on_demand=True)
        if device in self._state.failed_lanes:  # logged before
            return [StartLane(device)]
        return [lane.event(f"lane {device} is wanted"), StartLane(device)]

    def advance(self, session: Session) -> list[Effect]:
        """Have the lane map a waiting worker's memory, if lane and pool are ready."""
        pending = session.pending
        if pending is None or pending.step is not RegisterStep.WAITING:
            return []
        lane = self._state.lanes[pending.device]
        if self._state.namespaces is None or not lane.serves:
            return []
        pending.step = RegisterStep.IMPORTING
        return [import_worker(session, pending.message)]

    def unregister(self, request: Request[Unregister]) -> list[Effect]:
        """Release the session's memory; the reply comes when no lane touches it any more."""
        check_kind(request, "worker")
        session = request.session
        registration = session.registration
        if registration is None:
            raise Refusal(
                ErrorCode.BAD_STATE, "this session has registered no memory; send Register first"
            )
        identity = session.identity
        effects, num_freed = self._unregister(session, "unregistered")
        text = f"{identity} has unregistered{freed_text(num_freed)}"
        effects.append(LogEvent(text, fields=identity.fields))
        session.releasing = PendingUnregister(request, registration.device)
        release = self._release(session, registration.device)
        return effects + (release or self.released(session))

    # --------------------------------------------------------------- lanes

    def lane_started(self, lane: Lane) -> list[Effect]:
        """Give a new lane the workers of its device.

        These are those registered before, unless mapping their memory ends lanes, and those whose
        registration waits for the lane.
        """
        now = lane.child.heard_at  # the lane's message has just come
        effects: list[Effect] = []
        for session in self._state.registry.sessions.values():
            registration = session.registration
            if registration is None or registration.device != lane.device:
                effects += self.advance(session)  # only if it waits for this lane
            elif not self._state.fatal_imports.refusal(session, registration, now):
                effects.append(import_worker(session, registration))
        return effects

    def lane_ended_importing(self, session: Session, lane: Lane) -> list[Effect]:
        """Count the end of a lane's process that was mapping this session's memory.

        At `MAX_FATAL_IMPORTS` a registration under way is refused. One that holds and was being
        mapped again stays without a lane, and its engine is told that it is detached.
        """
        fatal, message, engine = self._state.fatal_imports, session.register_message, session.engine
        if message is None or engine is None:
            return []
        now = lane.child.heard_at
        fatal.lane_ended(session, lane.child.last_error, now)
        text = fatal.refusal(session, message, now)
        if not text:
            return []
        if session.pending is not None:
            return self.give_up(session, Refusal(ErrorCode.BAD_LAYOUT, text))
        notice = Detached(reason=text[:MAX_TEXT])
        notices = [Notify(number, notice) for number in engine.sessions]
        return [session.event(f"{session.identity}: {text}", "error"), *notices]

    def release_all(self, lane: Lane) -> list[Effect]:
        """Have a lane release every worker's memory; registrations hold for its next process."""
        workers = self._state.workers_of(lane.device)
        return [effect for worker in workers for effect in self._release(worker, lane.device)]

    def imported(self, message: Imported) -> list[Effect]:
        """Finish a registration: a lane has mapped the memory, or could not.

        1. Ignore the answer to an attempt that was given up.
        2. If the registration was complete before, the lane was restarted: bind the worker again.
        3. Refuse it on an error, or if it contradicts the other ranks by now.
        4. Register the rank; attach its engine if it was the last one.
        """
        session = self._state.registry.sessions.get(message.session)
        if session is None or message.attempt != session.attempt:
            return []
        self._state.fatal_imports.answered(session)
        pending, engine = session.pending, session.engine
        if pending is None or engine is None or pending.step is not RegisterStep.IMPORTING:
            return self._imported_again(session, message)
        if message.error:
            code = ErrorCode.LIMIT if message.out_of_files else ErrorCode.BAD_LAYOUT
            return self.give_up(session, Refusal(code, message.error))
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
            refusal = error if isinstance(error, Refusal) else None
            refusal = refusal or Refusal(ErrorCode.BAD_LAYOUT, str(error))
            release = self._release(session, pending.device)
            return [*release, *self.give_up(session, refusal)]
        session.pending = None
        session.last_refusal = ""
        missing = engine.missing_ranks
        text = f"{session.identity} registered; missing ranks: {list(missing) or 'none'}"
        return [
            lane_up(session, self._state.lanes[pending.device]),
            pending.request.reply(Registered(missing_ranks=missing)),
            session.event(text),
            *attached,
        ]

    def _imported_again(self, session: Session, message: Imported) -> list[Effect]:
        """Bind a registered worker again: a restarted lane has mapped its memory.

        If the lane could not, or could not bind the worker, end the session: the worker registers
        anew, which may succeed later and otherwise tells why.
        """
        if session.registration is None:
            return []
        if message.error:
            text = f"{session.identity}: its lane does not serve it: {message.error}"
            return [session.event(text, "error"), EndSession(session.number, message.error)]
        session.imported = True
        effects: list[Effect] = [lane_up(session, self._state.lanes[session.registration.device])]
        engine = session.engine
        if engine is not None and engine.attached:
            effects += [bind(self._state, session), *notify_attached(self._state, engine)]
        return effects

    @staticmethod
    def released(session: Session) -> list[Effect]:
        """Answer an Unregister: no lane touches the worker's memory any more."""
        releasing, session.releasing = session.releasing, None
        if releasing is None:
            return []
        return [DropFds(session.number), releasing.request.reply(Ok())]

    # ------------------------------------------------------------- departure

    def session_lost(self, session: Session) -> tuple[list[Effect], int]:
        """Release the memory of a session whose process is gone.

        Returns:
            The effects, and the number of chunks in writing that were given up.
        """
        effects: list[Effect] = []
        num_freed = 0
        registration, pending = session.registration, session.pending
        session.pending = None
        if registration is not None:
            effects, num_freed = self._unregister(session, f"rank {registration.rank} is gone")
            effects += self._release(session, registration.device)
        elif pending is not None and pending.step is RegisterStep.IMPORTING:
            effects += self._release(session, pending.device)
        return effects, num_freed

    def expire(self, now: float) -> list[Effect]:
        """Refuse registrations past their deadline; the text says what they waited for."""
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
                    f" registration; missing: {_missing_ranks(session.engine)}; try again when they"
                    " have come"
                )
            elif pending.step is RegisterStep.IMPORTING:
                text = f"lane {lane.device} did not map the memory in time; try again"
                effects += self._release(session, lane.device)
                session.attempt += 1
            else:
                text = f"lane {lane.device} is {lane.state}; try again"
            effects += self.give_up(session, Refusal(code, text))
        return effects

    def give_up(self, session: Session, refusal: Refusal) -> list[Effect]:
        """Refuse a registration under way, if there is one; close its descriptors."""
        pending, session.pending = session.pending, None
        if pending is None:
            return []
        self._state.reached(refusal.limit)
        return [
            *log_refusal(session, pending.message, str(refusal)),
            pending.request.reply(Error.of(refusal.code, str(refusal))),
            DropFds(session.number),
        ]

    def _release(self, session: Session, device: str) -> list[Effect]:
        """Have a lane that may have mapped the session's memory release it."""
        session.imported = False
        if not self._state.lanes[device].up:
            return []
        return [ToLane(device, ReleaseWorker(session=session.number))]

    def _unregister(self, session: Session, reason: str) -> tuple[list[Effect], int]:
        """Detach the engine and remove the session's registration."""
        engine, registration = session.engine, session.registration
        if engine is None or registration is None:
            return [], 0
        effects, num_freed = self._state.detach(engine, reason)
        engine.workers.pop(registration.rank, None)
        session.registration = None
        return effects, num_freed


def log_refusal(session: Session, message: Register, text: str) -> list[Effect]:
    """Return a log line on a refused registration; none if the session's last one was the same."""
    if session.last_refusal == text:
        return []
    session.last_refusal = text
    refusal = f"rank {message.rank} on {message.device!r} is refused: {text}"
    return [session.event(f"{session.identity}: {refusal}", "warning")]


def freed_text(num_freed: int) -> str:
    """Return what an event adds about chunks in writing that were given up, if any were."""
    if not num_freed:
        return ""
    return f"; {num_freed} {'chunk' if num_freed == 1 else 'chunks'} in writing freed"


def _waiting_messages(engine: Engine) -> list[Register]:
    """The registrations under way, in the order of ranks."""
    sessions = [session for _, session in sorted(engine.waiting.items())]
    messages = (session.register_message for session in sessions)
    return [message for message in messages if message is not None]


def _missing_ranks(engine: Engine) -> list[int]:
    """The ranks without a registration under way, by the world size of those that have one."""
    world_size = max((m.world_size for m in _waiting_messages(engine)), default=0)
    waiting = engine.waiting
    return [rank for rank in range(world_size) if rank not in waiting]
