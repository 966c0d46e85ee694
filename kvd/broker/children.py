"""Child processes as the broker sees them: liveness of every child, lanes, and fatal imports.

A child process owes a message from its start until its first one, and from a ping until the next
one. A process that owes a message for longer than a limit is killed.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from kvd.broker.effects import LogEvent
from kvd.broker.sessions import Session
from kvd.client_names import Fields
from kvd.metrics.counts import LaneCounts
from kvd.wire.link import LanePong
from kvd_proto.errors import DecodeError
from kvd_proto.messages import Register

NO_REPORT = LanePong()
"""The figures of a lane that has not answered yet."""
EXITED = "exit status 0"
"""The reason of a lost lane whose process exited as it was told."""
MAX_FATAL_IMPORTS = 2
FATAL_IMPORT_SECONDS = 600.0
MAX_WORKERS = 1024


@dataclass(slots=True)
class ChildState:
    """State of one child of the daemon, across restarts. Times are monotonic seconds.

    pid: of the process that served last; 0 before the first.
    up: the current process has reported that it serves.
    killed: the current process is being killed and has not ended yet.
    last_error: how the last process ended, or what the current one has reported.
    heard_at: time of the last message.
    owes_since: since when the process has owed a message; None if it owes none.
    stopped: `pid 12 is stopped (state T)` if a signal has stopped the process, else empty.
    """

    pid: int = 0
    up: bool = False
    killed: bool = False
    last_error: str = ""
    heard_at: float = 0.0
    owes_since: float | None = None
    stopped: str = ""
    _checked_at: float = 0.0
    _pinged_at: float = 0.0

    def started(self, now: float) -> None:
        """Record that a process was started, which owes its first message."""
        self.ended()
        self.owes_since = now

    def began_serving(self, pid: int) -> None:
        """Record that the process has reported that it serves."""
        self.up, self.pid = True, pid

    def heard(self, now: float) -> None:
        """Record a message from the process, which now owes none."""
        self.heard_at, self.owes_since, self.stopped = now, None, ""

    def expect(self, now: float) -> None:
        """Record that the process owes a message, from now unless it already owes one."""
        if self.owes_since is None:
            self.owes_since = now

    def ping_due(self, now: float, seconds: float) -> bool:
        """Return whether to ping now: once every `seconds`. If so, the process owes a message."""
        if now - self._pinged_at < seconds:
            return False
        self._pinged_at = now
        self.expect(now)
        return True

    def silent(self, now: float) -> float:
        """Return the seconds for which the process has owed a message."""
        return 0.0 if self.owes_since is None else now - self.owes_since

    def check(self, now: float, limit: float) -> str:
        """Return why the process must be killed, once; empty while it may live.

        Between two checks at most a quarter of `limit` counts: a suspended broker receives nothing.
        """
        suspended = now - self._checked_at - limit / 4
        self._checked_at = now
        if self.owes_since is None or self.killed:
            return ""
        if suspended > 0:
            self.owes_since = min(now, self.owes_since + suspended)
        silent = now - self.owes_since
        if silent <= limit:
            return ""
        self.killed = True
        return f"did not report for {silent:.1f} s{self.cause}"

    @property
    def cause(self) -> str:
        """Why the process is silent, to be appended to a text; empty if that is unknown."""
        return f": {self.stopped}" if self.stopped else ""

    def ended(self) -> None:
        """Record that the process has ended."""
        self.up = self.killed = False
        self.owes_since, self.stopped = None, ""


@dataclass(slots=True)
class Lane:
    """One device's lane: its process, and what the process last reported.

    on_demand: started for the first worker of its device; removed when its process has ended and
        no worker is left.
    pins: the lane can use the pool only where it has pinned it.
    failure: why the current process cannot serve, as it reports.
    reported_counts: counts of the current process, as `pong` has them.
    past: counts of the processes before the current one.
    reported_bytes: of the pool, which the lane could copy when it had executed `bindings_done` of
        the `bindings` orders that bind a worker.
    pool_error: why the lane will never be able to copy all of the pool.
    importing: the session whose memory it is mapping; 0 for none.
    last_used: when a session last had memory on the device, or wanted to; monotonic seconds.
    ending: the process was told to finish its jobs and exit.
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
    reported_counts: LaneCounts = field(default_factory=LaneCounts)
    past: LaneCounts = field(default_factory=LaneCounts)

    @property
    def up(self) -> bool:
        """Whether its process serves."""
        return self.child.up

    @property
    def state(self) -> str:
        """One of "up", "ending", "starting" (was never up), "down" (lost, or cannot start)."""
        if self.up:
            return "ending" if self.ending else "up"
        return "down" if self.child.last_error else "starting"

    @property
    def serves(self) -> bool:
        """Whether it takes workers."""
        return self.up and not self.ending

    @property
    def usable_bytes(self) -> int:
        """Length of the prefix of the pool, in `FillOrder`, that it can copy now.

        A newly bound worker may need memory that is not pinned yet: no byte counts as usable until
        the lane has answered that order.
        """
        return 0 if self.pins and self.bindings_done < self.bindings else self.reported_bytes

    @property
    def has_jobs(self) -> bool:
        """Whether jobs waited or were being copied at its last report."""
        return bool(self.pong.queued_jobs or self.pong.bytes_in_flight)

    @property
    def fields(self) -> Fields:
        """Identifiers of its current or last process, for events."""
        return {"lane": self.device, "incarnation": self.incarnation, "pid": self.child.pid}

    @property
    def counters(self) -> LaneCounts:
        """Totals over all incarnations."""
        return self.past + self.reported_counts

    def event(self, text: str, level: str = "info") -> LogEvent:
        """Return an event that carries this lane's identifiers."""
        return LogEvent(text, level, self.fields)

    def reported(self, pong: LanePong) -> None:
        """Record the figures and counters of a pong.

        Raises:
            DecodeError: the counters are those of another version of kvd.
        """
        try:
            self.reported_counts = msgspec.convert(pong.counters, LaneCounts)
        except msgspec.ValidationError as error:
            raise DecodeError(f"counters: {error}") from error
        self.pong = pong

    def process_ended(self, error: str) -> None:
        """Reset the state of the ended process; its counts are added to `past`.

        error: how it ended; empty if it was told to end.
        """
        self.past.add(self.reported_counts)
        self.past.restarts += bool(error)
        self.child.ended()
        self.child.last_error = error
        self.pong, self.reported_counts = NO_REPORT, LaneCounts()
        self.ending = False
        self.importing = self.bindings = self.bindings_done = 0
        self.failure = ""


