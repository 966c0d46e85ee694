"""Readiness check by check, and which part of the pool a lane can copy."""

from typing import Any

from kvd.broker.broker import Broker
from kvd.broker.effects import Notify, ToLane
from kvd.broker.sessions import Session
from kvd.broker.status_report import readiness_checks, status_report
from kvd.metrics.schema import CheckStatus
from kvd.pool.geometry import MIN_PIECE_BYTES
from kvd.wire.link import ImportWorker, PoolUsable, ReleaseWorker
from kvd_proto.messages import Attached, Detached, Step, Stepped
from tests.broker.brokers import CUDA, join, lane_up, make_broker, mapped, register, replies

POOL = 64 * 2**20


def engine_comes(broker: Broker, device: str) -> None:
    """An engine of one rank registers memory of `device`, whose lane comes up and pins."""
    session = join(broker)
    broker.request(session, 2, register(device), 0.0, 2)
    lane_up(broker, device, usable_bytes=POOL, pins=True)
    mapped(broker, session, device)
    assert broker.state.workers_of(device)


def named(broker: Broker, name: str, now: float = 1.0) -> CheckStatus:
    """One of the checks."""
    (found,) = [check for check in readiness_checks(broker.state, now) if check.name == name]
    return found


def report(broker: Broker, now: float = 1.0) -> dict[str, Any]:
    """The status."""
    return status_report(broker.state, 1, "kvd test", now)


