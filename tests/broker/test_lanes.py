"""Lanes: demand, lanes that cannot serve, silence, and what readiness says."""

from typing import Any

import pytest

from kvd.broker.admission import FAILED_SECONDS, MAX_CUDA_LANES
from kvd.broker.broker import Broker
from kvd.broker.children import FATAL_IMPORT_SECONDS, ChildState
from kvd.broker.effects import (
    DropFds,
    DropLane,
    Effect,
    EndSession,
    KillLane,
    LogEvent,
    Reply,
    StartLane,
    ToLane,
)
from kvd.broker.sessions import Session
from kvd.broker.status_report import readiness_checks, status_report
from kvd.client_names import Peer
from kvd.metrics.schema import CheckStatus
from kvd.pool.geometry import MIN_PIECE_BYTES
from kvd.wire.link import (
    Imported,
    Importing,
    ImportWorker,
    LaneFailed,
    LanePong,
    PoolUsable,
    Released,
    ReleaseWorker,
    StopLane,
)
from kvd_proto.messages import Error, ErrorCode, Ok, Registered, Step, Stepped, Unregister
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

POOL = 64 * 2**20


@pytest.fixture
def broker() -> Broker:
    """One whose host lane is up and whose pool is there."""
    made = make_broker(POOL)
    lane_up(made)
    return made


def request(broker: Broker, session: Session, now: float = 0.0, device: str = CUDA) -> list[Effect]:
    """A worker asks for its registration; return what the broker does then."""
    return broker.request(session, 2, register(device), now, 2)


def serve(broker: Broker, **lane: Any) -> Session:
    """A worker is registered, whose CUDA lane starts and maps the memory."""
    session = join(broker)
    assert StartLane(CUDA) in request(broker, session)
    lane_up(broker, CUDA, **lane)
    (reply,) = replies(mapped(broker, session, CUDA))
    assert isinstance(reply.message, Registered)
    return session


def events(effects: list[Effect]) -> list[str]:
    """The lines of the log among the effects."""
    return [effect.text for effect in effects if isinstance(effect, LogEvent)]


def imports(effects: list[Effect]) -> list[int]:
    """The sessions whose memory lanes are asked to map."""
    orders = [effect.message for effect in effects if isinstance(effect, ToLane)]
    return [order.session for order in orders if isinstance(order, ImportWorker)]


# ----------------------------------------------------------------------- demand


def test_a_starting_lane_does_not_unready_the_daemon(broker: Broker) -> None:
    """Before a lane serves anyone it does not count; a lost one does until the next is up."""
    session = join(broker)
    request(broker, session)
    is_ready = [broker.state.ready]
    lane_up(broker, CUDA)
    mapped(broker, session, CUDA)
    broker.supervision.lost(CUDA, "killed by signal 9")
    is_ready.append(broker.state.ready)
    assert CUDA in broker.state.lanes  # its worker waits for the next incarnation
    lane_up(broker, CUDA, incarnation=3)
    assert [*is_ready, broker.state.ready] == [True, False, True]


def test_a_lane_that_cannot_start_refuses_in_its_own_words(broker: Broker) -> None:
    """All who wait are refused with the lane's sentence, and so are those who ask soon after."""
    sessions = [join(broker, "worker", name) for name in ("one", "two")]
    for session in sessions:
        assert not replies(request(broker, session))
    effects = broker.supervision.received(CUDA, LaneFailed(error="no such device"), 0.0)
    assert KillLane(CUDA, "no such device") in effects
    effects = broker.supervision.lost(CUDA, "exit status 1")
    errors = [reply.message for reply in replies(effects)]
    assert errors == [Error.of(ErrorCode.BAD_LAYOUT, "no such device")] * 2
    lines = [line.partition(" (")[0] for line in events(effects)]
    assert lines == ["engine one worker", "engine two worker"]
    assert effects[-1] == DropLane(CUDA)
    assert list(broker.state.lanes) == ["host"]
    assert refusal(request(broker, sessions[0], 1.0)).text == "no such device"  # without a process
    assert StartLane(CUDA) in request(broker, sessions[0], FAILED_SECONDS + 1)


@pytest.mark.parametrize("when", ["mapping", "bound"])
def test_a_worker_that_its_lane_cannot_serve_registers_anew(broker: Broker, when: str) -> None:
    """The lane could not map its memory again, or not bind it: its session ends, with the reason.

    So a lack of descriptors that passes costs misses for a moment, and not until a restart.
    """
    session = serve(broker)
    if when == "mapping":
        broker.supervision.lost(CUDA, "killed by signal 9")
        lane_up(broker, CUDA, incarnation=3)
    error = Imported(session=session.number, error="Too many open files")
    effects = broker.supervision.received(CUDA, error, 0.0)
    assert EndSession(session.number, "Too many open files") in effects


