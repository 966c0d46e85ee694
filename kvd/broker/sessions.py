"""Sessions, engines, and the registry of both."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, TypeVar

import msgspec

from kvd.broker.effects import LogEvent, Reply
from kvd.cache.namespaces import Namespace
from kvd.client_names import ClientIdentity, Peer
from kvd.errors import IntegrityError, Refusal
from kvd.metrics.counts import EventCounts, LookupCounts
from kvd.metrics.declare import RecentMax
from kvd_proto.messages import ErrorCode, Message, Register, Unregister

M = TypeVar("M", bound=Message)


class RegisterStep(StrEnum):
    """The step of a registration under way."""

    UNCHECKED = "unchecked"  # the layout is not checked yet
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
        """The REGISTER message."""
        return self.request.message

    @property
    def device(self) -> str:
        """The device whose lane is to map the memory."""
        return self.request.message.device


@dataclass(slots=True, eq=False, repr=False)
class Session:
    """One connection to the broker, until its end of file.

    token: 16 bytes that the worker's connection to a lane begins with.
    kind: from HELLO; empty before it.
    imported: a living lane has mapped the registered memory.
    attempt: number of registrations that were given up while a lane mapped the memory.
    hello_at: when HELLO came, in monotonic seconds.
    lookups, kv_events: the totals last reported.
    last_refusal: why its registration was refused last.
    """

    number: int
    token: bytes
    peer: Peer
    kind: str = ""
    engine: "Engine | None" = None
    pending: PendingRegister | None = None
    registration: Register | None = None
    imported: bool = False
    attempt: int = 0
    releasing: "PendingUnregister | None" = None
    hello_at: float = 0.0
    lookups: LookupCounts = field(default_factory=LookupCounts)
    kv_events: EventCounts = field(default_factory=EventCounts)
    last_refusal: str = ""

    @property
    def state(self) -> str:
        """The session's state in the life cycle of docs/protocol.md."""
        if self.registration is not None:
            return "registered"
        return "welcomed" if self.kind else "connected"

    @property
    def register_message(self) -> Register | None:
        """The REGISTER that holds, or else the one under way."""
        return self.registration or (self.pending.message if self.pending is not None else None)

    @property
    def holds_memory(self) -> bool:
        """Whether the descriptors of a registration are needed, or those of one being undone."""
        return self.register_message is not None or self.releasing is not None

    @property
    def identity(self) -> ClientIdentity:
        """The session's name in logs and events."""
        engine = self.engine.name if self.engine is not None else None
        rank = self.registration.rank if self.registration is not None else None
        return ClientIdentity(self.number, self.peer.pid, engine, self.kind, rank)

    def event(self, text: str, level: str = "info") -> LogEvent:
        """Return an event that carries this session's identifiers."""
        return LogEvent(text, level, self.identity.fields)


class Request(msgspec.Struct, Generic[M], frozen=True):
    """A session's request; `now`: when it came, in monotonic seconds."""

    session: Session
    id: int
    message: M
    now: float

    def reply(self, message: Message) -> Reply:
        """Return the reply to this request."""
        return Reply(self.session.number, self.id, message)


def check_kind(request: Request[Any], kind: str) -> None:
    """Refuse a request of a session that was not opened, by HELLO, as one of this kind."""
    if request.session.kind != kind:
        raise Refusal(
            ErrorCode.BAD_STATE,
            f"{type(request.message).__name__} is for sessions of kind {kind}, and HELLO opened"
            f" this one as {request.session.kind}; connect again as {kind} for it",
        )


@dataclass(frozen=True, slots=True)
class PendingUnregister:
    """An Unregister that is answered when the lane of `device` has let go of the memory."""

    request: Request[Unregister]
    device: str


@dataclass(slots=True, eq=False, repr=False)
class Engine:
    """One inference server instance: its scheduler and its ranks.

    uid: the user of its processes; sessions of other users may not join.
    stepped: its scheduler has sent a step since the engine was attached.
    lookups, published: totals of all its sessions; publish_lag: in seconds.
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
        """Whether every rank is registered and bound to a namespace."""
        return self.namespace is not None

    @property
    def waiting(self) -> dict[int, Session]:
        """Sessions with a checked registration under way, by rank; of several the first."""
        by_rank: dict[int, Session] = {}
        for session in self.sessions.values():
            if session.pending is not None and session.pending.step is not RegisterStep.UNCHECKED:
                by_rank.setdefault(session.pending.message.rank, session)
        return by_rank

    @property
    def served(self) -> bool:
        """Whether it is attached and living lanes have mapped the memory of every rank."""
        return self.attached and all(worker.imported for worker in self.workers.values())

    @property
    def world_size(self) -> int:
        """The world size that its workers registered; 0 before the first."""
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
        """Refuse another session of this user at `max_sessions` or `max_sessions_per_user`."""
        num_of_user = sum(session.peer.uid == peer.uid for session in self.sessions.values())
        of_user = f" of uid {peer.uid}"
        for owner, count, setting, limit in (
            ("", len(self.sessions), "max_sessions", self.max_sessions),
            (of_user, num_of_user, "max_sessions_per_user", self.max_sessions_per_user),
        ):
            if count >= limit:
                raise Refusal(
                    ErrorCode.LIMIT,
                    f"{count} sessions{owner} are open: raise {setting} (now {limit}), or end"
                    " engines that are not needed",
                    limit=setting,
                )

    def connect(self, token: bytes, peer: Peer) -> Session:
        """Return a new session in state CONNECTED."""
        session = Session(self._next_session, token, peer)
        self._next_session += 1
        self.sessions[session.number] = session
        return session

    def join(self, session: Session, name: str) -> Engine:
        """Add the session to the engine `name`, which is made if it does not exist.

        A session of another user is refused: it could name the engine's chunks and leases.
        """
        engine = self.engines.get(name)
        if engine is None:
            engine = self.engines[name] = Engine(self._next_engine, name, session.peer.uid)
            self._next_engine += 1
        elif engine.uid != session.peer.uid:
            raise Refusal(
                ErrorCode.FORBIDDEN,
                f"engine {name!r} belongs to uid {engine.uid}, this process to uid"
                f" {session.peer.uid}; give each engine instance a name of its own",
            )
        engine.sessions[session.number] = session
        session.engine = engine
        return engine

    def remove(self, session: Session) -> None:
        """Remove a session, and its engine if it was the last one."""
        del self.sessions[session.number]
        engine = session.engine
        if engine is not None:
            del engine.sessions[session.number]
            if not engine.sessions:
                del self.engines[engine.name]

    def check_integrity(self) -> None:
        """Raise IntegrityError if an index names other objects."""
        for name, engine in self.engines.items():
            title = f"engine {engine.number} {engine.name!r}"
            if engine.name != name or not engine.sessions:
                raise IntegrityError(f"{title} is filed under {name!r} or empty")
            for session in engine.sessions.values():
                if self.sessions.get(session.number) is not session:
                    raise IntegrityError(f"{session.identity} of {title} is not a session")
            for rank, worker in engine.workers.items():
                if worker.registration is None or worker.registration.rank != rank:
                    raise IntegrityError(f"{worker.identity} is filed as rank {rank}")
                if worker.number not in engine.sessions:
                    raise IntegrityError(
                        f"{worker.identity} is a worker, not a session, of {title}"
                    )
            if engine.attached and engine.missing_ranks:
                raise IntegrityError(f"{title} is attached and lacks {engine.missing_ranks}")