def test_the_pool_says_how_far_it_is_and_how_long_it_takes() -> None:
    """Percent and seconds follow from what is allocated, until all of it is."""
    broker = make_broker(POOL, allocated=0)
    lane_up(broker)
    for second in (1, 2, 3):
        broker.pool_allocated(second * POOL // 8)
        broker.tick(float(second))
    check = named(broker, "pool")
    assert (check.ok, check.percent) == (False, 37.5)
    assert str(check) == "pool: 24 MiB of 64 MiB are allocated (38 %, about 5 s left)"
    broker.pool_allocated(POOL)
    assert named(broker, "pool") == CheckStatus("pool", True, "64 MiB are allocated", 100.0)
    assert broker.state.ready


def test_a_lane_that_pins_holds_readiness_up_while_it_has_workers() -> None:
    """A CUDA lane's pinning counts from its first worker on; without workers it fails nothing."""
    broker = make_broker(POOL, allocated=0)
    lane_up(broker)
    broker.pool_allocated(POOL)
    assert broker.state.ready
    engine_comes(broker, CUDA)
    assert named(broker, "pool").percent == 0.0  # it has not answered the order that binds
    broker.supervision.received(CUDA, PoolUsable(usable_bytes=POOL // 8, error="", bindings=1), 1.0)
    check = named(broker, "pool")
    assert (check.ok, check.percent) == (False, 12.5)
    assert check.text == f"lane {CUDA} has pinned 8 MiB of 64 MiB (12 %)"
    broker.supervision.received(
        CUDA, PoolUsable(usable_bytes=0, error="no memory may be locked", bindings=1), 2.0
    )
    assert named(broker, "pool").text == f"lane {CUDA}: no memory may be locked"
    assert report(broker)["lanes"][1]["pin_error"] == "no memory may be locked"
    broker.supervision.received(CUDA, PoolUsable(usable_bytes=POOL, error="", bindings=1), 3.0)
    assert broker.state.ready
    assert named(broker, "pool").text == "64 MiB are allocated and pinned"


def test_a_lost_lane_is_named_with_its_end() -> None:
    """The host's lane fails its check while it is not up, and says why."""
    broker = make_broker(POOL, allocated=0)
    broker.pool_allocated(POOL)
    assert named(broker, "lane host") == CheckStatus("lane host", False, "starting")
    lane_up(broker)
    assert named(broker, "lane host").text == "up, last heard 1.0 s ago, 0 jobs queued"
    broker.supervision.lost("host", "killed by signal 9")
    check = named(broker, "lane host")
    assert (check.ok, report(broker)["lanes"][0]["state"]) == (False, "down")
    assert check.text == "lost (killed by signal 9); it is started again"


def attached(cpu_bytes: int) -> tuple[Broker, Session]:
    """A broker whose one engine has one rank, which waits for its lane, and the rank's session."""
    broker = make_broker(cpu_bytes, allocated=0)
    session = join(broker)
    broker.request(session, 2, register(), 0.0, 2)
    return broker, session


def test_no_slot_is_lent_before_the_lane_has_looked_at_the_new_workers_arena() -> None:
    """A pinning lane's figure counts once it has executed every order that binds a worker."""
    size = 4 * MIN_PIECE_BYTES
    broker, first = attached(size)
    broker.pool_allocated(size)
    lane_up(broker, usable_bytes=size, pins=True)
    mapped(broker, first)
    assert first.engine is not None
    usable = [broker.state.usable_bytes(first.engine)]
    second = join(broker, "worker", "second")
    for message in (
        PoolUsable(usable_bytes=size, error="", bindings=1),
        None,  # another engine is bound
        PoolUsable(usable_bytes=MIN_PIECE_BYTES, error="", bindings=1),  # sent before that
        PoolUsable(usable_bytes=MIN_PIECE_BYTES, error="", bindings=2),
    ):
        if message is None:
            broker.request(second, 2, register(), 0.0, 2)
            mapped(broker, second)
        else:
            broker.supervision.received("host", message, 0.0)
        usable.append(broker.state.usable_bytes(first.engine))
    assert usable == [0, None, 0, 0, MIN_PIECE_BYTES]
    broker.supervision.lost("host", "killed by signal 9")
    lane_up(broker, usable_bytes=size, pins=True)
    mapped(broker, first)
    broker.supervision.received(
        "host", PoolUsable(usable_bytes=size, error="", bindings=1), 0.0
    )  # of this process
    assert broker.state.usable_bytes(first.engine) is None


def test_a_lane_that_cannot_pin_detaches_its_engines_until_its_next_process() -> None:
    """Sessions read the reason at once, and memory is released; what is registered holds."""
    broker, session = attached(2**20)
    lane_up(broker, pins=True)
    mapped(broker, session)
    error = PoolUsable(usable_bytes=0, error="no memory may be locked", bindings=1)
    effects = broker.supervision.received("host", error, 0.0)
    notices = [effect for effect in effects if isinstance(effect, Notify)]
    assert notices == [
        Notify(session.number, Detached(reason="lane host: no memory may be locked"))
    ]
    released = [e.message for e in effects if isinstance(e, ToLane)]
    assert released == [ReleaseWorker(session=session.number)]
    assert not broker.supervision.received("host", error, 0.0)  # it is told once
    broker.supervision.lost("host", "killed by signal 9")
    again = [e.message for e in lane_up(broker, pins=True) if isinstance(e, ToLane)]
    assert [type(order) for order in again] == [ImportWorker]
    back = mapped(broker, session)
    assert Attached in {type(e.message) for e in back if isinstance(e, Notify)}


def test_stores_begin_with_the_first_piece_of_the_pool() -> None:
    """Until then no slot is lent; afterwards what is there and no more."""
    size = 4 * MIN_PIECE_BYTES
    broker, session = attached(size)
    lane_up(broker, usable_bytes=size)
    mapped(broker, session)
    assert session.engine is not None
    assert session.engine.attached
    scheduler = join(broker, "scheduler")

    def lent() -> int:
        (reply,) = replies(broker.request(scheduler, 9, Step(wanted=8), 0.0))
        assert isinstance(reply.message, Stepped)
        return len(reply.message.slots)

    assert lent() == 0
    broker.pool_allocated(MIN_PIECE_BYTES)
    assert broker.state.usable_bytes(session.engine) == MIN_PIECE_BYTES
    assert lent() == 8
    broker.pool_allocated(size)
    assert broker.state.ready
    assert broker.state.usable_bytes(session.engine) is None
    lane_up(broker, usable_bytes=5)  # another lane, which pins anew
    assert broker.state.usable_bytes(session.engine) == 5
