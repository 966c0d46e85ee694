"""Readiness, check by check, and the estimate while the pool is being pinned."""

from typing import Any

from kvd.broker.broker import Broker
from kvd.broker.status_report import readiness_checks, status_report
from kvd.metrics.schema import CheckStatus
from kvd.wire.link import PoolUsable
from tests.broker import brokers
from tests.broker.brokers import CUDA

POOL = 64 * 2**20


def make_broker(cpu_bytes: str = "64MiB") -> Broker:
    """A broker with the host's lane, which has not started, and no memory yet."""
    return brokers.make_broker(cpu_bytes, allocated=0)


def engine_comes(broker: Broker, device: str) -> None:
    """An engine of one rank registers memory of `device`, whose lane comes up and pins."""
    session = brokers.join(broker)
    broker.request(session, 2, brokers.register(device), 0.0, 2)
    brokers.lane_up(broker, device, usable_bytes=POOL, pins=True)
    brokers.mapped(broker, session, device)
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
    broker = make_broker()
    brokers.lane_up(broker)
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
    broker = make_broker()
    brokers.lane_up(broker)
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
    broker = make_broker()
    broker.pool_allocated(POOL)
    assert named(broker, "lane host") == CheckStatus("lane host", False, "starting")
    brokers.lane_up(broker)
    assert named(broker, "lane host").text == "up, last heard 1.0 s ago, 0 jobs queued"
    broker.supervision.lost("host", "killed by signal 9")
    check = named(broker, "lane host")
    assert (check.ok, report(broker)["lanes"][0]["state"]) == (False, "down")
    assert check.text == "lost (killed by signal 9); it is started again"
