"""What must hold for the daemon to be ready, each in words for people.

All are ok exactly where `BrokerState.ready`. An engine that is absent fails
nothing: neither a pool whose size the first engine decides, nor a lane that
starts with its first worker.
"""

from kvd.broker.lanes import Lane
from kvd.broker.operations import by
from kvd.broker.state import BrokerState
from kvd.metrics.schema import Check
from kvd.metrics.words import duration
from kvd_proto.sizes import format_size

_UNSIZED = "its size is decided by the first engine (cpu_bytes = auto)"


def checks(state: BrokerState, now: float) -> list[Check]:
    """Every check, in the order in which a daemon passes them."""
    return [
        _pool(state),
        *(_lane(state, lane, now) for lane in state.lanes.values()),
        Check("drain", not state.draining, _drain_text(state)),
    ]


def _pool(state: BrokerState) -> Check:
    total = state.pool_bytes
    if total is None:
        return Check("pool", ok=True, text=_UNSIZED)
    pinning = state.pinning
    pinned = f" and pinned by {len(pinning)} lanes" if len(pinning) > 1 else " and pinned"
    if state.pool_usable:
        text = f"{format_size(total)} are allocated{pinned if pinning else ''}"
        return Check("pool", ok=True, text=text, percent=100.0)
    percent = min(100.0 * state.pinned_bytes / total, 99.9)
    failed = [lane for lane in pinning if lane.pool_error]
    if failed:
        text = f"lane {failed[0].device}: {failed[0].pool_error}"
        return Check("pool", ok=False, text=text, percent=percent)
    if not state.pool_ready:
        text = f"{format_size(state.allocated)} of {format_size(total)} are allocated"
    else:
        slowest = min(pinning, key=lambda lane: lane.usable_bytes)
        text = (
            f"lane {slowest.device} has pinned {format_size(slowest.usable_bytes)} of"
            f" {format_size(total)}"
        )
    left = state.progress.seconds_left(total)
    estimate = f", about {duration(left)} left" if left else ""
    return Check("pool", ok=False, text=f"{text} ({percent:.0f} %{estimate})", percent=percent)


def _drain_text(state: BrokerState) -> str:
    if state.stopping:
        return "stopping"
    if state.drain is not None:
        return f"drained by {by(state.drain.by)}; kvd resume undoes that"
    return "not draining"


def _lane(state: BrokerState, lane: Lane, now: float) -> Check:
    return Check(f"lane {lane.device}", not state.is_missing(lane), _lane_text(state, lane, now))


def _lane_text(state: BrokerState, lane: Lane, now: float) -> str:
    if lane.up:
        jobs = lane.pong.queued_jobs
        text = f"up, last heard {max(0.0, now - lane.last_seen):.1f} s ago, {jobs} jobs queued"
        if jobs:
            text += f", the oldest for {lane.pong.oldest_job_ns / 1e9:.1f} s"
        return text
    if state.pool_bytes is None:
        return "starts when the pool's size is known"
    if lane.last_error:
        return f"lost ({lane.last_error}); it is started again"
    return "starting"
