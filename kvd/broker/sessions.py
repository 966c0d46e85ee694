"""Sessions and engines: who is connected, and what each has registered."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

import msgspec

from kvd.broker.effects import LogEvent, Reply
from kvd.cache.namespaces import Namespace
from kvd.client_names import Peer, Who
from kvd.errors import IntegrityError, Refused
from kvd.metrics.counts import EventCounts, LookupCounts
from kvd.metrics.declare import RecentMax
from kvd_proto.messages import ErrorCode, Message, Register, Unregister

M = TypeVar("M", bound=Message)


class RegisterStep(StrEnum):
    """How far a registration has come."""

    UNCHECKED = "unchecked"  # its layout is large, and is checked in a turn of its own
    WAITING = "waiting"  # for the pool's size, or for a lane that serves
    IMPORTING = "importing"  # a lane maps the memory


@dataclass(slots=True)
class PendingRegister:
    """A registration that is under way."""

    request: "Request[Register]"
    deadline: float
    step: RegisterStep = RegisterStep.UNCHECKED

    @property
    def message(self) -> Register:
        """What the rank asks for."""
        return self.request.message

    @property
    def device(self) -> str:
        """Whose lane is to map the memory."""
        return self.request.message.device


@dataclass(slots=True, eq=False)
class Session:
    """One connection, until its end of file.

    token: 16 bytes, with which its connection to a lane says that it is this worker's.
    """

    number: int
    token: bytes
    peer: Peer
    kind: str = ""  # what it said with HELLO
    engine: "Engine | None" = None
    pending: PendingRegister | None = None
    registration: Register | None = None
    imported: bool = False
    attempt: int = 0  # how many registrations were given up while a lane mapped the memory
    releasing: "PendingUnregister | None" = None
    since: float = 0.0  # when HELLO came, monotonic seconds
    lookups: LookupCounts = field(default_factory=LookupCounts)  # as last reported
    kv_events: EventCounts = field(default_factory=EventCounts)  # as last reported
    refusal: str = ""  # why its registration was refused last

    @property
    def state(self) -> str:
        """Where the session stands, as docs/protocol.md draws it."""
        if self.registration is not None:
            return "registered"
        return "welcomed" if self.kind else "connected"

    @property
    def stated(self) -> Register | None:
        """What the rank has registered, or wants to."""
        return self.registration or (self.pending.message if self.pending is not None else None)

    @property
    def holds_memory(self) -> bool:
        """Whether the descriptors of a registration, or of what is left of one, are needed."""
        return self.stated is not None or self.releasing is not None

    @property
    def who(self) -> Who:
        """How logs and events name this session."""
        engine = self.engine.name if self.engine is not None else None
        rank = self.registration.rank if self.registration is not None else None
        return Who(self.number, self.peer.pid, engine, self.kind, rank)

    def event(self, text: str, level: str = "info") -> LogEvent:
        """Return an event that carries this session's identifiers."""
        return LogEvent(text, level, self.who.fields)


class Request(msgspec.Struct, Generic[M], frozen=True):
    """What a session asks for, at `now` in monotonic seconds."""

    session: Session
    id: int
    message: M
    now: float

    def reply(self, message: Message) -> Reply:
        """Return the answer to this request."""
        return Reply(self.session.number, self.id, message)


@dataclass(frozen=True, slots=True)
class PendingUnregister:
    """An Unregister that is answered when the lane of `device` has let go of the memory."""

    request: Request[Unregister]
    device: str


