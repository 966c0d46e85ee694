"""The broker's state of each tier: process, breaker, batches under way, measured speed.

`kvd.broker.tiers.demotion` and `promotion` give orders, `tiering` dispatches the answers.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeAlias

from kvd.broker.children import ChildState
from kvd.broker.effects import Effect, LogEvent, ToTier
from kvd.broker.tiers.breaker import Breaker
from kvd.cache.namespaces import Namespace
from kvd.config.values import TierSetting
from kvd.metrics.counts import TierCounts
from kvd.wire.tiering import Ask, Get, Put
from kvd_proto.messages import TierInfo
from kvd_proto.tier_table import TierStatus

BATCH_BYTES = 4 * 2**20
BATCH_CHUNKS = 256
PUT_BYTES_BESIDE_GETS = 32 * 2**20
GET_BYTES, GET_CHUNKS = 8 * BATCH_BYTES, 8
"""The lower limits for gets under way: work for a tier's threads, and as much waiting."""
GET_SECONDS = 0.005  # between an answer and the next order
FULL_PAUSES = (1.0, 30.0)  # seconds without puts after FULL: the first pause, and the longest
RATE_BYTES, RATE_SECONDS = 16 * 2**20, 0.25
"""The rate of gets is measured over so many bytes or seconds; the first sample may be shorter."""
UNKNOWN_RATE = 100e6
"""Bytes a second that are assumed before the first measurement."""

Order: TypeAlias = Put | Get | Ask


@dataclass(slots=True, eq=False)
class TierBatch:
    """An order without an answer yet.

    Attributes:
        sent: monotonic seconds.
        nbytes: of its chunks; 0 for an Ask.
        salt: for a Put, the namespace's salt when it was sent.
        alone: a Get that was sent while no other was under way.
        engines: numbers of the engines that wait for it.
        given_up: a Get whose slots were given up: they are freed once it has ended.
    """

    order: Order
    namespace: Namespace
    sent: float
    nbytes: int = 0
    salt: bytes = b""
    alone: bool = False
    engines: set[int] = field(default_factory=set)
    given_up: bool = False

    @property
    def refs(self) -> list[tuple[int, int]]:
        """Slots and generations; empty for an Ask."""
        if isinstance(self.order, Ask):
            return []
        return list(zip(self.order.slots.tolist(), self.order.generations.tolist(), strict=True))


@dataclass(slots=True)
class TierSpace:
    """A namespace that a tier's process was told to open.

    Attributes:
        since: when it was told, in monotonic seconds.
        salt: the salt in effect there; None until the process has answered.
    """

    since: float
    salt: bytes | None = None


class GetSpeed:
    """The measured rate and latency of gets; 0 before the first measurement."""

    def __init__(self) -> None:
        self.bytes_per_second = 0
        self._alone: deque[float] = deque(maxlen=16)  # latencies of gets that were alone
        self._bytes = 0
        self._seconds = 0.0
        self._from = 0.0  # up to this time `_seconds` has counted

    @property
    def latency_us(self) -> int:
        """Microseconds that a get takes beside the transfer of its bytes."""
        return int(median(self._alone) * 1e6) if self._alone else 0

    def seconds(self, nbytes: int) -> float:
        """Expected seconds for a get of `nbytes`; at `UNKNOWN_RATE` before the first sample."""
        return self.latency_us / 1e6 + nbytes / (self.bytes_per_second or UNKNOWN_RATE)

    def begin(self, now: float) -> None:
        """Start the clock: a get begins after a time without any."""
        self._from = now

    def observe(self, nbytes: int, now: float, alone_since: float | None) -> None:
        """Add a sample. `alone_since`: when its order was sent, if it was the only get."""
        self._seconds += max(0.0, now - self._from)
        self._from = now
        self._bytes += nbytes
        rate = self.bytes_per_second
        enough = not rate or self._bytes >= RATE_BYTES or self._seconds >= RATE_SECONDS
        if enough and self._seconds > 0:  # 0 if two answers came in the same turn
            found = int(self._bytes / self._seconds)
            self.bytes_per_second = (rate + found) // 2 if rate else found
            self._bytes, self._seconds = 0, 0.0
        if alone_since is not None and self.bytes_per_second:
            took = now - alone_since - nbytes / self.bytes_per_second
            self._alone.append(max(0.0, took))


