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
    PoolUsable,
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
    lane_ready,
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
    lines = [effect.text for effect in effects if isinstance(effect, LogEvent)]
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
    pong = LanePong(counters={"store_bytes": 4096})
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
    assert broker.state.lanes[CUDA].child.last_error == "the device is lost"


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
    assert killed.reason.startswith("did not report for ")


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


def test_a_registered_worker_whose_memory_ends_lanes_stays_without_one(broker: Broker) -> None:
    """After its second end of a lane the next one maps all others; its engine reads why, once."""
    bad, good = (join(broker, "worker", name) for name in ("bad", "good"))
    serve(broker, bad)
    broker.request(good, 2, register(CUDA), 0.0, 2)
    mapped(broker, good, CUDA)
    broker.supervision.lost(CUDA, "killed by signal 9")
    told: list[Notify] = []
    for incarnation in (3, 4):
        assert imports(lane_up(broker, CUDA, incarnation=incarnation)) == [bad.number, good.number]
        importing(broker, bad)
        effects = broker.supervision.lost(CUDA, "killed by signal 11")
        told += [effect for effect in effects if isinstance(effect, Notify)]
    (notice,) = told
    assert notice.session == bad.number
    assert isinstance(notice.message, Detached)
    assert "ended 2 times while it mapped" in notice.message.reason
    assert imports(lane_up(broker, CUDA, incarnation=5)) == [good.number]
    assert bad.engine is not None
    assert not bad.engine.served


def test_a_lane_that_answers_clears_the_worker(broker: Broker) -> None:
    """Two ends of lanes count only where no lane mapped or refused the memory between them."""
    session = join(broker)
    serve(broker, session)
    for incarnation in (3, 4, 5):
        importing(broker, session)
        broker.supervision.lost(CUDA, "killed by signal 11")
        assert imports(lane_up(broker, CUDA, incarnation=incarnation)) == [session.number]
        importing(broker, session)
        mapped(broker, session, CUDA)


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


def test_a_lane_that_a_session_waits_for_or_leaves_does_not_end(broker: Broker) -> None:
    """Registering and unregistering are use, however long they take."""
    session = join(broker)
    broker.request(session, 2, register(CUDA), 0.0, 2)
    lane_up(broker, CUDA, incarnation=2)
    assert not watch(broker, 0, 400)
    mapped(broker, session, CUDA)
    broker.request(session, 3, Unregister(), 0.0)
    assert not watch(broker, 400, 800)
    broker.supervision.received(CUDA, Released(session=session.number), 800.0)
    assert [at for at, _ in watch(broker, 801, 1200)] == [1101]


def test_a_lane_that_came_too_late_for_its_worker_waits_for_another(broker: Broker) -> None:
    """The time without engines counts from the lane's start."""
    session = join(broker)
    broker.request(session, 2, register(CUDA), 0.0, 2)
    broker.lost(session)
    broker.supervision.received(CUDA, lane_ready(), 1000.0)
    assert [at for at, _ in watch(broker, 1001, 1400)] == [1301]


def test_a_worker_that_comes_while_its_lane_ends_gets_the_next_one(idle: Broker) -> None:
    """The lane that ends takes no worker; the process after it does."""
    watch(idle, 101, 140)
    session = join(idle, "worker", "late")
    effects = idle.request(session, 2, register(CUDA), 140.0, 2)
    assert not [effect for effect in effects if isinstance(effect, ToLane | StartLane)]
    assert not replies(effects)
    ended = idle.supervision.lost(CUDA, "exit status 0")
    assert not [effect for effect in ended if isinstance(effect, DropLane)]
    assert not replies(ended)
    assert imports(lane_up(idle, CUDA, incarnation=3)) == [session.number]


def test_a_lane_that_cannot_pin_ends_after_a_while_and_the_next_one_tries(broker: Broker) -> None:
    """Registered sessions do not keep it: the next process gets their memory."""
    session = join(broker)
    serve(broker, session)
    broker.supervision.received(CUDA, PoolUsable(usable_bytes=0, error="no memory"), 0.0)
    assert [at for at, _ in watch(broker, 1, 400)] == [301]
    ended = broker.supervision.lost(CUDA, "exit status 0")
    assert "could not pin the pool; the next one tries again" in events(ended)[0].text
    assert not [effect for effect in ended if isinstance(effect, DropLane)]
    assert imports(lane_up(broker, CUDA, incarnation=3)) == [session.number]


def test_a_lane_that_loses_its_device_is_replaced_and_its_reason_kept(broker: Broker) -> None:
    """The reason is in the log and the status; who registers next waits for the next process."""
    serve(broker, join(broker))
    told = broker.supervision.received(CUDA, LaneFailed(error="the device is lost"), 1.0)
    assert told == [KillLane(CUDA, "the device is lost")]
    ended = broker.supervision.lost(CUDA, "killed by kvd: the device is lost")
    assert events(ended)[-1].text == f"lane {CUDA} is lost: the device is lost"
    late = broker.request(join(broker, "worker", "late"), 2, register(CUDA), 2.0, 2)
    assert not replies(late)


@pytest.mark.parametrize("reason", ["killed by signal 11", "exit status 1"])
def test_a_lane_that_fails_while_it_ends_is_an_error(idle: Broker, reason: str) -> None:
    """Only an exit with status 0 is what it was told."""
    watch(idle, 101, 140)
    assert ("error", f"lane {CUDA} is lost: {reason}") in [
        (event.level, event.text) for event in events(idle.supervision.lost(CUDA, reason))
    ]


def test_a_lane_that_hangs_while_it_ends_is_killed(idle: Broker) -> None:
    """It is pinged as before, and silence has the same end."""
    watch(idle, 101, 140)
    effects = [effect for tick in range(141, 151) for effect in idle.supervision.watch(float(tick))]
    assert CUDA in {effect.device for effect in effects if isinstance(effect, KillLane)}


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