@dataclass(slots=True, eq=False)
class Engine:
    """One inference server instance: its scheduler and its ranks.

    uid: the user whose processes they are; no other user may join under this name.
    stepped: its scheduler has sent a step since it was attached.
    lookups, published: in all its sessions together; publish_lag: in seconds.
    prefill_seconds: in which it computes a token of a prompt, as last reported; None: not known.
    """

    number: int
    name: str
    uid: int
    sessions: dict[int, Session] = field(default_factory=dict)
    workers: dict[int, Session] = field(default_factory=dict)
    namespace: Namespace | None = None
    stepped: bool = False
    lookups: LookupCounts = field(default_factory=LookupCounts)
    prefill_seconds: float | None = None
    published: EventCounts = field(default_factory=EventCounts)
    publish_lag: RecentMax = field(default_factory=RecentMax)

    @property
    def attached(self) -> bool:
        """Every rank is registered and bound to a namespace."""
        return self.namespace is not None

    @property
    def waiting(self) -> dict[int, Session]:
        """The sessions whose registration is under way, by rank; of several the first."""
        found: dict[int, Session] = {}
        for session in self.sessions.values():
            if session.pending is not None and session.pending.step is not RegisterStep.UNCHECKED:
                found.setdefault(session.pending.message.rank, session)
        return found

    @property
    def served(self) -> bool:
        """It is attached, and a lane that lives has mapped the memory of every rank."""
        return self.attached and all(worker.imported for worker in self.workers.values())

    @property
    def world_size(self) -> int:
        """As its workers registered it; 0 before the first."""
        for worker in self.workers.values():
            if worker.registration:
                return worker.registration.world_size
        return 0

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks that have not registered."""
        return tuple(rank for rank in range(self.world_size) if rank not in self.workers)


class Registry:
    """All sessions, by number, and engines, by name."""

    def __init__(self, max_sessions: int, max_sessions_per_user: int) -> None:
        self.max_sessions = max_sessions
        self.max_sessions_per_user = max_sessions_per_user
        self.sessions: dict[int, Session] = {}
        self.engines: dict[str, Engine] = {}
        self._next_session = 1
        self._next_engine = 1

    def check_room(self, peer: Peer) -> None:
        """Refuse one process more of this user than there is room for; with the setting."""
        of_user = sum(session.peer.uid == peer.uid for session in self.sessions.values())
        for whose, count, limit, most in (
            ("", len(self.sessions), "max_sessions", self.max_sessions),
            (f" of uid {peer.uid}", of_user, "max_sessions_per_user", self.max_sessions_per_user),
        ):
            if count >= most:
                raise Refused(
                    ErrorCode.LIMIT,
                    f"{count} sessions{whose} are open: raise {limit} (now {most}), or end engines"
                    " that are not needed",
                    limit=limit,
                )

    def connect(self, token: bytes, peer: Peer) -> Session:
        """Return a new session in state CONNECTED."""
        session = Session(self._next_session, token, peer)
        self._next_session += 1
        self.sessions[session.number] = session
        return session

    def join(self, session: Session, name: str) -> Engine:
        """Put the session into the engine `name`, made if need be; or refuse another user's.

        Its chunks and leases could be named from within.
        """
        engine = self.engines.get(name)
        if engine is None:
            engine = self.engines[name] = Engine(self._next_engine, name, session.peer.uid)
            self._next_engine += 1
        elif engine.uid != session.peer.uid:
            raise Refused(
                ErrorCode.FORBIDDEN,
                f"engine {name!r} belongs to uid {engine.uid}, this process to uid"
                f" {session.peer.uid}; give each engine instance a name of its own",
            )
        engine.sessions[session.number] = session
        session.engine = engine
        return engine

    def remove(self, session: Session) -> None:
        """Forget a session, and its engine with the last of them."""
        del self.sessions[session.number]
        engine = session.engine
        if engine is not None:
            del engine.sessions[session.number]
            if not engine.sessions:
                del self.engines[engine.name]

    def check_integrity(self) -> None:
        """Raise IntegrityError where an index names other objects."""
        for name, engine in self.engines.items():
            if engine.name != name or not engine.sessions:
                raise IntegrityError(f"{engine!r} is filed under {name!r} or empty")
            for session in engine.sessions.values():
                if self.sessions.get(session.number) is not session:
                    raise IntegrityError(f"{session!r} of {engine!r} is not a session")
            for rank, worker in engine.workers.items():
                if worker.registration is None or worker.registration.rank != rank:
                    raise IntegrityError(f"{worker!r} is filed as rank {rank}")
                if worker.number not in engine.sessions:
                    raise IntegrityError(f"{worker!r} is a worker, not a session, of {engine!r}")
            if engine.attached and engine.missing_ranks:
                raise IntegrityError(f"{engine!r} is attached and lacks {engine.missing_ranks}")
