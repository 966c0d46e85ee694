"""The lanes' part of the metrics: their state, and the jobs that they do."""

from collections.abc import Iterator, Sequence

from prometheus_client.core import Metric

from kvd.report.http.families import Report, counter, gauge, histogram
from kvd_proto.messages import JobStatus

WAYS = ("store", "load")


def lane_families(lanes: Sequence[Report]) -> Iterator[Metric]:
    """Every family that is computed from `lanes` of the report."""
    yield from _lanes(lanes)
    yield from _jobs(lanes)


def _lanes(lanes: Sequence[Report]) -> Iterator[Metric]:
    named = [((lane["device"],), lane) for lane in lanes]
    for name, key, text in (
        ("up", "up", "1 if the lane serves."),
        ("queued_jobs", "queued_jobs", "Jobs that wait in the lane."),
        ("oldest_job_seconds", "oldest_job_seconds", "Age of the job that has waited longest."),
        ("in_flight_bytes", "bytes_in_flight", "Bytes being copied now."),
        ("workers", "workers", "Workers' memories that the lane has imported."),
        ("pool_usable_bytes", "usable_bytes", "Bytes of the pool that the lane can copy by now."),
    ):
        values = [(where, lane[key]) for where, lane in named]
        yield gauge(f"kvd_lane_{name}", text, values, ["device"])
    yield gauge(
        "kvd_lane_silent_seconds",
        "Time since the lane was heard of; nothing while it is down.",
        [
            (where, lane["seconds_since_heard"])
            for where, lane in named
            if lane["seconds_since_heard"] is not None
        ],
        ["device"],
    )
    yield counter(
        "kvd_lane_restarts_total",
        "Times that the lane's process was started again.",
        [(where, lane["restarts"]) for where, lane in named],
        ["device"],
    )
    yield counter(
        "kvd_lane_dropped_messages_total",
        "Messages that the lane could not read, and replies that nobody took.",
        [
            ((*where, kind), lane["counters"][f"dropped_{kind}"])
            for where, lane in named
            for kind in ("frames", "replies")
        ],
        ["device", "kind"],
    )
    yield counter(
        "kvd_lane_limits_reached_total",
        "Connections that the lane closed, by the limit that they were above.",
        [
            ((*where, limit), count)
            for where, lane in named
            for limit, count in lane["counters"]["limits"].items()
        ],
        ["device", "limit"],
    )


def _jobs(lanes: Sequence[Report]) -> Iterator[Metric]:
    ways = [
        ((lane["device"], way), lane["counters"], lane["stages"].get(way, {}))
        for lane in lanes
        for way in WAYS
    ]
    labels = ["device", "direction"]
    yield counter(
        "kvd_copied_bytes_total",
        "Bytes copied between engines and pool.",
        [(where, counters[f"{where[1]}_bytes"]) for where, counters, _ in ways],
        labels,
    )
    yield counter(
        "kvd_copy_seconds_total",
        "Time in which such bytes were being copied.",
        [(where, counters[f"{where[1]}_seconds"]) for where, counters, _ in ways],
        labels,
    )
    yield counter(
        "kvd_jobs_total",
        "Jobs that have ended, by how.",
        [  # every outcome from the start, so that the first of its kind is a rise
            ((*where, outcome.value), counters["jobs"].get(f"{where[1]}_{outcome}", 0))
            for where, counters, _ in ways
            for outcome in JobStatus
        ],
        [*labels, "outcome"],
    )
    yield histogram(
        "kvd_job_stage_seconds",
        "Time that jobs spent in a stage: queued, stream_wait, copied, reported.",
        [
            ((*where, stage), spread)
            for where, _, stages in ways
            for stage, spread in stages.items()
        ],
        [*labels, "stage"],
    )
