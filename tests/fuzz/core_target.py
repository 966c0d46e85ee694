"""The broker's decisions in this process: every frame is decided on, every state checked."""

import contextlib

from kvd.broker.effects import Effect, KillLane, Notify, Reply, StartLane, ToLane
from kvd.broker.sessions import Session
from kvd.broker.status_report import status_report
from kvd.wire.link import BindWorker, ImportWorker, LaneFailed, ReleaseWorker
from kvd_proto.codec import REQUESTS, WIRE
from kvd_proto.errors import DecodeError, ProtoError
from kvd_proto.messages import TAGS, Join, Message, Register, Store
from tests.broker.brokers import DrivenBroker, lane_ready, make_broker, share_done
from tests.fuzz.sessions import Act, Finding, Marks, Script

POOL = 64 * 4096
QUIET_SECONDS = 60


def play_core(script: Script) -> None:
    """A new broker for each script; a lane that does at once what it is told."""
    play = CorePlay()
    for number, step in enumerate(script):
        try:
            play.do(step)
            play.check()
        except Exception as error:
            raise Finding(f"step {number}, {step.where}: {error!r}") from error
    ended = False
    try:
        if len(script) % 2 == 0:  # else what is held goes with its owner, before any deadline
            play.wait(QUIET_SECONDS)
            play.check_answered()
        status_report(play.broker.state, 1, "fuzz", play.now)
        ended = True
        play.check_nothing_held()
    except Exception as error:
        leak = ended and isinstance(error, AssertionError)
        raise Finding(f"in the end: {error!r}", leak=leak) from error


class CorePlay(DrivenBroker):
    """One broker's life."""

    def __init__(self) -> None:
        super().__init__(make_broker(POOL, max_namespaces=8, max_leases=16))
        self.marks = Marks()
        self.actors: dict[int, Session] = {}
        self.joined: dict[int, Session] = {}  # by actor: whose jobs it sends
        self.bound: dict[int, BindWorker] = {}
        self.waiting: list[tuple[Session, Store]] = []  # jobs whose step the broker has not read
        self.from_lane(lane_ready())

    def do(self, step: Act) -> None:
        """Do what the step says, and what follows from it."""
        match step.where:
            case "open":
                self._close(step.actor)
                self.actors[step.actor] = self.connected()
            case "close":
                self._close(step.actor)
            case "time":
                self.wait(step.actor)
            case "broker":
                self._request(step)
            case "lane":
                self._job(step)

    def _close(self, actor: int) -> None:
        session = self.actors.pop(actor, None)
        self.joined.pop(actor, None)
        if session is not None:
            self.lose(session)

    def wait(self, seconds: int) -> None:
        """Time passes, and all that was put off is done."""
        self.pass_time(seconds, ["host"])
        self.settle()

    def _request(self, step: Act) -> None:
        """As `kvd.server.sessions` has it."""
        session = self.actors.get(step.actor)
        frame = self.marks.resolve(step.frame)
        is_register = TAGS.get(int.from_bytes(frame[6:8], "little")) is Register
        if step.bare or (step.fds and not is_register):
            self._close(step.actor)
        elif session is not None:
            with contextlib.suppress(DecodeError):
                header = WIRE.decode_header(frame)
                message = REQUESTS.decode_body(header, frame)
                self.request(session, header.request_id, message, len(step.fds))
                if self.broker.reloading.begin():
                    loaded = self.broker.reloading.loaded
                    self.carry_out(self.broker.reloading.finish(loaded))
        waiting, self.waiting = self.waiting, []
        for job in waiting:
            self._write(*job)

    def _job(self, step: Act) -> None:
        """The lane gets a job."""
        if step.bare:
            self.joined.pop(step.actor, None)
            return
        with contextlib.suppress(DecodeError):
            _, message = WIRE.decode(self.marks.resolve(step.frame))
            if isinstance(message, Join):
                for session in self.actors.values():
                    if session.token == message.token:
                        self.joined[step.actor] = session
            elif isinstance(message, Store) and step.actor in self.joined:
                self._write(self.joined[step.actor], message)

    def _write(self, session: Session, job: Store) -> None:
        """Copy, if it is a store into slots that there are, and report, once none is on loan."""
        bound, slots = self.bound.get(session.number), job.blocks.slots.numpy()
        generations = job.blocks.generations.numpy()
        if bound is None or len(slots) != len(generations) or session.registration is None:
            return
        namespaces = self.broker.state.namespaces
        namespace = namespaces and namespaces.get(bound.namespace)
        in_pool = slots < bound.num_slots
        refs = list(zip(slots[in_pool].tolist(), generations[in_pool].tolist(), strict=True))
        if namespace and any(namespace.directory.is_lent(*ref) for ref in refs):
            self.waiting.append((session, job))
            return
        self.from_lane(share_done(session, bound.namespace, refs, ok=job.deadline_ms % 5 != 4))

    def carried_out(self, effect: Effect) -> None:
        """The other side learns what it is sent; the lane does what it is told."""
        match effect:
            case Reply(session=number, message=message) | Notify(session=number, message=message):
                for actor, session in self.actors.items():
                    if session.number == number:
                        self.marks.learn(actor, _sent(message))
            case ToLane():
                self._lane_gets(effect.message)
            case StartLane(device=device):
                self.from_lane(LaneFailed(error="there is no such device"), device)
            case KillLane():
                raise Finding(f"lane {effect.device} is killed")

    def _lane_gets(self, message: Message) -> None:
        match message:
            case BindWorker(session=session):
                self.bound[session] = message
            case ReleaseWorker(session=session):
                self.bound.pop(session, None)
        third = isinstance(message, ImportWorker) and message.rank == 3
        self.lane_answers(message, error="it cannot be mapped" if third else "")


def _sent(message: Message) -> Message:
    """The message as the other side gets it.

    Raises:
        Finding: it is none that the other side would take.
    """
    try:
        return WIRE.decode(WIRE.encode(message))[1]
    except ProtoError as error:
        raise Finding(f"a {type(message).__name__} that cannot be read: {error}") from error
