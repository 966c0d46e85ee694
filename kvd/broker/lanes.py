"""Lanes as the broker sees them, and writes that are being called back."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvd.broker.effects import Event
from kvd.cache.directory import Refs
from kvd.client_names import Fields
from kvd.metrics.counts import LaneCounts
from kvd.wire.link import LanePong, Revoke, Revoked
from kvd_proto.arrays import IntArray

NO_REPORT = LanePong()
"""The figures of a lane that has not answered yet."""


@dataclass(slots=True)
class Lane:
    """One device's lane: its process, and what that last reported.

    on_demand: it came with the first worker of its device, and goes when it ends and none is left.
    pins: it can use the pool only where it has pinned it.
    failure: why the present process cannot serve, as it reports.
    past: what the processes before the present one have done.
    usable_bytes: how much of the pool it can copy, in the order of `kvd.pool.filling`.
    pool_error: why that will never be all of it.
    """

    device: str
    on_demand: bool = False
    failure: str = ""
    usable_bytes: int = 0
    pool_error: str = ""
    incarnation: int = 0
    up: bool = False
    pins: bool = False
    pid: int = 0
    endpoint: str = ""
    last_seen: float = 0.0
    last_error: str = ""
    last_ping: float = 0.0
    killed: bool = False
    pong: LanePong = NO_REPORT
    past: LaneCounts = field(default_factory=LaneCounts)

    @property
    def state(self) -> str:
        """One of "up", "starting" (it never was up), "down" (it was lost or cannot start)."""
        if self.up:
            return "up"
        return "down" if self.last_error else "starting"

    @property
    def serves(self) -> bool:
        """It is up, and can copy some of the pool or knows that it never will."""
        return self.up and bool(self.usable_bytes or self.pool_error)

    @property
    def fields(self) -> Fields:
        """Identifiers of its present or last process, for events."""
        return {"lane": self.device, "incarnation": self.incarnation, "pid": self.pid}

    @property
    def counters(self) -> LaneCounts:
        """Totals over all incarnations."""
        return self.past + self.pong.counters

    def event(self, text: str, level: str = "info") -> Event:
        """Return an event that carries this lane's identifiers."""
        return Event(text, level, self.fields)

    def __repr__(self) -> str:
        state = "up" if self.up else "down"
        return f"<Lane {self.device}#{self.incarnation} {state}, {self.past.restarts} restarts>"


class Revocations:
    """Slots in DRAINING, and the lanes that may still write there."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[bytes, int, int], set[str]] = {}

    def start(self, namespace: bytes, slots: Refs, devices: Sequence[str]) -> Revoke:
        """Ask `devices` about these slots; the message to send to each."""
        for slot, generation in slots:
            self._waiting[namespace, slot, generation] = set(devices)
        return Revoke(
            namespace=namespace,
            slots=IntArray.of([slot for slot, _ in slots], "u4"),
            generations=IntArray.of([generation for _, generation in slots], "u8"),
        )

    def answered(self, device: str, message: Revoked) -> Refs:
        """Return the slots that no lane writes to any more, now that `device` has answered."""
        pairs = zip(
            message.slots.numpy().tolist(), message.generations.numpy().tolist(), strict=True
        )
        return [pair for pair in pairs if self._done(device, (message.namespace, *pair))]

    def lane_lost(self, device: str) -> dict[bytes, Refs]:
        """Return, by namespace, the slots that this lane, which is gone, alone held up."""
        free: dict[bytes, Refs] = {}
        for key in list(self._waiting):
            if self._done(device, key):
                namespace, slot, generation = key
                free.setdefault(namespace, []).append((slot, generation))
        return free

    def _done(self, device: str, key: tuple[bytes, int, int]) -> bool:
        waiting = self._waiting.get(key)
        if waiting is None:
            return False
        waiting.discard(device)
        if not waiting:
            del self._waiting[key]
        return not waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def __repr__(self) -> str:
        return f"<Revocations {len(self)} slots>"
