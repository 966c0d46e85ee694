"""A broker for tests, with what surrounds it: a pool, lanes, sessions."""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from kvd.broker.broker import Broker
from kvd.broker.effects import Effect, Reply
from kvd.broker.sessions import Session
from kvd.broker.tiers.tier import tiers_of
from kvd.cache.namespaces import Namespaces
from kvd.client_names import Peer
from kvd.config.settings import Settings
from kvd.config.sources import LoadedSettings
from kvd.config.values import parse_tiers
from kvd.wire.link import (
    Imported,
    ImportWorker,
    LanePing,
    LanePong,
    LaneReady,
    Released,
    ReleaseWorker,
    Revoke,
    Revoked,
    ShareDone,
)
from kvd_proto.jobs import IntArray
from kvd_proto.messages import (
    PROTOCOL_VERSION,
    Error,
    Fingerprint,
    Hello,
    HostHandle,
    IpcHandle,
    Kind,
    Message,
    Register,
)
from tests.layouts import flat_layout

PAGE = 4096
CUDA = "cuda:" + "0f" * 16
_tokens = itertools.count()


def make_broker(
    cpu_bytes: int | str = 2**20,
    *,
    devices: Iterable[str] = ("host",),
    allocated: int = 2**62,
    **settings: Any,
) -> Broker:
    """Return a broker whose pool, unless its size is ``auto``, is open and allocated."""
    chosen = Settings(runtime_dir="/nowhere", cpu_bytes=cpu_bytes, **settings)
    tiers = tiers_of(
        (tier, "remote" if tier.kind == "mooncake" else tier.kind, tier.kind == "mooncake")
        for tier in parse_tiers(chosen.tier)
    )
    broker = Broker(
        LoadedSettings(chosen),
        boot_id=bytes(16),
        version="test",
        pid=1,
        devices=devices,
        tiers=tiers,
    )
    if chosen.pool_bytes is not None:
        open_pool(broker, chosen.pool_bytes)
        broker.pool_allocated(allocated)
    return broker


def open_pool(broker: Broker, cpu_bytes: int, explanation: str = "") -> list[Effect]:
    """Open a pool in plain memory, as the broker's settings say."""
    namespaces = Namespaces(
        cpu_bytes,
        broker.state.settings,
        boot_id=bytes(16),
        make_buffer=lambda _, nbytes: bytearray(nbytes),
    )
    return broker.registration.pool_opened(namespaces, explanation)


def lane_ready(usable_bytes: int = 2**62, **fields: Any) -> LaneReady:
    """Return what a lane says that serves."""
    ready = LaneReady(incarnation=1, pid=2, endpoint="ipc://lane", usable_bytes=usable_bytes)
    return replace(ready, **fields)


def lane_up(broker: Broker, device: str = "host", **fields: Any) -> list[Effect]:
    """Have a lane say that it serves; return what the broker does then."""
    return broker.supervision.received(device, lane_ready(**fields), 0.0)


def hello(kind: Kind = "worker", engine: str = "e") -> Hello:
    """Return the first request of a session."""
    return Hello(
        kind=kind,
        engine=engine,
        pid=1,
        protocol_min=PROTOCOL_VERSION,
        protocol_max=PROTOCOL_VERSION,
        client="test",
    )


def join(
    broker: Broker,
    kind: Kind = "worker",
    engine: str = "e",
    *,
    peer: Peer = Peer(1, 0, 0),  # noqa: B008  # it is frozen
    now: float = 0.0,
) -> Session:
    """Return a session that has said HELLO."""
    session = broker.connected(next(_tokens).to_bytes(16), peer)
    broker.request(session, 1, hello(kind, engine), now)
    return session


def register(device: str = "host", rank: int = 0, world_size: int = 1, **fields: Any) -> Register:
    """Return the registration of a rank with one tensor, but for the `fields`."""
    memory = HostHandle(fd_index=1)
    ipc = IpcHandle(handle=bytes(64), allocation=8 * PAGE)
    message = Register(
        rank=rank,
        world_size=world_size,
        device=device,
        fingerprint=Fingerprint(model="m"),
        layout=flat_layout(PAGE),
        handles=(memory if device == "host" else ipc,),
    )
    return replace(message, **fields)


