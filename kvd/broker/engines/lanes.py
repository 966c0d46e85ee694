"""Lanes as the broker sees them."""

from dataclasses import dataclass, field

import msgspec

from kvd.broker.child import ChildState
from kvd.broker.effects import Event
from kvd.client_names import Fields
from kvd.metrics.counts import LaneCounts
from kvd.wire.link import LanePong
from kvd_proto.errors import DecodeError

NO_REPORT = LanePong()
"""The figures of a lane that has not answered yet."""
EXITED = "exit status 0"
"""The reason that a lost lane's process gives where it ended as it was told."""


@dataclass(slots=True)
class Lane:
    """One device's lane: its process, and what that last reported.

    on_demand: started for the first worker of its device; removed when its process has ended and
        no worker is left.
    pins: it can use the pool only where it has pinned it.
    failure: why the present process cannot serve, as it reports.
    done: what the present process has done, as `pong` has it.
    past: what the processes before the present one have done.
    reported_bytes: of the pool, which it could copy when it had executed `bindings_done` of the
        `bindings` orders that bind a worker.
    pool_error: why that will never be all of it.
    importing: the session whose memory it is mapping; 0 for none.
    last_used: when a session last had memory on the device, or wanted to; monotonic seconds.
    ending: it was told to finish its jobs and exit.
    """

    device: str
    on_demand: bool = False
    failure: str = ""
    reported_bytes: int = 0
    bindings: int = 0
    bindings_done: int = 0
    pool_error: str = ""
    importing: int = 0
    last_used: float = 0.0
    ending: bool = False
    incarnation: int = 0
    pins: bool = False
    endpoint: str = ""
    child: ChildState = field(default_factory=ChildState)
    pong: LanePong = NO_REPORT
    done: LaneCounts = field(default_factory=LaneCounts)
    past: LaneCounts = field(default_factory=LaneCounts)

    @property
    def up(self) -> bool:
        """Its process serves."""
        return self.child.up

    @property
    def state(self) -> str:
        """One of "up", "ending", "starting" (it never was up), "down" (lost, or cannot start)."""
        if self.up:
            return "ending" if self.ending else "up"
        return "down" if self.child.last_error else "starting"

    @property
    def serves(self) -> bool:
        """It takes workers."""
        return self.up and not self.ending

    @property
    def usable_bytes(self) -> int:
        """How much of the pool it can copy, in the order of `kvd.pool.geometry`.

        A worker that was just bound may need memory that is not pinned: until the lane has answered
        that order, none is known to be usable.
        """
        return 0 if self.pins and self.bindings_done < self.bindings else self.reported_bytes

    @property
    def has_jobs(self) -> bool:
        """Its last report says that jobs wait or are being copied."""
        return bool(self.pong.queued_jobs or self.pong.bytes_in_flight)

    @property
    def fields(self) -> Fields:
        """Identifiers of its present or last process, for events."""
        return {"lane": self.device, "incarnation": self.incarnation, "pid": self.child.pid}

    @property
    def counters(self) -> LaneCounts:
        """Totals over all incarnations."""
        return self.past + self.done

    def event(self, text: str, level: str = "info") -> Event:
        """Return an event that carries this lane's identifiers."""
        return Event(text, level, self.fields)

    def reported(self, pong: LanePong) -> None:
        """Take in what it holds and has done.

        Raises:
            DecodeError: its counters are those of another version of kvd.
        """
        try:
            self.done = msgspec.convert(pong.counters, LaneCounts)
        except msgspec.ValidationError as error:
            raise DecodeError(f"counters: {error}") from error
        self.pong = pong

    def process_ended(self, error: str) -> None:
        """Forget what held for its process alone; what that has done stays counted.

        error: how it ended; empty where it ended because it was told to.
        """
        self.past.add(self.done)
        self.past.restarts += bool(error)
        self.child.ended()
        self.child.last_error = error
        self.pong, self.done = NO_REPORT, LaneCounts()
        self.ending = False
        self.importing = self.bindings = self.bindings_done = 0
        self.failure = ""

    def __repr__(self) -> str:
        state = "up" if self.up else "down"
        return f"<Lane {self.device}#{self.incarnation} {state}, {self.past.restarts} restarts>"
