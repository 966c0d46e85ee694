"""Lanes of CUDA devices: who gets one, and what becomes of one that cannot serve."""

import pytest
from msgspec.structs import replace

from kvd.broker.admission import FAILED_SECONDS, MAX_CUDA_LANES
from kvd.broker.broker import Broker
from kvd.broker.effects import DropFds, DropLane, Effect, Event, KillLane, Reply, StartLane, ToLane
from kvd.broker.sessions import Session
from kvd.broker.status_report import status_report
from kvd.metrics.counts import LaneCounts
from kvd.wire.link import (
    LaneFailed,
    LanePong,
    Released,
    ReleaseWorker,
)
from kvd_proto.messages import (
    Error,
    ErrorCode,
    Message,
    Ok,
    Registered,
    Unregister,
)
from tests.broker.brokers import (
    CUDA,
    join,
    lane_up,
    make_broker,
    mapped,
    refusal,
    register,
    replies,
)


@pytest.fixture
def broker() -> Broker:
    """One whose host lane is up and whose pool is there."""
    made = make_broker()
    lane_up(made)
    return made


def answers(effects: list[Effect]) -> list[type[Message]]:
    """The types of the replies."""
    return [type(reply.message) for reply in replies(effects)]


def serve(broker: Broker, session: Session, incarnation: int = 2) -> None:
    """Register on CUDA with a lane that starts and maps the memory."""
    effects = broker.request(session, 2, register(CUDA), 0.0, 2)
    assert StartLane(CUDA) in effects
    lane_up(broker, CUDA, incarnation=incarnation)
    done = mapped(broker, session, CUDA)
    assert answers(done) == [Registered]


def test_the_first_worker_of_a_device_starts_its_lane(broker: Broker) -> None:
    """One lane for all workers of a device; the daemon stays ready while it starts."""
    serve(broker, join(broker, "worker", "one"))
    again = broker.request(join(broker, "worker", "two"), 2, register(CUDA), 0.0, 2)
    assert not [effect for effect in again if isinstance(effect, StartLane)]
    assert list(broker.state.lanes) == ["host", CUDA]


def test_a_registration_that_cannot_be_served_takes_no_device_away(broker: Broker) -> None:
    """Refused for its layout as the first of a device, it leaves the lane to who comes next."""
    wrong = replace(register(CUDA), layout=replace(register(CUDA).layout, hash_block_size=7))
    session = join(broker)
    assert "hash block size 7" in refusal(broker.request(session, 2, wrong, 0.0, 2)).text
    serve(broker, session)


def test_a_starting_lane_does_not_unready_the_daemon(broker: Broker) -> None:
    """A lane that nobody is served by yet is no reason not to be ready; a lost one is."""
    session = join(broker)
    broker.request(session, 2, register(CUDA), 0.0, 2)
    seen = [broker.state.ready]
    lane_up(broker, CUDA, incarnation=2)
    mapped(broker, session, CUDA)
    broker.supervision.lost(CUDA, "killed by signal 9")
    seen.append(broker.state.ready)
    assert CUDA in broker.state.lanes  # its worker waits for the next incarnation
    lane_up(broker, CUDA, incarnation=3)
    assert [*seen, broker.state.ready] == [True, False, True]


@pytest.mark.parametrize("device", ["cuda:0", "gpu", "cuda", f"cuda:{'0F' * 16}", f"{CUDA}0"])
def test_a_device_without_a_uuid_is_refused(broker: Broker, device: str) -> None:
    """An index, or what is no device at all, is refused with the remedy."""
    error = refusal(broker.request(join(broker), 2, register(device), 0.0, 2))
    assert error.code is ErrorCode.BAD_LAYOUT
    assert repr(device) in error.text
    assert "nvidia-smi -L" in error.text
    assert list(broker.state.lanes) == ["host"]


def test_a_lane_that_cannot_start_refuses_in_its_own_words(broker: Broker) -> None:
    """Everybody who waits is refused with the lane's sentence; who asks soon after, too."""
    sessions = [join(broker, "worker", name) for name in ("one", "two")]
    for session in sessions:
        assert not replies(broker.request(session, 2, register(CUDA), 0.0, 2))
    effects = broker.supervision.received(CUDA, LaneFailed(error="no such device"), 0.0)
    assert KillLane(CUDA, "no such device") in effects
    effects = broker.supervision.lost(CUDA, "exit status 1")
    errors = [r.message for r in replies(effects) if isinstance(r.message, Error)]
    assert [(e.code, e.text) for e in errors] == [(ErrorCode.BAD_LAYOUT, "no such device")] * 2
    lines = [effect.text for effect in effects if isinstance(effect, Event)]
    assert [line.partition(" (")[0] for line in lines] == ["engine one worker", "engine two worker"]
    assert effects[-1] == DropLane(CUDA)
    assert list(broker.state.lanes) == ["host"]
    again = refusal(broker.request(sessions[0], 3, register(CUDA), 1.0, 2))
    assert again.text == "no such device"  # at once, without a process
    assert StartLane(CUDA) in broker.request(sessions[0], 4, register(CUDA), FAILED_SECONDS + 1, 2)


