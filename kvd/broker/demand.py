"""Lanes of CUDA devices: started for the first worker of a device, let go when none is left.

A lane that has started stays while it lives, with workers or without. One that
cannot start refuses the registrations that wait for it, and those of the next
seconds, in its own words; it is started again by itself only for workers that
were served before.
"""

from kvd.broker.admission import refused
from kvd.broker.effects import DropFds, DropLane, Effect, Event, KillLane, Reply, StartLane
from kvd.broker.lanes import Lane
from kvd.broker.state import BrokerState
from kvd.errors import Refused
from kvd.wire.link import LaneFailed
from kvd_proto.devices import is_cuda_device
from kvd_proto.messages import Error, ErrorCode

MAX_CUDA_LANES = 64
FAILED_SECONDS = 10.0  # clients ask every 2 s: not each of them is worth a process


def check_device(state: BrokerState, device: str, now: float) -> None:
    """There is a lane for `device`, or there may be one.

    Raises:
        Refused: no device that a lane could serve, a lane that could not start a moment ago, or
            too many lanes.
    """
    if device in state.lanes:
        return
    failed_at, failure = state.failed_lanes.get(device, (-FAILED_SECONDS, ""))
    if failure and now < failed_at + FAILED_SECONDS:
        raise Refused(ErrorCode.BAD_LAYOUT, failure)
    if not is_cuda_device(device):
        raise Refused(
            ErrorCode.BAD_LAYOUT,
            f"device {device!r} is not served here; served: host, and CUDA devices by their UUID"
            " without dashes, cuda:<32 hex digits> or cuda:MIG-<32 hex digits>, which"
            " `nvidia-smi -L` shows",
        )
    if sum(lane.on_demand for lane in state.lanes.values()) >= MAX_CUDA_LANES:
        raise Refused(
            ErrorCode.LIMIT,
            f"lanes of {MAX_CUDA_LANES} CUDA devices run already, {device} would be one more;"
            " restart the daemon to be rid of those that are not used any more",
            limit="cuda_lanes",
        )


def want_lane(state: BrokerState, device: str) -> list[Effect]:
    """Have a lane for `device`, which `check_device` has passed."""
    if device in state.lanes:
        return []
    state.lanes[device] = Lane(device, on_demand=True)
    if device in state.failed_lanes:  # it was said before
        return [StartLane(device)]
    return [Event(f"lane {device} is wanted", fields={"lane": device}), StartLane(device)]


def lane_failed(state: BrokerState, lane: Lane, message: LaneFailed, now: float) -> list[Effect]:
    """A lane process says why it cannot serve; what follows from that comes with its end."""
    lane.failure = message.error
    state.failed_lanes.pop(lane.device, None)
    state.failed_lanes[lane.device] = (now, message.error)
    if len(state.failed_lanes) > MAX_CUDA_LANES:
        del state.failed_lanes[next(iter(state.failed_lanes))]  # the oldest
    return [KillLane(lane.device)]


def lane_ended(state: BrokerState, lane: Lane, *, served: bool) -> list[Effect]:
    """A lane's process is gone: whether anybody is to wait for the next one.

    Args:
        state: shared.
        lane: whose process it was.
        served: it had been up.
    """
    failure, lane.failure = lane.failure, ""
    if not lane.on_demand:
        return []
    effects: list[Effect] = []
    waiting = state.waiting_for(lane.device)
    if waiting and not served:
        refusal = Error(
            code=ErrorCode.BAD_LAYOUT if failure else ErrorCode.LANE_LOST,
            text=failure
            or f"lane {lane.device} did not start: {lane.last_error}; the daemon's log says more",
        )
        for session in waiting:
            if session.pending is not None:
                effects += refused(session, session.pending.message, refusal.text)
                effects.append(Reply(session.number, session.pending.request_id, refusal))
                effects.append(DropFds(session.number))
            session.pending = None
        waiting = []
    if not waiting and not state.workers_of(lane.device):
        del state.lanes[lane.device]
        state.gone_lanes.add(lane.past)
        effects.append(DropLane(lane.device))
    return effects
