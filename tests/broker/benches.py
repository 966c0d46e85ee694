"""A broker with an attached engine, and tiers whose processes a test plays."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from kvd.broker.broker import Broker
from kvd.broker.effects import ChunksReady, Effect, KillTier, LogEvent, ToLane, ToTier
from kvd.broker.sessions import Session
from kvd.broker.tiers.tier import TierProcess
from kvd.cache.chunks import ChunkTable
from kvd.outcomes import Outcome
from kvd.wire.link import Revoke, Revoked
from kvd.wire.tiering import (
    BatchResult,
    Drop,
    Get,
    Lookup,
    NamespaceOpened,
    NewSalt,
    OpenNamespace,
    Put,
    ScanResult,
    TierPing,
    TierPong,
    TierReady,
)
from kvd_proto.directory import LookupResult
from kvd_proto.jobs import IntArray
from kvd_proto.messages import Fingerprint, Message, Pin, Step, Stepped
from tests.broker.brokers import (
    PAGE,
    columns,
    join,
    lane_up,
    make_broker,
    mapped,
    register,
    replies,
    share_done,
)
from tests.cache.tables import loans_of

STEP = 0.05
Ref = tuple[int, int]
Coverage = tuple[int, int, int, bytes]  # first block, count, groups, description


def bring_up(broker: Broker, engine: str = "e", model: str = "m") -> Session:
    """Attach an engine of one rank, and return its scheduler."""
    scheduler, worker = join(broker, "scheduler", engine), join(broker, "worker", engine)
    broker.request(worker, 2, register(fingerprint=Fingerprint(model=model)), 0.0, 2)
    mapped(broker, worker)
    return scheduler


def pin(number: int, refs: Sequence[Ref], lease_ms: int = 10_000) -> Pin:
    """A lease on these chunks."""
    return Pin(lease=number, lease_ms=lease_ms, **columns(refs))


class Bench:
    """A broker with a lane and an engine of one rank, at a time that a test lets pass.

    now: seconds; of all benches, so that a test can have directories read that clock, too.
    """

    now: ClassVar[float] = 1.0

    def __init__(self, chunks: int = 64, **settings: Any) -> None:
        Bench.now = 1.0
        self.broker = make_broker(chunks * PAGE, **settings)
        lane_up(self.broker)
        self.scheduler = bring_up(self.broker)
        (self.worker,) = self.engine().workers.values()

    def engine(self, session: Session | None = None) -> Any:
        """The engine of a session."""
        return (session or self.scheduler).engine

    @property
    def namespace(self) -> Any:
        """The engine's."""
        return self.engine().namespace

    @property
    def table(self) -> ChunkTable:
        """The engine's."""
        table: ChunkTable = self.namespace.table
        return table

    def step(
        self, session: Session | None = None, now: float | None = None, **fields: Any
    ) -> tuple[list[Ref], list[Effect]]:
        """What a step is lent, and everything that follows from it."""
        time = self.now if now is None else now
        effects = self.broker.request(session or self.scheduler, 3, Step(**fields), time)
        (reply,) = replies(effects)
        assert isinstance(reply.message, Stepped)
        slots, generations = reply.message.slots.tolist(), reply.message.generations.tolist()
        return list(zip(slots, generations, strict=True)), effects

    def reserve(self, slots: int) -> list[Ref]:
        """What the engine is lent of so many slots, which it needs for bulk work."""
        self.step()  # the first step is lent nothing in bulk
        return self.step(wanted=slots)[0]

    def begin(self, keys: Sequence[bytes], refs: Sequence[Ref]) -> None:
        """Keys get these slots."""
        self.step(keys=tuple(keys), **columns(refs))

    def share(self, refs: Sequence[Ref]) -> list[Effect]:
        """The lane reports the rank's share of these slots."""
        report = share_done(self.worker, self.namespace.id, refs)
        return self.broker.supervision.received("host", report, self.now)

    def store(self, *keys: bytes) -> list[Ref]:
        """These are READY; no load has asked for them yet."""
        self.reserve(len(keys) + 1)
        refs = loans_of(self.table, self.engine().number)[: len(keys)]
        self.begin(keys[: len(refs)], refs)
        self.share(refs)
        return refs

    def answer(self, effects: list[Effect]) -> None:
        """The lane has nothing under way in the slots that are called back."""
        for effect in effects:
            match effect:
                case ToLane(message=Revoke(namespace=namespace, slots=s, generations=g)):
                    answer = Revoked(namespace=namespace, slots=s, generations=g)
                    self.broker.supervision.received("host", answer, self.now)


