"""The broker's state of each tier: process, breaker, batches under way, measured speed of gets.

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
from kvd.wire.tiering import Get, Lookup, Put
from kvd_proto.messages import TierInfo
from kvd_proto.tier_table import TierHealth

BATCH_BYTES = 4 * 2**20
BATCH_CHUNKS = 256
PUT_BYTES_BESIDE_GETS = 32 * 2**20
GET_BYTES, GET_CHUNKS = 8 * BATCH_BYTES, 8
"""Gets under way may always have these bytes and chunks: work for a tier's threads, and as much
waiting."""
GET_SECONDS = 0.005  # from an answer to the next order
FULL_PAUSE_SECONDS = (1.0, 30.0)  # without puts after FULL: first, longest
RATE_BYTES, RATE_SECONDS = 16 * 2**20, 0.25
"""The rate of gets is measured over this many bytes or seconds; the first sample may be shorter."""
UNKNOWN_BYTES_PER_SECOND = 100e6
"""The rate in bytes per second that is assumed before the first measurement."""

Order: TypeAlias = Put | Get | Lookup


@dataclass(slots=True, eq=False)
class TierBatch:
    """An order without an answer yet.

    Attributes:
        sent: monotonic seconds.
        nbytes: of its chunks; 0 for a Lookup.
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
        """Slots and generations; empty for a Lookup."""
        if isinstance(self.order, Lookup):
            return []
        return list(zip(self.order.slots.tolist(), self.order.generations.tolist(), strict=True))


@dataclass(slots=True)
class TierNamespace:
    """A namespace that a tier's process was told to open.

    Attributes:
        requested_at: when it was told, in monotonic seconds.
        salt: the salt in effect there; None until the process has answered.
    """

    requested_at: float
    salt: bytes | None = None


class GetSpeed:
    """The measured rate and latency of gets; 0 before the first measurement."""

    def __init__(self) -> None:
        self.bytes_per_second = 0
        self._latencies: deque[float] = deque(maxlen=16)  # of gets that were the only one
        self._bytes = 0
        self._seconds = 0.0
        self._counted_until = 0.0  # the time up to which `_seconds` has counted

    @property
    def latency_us(self) -> int:
        """Microseconds that a get takes beside the transfer of its bytes."""
        return int(median(self._latencies) * 1e6) if self._latencies else 0

    def seconds(self, nbytes: int) -> float:
        """Expected seconds of a get; before the first sample at `UNKNOWN_BYTES_PER_SECOND`."""
        return self.latency_us / 1e6 + nbytes / (self.bytes_per_second or UNKNOWN_BYTES_PER_SECOND)

    def begin(self, now: float) -> None:
        """Start the clock: a get begins after a time without any."""
        self._counted_until = now

    def observe(self, nbytes: int, now: float, alone_since: float | None) -> None:
        """Add an ended get. `alone_since`: when it was sent, if no other get was under way."""
        self._seconds += max(0.0, now - self._counted_until)
        self._counted_until = now
        self._bytes += nbytes
        rate = self.bytes_per_second
        enough = not rate or self._bytes >= RATE_BYTES or self._seconds >= RATE_SECONDS
        if enough and self._seconds > 0:  # 0 if two answers came in the same turn
            sample = int(self._bytes / self._seconds)
            self.bytes_per_second = (rate + sample) // 2 if rate else sample
            self._bytes, self._seconds = 0, 0.0
        if alone_since is not None and self.bytes_per_second:
            latency = now - alone_since - nbytes / self.bytes_per_second
            self._latencies.append(max(0.0, latency))


