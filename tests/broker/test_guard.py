"""Faults of the broker's own in what it does for tiers: they begin anew, and the daemon goes on."""

from typing import Any

import pytest
from msgspec.structs import replace

from kvd.broker.tiers.breaker import BreakerState
from kvd.broker.tiers.demotion import Demotion
from kvd.broker.tiers.promotion import Promotion
from kvd.broker.tiers.tiering import Tiering
from kvd.outcomes import Outcome
from kvd.wire.tiering import Get, Lookup
from kvd_proto.directory import LookupResult, SlotState
from tests.broker.fake_tier import TierBench, done
from tests.daemon.hidden import assert_hidden

DISK = "disk:/a"
HIT, MISS = LookupResult.HIT, LookupResult.MISS


@pytest.fixture(autouse=True)
def one_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories read the time that tests let pass."""
    monkeypatch.setattr("kvd_proto.tier_table.monotonic_ns", lambda: int(TierBench.now * 1e9))


class Fault:
    """Stands for a method, and raises the first times that it is called, when it has done its part.

    Of a decision that is made anew after a fault, the class has the method.
    """

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, name: str, times: int = 1) -> None:
        self.left, whole = times, getattr(owner, name)

        def method(*arguments: Any, **named: Any) -> Any:
            result = whole(*arguments, **named)
            if not self.left:
                return result
            self.left -= 1
            raise KeyError("a fault")

        patch.setattr(owner, name, method)


def replace_killed(bench: TierBench) -> None:
    """Processes that were told to end have ended, and others begin."""
    killed, bench.killed = bench.killed, []
    for index in killed:
        bench.fakes[index].end()
        bench.fakes[index].start()


def live(bench: TierBench, seconds: float) -> None:
    """Time passes; processes that are killed end, and are replaced."""
    for _ in range(int(seconds / 0.25)):
        bench.run(0.25)
        replace_killed(bench)


def faults_told(bench: TierBench) -> list[str]:
    """Traces that the log has."""
    return [event.trace for event in bench.events if event.trace]


PLACES: dict[str, tuple[type, str]] = {
    "a get's answer": (Promotion, "get_ended"),
    "a put's answer": (Demotion, "put_ended"),
    "what is sought": (Promotion, "_take_by_tier"),
    "orders of gets": (Promotion, "_get_all"),
    "orders of puts": (Demotion, "_put"),
    "a look": (Tiering, "_check_liveness"),
    "namespaces": (Tiering, "_update_namespaces"),
    "a scan": (Tiering, "_apply_scan"),
    "an end": (Promotion, "give_up"),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_fault_replaces_the_tiers_processes_and_they_are_used_again(
    place: tuple[type, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, anywhere: the log has a trace, nothing is left over, and chunks come up afterwards."""
    bench = TierBench(DISK, "memory:")
    disk = bench.fakes[0]
    bench.keep(b"a", b"b")
    fault = Fault(monkeypatch, *place)
    bench.evict()
    bench.seek(b"a")
    live(bench, 1.0)
    bench.load(bench.store(b"c"))
    live(bench, 1.0)
    disk.end()
    disk.start()
    live(bench, 8.0)
    assert fault.left == 0
    assert len(faults_told(bench)) == 1
    assert 'raise KeyError("a fault")' in faults_told(bench)[0]
    for fake in bench.fakes:
        assert fake.tier.counts.opened["wrong"] <= 1
        assert fake.tier.counts.restarts >= 1
        assert fake.tier.breaker.state is BreakerState.CLOSED
    bench.seek(b"a", b"b")
    live(bench, 2.0)
    assert bench.lookup(b"a", b"b") == [HIT, HIT]
    bench.load(bench.store(b"d"))
    live(bench, 2.0)
    assert bench.below(b"d") == 3
    stats = bench.table().slots.stats()
    assert (stats["writing"], stats["draining"]) == (0, 0)
    bench.check()


def test_slots_that_a_tier_may_still_write_wait_for_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fault in the midst of an answer: they are not free before the process has ended."""
    bench = TierBench(DISK)
    (disk,) = bench.fakes
    bench.keep(b"a", b"b")
    bench.evict()
    disk.hangs = True
    bench.seek(b"a")
    bench.seek(b"b")
    first, second = [order for order in disk.waiting if isinstance(order, Get)]
    free = bench.table().space.free_slots
    Fault(monkeypatch, Promotion, "_settle")
    bench.woken.clear()
    disk.hangs, disk.waiting = False, [first, second]
    disk.answer()
    assert bench.killed == [0]
    assert bench.woken == [bench.engine(bench.scheduler).number]
    assert bench.table().space.free_slots == free
    assert not disk.tier.up
    bench.turn(40.0)  # longer than anybody waits for a slot that a tier fills
    bench.carry_out(bench.broker.tick(bench.now))
    slots = bench.table().slots
    draining = {*first.slots.tolist(), *second.slots.tolist()}
    assert set(slots.directory.slots_in(SlotState.DRAINING)) == draining
    assert bench.lookup(b"a", b"b") == [MISS, MISS]
    disk.end()
    assert slots.stats()["draining"] == slots.stats()["writing"] == 0
    bench.check()


def test_what_is_told_of_a_fault_shows_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception, or an answer, that holds a key is told of without it: log, trace and status."""
    bench = TierBench(DISK)
    (disk,) = bench.fakes
    bench.keep(b"a")
    bench.evict()

    def fault(*_: object) -> None:
        raise KeyError(b"SECRET")

    with monkeypatch.context() as patch:
        patch.setattr(Promotion, "get_ended", fault)
        bench.seek(b"a")
        bench.run(0.2)
    disk_told = [disk.tier.child.last_error, disk.tier.breaker.reason]
    live(bench, 8.0)
    unknown = Lookup(number=99, namespace=bench.namespace.id, keys=(b"SECRET",), deadline_ms=1)
    disk.say(replace(done(unknown, [Outcome.OK]), descriptions=(b"SECRET",)))
    told = [f"{event.text}\n{event.trace}" for event in bench.events]
    assert any("KeyError(b'…')" in text for text in disk_told)
    assert any("KeyError: b'…'" in text for text in told)
    assert any("fits no order" in text for text in told)
    assert_hidden([*told, *disk_told], b"SECR")


def test_a_fault_that_stays_is_told_after_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker neither ends nor does anything else all the time, and engines miss."""
    bench = TierBench(DISK)
    bench.keep(b"a")
    bench.evict()
    Fault(monkeypatch, Tiering, "_work", times=10**6)
    live(bench, 60.0)
    assert 5 <= len(faults_told(bench)) <= 20
    bench.seek(b"a")
    assert bench.lookup(b"a") == [MISS]
    bench.check()
