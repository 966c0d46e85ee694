"""The broker's decisions in this process: every frame is decided on, every state checked."""

import contextlib
from collections import Counter

from kvd.broker.effects import Effect, KillLane, Notify, Reply, StartLane, ToLane
from kvd.broker.sessions import Peer, Session
from kvd.broker.status_report import status_report
from kvd.errors import IntegrityError
from kvd.wire.link import (
    BindWorker,
    Imported,
    ImportWorker,
    LaneFailed,
    LanePing,
    LanePong,
    Released,
    ReleaseWorker,
    Revoke,
    Revoked,
    ShareDone,
)
from kvd_proto.arrays import IntArray
from kvd_proto.codec import NO_ID, REQUESTS, WIRE, Header
from kvd_proto.errors import DecodeError, ProtoError
from kvd_proto.messages import TAGS, Message, Register, Store
from tests.broker.brokers import lane_ready, make_broker
from tests.fuzz.script import Marks, Script, Step
from tests.fuzz.target import Finding

POOL = 64 * 4096
BOOT_ID = bytes(range(16))
HOST = "host"
QUIET_SECONDS = 60


def play_core(script: Script) -> None:
    """A new broker for each script; a lane that does at once what it is told."""
    play = _Play()
    for number, step in enumerate(script):
        try:
            play.do(step)
            play.check()
        except Finding:
            raise
        except Exception as error:
            raise Finding(f"step {number}, {step.where}: {error!r}") from error
    try:
        play.end(patient=len(script) % 2 == 0)
    except IntegrityError as error:
        raise Finding(f"in the end: {error!r}") from error