class FakeTier:
    """A tier's process: it has chunks by namespace, salt and key, and answers when it is told.

    hangs: it answers nothing. failure: the outcome of each of its chunks. salts: by namespace, what
    it has noted. salt_at: of each order, the salt under which it was given.
    """

    def __init__(self, bench: "TierBench", index: int) -> None:
        self.bench = bench
        self.index = index
        self.chunks: dict[tuple[bytes, bytes, bytes], Coverage] = {}
        self.salts: dict[bytes, bytes] = {}
        self.messages: list[Message] = []
        self.orders: list[Put | Get | Lookup] = []
        self.salt_at: dict[int, bytes] = {}
        self.unopened: list[bytes] = []
        self.hangs = False
        self.failure: Outcome | None = None
        self.progress = 0

    @property
    def tier(self) -> TierProcess:
        """What the broker knows of it."""
        return self.bench.broker.state.tiers[self.index]

    def start(self) -> None:
        """A process begins, and serves."""
        pid = 100 + self.index
        self.bench.broker.tiering.process_started(self.index, pid, self.bench.now)
        figures: Any = dict.fromkeys(("total_bytes", "used_bytes", "chunks", "damaged_records"), 0)
        self.say(TierReady(pid=pid, described="", **figures))

    def say(self, message: Message) -> None:
        """It sends a message."""
        bench = self.bench
        bench.carry_out(bench.broker.tiering.received(self.index, message, bench.now))

    def end(self) -> None:
        """Its process ends."""
        bench = self.bench
        self.orders.clear()
        self.unopened.clear()
        bench.carry_out(bench.broker.tiering.lost(self.index, "killed", bench.now))

    def take(self, message: Message) -> None:
        """It is sent a message."""
        self.messages.append(message)
        match message:
            case (
                OpenNamespace(namespace=namespace, salt=salt)
                | NewSalt(namespace=namespace, salt=salt)
            ):
                self.salts[namespace] = salt or self.salts.get(namespace, b"its own")
                self.unopened.append(namespace)
                self.open_namespaces()
            case TierPing():
                self.pong()
            case Put() | Get() | Lookup():
                assert self.tier.up
                self.orders.append(message)
                self.salt_at[message.number] = self.salts[message.namespace]
            case Drop(namespace=namespace, keys=keys):
                for key in keys:
                    self.chunks.pop((namespace, self.salts[namespace], key), None)

    def pong(self) -> None:
        """It answers a ping, unless it hangs."""
        if not self.hangs:
            figures: Any = {"queued_bytes": 0, "total_bytes": 2**30, "used_bytes": 0, "chunks": 0}
            self.say(TierPong(progress=self.progress, busy=0, **figures))

    def open_namespaces(self) -> None:
        """It opens what it was told to open, and says what it has there, unless it hangs."""
        while self.unopened and not self.hangs:
            namespace = self.unopened.pop(0)
            self.say(NamespaceOpened(namespace=namespace, salt=self.salts[namespace]))
            self.say(self.scan_result(namespace, self.chunks_of(namespace)))

    def chunks_of(self, namespace: bytes) -> dict[bytes, Coverage]:
        """What it has of a namespace as it is now."""
        place = namespace, self.salts.get(namespace)
        return {key: it for (*at, key), it in self.chunks.items() if (*at,) == place}

    def scan_result(self, namespace: bytes, chunks: dict[bytes, Coverage]) -> ScanResult:
        """What a scan of a namespace says as it is now."""
        salt, parts = self.salts[namespace], _parts(chunks.values())
        return ScanResult(namespace=namespace, salt=salt, keys=tuple(chunks), last=True, **parts)

    def keys(self, kind: type[Put | Get | Lookup]) -> list[bytes]:
        """Keys of all orders of this kind that it was given."""
        return [key for order in self.messages if isinstance(order, kind) for key in order.keys]

    def answer(self) -> None:
        """It does what it was told, unless it hangs."""
        self.open_namespaces()
        self.pong()
        if not self.hangs:
            orders, self.orders = self.orders, []
            for order in orders:
                self.progress += len(order.keys)
                self.say(self.done(order))

    def done(self, order: Put | Get | Lookup) -> BatchResult:
        """It carries out an order, and returns its answer."""
        place = order.namespace, self.salts[order.namespace]
        outcomes, chunks = [], list[Coverage]()
        for i, key in enumerate(order.keys):
            if self.salt_at[order.number] != place[1]:
                outcome = Outcome.GONE
            elif isinstance(order, Put) or (*place, key) in self.chunks:
                outcome = self.failure or Outcome.OK
            else:
                outcome = Outcome.ABSENT
            if isinstance(order, Put) and outcome is Outcome.OK:
                blocks = (order.first.tolist()[i], order.count.tolist()[i])
                self.chunks[(*place, key)] = (*blocks, order.groups.tolist()[i], b"")
            outcomes.append(outcome)
            here = isinstance(order, Get) and outcome is Outcome.OK
            chunks.append(self.chunks[(*place, key)] if here else (0, 0, 0, b""))
        return result_of(order, outcomes, chunks if isinstance(order, Get) else [])