def test_a_worker_that_leaves_while_the_next_lane_maps_is_released_there(broker: Broker) -> None:
    """The lane was asked to map it, so it is asked to let go, and no answer of it counts."""
    session = serve(broker)
    broker.supervision.lost(CUDA, "killed by signal 9")
    lane_up(broker, CUDA, incarnation=3)
    effects = broker.request(session, 3, Unregister(), 0.0, 2)
    assert not replies(effects)
    assert ToLane(CUDA, ReleaseWorker(session=session.number)) in effects
    mapped(broker, session, CUDA)
    assert session.registration is None
    released = broker.supervision.received(CUDA, Released(session=session.number), 0.0)
    dropped, reply = [e for e in released if isinstance(e, DropFds | Reply)]  # in this order
    assert isinstance(dropped, DropFds)
    assert isinstance(reply, Reply)
    assert reply.message == Ok()


def test_a_late_answer_to_a_registration_is_not_that_of_the_next(broker: Broker) -> None:
    """A lane that maps after the deadline does not map for the registration that follows."""
    session = join(broker)
    request(broker, session)
    lane_up(broker, CUDA)
    assert "did not map the memory in time" in refusal(broker.tick(100.0)).text
    assert not replies(request(broker, session, 100.0))
    assert not replies(mapped(broker, session, CUDA))
    assert session.registration is None
    assert replies(mapped(broker, session, CUDA, attempt=1))


def test_the_number_of_lanes_is_bounded(broker: Broker) -> None:
    """A registration that would need one lane too many is refused."""
    for index in range(MAX_CUDA_LANES):
        device, session = f"cuda:{index:032x}", join(broker, "worker", f"e{index}")
        assert StartLane(device) in request(broker, session, device=device)
    error = refusal(request(broker, join(broker, "worker", "more")))
    assert error.code is ErrorCode.LIMIT
    assert CUDA in error.text


def test_memory_that_ended_two_lanes_is_not_mapped_again(broker: Broker) -> None:
    """It is refused with the reason, in a new session too, for a while; others are served."""
    bad, good = (join(broker, "worker", name) for name in ("bad", "good"))
    for session in (bad, good):
        request(broker, session)
    for incarnation in (2, 3):
        assert imports(lane_up(broker, CUDA, incarnation=incarnation)) == [bad.number, good.number]
        broker.supervision.received(CUDA, Importing(session=bad.number), 0.0)
        effects = broker.supervision.lost(CUDA, "killed by signal 11")
        assert any("mapped the memory of engine bad" in line for line in events(effects))
    error = refusal(effects)
    assert error.code is ErrorCode.BAD_LAYOUT
    assert f"lane {CUDA} ended 2 times while it mapped the memory of pid 1" in error.text
    assert "killed by signal 11" in error.text
    assert imports(lane_up(broker, CUDA, incarnation=4)) == [good.number]
    anew, other = join(broker, "worker", "bad"), join(broker, "worker", "bad", peer=Peer(2, 0, 0))
    for session in (bad, anew):
        assert refusal(request(broker, session, 1.0)) == error
    assert imports(request(broker, other, 1.0)) == [other.number]
    assert imports(request(broker, anew, FATAL_IMPORT_SECONDS + 1.0)) == [anew.number]


def test_a_stop_waits_for_jobs_and_then_for_memory_that_is_unpinned(broker: Broker) -> None:
    """Lanes that have jobs after the drain are killed; the others get time by what they pinned."""
    serve(broker)
    broker.supervision.received("host", LanePong(queued_jobs=2), 0.0)
    broker.supervision.received(CUDA, LanePong(pinned_bytes=400 * 2**30), 0.0)
    stops = [effect for effect in broker.stop() if isinstance(effect, ToLane)]
    assert stops == [ToLane("host", StopLane()), ToLane(CUDA, StopLane())]
    assert broker.supervision.unpin_seconds == pytest.approx(50.0)
    killed = broker.supervision.end_drain()
    assert [effect.device for effect in killed if isinstance(effect, KillLane)] == ["host"]
    assert not broker.supervision.end_drain()
    ended = broker.supervision.lost(CUDA, "exit status 0")
    assert not events(ended)
    assert broker.state.lanes[CUDA].counters.restarts == 0
    assert broker.supervision.unpin_seconds == pytest.approx(10.0)


# ---------------------------------------------------------------------- silence

LIMIT = 8.0
INTERVAL = 1.0


def killed_at(child: ChildState, begin: float, end: float) -> list[float]:
    """When the checks of a stretch of time say that it has to be killed."""
    times = [begin + INTERVAL * number for number in range(int((end - begin) / INTERVAL))]
    return [now for now in times if child.check(now, LIMIT)]


def test_a_process_that_never_says_anything_is_killed_once() -> None:
    """After the limit, counted from its start; the next one is given as long."""
    child = ChildState()
    assert not killed_at(child, 0.0, 100.0)  # none was started
    for start in (100.0, 200.0):
        child.started(start)
        assert killed_at(child, start, start + 50.0) == [start + LIMIT + INTERVAL]


