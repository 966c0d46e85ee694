"""Lanes of CUDA devices: who gets one, and what becomes of one that cannot serve."""

import pytest
from msgspec.structs import replace

from kvd.broker.admission import FAILED_SECONDS, MAX_CUDA_LANES
from kvd.broker.broker import Broker
from kvd.broker.children import FATAL_IMPORT_SECONDS
from kvd.broker.effects import (
    DropFds,
    DropLane,
    Effect,
    KillLane,
    LogEvent,
    Notify,
    Reply,
    StartLane,
    ToLane,
)
from kvd.broker.sessions import Session
from kvd.broker.status_report import status_report
from kvd.client_names import Peer
from kvd.wire.link import (
    Importing,
    ImportWorker,
    LaneFailed,
    LanePong,
    Released,
    ReleaseWorker,
    StopLane,
)
from kvd_proto.messages import (
    Detached,
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
    lines = [effect.text for effect in effects if isinstance(effect, LogEvent)]
    assert [line.partition(" (")[0] for line in lines] == ["engine one worker", "engine two worker"]
    assert effects[-1] == DropLane(CUDA)
    assert list(broker.state.lanes) == ["host"]
    again = refusal(broker.request(sessions[0], 3, register(CUDA), 1.0, 2))
    assert again.text == "no such device"  # at once, without a process
    assert StartLane(CUDA) in broker.request(sessions[0], 4, register(CUDA), FAILED_SECONDS + 1, 2)


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


def importing(broker: Broker, session: Session) -> None:
    """The lane says that it is about to map the session's memory."""
    broker.supervision.received(CUDA, Importing(session=session.number), 0.0)


def imports(effects: list[Effect]) -> list[int]:
    """The sessions whose memory lanes are asked to map."""
    orders = [effect.message for effect in effects if isinstance(effect, ToLane)]
    return [order.session for order in orders if isinstance(order, ImportWorker)]


def test_memory_that_ended_two_lanes_is_not_mapped_again(broker: Broker) -> None:
    """It is refused with the reason, in a new session too, for a while; others are served."""
    bad, good = (join(broker, "worker", name) for name in ("bad", "good"))
    for session in (bad, good):
        broker.request(session, 2, register(CUDA), 0.0, 2)
    lane_up(broker, CUDA, incarnation=2)
    importing(broker, bad)
    lost = broker.supervision.lost(CUDA, "killed by signal 11")
    assert not replies(lost)
    assert any("while it mapped the memory of engine bad" in e.text for e in events(lost))
    assert imports(lane_up(broker, CUDA, incarnation=3)) == [bad.number, good.number]
    importing(broker, bad)
    error = refusal(broker.supervision.lost(CUDA, "killed by signal 7"))
    assert error.code is ErrorCode.BAD_LAYOUT
    assert f"lane {CUDA} ended 2 times while it mapped the memory of pid 1" in error.text
    assert "killed by signal 7" in error.text
    assert imports(lane_up(broker, CUDA, incarnation=4)) == [good.number]
    anew, other = join(broker, "worker", "bad"), join(broker, "worker", "bad", peer=Peer(2, 0, 0))
    for session in (bad, anew):
        assert refusal(broker.request(session, 3, register(CUDA), 1.0, 2)) == error
    assert imports(broker.request(other, 2, register(CUDA), 1.0, 2)) == [other.number]
    later = FATAL_IMPORT_SECONDS + 1.0
    assert imports(broker.request(anew, 4, register(CUDA), later, 2)) == [anew.number]


def events(effects: list[Effect]) -> list[LogEvent]:
    """The events among the effects."""
    return [effect for effect in effects if isinstance(effect, LogEvent)]


def watch(broker: Broker, begin: float, end: float) -> list[tuple[float, ToLane | KillLane]]:
    """What lanes are told but pings, with the time; those that are up answer every second."""
    told: list[tuple[float, ToLane | KillLane]] = []
    for second in range(int(begin), int(end) + 1):
        for device, lane in broker.state.lanes.items():
            if lane.up:
                broker.supervision.received(device, LanePong(), float(second))
        effects = broker.supervision.watch(float(second))
        orders = [effect for effect in effects if isinstance(effect, ToLane | KillLane)]
        told += [
            (second, order)
            for order in orders
            if isinstance(order, KillLane) or isinstance(order.message, StopLane)
        ]
    return told


@pytest.fixture
def idle(broker: Broker) -> Broker:
    """One whose CUDA lane served a worker for 100 s, and whose last session left then."""
    broker.state.settings = replace(broker.state.settings, lane_idle_seconds=30.0)
    session = join(broker)
    serve(broker, session)
    assert not watch(broker, 0, 100)
    broker.lost(session)
    return broker


def test_a_lane_without_engines_ends_after_a_while(idle: Broker) -> None:
    """It is told once, the host's never; its end is no error, no restart, and leaves no lane."""
    (at, order), *more = watch(idle, 101, 200)
    assert (at, order, more) == (131, ToLane(CUDA, StopLane()), [])
    assert status_report(idle.state, 1, "test", 200.0)["lanes"][1]["state"] == "ending"
    assert idle.state.ready
    idle.supervision.received(CUDA, LanePong(counters={"store_bytes": 4096}), 200.0)
    effects = idle.supervision.lost(CUDA, "exit status 0")
    (line,) = events(effects)
    assert (line.text, line.level) == (f"lane {CUDA} has ended: no engine for 30 s", "info")
    assert effects[-1] == DropLane(CUDA)
    totals = status_report(idle.state, 1, "test", 200.0)["counters"]
    assert (totals["store_bytes"], totals["restarts"]) == (4096, 0)


def test_a_stop_waits_for_jobs_and_then_for_memory_that_is_unpinned(broker: Broker) -> None:
    """Lanes that have jobs after the drain are killed; the others get time by what they pinned."""
    serve(broker, join(broker))
    pinned = LanePong(pinned_bytes=400 * 2**30)
    for device, pong in (("host", LanePong(queued_jobs=2)), (CUDA, pinned)):
        broker.supervision.received(device, pong, 0.0)
    stops = [effect for effect in broker.stop() if isinstance(effect, ToLane)]
    assert stops == [ToLane("host", StopLane()), ToLane(CUDA, StopLane())]
    assert broker.supervision.unpin_seconds == pytest.approx(50.0)
    report = status_report(broker.state, 1, "test", 0.0)
    assert [lane["pinned_bytes"] for lane in report["lanes"]] == [0, 400 * 2**30]
    killed, again = broker.supervision.end_drain(), broker.supervision.end_drain()
    assert [effect.device for effect in killed if isinstance(effect, KillLane)] == ["host"]
    assert not again
    assert "not drained after 10 s, 2 jobs" in events(killed)[0].text
    ended = broker.supervision.lost(CUDA, "exit status 0")
    assert not events(ended)
    assert [type(e.message) for e in ended if isinstance(e, Notify)] == [Detached]
    assert broker.state.lanes[CUDA].counters.restarts == 0
    assert broker.supervision.unpin_seconds == pytest.approx(10.0)