class TierBench(Bench):
    """A bench with tiers: what they are sent, and what the broker does with their answers."""

    def __init__(self, *tiers: str, chunks: int = 64) -> None:
        self.woken: list[int] = []
        self.events: list[LogEvent] = []
        self.killed: list[int] = []
        self.fakes: list[FakeTier] = []
        super().__init__(chunks, tier=list(tiers))
        self.fakes = [FakeTier(self, index) for index in range(len(tiers))]
        for fake in self.fakes:
            fake.start()
        self.turn()

    def carry_out(self, effects: list[Effect]) -> None:
        """Do what the broker wants done."""
        for effect in effects:
            match effect:
                case ToTier(tier=index, message=message):
                    self.fakes[index].take(message)
                case KillTier(tier=index):
                    self.killed.append(index)
                case ChunksReady(engine=engine):
                    self.woken.append(engine)
                case LogEvent():
                    self.events.append(effect)
        self.answer(effects)

    def ask(self, message: Message, session: Session | None = None) -> None:
        """The scheduler makes a request."""
        self.carry_out(self.broker.request(session or self.scheduler, 9, message, self.now))

    def turn(self, seconds: float = 0.0) -> None:
        """Time passes, and the broker's loop turns."""
        end = self.now + seconds
        while True:
            self.carry_out(self.broker.tiering.turn(self.now))
            while self.broker.background.busy:
                self.carry_out(self.broker.background.work())
            self.broker.tiering.due(self.now)
            if self.now >= end:
                return
            Bench.now = min(end, self.now + STEP)

    def run(self, seconds: float = 1.0) -> None:
        """Time passes, and tiers do what they are told."""
        end = self.now + seconds
        while self.now < end:
            self.turn(STEP)
            for fake in self.fakes:
                fake.answer()

    def load(self, refs: Sequence[Ref]) -> None:
        """An engine loads these chunks."""
        self.step(pins=(pin(1, refs),))
        self.step(unpinned=(1,))

    def keep(self, *keys: bytes) -> None:
        """These are in the tiers that want what was asked for, and in memory."""
        self.load(self.store(*keys))
        self.run()

    def evict(self) -> None:
        """Memory loses all chunks."""
        self.table.remove(0, self.namespace.geometry.num_slots, 0.0)

    def seek(self, *keys: bytes, session: Session | None = None) -> None:
        """The scheduler wants these."""
        self.carry_out(self.step(session, sought=keys)[1])

    def lookup(self, *keys: bytes) -> list[LookupResult]:
        """What lookups answer."""
        results: list[LookupResult] = self.namespace.directory.lookup_many(list(keys))
        return results

    def below(self, key: bytes) -> int | None:
        """Bits of the tiers that the directory names; None: none."""
        place = self.namespace.directory.tiers.find(key)
        return None if place is None else place.tiers

    def check(self) -> None:
        """The broker's state does not contradict itself."""
        self.broker.state.check_integrity()


def _parts(chunks: Iterable[Coverage]) -> dict[str, Any]:
    """First blocks, counts and groups as messages have them."""
    values = list(zip(*chunks, strict=True))[:3] or [()] * 3
    names = ("first", "count", "groups")
    return {name: IntArray.of(column, "u2") for name, column in zip(names, values, strict=True)}


def result_of(
    order: Put | Get | Lookup, outcomes: Sequence[Outcome], chunks: Sequence[Coverage] = ()
) -> BatchResult:
    """The answer to an order."""
    return BatchResult(
        number=order.number,
        outcomes=IntArray.of(list(map(int, outcomes)), "u1"),
        descriptions=tuple(chunk[3] for chunk in chunks),
        nanoseconds=1000,
        waited=0,
        error="",
        **_parts(chunks),
    )