class TierProcess:
    """A tier as the broker sees it.

    Args:
        index: its position in the order of tiers, from 0.
        name: unique, shown in logs and reports.
        setting: the operator's setting, parsed.
        medium, shared: see `kvd.tier.contract.TierBackend`.

    Attributes:
        namespaces: those that its process was told to open.
        unconfirmed: ids of namespaces whose last reset the tier has not confirmed.
        batches: orders under way, by number.
        put_bytes, get_bytes: bytes of these.
        handled_state: the breaker's state at the last `Tiering._on_breaker_change`.
        probe_chunk: namespace and key of a get that was given up, to probe the tier with.
        child: state of its process; messages of a killed one are ignored.
        writer_name: the process's name in `Slots`, which lists the slots that it may write.
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
        self.namespaces: dict[Namespace, TierNamespace] = {}
        self.unconfirmed: set[bytes] = set()
        self.handled_state = self.breaker.state
        self.probe_chunk: tuple[Namespace, bytes] | None = None
        self.described = ""
        self.child = ChildState()
        self.writer_name = ""
        self.total_bytes = self.used_bytes = self.chunks = 0
        self.progress = 0
        self.full_until = 0.0
        self._full_pause = FULL_PAUSE_SECONDS[0]
        self._busy_since = {Put: 0.0, Get: 0.0, Lookup: 0.0}
        self._num_under_way = {Put: 0, Get: 0, Lookup: 0}
        self._last_number = 0

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
        tier_namespace = self.namespaces.get(namespace)
        return tier_namespace is not None and tier_namespace.salt is not None and self.in_use

    def unopened_seconds(self, now: float) -> float:
        """Return the longest time for which a namespace waits to be opened; 0 if none does."""
        unopened = [n for n in self.namespaces.values() if n.salt is None]
        return max((now - n.requested_at for n in unopened), default=0.0)

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
        limit = self.setting.queue_bytes
        if self._num_under_way[Get]:
            limit = min(limit, PUT_BYTES_BESIDE_GETS)
        return limit - self.put_bytes

    def has_get_room(self, planned: int, nbytes: int) -> bool:
        """Return whether a get of `nbytes` fits behind those under way and `planned` bytes.

        A first get always fits. Twice what the tier moves between an order and its answer keeps it
        busy; more would only wait in its queue, ahead of later requests of other engines.
        """
        planned += self.get_bytes
        busy = 2 * self.speed.bytes_per_second * (self.speed.latency_us / 1e6 + GET_SECONDS)
        limit = min(self.setting.queue_bytes, max(GET_BYTES, GET_CHUNKS * nbytes, int(busy)))
        return not planned or planned + nbytes <= limit

    def on_full(self, now: float) -> None:
        """Pause puts after a FULL; the pause doubles until a put succeeds."""
        if now >= self.full_until:
            self.full_until = now + self._full_pause
            self._full_pause = min(2 * self._full_pause, FULL_PAUSE_SECONDS[1])

    def on_put_ok(self) -> None:
        """Reset the pause for the next FULL: a put has succeeded."""
        self._full_pause = FULL_PAUSE_SECONDS[0]

    def deadline(self, nbytes: int) -> float:
        """Return the seconds that a get of `nbytes` may take, including the gets ahead of it."""
        return max(4 * self.speed.seconds(self.get_bytes + nbytes), self.setting.late_seconds)

    # ------------------------------------------------------------------- orders

    def next_number(self) -> int:
        """Return a new order number."""
        self._last_number += 1
        return self._last_number

    def send(self, batch: TierBatch) -> Effect:
        """Record a new batch; return the effect that sends its order."""
        kind, now = type(batch.order), batch.sent
        if not self.batches:
            self.breaker.moved_at = now
        if not self._num_under_way[kind]:
            self._busy_since[kind] = now
            if kind is Get:
                self.speed.begin(now)
        self._num_under_way[kind] += 1
        self.batches[batch.order.number] = batch
        self._count(batch, 1)
        return ToTier(self.index, batch.order)

    def batch_ended(self, batch: TierBatch, now: float) -> None:
        """Record that a batch was answered."""
        del self.batches[batch.order.number]
        kind, seconds = type(batch.order), now - batch.sent
        self._count(batch, -1)
        self._num_under_way[kind] -= 1
        busy_seconds = 0.0 if self._num_under_way[kind] else now - self._busy_since[kind]
        if kind is Put:
            self.counts.put_seconds += busy_seconds
            self.counts.put_latency.observe(seconds)
        elif kind is Get:
            self.counts.get_seconds += busy_seconds
            self.counts.get_latency.observe(seconds)

    def process_ended(self) -> None:
        """Forget the batches and namespaces of the ended process."""
        self.batches.clear()
        self.put_bytes = self.get_bytes = 0
        self._num_under_way = dict.fromkeys(self._num_under_way, 0)
        self.namespaces.clear()
        self.child.ended()
        self.progress = 0

    def _count(self, batch: TierBatch, sign: int) -> None:
        if isinstance(batch.order, Put):
            self.put_bytes += sign * batch.nbytes
        else:
            self.get_bytes += sign * batch.nbytes

    def health(self, namespace: Namespace, waiting_bytes: int) -> TierHealth:
        """Return the health for a namespace's directory; waiting requests add to the queue."""
        return TierHealth(
            usable=self.serves(namespace),
            latency_us=self.speed.latency_us,
            bytes_per_second=self.speed.bytes_per_second,
            queued_bytes=self.get_bytes + waiting_bytes,
        )


Tiers: TypeAlias = Sequence[TierProcess]


def tiers_of(settings: Iterable[tuple[TierSetting, str, bool]]) -> list[TierProcess]:
    """Return the tiers of these settings; a setting comes with its medium and `shared`."""
    tiers: list[TierProcess] = []
    for setting, medium, shared in settings:
        ordinal = 1 + sum(tier.setting.kind == setting.kind for tier in tiers)
        name = setting.kind if ordinal == 1 else f"{setting.kind}-{ordinal}"
        tiers.append(TierProcess(len(tiers), name, setting, medium, shared=shared))
    return tiers


def first_serving(tiers: Tiers, mask: int, namespace: Namespace) -> TierProcess | None:
    """Return the first tier whose bit is set and that serves the namespace."""
    for tier in tiers:
        if mask >> tier.index & 1 and tier.serves(namespace):
            return tier
    return None