class TierProcess:
    """One tier.

    Args:
        index: its place in the order of tiers, from 0.
        name: unique, shown in logs and reports.
        setting: the operator's setting, parsed.
        medium, shared: see `kvd.tier.contract.Tier`.

    Attributes:
        spaces: namespaces that its process was told to open.
        unconfirmed: ids of namespaces whose last reset the tier has not confirmed.
        batches: orders under way, by number.
        put_bytes, get_bytes: bytes of these.
        child: state of its process; messages of a killed one are ignored.
    """

    def __init__(
        self, index: int, name: str, setting: TierSetting, medium: str, *, shared: bool
    ) -> None:
        self.index = index
        self.setting = setting
        self.info = TierInfo(name=name, medium=medium, shared=shared)
        self.counts = TierCounts()
        self.breaker = Breaker(setting.late_seconds, self.counts.opened)
        self.speed = GetSpeed()
        self.batches: dict[int, TierBatch] = {}
        self.put_bytes = self.get_bytes = 0
        self.spaces: dict[Namespace, TierSpace] = {}
        self.unconfirmed: set[bytes] = set()
        self.seen = self.breaker.state  # the last state that was acted upon
        self.trial: tuple[Namespace, bytes] | None = None  # a chunk to probe the tier with
        self.described = ""
        self.child = ChildState()
        self.process = ""  # whose writes its slots wait for, see `Promotions.begin`
        self.total_bytes = self.used_bytes = self.chunks = 0
        self.progress = 0
        self.full_until = 0.0
        self._full_pause = FULL_PAUSES[0]
        self._busy_from = {Put: 0.0, Get: 0.0, Ask: 0.0}
        self._under_way = {Put: 0, Get: 0, Ask: 0}
        self._numbers = 0

    @property
    def name(self) -> str:
        """The name in logs and reports."""
        return self.info.name

    @property
    def up(self) -> bool:
        """Whether its process serves."""
        return self.child.up and not self.child.killed

    @property
    def in_use(self) -> bool:
        """Whether it gets orders: its process serves and its breaker is closed."""
        return self.up and self.breaker.closed

    def serves(self, namespace: Namespace) -> bool:
        """Whether orders for this namespace may go to it."""
        opening = self.spaces.get(namespace)
        return opening is not None and opening.salt is not None and self.in_use

    def unopened_seconds(self, now: float) -> float:
        """Seconds for which the namespace told longest ago has not been opened; 0 if all are."""
        waiting = (now - each.since for each in self.spaces.values() if each.salt is None)
        return max(waiting, default=0.0)

    def event(self, text: str, level: str = "info") -> LogEvent:
        """A log line about this tier."""
        return LogEvent(f"tier {self.name} {text}", level, {"tier": self.name})

    def gets(self) -> Iterator[TierBatch]:
        """The gets under way."""
        return (batch for batch in self.batches.values() if isinstance(batch.order, Get))

    # ------------------------------------------------------------------- bounds

    def put_room(self, now: float) -> int:
        """Bytes of puts that may be sent now; less while gets are under way."""
        if now < self.full_until:
            return 0
        most = self.setting.queue_bytes
        if self._under_way[Get]:
            most = min(most, PUT_BYTES_BESIDE_GETS)
        return most - self.put_bytes

    def get_room(self, before: int, nbytes: int) -> bool:
        """Whether a get of `nbytes` may follow those under way and `before`; a first one always.

        Twice what the tier moves between an order and its answer keeps it busy. More would only
        wait in its queue, ahead of later requests of other engines.
        """
        before += self.get_bytes
        busy = 2 * self.speed.bytes_per_second * (self.speed.latency_us / 1e6 + GET_SECONDS)
        most = min(self.setting.queue_bytes, max(GET_BYTES, GET_CHUNKS * nbytes, int(busy)))
        return not before or before + nbytes <= most

    def full(self, now: float) -> None:
        """Pause puts after a FULL; the pause doubles until a put succeeds."""
        if now >= self.full_until:
            self.full_until = now + self._full_pause
            self._full_pause = min(2 * self._full_pause, FULL_PAUSES[1])

    def has_room(self) -> None:
        """Reset the pause for the next FULL: a put has succeeded."""
        self._full_pause = FULL_PAUSES[0]

    def deadline(self, nbytes: int) -> float:
        """Seconds that a get of `nbytes` may take, including the gets ahead of it."""
        return max(4 * self.speed.seconds(self.get_bytes + nbytes), self.setting.late_seconds)

    # ------------------------------------------------------------------- orders

    def number(self) -> int:
        """Draw the next order's number."""
        self._numbers += 1
        return self._numbers

    def send(self, batch: TierBatch) -> Effect:
        """Record a new order; return the effect that sends it."""
        kind, now = type(batch.order), batch.sent
        if not self.batches:
            self.breaker.moved_at = now
        if not self._under_way[kind]:
            self._busy_from[kind] = now
            if kind is Get:
                self.speed.begin(now)
        self._under_way[kind] += 1
        self.batches[batch.order.number] = batch
        self._count(batch, 1)
        return ToTier(self.index, batch.order)

    def ended(self, batch: TierBatch, now: float) -> None:
        """Record that an order was answered."""
        del self.batches[batch.order.number]
        kind, seconds = type(batch.order), now - batch.sent
        self._count(batch, -1)
        self._under_way[kind] -= 1
        spent = 0.0 if self._under_way[kind] else now - self._busy_from[kind]
        if kind is Put:
            self.counts.put_seconds += spent
            self.counts.put_latency.observe(seconds)
        elif kind is Get:
            self.counts.get_seconds += spent
            self.counts.get_latency.observe(seconds)

    def process_ended(self) -> None:
        """Forget the orders and namespaces of the process, which has ended."""
        self.batches.clear()
        self.put_bytes = self.get_bytes = 0
        self._under_way = dict.fromkeys(self._under_way, 0)
        self.spaces.clear()
        self.child.ended()
        self.progress = 0

    def _count(self, batch: TierBatch, sign: int) -> None:
        if isinstance(batch.order, Put):
            self.put_bytes += sign * batch.nbytes
        else:
            self.get_bytes += sign * batch.nbytes

    def status(self, namespace: Namespace, waiting: int) -> TierStatus:
        """The status in a namespace's directory; `waiting` bytes of requests add to the queue."""
        return TierStatus(
            usable=self.serves(namespace),
            latency_us=self.speed.latency_us,
            bytes_per_second=self.speed.bytes_per_second,
            queued_bytes=self.get_bytes + waiting,
        )


Tiers: TypeAlias = Sequence[TierProcess]


def tiers_of(settings: Iterable[tuple[TierSetting, str, bool]]) -> list[TierProcess]:
    """Return the tiers of these settings, each with its medium and whether it is shared."""
    tiers: list[TierProcess] = []
    for setting, medium, shared in settings:
        same = 1 + sum(tier.setting.kind == setting.kind for tier in tiers)
        name = setting.kind if same == 1 else f"{setting.kind}-{same}"
        tiers.append(TierProcess(len(tiers), name, setting, medium, shared=shared))
    return tiers


def first_of(tiers: Tiers, bits: int, namespace: Namespace) -> TierProcess | None:
    """Return the first tier whose bit is set and that serves the namespace."""
    for tier in tiers:
        if bits >> tier.index & 1 and tier.serves(namespace):
            return tier
    return None
