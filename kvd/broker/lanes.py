"""Lanes as the broker sees them."""

from dataclasses import dataclass, field

from kvd.broker.effects import Event
from kvd.client_names import Fields
from kvd.metrics.counts import LaneCounts
from kvd.wire.link import LanePong

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
