"""What the lane tells the broker while copies are still in flight: nothing too early."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvd.lane.orders import Orders
from kvd.lane.reports import Reports
from kvd.wire.link import LINK, Released, ReleaseWorker, Revoke, Revoked
from kvd.wire.seqpacket import Channel
from kvd_proto.arrays import IntArray
from kvd_proto.messages import Message, Store
from tests.lane.support import NAMESPACE, make_job
from tests.lane.test_runner import Bench


class Link:
    """Keeps what is sent to the broker."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send(self, frame: bytes) -> None:
        """Note the message."""
        self.sent.append(LINK.decode(frame)[1])

    def kinds(self) -> list[type[Message]]:
        """The types of what was sent."""
        return [type(message) for message in self.sent]


@pytest.fixture
def bench() -> Iterator[Bench]:
    """A device whose transfers stay in flight."""
    made = Bench()
    yield made
    made.close()


def orders_on(bench: Bench) -> tuple[Orders, Reports, Link]:
    """The broker's orders and the reports of ended jobs over the bench's runner and workers."""
    link = Link()
    router: Any = SimpleNamespace(limits={}, send=lambda _identity, _frame: True)
    reports = Reports(router, cast(Channel, link), bench.runner)
    return Orders(reports, bench.workers, pool_bytes=1), reports, link


def test_a_slot_is_given_back_only_when_no_copy_into_it_flies(bench: Bench) -> None:
    """Revoked is sent after the last transfer of every job that writes there has landed."""
    orders, reports, link = orders_on(bench)
    bench.submit(bench.worker(), make_job(Store, 1, [1, 2], [3, 4]))
    bench.runner.turn()
    assert len(bench.device.flying) == 2
    revoke = Revoke(
        namespace=NAMESPACE, slots=IntArray.of([4], "u4"), generations=IntArray.of([1], "u8")
    )
    orders.carry_out(revoke)
    for _ in range(2):
        reports.report_ended()
        assert Revoked not in link.kinds()
        bench.device.land()
        bench.runner.turn()
    reports.report_ended()
    answer = Revoked(namespace=NAMESPACE, slots=revoke.slots, generations=revoke.generations)
    assert link.sent[-1] == answer
    orders.carry_out(revoke)  # nothing writes there now
    reports.report_ended()
    assert link.sent[-2:] == [answer, answer]


def test_memory_is_released_only_when_no_copy_touches_it(bench: Bench) -> None:
    """Released is sent after the worker's last transfer has landed."""
    orders, reports, link = orders_on(bench)
    worker = bench.worker()
    bench.submit(worker, make_job(Store, 1, [1], [3]))
    bench.runner.turn()
    orders.carry_out(ReleaseWorker(session=worker.order.session))
    reports.report_ended()
    assert Released not in link.kinds()
    bench.device.land()
    bench.runner.turn()
    reports.report_ended()
    assert Released in link.kinds()
    assert bench.workers.by_session(worker.order.session) is None
