"""Workers whose memory was being mapped when a lane's process ended.

Mapping foreign memory may end a lane's process: a fault in the driver, a call that hangs until the
lane is killed. The lane is started again and would map the same memory again, for ever. So each
such end is counted against the worker whose memory it was, and at the second one that memory is
not mapped any more. Every other worker of the device is served.

A worker is known by process, engine, rank and device, so one that registers anew in another session
is still known. A lane's answer, of any kind, clears its count.
"""

from dataclasses import dataclass
from typing import NamedTuple

from kvd.broker.engines.sessions import Session
from kvd_proto.messages import Register

MOST_ENDS = 2
REMEMBERED_SECONDS = 600.0
MAX_WORKERS = 1024


class WorkerKey(NamedTuple):
    """What one worker is known by."""

    pid: int
    engine: str
    rank: int
    device: str

    @classmethod
    def of(cls, session: Session, message: Register) -> "WorkerKey":
        """The key of the worker that registers, or has registered, with this message."""
        engine = session.engine.name if session.engine is not None else ""
        return cls(session.peer.pid, engine, message.rank, message.device)


@dataclass(slots=True)
class LaneEnds:
    """How many lanes ended while they mapped one worker's memory; when and how the last one did."""

    count: int = 0
    last: float = 0.0
    error: str = ""


class FatalImports:
    """The ends of lanes by worker, those of the last 10 minutes."""

    def __init__(self) -> None:
        self._ends: dict[WorkerKey, LaneEnds] = {}

    def lane_ended(self, session: Session, error: str, now: float) -> None:
        """Count the end of a lane that was mapping this session's memory."""
        if session.stated is None:
            return
        key = WorkerKey.of(session, session.stated)
        ends = self._ends.pop(key, None)
        if ends is None or now >= ends.last + REMEMBERED_SECONDS:
            ends = LaneEnds()
        self._ends[key] = LaneEnds(ends.count + 1, now, error)
        if len(self._ends) > MAX_WORKERS:
            del self._ends[next(iter(self._ends))]  # the oldest

    def answered(self, session: Session) -> None:
        """A lane has mapped this session's memory, or refused it, and lives."""
        if session.stated is not None:
            self._ends.pop(WorkerKey.of(session, session.stated), None)

    def refusal(self, session: Session, message: Register, now: float) -> str:
        """Return why this worker's memory is not to be mapped; empty where it is."""
        ends = self._ends.get(WorkerKey.of(session, message))
        if ends is None or ends.count < MOST_ENDS or now >= ends.last + REMEMBERED_SECONDS:
            return ""
        return (
            f"lane {message.device} ended {ends.count} times while it mapped the memory of pid"
            f" {session.peer.pid} (last: {ends.error}), so it is not mapped again for"
            f" {REMEMBERED_SECONDS:.0f} s; restart the engine, and if that ends lanes too, update"
            " the GPU's driver or run the engine without kvd"
        )

    def __repr__(self) -> str:
        return f"<FatalImports of {len(self._ends)} workers>"
