"""A broker with tiers whose processes a test plays: what they are told, and what they answer."""

from collections.abc import Sequence
from typing import Any, ClassVar

from kvd.broker.effects import ChunksReady, Effect, KillTier, LogEvent, ToTier
from kvd.broker.tiers.tier import TierProcess
from kvd.outcomes import Outcome
from kvd.wire.tiering import (
    BatchResult,
    CloseNamespace,
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
from kvd_proto.messages import Message
from tests.broker.test_steps import Bench, Ref, pin
from tests.cache.tables import loans_of

STEP = 0.05


class FakeTier:
    """A tier's process: it has chunks by namespace, salt and key, and answers when it is told.

    hangs: it answers nothing. salts: by namespace, what it has noted. began: of each order, the
    salt under which it was given.
    """

    def __init__(self, bench: "TierBench", index: int) -> None:
        self.bench = bench
        self.index = index
        self.kept: dict[tuple[bytes, bytes, bytes], tuple[int, int, int, bytes]] = {}
        self.salts: dict[bytes, bytes] = {}
        self.told: list[Message] = []
        self.waiting: list[Put | Get | Lookup] = []
        self.began: dict[int, bytes] = {}
        self.unopened: list[bytes] = []
        self.hangs = False
        self.spoils: Outcome | None = None
        self.progress = 0
        self.pinged = False

    @property
    def tier(self) -> TierProcess:
        """What the broker knows of it."""
        return self.bench.broker.state.tiers[self.index]

    def start(self, damaged_records: int = 0) -> None:
        """A process begins, and serves."""
        pid = 100 + self.index
        self.bench.broker.tiering.process_started(self.index, pid, self.bench.now)
        ready = TierReady(
            pid=pid,
            described="",
            total_bytes=0,
            used_bytes=0,
            chunks=0,
            damaged_records=damaged_records,
        )
        self.say(ready)

    def say(self, message: Message) -> None:
        """It sends a message."""
        bench = self.bench
        bench.carry_out(bench.broker.tiering.received(self.index, message, bench.now))

    def end(self) -> None:
        """Its process ends."""
        bench = self.bench
        self.waiting.clear()
        self.unopened.clear()
        bench.carry_out(bench.broker.tiering.lost(self.index, "killed", bench.now))

    def take(self, message: Message) -> None:
        """It is told something."""
        self.told.append(message)
        match message:
            case OpenNamespace(namespace=namespace, salt=salt):
                self.salts[namespace] = salt or self.salts.get(namespace, b"its own")
                self.unopened.append(namespace)
                self.open_namespaces()
            case NewSalt(namespace=namespace, salt=salt):
                self.salts[namespace] = salt
                self.unopened.append(namespace)
                self.open_namespaces()
            case TierPing():
                self.pinged = True
                if not self.hangs:
                    self.pong()
            case Put() | Get() | Lookup():
                assert self.tier.up
                self.waiting.append(message)
                self.began[message.number] = self.salts[message.namespace]
            case Drop(namespace=namespace, keys=keys):
                for key in keys:
                    self.kept.pop((namespace, self.salts[namespace], key), None)
            case CloseNamespace():
                pass

    def pong(self) -> None:
        """It answers a ping."""
        self.pinged = False
        self.say(pong(self.progress))

    def open_namespaces(self) -> None:
        """It opens what it was told to open, unless it hangs."""
        while self.unopened and not self.hangs:
            self.opened(self.unopened.pop(0))

    def opened(self, namespace: bytes) -> None:
        """It serves a namespace, and says what it has of it."""
        salt = self.salts[namespace]
        self.say(NamespaceOpened(namespace=namespace, salt=salt))
        mine = {key: it for (of, at, key), it in self.kept.items() if (of, at) == (namespace, salt)}
        self.say(held(namespace, salt, mine))

    def answer(self) -> list[Put | Get | Lookup]:
        """It does what it was told, as far as it does not hang; what that was."""
        if self.hangs:
            return []
        self.open_namespaces()
        if self.pinged:
            self.pong()
        orders, self.waiting = self.waiting, []
        for order in orders:
            self.progress += len(order.keys)
            self.say(self.done(order))
        return orders

    def done(self, order: Put | Get | Lookup) -> BatchResult:
        """It carries out an order; its answer."""
        namespace = order.namespace
        salt = self.salts[namespace]
        outcomes, found = [], []
        for i, key in enumerate(order.keys):
            there = self.kept.get((namespace, salt, key))
            if self.began[order.number] != salt:
                outcome = Outcome.GONE
            elif isinstance(order, Put):
                blocks = order.first.tolist()[i], order.count.tolist()[i], order.groups.tolist()[i]
                if self.spoils is None:
                    self.kept[namespace, salt, key] = (*blocks, b"")
                outcome = Outcome.OK if self.spoils is None else self.spoils
            elif there is None:
                outcome = Outcome.ABSENT
            else:
                outcome = Outcome.OK if self.spoils is None else self.spoils
            outcomes.append(outcome)
            found.append(there if there and outcome is Outcome.OK else (0, 0, 0, b""))
        return done(order, outcomes, found if isinstance(order, Get) else [])


class TierBench(Bench):
    """A broker with a lane, tiers and an engine of one rank, at a time that a test lets pass.

    now: seconds; of all of them, so that a test can have directories read that clock, too.
    """

    now: ClassVar[float] = 1.0

    def __init__(self, *tiers: str, chunks: int = 64, **settings: Any) -> None:
        type(self).now = 1.0
        self.woken: list[int] = []
        self.events: list[LogEvent] = []
        self.killed: list[int] = []
        self.fakes: list[FakeTier] = []
        super().__init__(chunks, tier=list(tiers), **settings)
        self.fakes = [FakeTier(self, index) for index in range(len(tiers))]
        for fake in self.fakes:
            fake.start()
        self.turn()

    @property
    def namespace(self) -> Any:
        """The engine's."""
        return self.engine(self.scheduler).namespace

    def carry_out(self, effects: list[Effect]) -> None:
        """What the broker wants done."""
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

    def turn(self, seconds: float = 0.0) -> None:
        """Time passes, and the broker looks around."""
        end = self.now + seconds
        while True:
            self.carry_out(self.broker.tiering.turn(self.now))
            while self.broker.background.busy:
                self.carry_out(self.broker.background.work())
            self.broker.tiering.due(self.now)
            if self.now >= end:
                return
            type(self).now = min(end, self.now + STEP)

    def run(self, seconds: float = 1.0) -> None:
        """Time passes, and tiers do what they are told."""
        end = self.now + seconds
        while self.now < end:
            self.turn(STEP)
            for fake in self.fakes:
                fake.answer()

    def store(self, *keys: bytes) -> list[Ref]:
        """These are READY; nobody has asked for them yet."""
        self.reserve(len(keys) + 1, self.now)
        refs = loans_of(self.table(), self.engine(self.scheduler).number)[: len(keys)]
        self.begin(list(keys[: len(refs)]), refs, now=self.now)
        self.share(refs)
        return refs

    def load(self, refs: Sequence[Ref]) -> None:
        """An engine loads these chunks."""
        number = self.number = getattr(self, "number", 0) + 1
        self.step(pins=(pin(number, list(refs)),), now=self.now)
        self.step(unpinned=(number,), now=self.now)

    def keep(self, *keys: bytes) -> None:
        """These are in the tiers that want what was asked for, and in memory."""
        self.load(self.store(*keys))
        self.run()

    def evict(self) -> None:
        """Memory holds no chunk any more."""
        self.table().remove(0, self.namespace.geometry.num_slots, 0.0)

    def seek(self, *keys: bytes) -> None:
        """The scheduler wants these."""
        self.carry_out(self.step(sought=keys, now=self.now)[1])

    def lookup(self, *keys: bytes) -> list[LookupResult]:
        """What lookups answer."""
        found: list[LookupResult] = self.namespace.directory.lookup_many(list(keys))
        return found

    def below(self, key: bytes) -> int | None:
        """Bits of the tiers that the directory names; None: none."""
        place = self.namespace.directory.tiers.find(key)
        return None if place is None else place.tiers

    def check(self) -> None:
        """What the broker believes contradicts itself nowhere."""
        self.broker.state.check_integrity()


def pong(progress: int) -> TierPong:
    """An answer to a ping."""
    return TierPong(
        progress=progress, busy=0, queued_bytes=0, total_bytes=2**30, used_bytes=0, chunks=0
    )


def done(
    order: Put | Get | Lookup,
    outcomes: Sequence[Outcome],
    found: Sequence[tuple[int, int, int, bytes]] = (),
) -> BatchResult:
    """The answer to an order."""
    return BatchResult(
        number=order.number,
        outcomes=IntArray.of(list(map(int, outcomes)), "u1"),
        first=IntArray.of([it[0] for it in found], "u2"),
        count=IntArray.of([it[1] for it in found], "u2"),
        groups=IntArray.of([it[2] for it in found], "u2"),
        descriptions=tuple(it[3] for it in found),
        nanoseconds=1000,
        waited=0,
        error="",
    )


def held(
    namespace: bytes, salt: bytes, kept: dict[bytes, tuple[int, int, int, bytes]]
) -> ScanResult:
    """What a scan has found."""
    return ScanResult(
        namespace=namespace,
        salt=salt,
        keys=tuple(kept),
        first=IntArray.of([it[0] for it in kept.values()], "u2"),
        count=IntArray.of([it[1] for it in kept.values()], "u2"),
        groups=IntArray.of([it[2] for it in kept.values()], "u2"),
        last=True,
    )