class _Play:
    """One broker's life."""

    def __init__(self) -> None:
        self.now = 100.0
        self.marks = Marks(BOOT_ID)
        self.actors: dict[int, Session] = {}
        self.bound: dict[int, BindWorker] = {}
        self.answers: Counter[tuple[int, int]] = Counter()
        self.asked: Counter[tuple[int, int]] = Counter()
        self.came = 0
        self.broker = make_broker(POOL, max_namespaces=8, max_leases=16)
        self._from_lane(lane_ready())

    # ---------------------------------------------------------------- a step

    def do(self, step: Step) -> None:
        """Do what the step says, and what follows from it."""
        match step.where:
            case "open":
                self._open(step.actor)
            case "close":
                self._close(step.actor)
            case "time":
                self._pass(step.actor)
            case "control socket":
                self._control_socket(step)
            case "broker":
                self._request(step)
            case "lane":
                self._job(step)

    def _open(self, actor: int) -> None:
        self._close(actor)
        self.came += 1
        session, effects = self.broker.connected(self.came.to_bytes(16), Peer(1, 0, 0))
        self.actors[actor] = session
        self.marks.came(actor, session.token)
        self._carry_out(effects)

    def _close(self, actor: int) -> None:
        session = self.actors.pop(actor, None)
        if session is not None:
            self._carry_out(self.broker.lost(session))
            for key in [key for key in self.asked if key[0] == session.number]:
                del self.asked[key]
                self.answers.pop(key, None)

    def _pass(self, seconds: int) -> None:
        self.now += seconds
        self.broker.state.lanes[HOST].last_seen = self.now
        self._carry_out(self.broker.tick(self.now))
        while self.broker.background.busy:
            self._carry_out(self.broker.background.work())

    def _control_socket(self, step: Step) -> None:
        """As `kvd.daemon.connections` has it."""
        session = self.actors.get(step.actor)
        if session is None:
            return
        frame = self.marks.resolve(step.parts[0] if step.parts else b"")
        try:
            header = WIRE.decode_header(frame)
        except DecodeError:
            self._close(step.actor)
            return
        if TAGS.get(header.tag) is not Register:
            self._close(step.actor)
            return
        self._serve(session, header, frame, len(step.fds))

    def _request(self, step: Step) -> None:
        """As `kvd.daemon.request_socket` has it."""
        if len(step.parts) != 1:
            return
        frame = self.marks.resolve(step.parts[0])
        with contextlib.suppress(DecodeError):
            header = WIRE.decode_header(frame)
            session = self.broker.state.registry.by_token.get(header.session)
            if header.boot_id not in (BOOT_ID, NO_ID):
                return
            if session is not None and session is self.actors.get(step.actor):
                self._serve(session, header, frame)

    def _serve(self, session: Session, header: Header, frame: bytes, descriptors: int = 0) -> None:
        with contextlib.suppress(DecodeError):
            message = REQUESTS.decode_body(header, frame)
            number = header.request_id
            self.asked[session.number, number] += 1
            self._carry_out(self.broker.request(session, number, message, self.now, descriptors))
            if self.broker.reloading.begin():
                loaded = self.broker.reloading.loaded
                self._carry_out(self.broker.reloading.read(loaded))

    def _job(self, step: Step) -> None:
        """The lane copies what is asked for, if it is a store into slots that there are."""
        frame = self.marks.resolve(step.parts[0] if step.parts else b"")
        with contextlib.suppress(DecodeError):
            header, message = WIRE.decode(frame)
            session = self.broker.state.registry.by_token.get(header.session)
            bound = self.bound.get(session.number) if session is not None else None
            if bound is None or not isinstance(message, Store) or session is None:
                return
            slots = message.blocks.slots.numpy()
            generations = message.blocks.generations.numpy()
            registration = session.registration
            if len(slots) != len(generations) or registration is None:
                return
            here = slots < bound.num_slots
            many = int(here.sum())
            factor = registration.layout.blocks_per_chunk
            share = ShareDone(
                session=session.number,
                rank=registration.rank,
                namespace=bound.namespace,
                slots=IntArray.of(slots[here], "u4"),
                generations=IntArray.of(generations[here], "u8"),
                first=IntArray.of([0] * many, "u2"),
                count=IntArray.of([factor] * many, "u2"),
                groups=IntArray.of([0] * many, "u2"),
                ok=message.deadline_ms % 5 != 4,
            )
            self._from_lane(share)

    # ------------------------------------------------------------- the rest

    def _from_lane(self, message: Message, device: str = HOST) -> None:
        self._carry_out(self.broker.supervision.received(device, message, self.now))

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Reply():
                    self._reply(effect)
                case Notify(message=message):
                    self.marks.learn(_sent(message))
                case ToLane():
                    self._told(effect)
                case StartLane(device=device):
                    self._from_lane(LaneFailed(error="there is no such device"), device)
                case KillLane():
                    raise Finding(f"lane {effect.device} is killed")
                case _:
                    pass

    def _reply(self, effect: Reply) -> None:
        if effect.session in self.broker.state.registry.sessions:  # the others have left
            self.answers[effect.session, effect.request_id] += 1
        self.marks.learn(_sent(effect.message))

    def _told(self, effect: ToLane) -> None:
        match effect.message:
            case ImportWorker(session=session, rank=rank, attempt=attempt):
                error = "it cannot be mapped" if rank == 3 else ""
                self._from_lane(Imported(session=session, error=error, attempt=attempt))
            case BindWorker(session=session):
                self.bound[session] = effect.message
            case ReleaseWorker(session=session):
                self.bound.pop(session, None)
                self._from_lane(Released(session=session))
            case Revoke(namespace=namespace, slots=slots, generations=generations):
                self._from_lane(Revoked(namespace=namespace, slots=slots, generations=generations))
            case LanePing():
                self._from_lane(LanePong(workers=len(self.bound)))
            case _:
                pass

    def check(self) -> None:
        """What holds after every step."""
        self.broker.state.check_integrity()
        for key, count in self.answers.items():
            if count > self.asked[key]:
                raise Finding(f"request {key} has {count} answers")

    def end(self, *, patient: bool) -> None:
        """When all is quiet every request is answered; when all are gone nothing is held.

        Who is patient waits for deadlines first; else what is held goes with its owner alone.
        """
        if patient:
            self._pass(QUIET_SECONDS)
            for key, count in self.asked.items():
                if self.answers[key] != count:
                    raise Finding(
                        f"request {key}: asked {count} times, {self.answers[key]} answers"
                    )
        status_report(self.broker.state, 1, "fuzz", self.now)
        for actor in list(self.actors):
            self._close(actor)
        self._pass(0)
        state = self.broker.state
        if state.registry.engines or state.registry.sessions:
            raise Finding(f"left over: {state.registry!r}", leak=True)
        for namespace in state.namespaces or ():
            stats = namespace.table.slots.stats()
            if namespace.engines or namespace.temporary or namespace.table.slots.leases:
                raise Finding(f"left over: {namespace!r}", leak=True)
            if stats["writing"] or stats["draining"] or stats["pinned"]:
                raise Finding(f"left over: {stats}", leak=True)
        state.check_integrity()


def _sent(message: Message) -> Message:
    """The message as the other side gets it.

    Raises:
        Finding: it is none that the other side would take.
    """
    try:
        return WIRE.decode(WIRE.encode(message))[1]
    except ProtoError as error:
        raise Finding(f"a {type(message).__name__} that cannot be read: {error}") from error