# ------------------------------------------------------------- fatal imports


class WorkerKey(NamedTuple):
    """Identifies a worker, also if it registers again in another session."""

    pid: int
    engine: str
    rank: int
    device: str

    @classmethod
    def of(cls, session: Session, message: Register) -> "WorkerKey":
        """Return the key of the worker that registers, or has registered, with this message."""
        engine = session.engine.name if session.engine is not None else ""
        return cls(session.peer.pid, engine, message.rank, message.device)


@dataclass(slots=True)
class LaneEnds:
    """The lanes that ended while mapping one worker's memory: number, and the last one's error."""

    count: int = 0
    last: float = 0.0
    error: str = ""


class FatalImports:
    """Workers whose memory was being mapped when lanes ended, in the last 10 minutes.

    Mapping foreign memory may end a lane's process: by a fault in the driver, or by a call that
    hangs until the lane is killed. The next process would map the same memory again, forever. So
    each end is counted against the worker, and after `MAX_FATAL_IMPORTS` its memory is not mapped
    any more; the device's other workers are served. Any answer of a lane clears the count.
    """

    def __init__(self) -> None:
        self._ends: dict[WorkerKey, LaneEnds] = {}

    def lane_ended(self, session: Session, error: str, now: float) -> None:
        """Count the end of a lane that was mapping this session's memory."""
        if session.register_message is None:
            return
        key = WorkerKey.of(session, session.register_message)
        ends = self._ends.pop(key, None)
        if ends is None or now >= ends.last + FATAL_IMPORT_SECONDS:
            ends = LaneEnds()
        self._ends[key] = LaneEnds(ends.count + 1, now, error)
        if len(self._ends) > MAX_WORKERS:
            del self._ends[next(iter(self._ends))]  # the oldest

    def answered(self, session: Session) -> None:
        """Clear the count: a lane has mapped this session's memory or refused it, and lives."""
        if session.register_message is not None:
            self._ends.pop(WorkerKey.of(session, session.register_message), None)

    def refusal(self, session: Session, message: Register, now: float) -> str:
        """Return why this worker's memory must not be mapped; empty if it may be."""
        ends = self._ends.get(WorkerKey.of(session, message))
        if ends is None or ends.count < MAX_FATAL_IMPORTS:
            return ""
        if now >= ends.last + FATAL_IMPORT_SECONDS:
            return ""
        return (
            f"lane {message.device} ended {ends.count} times while it mapped the memory of pid"
            f" {session.peer.pid} (last: {ends.error}), so it is not mapped again for"
            f" {FATAL_IMPORT_SECONDS:.0f} s; restart the engine, and if that ends lanes too, update"
            " the GPU's driver or run the engine without kvd"
        )