def columns(refs: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Return slots and generations as messages have them."""
    return {
        "slots": IntArray.of([slot for slot, _ in refs], "u4"),
        "generations": IntArray.of([generation for _, generation in refs], "u8"),
    }


def share_done(
    worker: Session, namespace: bytes, refs: Sequence[tuple[int, int]], *, ok: bool = True
) -> ShareDone:
    """Return the report of a worker's lane on its share of whole chunks."""
    registration = worker.registration
    assert registration is not None
    many = len(refs)
    return ShareDone(
        session=worker.number,
        rank=registration.rank,
        namespace=namespace,
        first=IntArray.of([0] * many, "u2"),
        count=IntArray.of([registration.layout.blocks_per_chunk] * many, "u2"),
        groups=IntArray.of([0] * many, "u2"),
        ok=ok,
        **columns(refs),
    )


def mapped(
    broker: Broker, session: Session, device: str = "host", attempt: int = 0
) -> list[Effect]:
    """Have a lane say that it has mapped the session's memory; return what the broker does."""
    message = Imported(session=session.number, error="", attempt=attempt)
    return broker.supervision.received(device, message, 0.0)


def replies(effects: list[Effect]) -> list[Reply]:
    """Return the replies among the effects."""
    return [effect for effect in effects if isinstance(effect, Reply)]


def refusal(effects: list[Effect]) -> Error:
    """Return the one reply, which is a refusal."""
    (reply,) = replies(effects)
    assert isinstance(reply.message, Error)
    return reply.message


class DrivenBroker:
    """Counts requests and replies of open sessions; `carried_out` sees every effect."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.now = 100.0
        self.asked: Counter[tuple[int, int]] = Counter()
        self.replies: dict[tuple[int, int], list[Message]] = {}
        self.num_sessions = 0

    def connected(self) -> Session:
        """A new session, before its HELLO; tokens are the same in each run."""
        self.num_sessions += 1
        return self.broker.connected(self.num_sessions.to_bytes(16), Peer(1, 0, 0))

    def request(self, session: Session, number: int, message: Message, fds: int = 0) -> None:
        """A session asks."""
        self.asked[session.number, number] += 1
        self.carry_out(self.broker.request(session, number, message, self.now, fds))

    def lose(self, session: Session) -> None:
        """A process ends; its replies are forgotten."""
        self.carry_out(self.broker.lost(session))
        for key in [key for key in self.asked if key[0] == session.number]:
            del self.asked[key]
            self.replies.pop(key, None)

    def from_lane(self, message: Message, device: str = "host") -> None:
        """A lane says something."""
        self.carry_out(self.broker.supervision.received(device, message, self.now))

    def lane_answers(self, message: Message, device: str = "host", error: str = "") -> None:
        """A lane has done what it was told; an `error` is that of a mapping."""
        match message:
            case ImportWorker(session=session, attempt=attempt):
                self.from_lane(Imported(session=session, error=error, attempt=attempt), device)
            case ReleaseWorker(session=session):
                self.from_lane(Released(session=session), device)
            case Revoke(namespace=namespace, slots=slots, generations=generations):
                answer = Revoked(namespace=namespace, slots=slots, generations=generations)
                self.from_lane(answer, device)
            case LanePing():
                self.from_lane(LanePong(), device)

    def pass_time(self, seconds: float, heard: Iterable[str]) -> None:
        """Deadlines come; these lanes have been heard meanwhile."""
        self.now += seconds
        for device in heard:
            self.from_lane(LanePong(), device)
        self.carry_out(self.broker.tick(self.now))

    def carry_out(self, effects: list[Effect]) -> None:
        """What the broker wants done."""
        for effect in effects:
            if isinstance(effect, Reply) and effect.session in self.broker.state.registry.sessions:
                key = (effect.session, effect.request_id)
                self.replies.setdefault(key, []).append(effect.message)
            self.carried_out(effect)

    def carried_out(self, effect: Effect) -> None:
        """One effect."""
        raise NotImplementedError

    def settle(self) -> None:
        """The broker does all that it has put off."""
        while self.broker.background.busy:
            self.carry_out(self.broker.background.work())

    # ------------------------------------------------------------- invariants

    def check(self) -> None:
        """Everything that can be checked holds, and no request has an answer too many."""
        self.broker.state.check_integrity()
        for key, replies in self.replies.items():
            assert len(replies) <= self.asked[key], f"request {key} has {len(replies)} answers"

    def check_answered(self) -> None:
        """When all is quiet every request has its answer."""
        for key, count in self.asked.items():
            got = len(self.replies.get(key, ()))
            assert got == count, f"request {key}: asked {count} times, {got} answers"

    def check_nothing_held(self) -> None:
        """When all are gone nothing of theirs is left."""
        state = self.broker.state
        for session in list(state.registry.sessions.values()):
            self.lose(session)
        self.settle()
        self.carry_out(self.broker.tick(self.now))
        self.settle()
        assert not state.registry.engines, repr(state.registry)
        assert not state.registry.sessions, repr(state.registry)
        for namespace in state.namespaces or ():
            slots = namespace.table.slots
            counts = slots.stats()
            assert not namespace.engines, repr(namespace)
            assert not namespace.temporary, repr(namespace)
            assert not slots.leases, repr(namespace)
            left = [state for state in ("lent", "writing", "draining", "pinned") if counts[state]]
            assert not left, counts
        state.check_integrity()
