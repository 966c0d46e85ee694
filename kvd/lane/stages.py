"""How long a lane's jobs spend in each stage of their lives.

stream_wait: its turn had come, the engine's stream had not come as far as the job's number
on the worker's timeline; 0 where nothing was waited for. queued: the rest of the time until
it started. copied: first to last byte. reported: last byte until Done was sent. Each job that
ended ok counts once in every stage.
"""

from kvd.lane.devices.device import Direction
from kvd.lane.jobs import LaneJob
from kvd.metrics.histogram import Histogram
from kvd.wire.link import Spread

STAGE_BOUNDS = (
    *(20e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0),
)
"""Upper bounds in seconds."""
STAGES = ("queued", "stream_wait", "copied", "reported")


class Stages:
    """A histogram for each direction and stage."""

    def __init__(self) -> None:
        self._by_way = {way: tuple(Histogram(STAGE_BOUNDS) for _ in STAGES) for way in Direction}

    def observe(self, job: LaneJob, reported_ns: int) -> None:
        """A job has ended well, and its Done was sent at `reported_ns`."""
        queued, stream_wait, copied, reported = self._by_way[job.direction]
        queued.observe((job.started_ns - job.accepted_ns - job.stream_wait_ns) / 1e9)
        stream_wait.observe(job.stream_wait_ns / 1e9)
        copied.observe((job.ended_ns - job.started_ns) / 1e9)
        reported.observe((reported_ns - job.ended_ns) / 1e9)

    def spreads(self) -> dict[str, dict[str, Spread]]:
        """For the link."""
        return {
            str(way): {
                name: Spread(bounds=each.bounds, counts=tuple(each.counts), sum=each.sum)
                for name, each in zip(STAGES, histograms, strict=True)
            }
            for way, histograms in self._by_way.items()
        }

    def __repr__(self) -> str:
        counts = ", ".join(f"{each[0].count} {way}s" for way, each in self._by_way.items())
        return f"<Stages of {counts}>"