def test_a_lane_that_dies_at_its_start_may_be_tried_again(broker: Broker) -> None:
    """Without a word of its own the refusal says how it ended, and that is no verdict."""
    broker.request(join(broker), 2, register(CUDA), 0.0, 2)
    error = refusal(broker.supervision.lost(CUDA, "killed by signal 11"))
    assert error.code is ErrorCode.LANE_LOST
    assert "killed by signal 11" in error.text
    assert CUDA not in broker.state.lanes


def test_a_lane_that_ends_without_workers_is_let_go(broker: Broker) -> None:
    """It stays while it lives, and is not replaced; what it has done stays counted."""
    session = join(broker)
    serve(broker, session)
    broker.lost(session)
    assert CUDA in broker.state.lanes
    counters = LaneCounts(store_bytes=4096)
    pong = LanePong(counters=counters)
    broker.supervision.received(CUDA, pong, 0.0)
    assert DropLane(CUDA) in broker.supervision.lost(CUDA, "exit status 0")
    totals = status_report(broker.state, 1, "test", 0.0)["counters"]
    assert (totals["store_bytes"], totals["restarts"]) == (4096, 1)


def test_a_release_ends_with_its_own_lane(broker: Broker) -> None:
    """A worker that leaves while lanes die is answered once, by the end of the one that had it."""
    session = join(broker)
    serve(broker, session)
    assert not replies(broker.request(session, 3, Unregister(), 0.0))
    assert not replies(broker.supervision.lost("host", "killed by signal 9"))
    effects = broker.supervision.lost(CUDA, "killed by signal 9")
    assert answers(effects) == [Ok]
    assert effects[-1] == DropLane(CUDA)


def test_a_worker_that_leaves_while_the_next_lane_maps_is_released_there(
    broker: Broker,
) -> None:
    """The lane was asked to map it, so it is asked to let go, and no answer of it counts."""
    session = join(broker)
    serve(broker, session)
    broker.supervision.lost(CUDA, "killed by signal 9")
    lane_up(broker, CUDA, incarnation=3)
    effects = broker.request(session, 3, Unregister(), 0.0, 2)
    assert not replies(effects)
    assert ToLane(CUDA, ReleaseWorker(session=session.number)) in effects
    mapped(broker, session, CUDA)
    assert session.registration is None
    released = broker.supervision.received(CUDA, Released(session=session.number), 0.0)
    assert answers(released) == [Ok]
    kinds = [type(effect) for effect in released]
    assert kinds.index(DropFds) < kinds.index(Reply), "nobody has the memory once it is told so"


def test_a_late_answer_to_a_registration_is_not_that_of_the_next(
    broker: Broker,
) -> None:
    """A lane that maps too late maps for nobody: the memory that comes next is not there yet."""
    session = join(broker)
    broker.request(session, 2, register(CUDA), 0.0, 2)
    lane_up(broker, CUDA, incarnation=2)
    assert "did not map the memory in time" in refusal(broker.tick(100.0)).text
    assert not replies(broker.request(session, 3, register(CUDA), 100.0, 2))
    assert not replies(mapped(broker, session, CUDA))
    assert session.registration is None
    assert replies(mapped(broker, session, CUDA, attempt=1))


def test_workers_that_were_served_wait_for_a_lane_that_fails(broker: Broker) -> None:
    """A lane that is lost and cannot start now is tried again for them, newcomers are refused."""
    serve(broker, join(broker, "worker", "old"))
    broker.supervision.lost(CUDA, "killed by signal 9")
    new = join(broker, "worker", "new")
    assert not replies(broker.request(new, 2, register(CUDA), 0.0, 2))
    broker.supervision.received(CUDA, LaneFailed(error="the device is lost"), 0.0)
    effects = broker.supervision.lost(CUDA, "exit status 1")
    assert refusal(effects).text == "the device is lost"
    assert CUDA in broker.state.lanes
    assert broker.state.lanes[CUDA].last_error == "the device is lost"


def test_the_number_of_lanes_is_bounded(broker: Broker) -> None:
    """A registration that would need one lane too many is refused."""
    for index in range(MAX_CUDA_LANES):
        device = f"cuda:{index:032x}"
        assert StartLane(device) in broker.request(
            join(broker, "worker", f"e{index}"), 2, register(device), 0.0, 2
        )
    error = refusal(broker.request(join(broker, "worker", "more"), 2, register(CUDA), 0.0, 2))
    assert error.code is ErrorCode.LIMIT
    assert CUDA in error.text


def test_silence_counts_only_while_the_broker_listens(broker: Broker) -> None:
    """After a pause of its own the broker kills no lane; one that stays silent it does."""
    timeout = broker.state.settings.lane_timeout_seconds
    effects = broker.tick(0.1) + broker.tick(100.0)
    assert not [effect for effect in effects if isinstance(effect, KillLane)]
    times = [100.0 + timeout * part / 4 for part in range(1, 9)]
    killed = [now for now in times for e in broker.tick(now) if isinstance(e, KillLane)]
    assert len(killed) == 1
    assert killed[0] > 100.0 + timeout / 2


def test_a_slow_broker_still_notices_a_silent_lane(broker: Broker) -> None:
    """However long each turn of the broker takes, a lane that never answers is killed."""
    effects = [effect for turn in range(20) for effect in broker.tick(turn * 100.0)]
    (killed,) = [effect for effect in effects if isinstance(effect, KillLane)]
    assert killed.why.startswith("did not report for ")
