"""What a lane has done, counted for the broker's reports."""

from collections import Counter

from kvd.lane.devices.device import Direction
from kvd.lane.jobs import LaneJob
from kvd.lane.sockets import Sockets
from kvd.lane.stages import Stages
from kvd.wire.link import LaneCounters
from kvd_proto.messages import JobStatus


class Tally:
    """Totals since the lane's start.

    Attributes:
        dropped_frames: those of workers that were no requests, or came a second time.
    """

    def __init__(self) -> None:
        self.dropped_frames = 0
        self._jobs: Counter[str] = Counter()
        self._moved: Counter[str] = Counter()
        self._stages = Stages()

    def ended(self, job: LaneJob, status: JobStatus) -> None:
        """A job has ended, and is about to be reported."""
        self._jobs[f"{job.direction}_{status}"] += 1
        self._moved[f"{job.direction}_bytes"] += job.moved_bytes
        self._moved[f"{job.direction}_ns"] += job.copy_ns

    def reported(self, job: LaneJob, now: int) -> None:
        """The Done of a job that ended ok was sent at `now`, in monotonic nanoseconds."""
        self._stages.observe(job, now)

    def refused(self, way: Direction) -> None:
        """A job was not taken."""
        self._jobs[f"{way}_{JobStatus.REFUSED}"] += 1

    def counters(self, sockets: Sockets) -> LaneCounters:
        """All of it, with what the sockets have counted."""
        return LaneCounters(
            store_bytes=self._moved["store_bytes"],
            load_bytes=self._moved["load_bytes"],
            store_ns=self._moved["store_ns"],
            load_ns=self._moved["load_ns"],
            jobs=dict(self._jobs),
            dropped_frames=self.dropped_frames + sockets.dropped_messages,
            dropped_replies=sockets.dropped_replies,
            stages=self._stages.spreads(),
            limits=dict(sockets.limits),
        )

    def __repr__(self) -> str:
        return f"<Tally of {self._jobs.total()} jobs, {self._stages!r}>"
