"""What the broker knows of each tier: its process, its breaker, what is under way, how fast it is.

`kvd.broker.tiers.demotion` and `promotion` give orders, `tiering` takes the answers in.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeAlias

from kvd.broker.child import ChildState
from kvd.broker.effects import Effect, Event, ToTier
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
"""Gets under way may always be so much: work for each thread of a tier, and as much waiting."""
GET_SECONDS = 0.005  # between an answer and the next order
FULL_PAUSES = (1.0, 30.0)  # without puts, in seconds: the first, and the longest
RATE_BYTES, RATE_SECONDS = 16 * 2**20, 0.25
"""Gets are measured in stretches of at least so much; the first counts however short it is."""
UNKNOWN_RATE = 100e6
"""Bytes a second that a tier must reach while nothing was measured: batches may be large."""

Order: TypeAlias = Put | Get | Ask


@dataclass(slots=True, eq=False)
class Batch:
    """An order that has no answer yet.

    Attributes:
        sent: monotonic seconds.
        nbytes: of its chunks; 0 of an Ask.
        salt: of the namespace of a Put, when it was sent.
        alone: a Get, and no other was on its way.
        engines: that wait for it.
        given_up: a Get whose slots have gone: they are free when it has ended.
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
        """Slots and generations; none of an Ask."""
        if isinstance(self.order, Ask):
            return []
        return list(zip(self.order.slots.tolist(), self.order.generations.tolist(), strict=True))


@dataclass(slots=True)
class Opening:
    """A namespace that a tier's process was told of.

    Attributes:
        since: when it was told, in monotonic seconds.
        salt: that holds there; None while it has not answered.
    """

    since: float
    salt: bytes | None = None


class Pace:
    """How fast gets are, by the last ones; 0 while nobody knows."""

    def __init__(self) -> None:
        self.bytes_per_second = 0
        self._alone: deque[float] = deque(maxlen=16)  # seconds besides those of the bytes
        self._bytes = 0
        self._seconds = 0.0
        self._from = 0.0  # until when time is counted

    @property
    def latency_us(self) -> int:
        """What a get takes apart from its bytes, in microseconds."""
        return int(median(self._alone) * 1e6) if self._alone else 0

    def seconds(self, nbytes: int) -> float:
        """How long `nbytes` are likely to take; at `UNKNOWN_RATE` before the first ones came."""
        return self.latency_us / 1e6 + nbytes / (self.bytes_per_second or UNKNOWN_RATE)

    def begin(self, now: float) -> None:
        """The first get after a time without any."""
        self._from = now

    def observe(self, nbytes: int, now: float, alone_since: float | None) -> None:
        """Bytes have come; `alone_since`: when their order was sent, if it was the only one."""
        self._seconds += max(0.0, now - self._from)
        self._from = now
        self._bytes += nbytes
        rate = self.bytes_per_second
        enough = not rate or self._bytes >= RATE_BYTES or self._seconds >= RATE_SECONDS
        if enough and self._seconds > 0:  # two answers may be taken in the same turn
            found = int(self._bytes / self._seconds)
            self.bytes_per_second = (rate + found) // 2 if rate else found
            self._bytes, self._seconds = 0, 0.0
        if alone_since is not None and self.bytes_per_second:
            took = now - alone_since - nbytes / self.bytes_per_second
            self._alone.append(max(0.0, took))

    def __repr__(self) -> str:
        return f"<Pace {self.bytes_per_second} B/s after {self.latency_us} µs>"