def test_only_an_unanswered_ping_counts_as_silence() -> None:
    """Without one a process may be silent for ever; any message is an answer."""
    child = ChildState()
    child.started(0.0)
    child.heard(1.0)
    assert not killed_at(child, 2.0, 100.0)
    assert child.ping_due(100.0, INTERVAL)
    assert not child.ping_due(100.5, INTERVAL)
    assert child.ping_due(101.0, INTERVAL)  # its answer is owed since the first
    assert child.silent(103.0) == 3.0
    child.heard(104.0)
    assert (child.silent(105.0), child.heard_at) == (0.0, 104.0)
    child.expect(106.0)
    assert killed_at(child, 106.0, 150.0) == [106.0 + LIMIT + INTERVAL]


def test_a_broker_that_stood_still_counts_a_quarter_of_the_limit() -> None:
    """A pause of the broker kills no process, but one that never answers is killed in the end."""
    child = ChildState()
    child.started(0.0)
    child.check(0.0, LIMIT)
    pauses = [1000.0 * number for number in range(1, 10)]
    assert [now for now in pauses if child.check(now, LIMIT)] == [5000.0]


# -------------------------------------------------------------------- readiness


def check_named(broker: Broker, name: str) -> CheckStatus:
    """One of the checks."""
    (status,) = [check for check in readiness_checks(broker.state, 1.0) if check.name == name]
    return status


def test_the_pool_says_how_far_it_is_and_how_long_it_takes() -> None:
    """Percent and seconds follow from what is allocated, until all of it is."""
    broker = make_broker(POOL, allocated=0)
    lane_up(broker)
    for second in (1, 2, 3):
        broker.pool_allocated(second * POOL // 8)
        broker.tick(float(second))
    check = check_named(broker, "pool")
    assert (check.ok, check.percent) == (False, 37.5)
    assert str(check) == "pool: 24 MiB of 64 MiB are allocated (38 %, about 5 s left)"
    broker.pool_allocated(POOL)
    assert check_named(broker, "pool") == CheckStatus("pool", True, "64 MiB are allocated", 100.0)
    assert broker.state.ready


def test_the_hosts_lane_says_how_it_is() -> None:
    """Its check fails while it is not up, and says why."""
    broker = make_broker(POOL)
    assert check_named(broker, "lane host") == CheckStatus("lane host", False, "starting")
    lane_up(broker)
    assert check_named(broker, "lane host").text == "up, last heard 1.0 s ago, 0 jobs queued"
    broker.supervision.lost("host", "killed by signal 9")
    text = "lost (killed by signal 9); it is started again"
    assert check_named(broker, "lane host") == CheckStatus("lane host", False, text)


def test_a_lane_that_pins_holds_readiness_up_while_it_has_workers(broker: Broker) -> None:
    """A CUDA lane's pinning counts from its first worker on; without workers it fails nothing."""

    def usable(nbytes: int, error: str = "") -> CheckStatus:
        figures = PoolUsable(usable_bytes=nbytes, error=error, bindings=1)
        broker.supervision.received(CUDA, figures, 1.0)
        return check_named(broker, "pool")

    assert broker.state.ready
    serve(broker, usable_bytes=POOL, pins=True)
    assert check_named(broker, "pool").percent == 0.0  # the order that binds is not answered
    check = usable(POOL // 8)
    assert (check.ok, check.percent) == (False, 12.5)
    assert check.text == f"lane {CUDA} has pinned 8 MiB of 64 MiB (12 %)"
    assert usable(0, "no memory may be locked").text == f"lane {CUDA}: no memory may be locked"
    report = status_report(broker.state, 1, "test", 1.0)
    assert report["lanes"][1]["pin_error"] == "no memory may be locked"
    assert usable(POOL).text == "64 MiB are allocated and pinned"
    assert broker.state.ready


def test_stores_begin_with_the_first_piece_of_the_pool() -> None:
    """Until then no slot is lent; afterwards what is there and no more."""
    size = 4 * MIN_PIECE_BYTES
    broker = make_broker(size, allocated=0)
    lane_up(broker, usable_bytes=size)
    session, scheduler = join(broker), join(broker, "scheduler")
    request(broker, session, device="host")
    mapped(broker, session)
    engine = session.engine
    assert engine is not None
    assert engine.attached

    def lent() -> int:
        (reply,) = replies(broker.request(scheduler, 9, Step(wanted=8), 0.0))
        assert isinstance(reply.message, Stepped)
        return len(reply.message.slots)

    assert lent() == 0
    broker.pool_allocated(MIN_PIECE_BYTES)
    assert broker.state.usable_bytes(engine) == MIN_PIECE_BYTES
    assert lent() == 8
    broker.pool_allocated(size)
    assert broker.state.ready
    assert broker.state.usable_bytes(engine) is None
    lane_up(broker, usable_bytes=5)  # another lane, which pins anew
    assert broker.state.usable_bytes(engine) == 5