class Tier:
    """One tier.

    Args:
        index: its place in the order, from 0.
        name: its own, for people.
        setting: as the operator wrote it.
        medium: see `kvd.tier.contract.Tier`.
        shared: see there.

    Attributes:
        spaces: namespaces that its process was told of.
        unconfirmed: namespaces whose last reset it has not confirmed.
        batches: that are under way, by number.
        put_bytes, get_bytes: of these.
        child: its process; nothing counts that one says which was told to end.
    """

    def __init__(
        self, index: int, name: str, setting: TierSetting, medium: str, *, shared: bool
    ) -> None:
        self.index = index
        self.setting = setting
        self.info = TierInfo(name=name, medium=medium, shared=shared)
        self.counts = TierCounts()
        self.breaker = Breaker(setting.late_seconds, self.counts.opened)
        self.pace = Pace()
        self.batches: dict[int, Batch] = {}
        self.put_bytes = self.get_bytes = 0
        self.spaces: dict[Namespace, Opening] = {}
        self.unconfirmed: set[bytes] = set()
        self.seen = self.breaker.state  # what was acted upon
        self.trial: tuple[Namespace, bytes] | None = None  # a chunk to probe it with
        self.described = ""
        self.child = ChildState()
        self.process = ""  # what its slots wait for, see `Promotions.begin`
        self.total_bytes = self.used_bytes = self.chunks = 0
        self.progress = 0
        self.full_until = 0.0
        self._full_pause = FULL_PAUSES[0]
        self._busy_from = {Put: 0.0, Get: 0.0, Ask: 0.0}
        self._under_way = {Put: 0, Get: 0, Ask: 0}
        self._numbers = 0

    @property
    def name(self) -> str:
        """How logs and reports call it."""
        return self.info.name

    @property
    def up(self) -> bool:
        """Its process serves."""
        return self.child.up and not self.child.killed

    @property
    def in_use(self) -> bool:
        """It gets orders, and engines are told so."""
        return self.up and self.breaker.closed

    def serves(self, namespace: Namespace) -> bool:
        """Whether orders for this namespace may go to it."""
        opening = self.spaces.get(namespace)
        return opening is not None and opening.salt is not None and self.in_use

    def unopened_seconds(self, now: float) -> float:
        """How long it has not begun a namespace that it was told of, the oldest one; else 0."""
        waiting = (now - each.since for each in self.spaces.values() if each.salt is None)
        return max(waiting, default=0.0)

    def event(self, text: str, level: str = "info") -> Event:
        """A line of the log on it."""
        return Event(f"tier {self.name} {text}", level, {"tier": self.name})

    def gets(self) -> Iterator[Batch]:
        """Gets that are under way."""
        return (batch for batch in self.batches.values() if isinstance(batch.order, Get))

    # ------------------------------------------------------------------- bounds

    def put_room(self, now: float) -> int:
        """Bytes that it may be sent to keep; promotions come first."""
        if now < self.full_until:
            return 0
        most = self.setting.queue_bytes
        if self._under_way[Get]:
            most = min(most, PUT_BYTES_BESIDE_GETS)
        return most - self.put_bytes

    def get_room(self, before: int, nbytes: int) -> bool:
        """Whether so many bytes more may be asked of it, after others; a first chunk always.

        Twice what the tier moves between an order and its answer keeps it busy. More would only
        wait in its queue, ahead of what other engines request meanwhile.
        """
        before += self.get_bytes
        busy = 2 * self.pace.bytes_per_second * (self.pace.latency_us / 1e6 + GET_SECONDS)
        most = min(self.setting.queue_bytes, max(GET_BYTES, GET_CHUNKS * nbytes, int(busy)))
        return not before or before + nbytes <= most

    def full(self, now: float) -> None:
        """It has no room: nothing is put for a while, which grows."""
        if now >= self.full_until:
            self.full_until = now + self._full_pause
            self._full_pause = min(2 * self._full_pause, FULL_PAUSES[1])

    def has_room(self) -> None:
        """It has taken a chunk."""
        self._full_pause = FULL_PAUSES[0]

    def deadline(self, nbytes: int) -> float:
        """Seconds that a get of so many bytes more may take, with what is before it."""
        return max(4 * self.pace.seconds(self.get_bytes + nbytes), self.setting.late_seconds)

    # ------------------------------------------------------------------- orders

    def number(self) -> int:
        """The next order's."""
        self._numbers += 1
        return self._numbers

    def send(self, batch: Batch) -> Effect:
        """Note an order that goes out."""
        kind, now = type(batch.order), batch.sent
        if not self.batches:
            self.breaker.moved_at = now
        if not self._under_way[kind]:
            self._busy_from[kind] = now
            if kind is Get:
                self.pace.begin(now)
        self._under_way[kind] += 1
        self.batches[batch.order.number] = batch
        self._count(batch, 1)
        return ToTier(self.index, batch.order)

    def ended(self, batch: Batch, now: float) -> None:
        """An order's answer has come."""
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
        """Its process has ended: what was under way never ends."""
        self.batches.clear()
        self.put_bytes = self.get_bytes = 0
        self._under_way = dict.fromkeys(self._under_way, 0)
        self.spaces.clear()
        self.child.ended()
        self.progress = 0

    def _count(self, batch: Batch, sign: int) -> None:
        if isinstance(batch.order, Put):
            self.put_bytes += sign * batch.nbytes
        else:
            self.get_bytes += sign * batch.nbytes

    def status(self, namespace: Namespace, waiting: int) -> TierStatus:
        """What readers of a namespace's directory are told; `waiting` bytes come after these."""
        return TierStatus(
            usable=self.serves(namespace),
            latency_us=self.pace.latency_us,
            bytes_per_second=self.pace.bytes_per_second,
            queued_bytes=self.get_bytes + waiting,
        )

    def __repr__(self) -> str:
        return (
            f"<Tier {self.index} {self.name} {'up' if self.up else 'down'}, {self.breaker!r},"
            f" {len(self.batches)} batches>"
        )


Tiers: TypeAlias = Sequence[Tier]


def tiers_of(settings: Iterable[tuple[TierSetting, str, bool]]) -> list[Tier]:
    """The tiers of these settings, each with its medium and whether it is shared."""
    tiers: list[Tier] = []
    for setting, medium, shared in settings:
        same = 1 + sum(tier.setting.kind == setting.kind for tier in tiers)
        name = setting.kind if same == 1 else f"{setting.kind}-{same}"
        tiers.append(Tier(len(tiers), name, setting, medium, shared=shared))
    return tiers


def first_of(tiers: Tiers, bits: int, namespace: Namespace) -> Tier | None:
    """The first tier whose bit is set and that serves the namespace."""
    for tier in tiers:
        if bits >> tier.index & 1 and tier.serves(namespace):
            return tier
    return None
