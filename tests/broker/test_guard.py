"""Faults of the broker's own in what it does for tiers: a tier is set aside, the daemon goes on."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from kvd.broker.tiers.breaker import State
from kvd.broker.tiers.tiering import Tiering
from kvd.wire.tiering import Ask, Get, Outcome, Put
from kvd_proto.directory import LookupResult
from tests.broker.fake_tier import TierBench, done, held
from tests.daemon.hidden import assert_hidden

DISK = "disk:/a"
HIT, MISS = LookupResult.HIT, LookupResult.MISS


@pytest.fixture(autouse=True)
def one_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories read the time that tests let pass."""
    monkeypatch.setattr("kvd_proto.tier_table.monotonic_ns", lambda: int(TierBench.now * 1e9))


class Fault:
    """Stands for a method, and raises the first times that it is called."""

    def __init__(self, owner: Any, name: str, times: int = 1, *, after: bool = False) -> None:
        self.whole: Callable[..., Any] = getattr(owner, name)
        self.left, self.after = times, after
        setattr(owner, name, self)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Raise, before or after the method has done what it does; or only do that."""
        if not self.left:
            return self.whole(*arguments, **named)
        if self.after:
            self.whole(*arguments, **named)
        self.left -= 1
        raise KeyError("a fault")


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


PLACES: dict[str, Callable[[Tiering], tuple[Any, str]]] = {
    "a get's answer": lambda tiering: (tiering.promotion, "done"),
    "a put's answer": lambda tiering: (tiering.demotion, "done"),
    "promotions that are sought": lambda tiering: (tiering.promotion, "_sorted"),
    "demotions": lambda tiering: (tiering.demotion, "work"),
    "orders of gets": lambda tiering: (tiering.promotion, "_get_all"),
    "a look": lambda tiering: (tiering, "_look"),
    "what follows": lambda tiering: (tiering, "_follow"),
    "namespaces": lambda tiering: (tiering.spaces, "tell"),
    "a namespace that is open": lambda tiering: (tiering.spaces, "opened"),
    "a scan": lambda tiering: (tiering, "_take_in"),
    "what waits": lambda tiering: (tiering.promotion, "prune"),
    "an end": lambda tiering: (tiering.promotion, "give_up"),
}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_fault_sets_the_tier_aside_and_it_is_used_again(
    place: Callable[[Tiering], tuple[Any, str]], after: bool
) -> None:
    """Once, anywhere: the log has a trace, nothing is left over, and chunks come up afterwards."""
    bench = TierBench(DISK)
    disk, tiering = bench.fakes[0], bench.broker.tiering
    bench.keep(b"a", b"b")
    fault = Fault(*place(tiering), after=after)
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
    assert disk.tier.counts.opened.get("wrong", 0) <= 1
    assert disk.tier.breaker.state is State.CLOSED
    bench.seek(b"a", b"b")
    live(bench, 2.0)
    assert bench.lookup(b"a", b"b") == [HIT, HIT]
    bench.load(bench.store(b"d"))
    live(bench, 2.0)
    assert bench.below(b"d") == 1
    stats = bench.table().slots.stats()
    assert (stats["writing"], stats["draining"]) == (0, 0)
    assert tiering.promotion._filling == {}
    assert all(not waiting.under_way for waiting in tiering.promotion._waiting.values())
    bench.check()


def test_slots_that_a_tier_may_still_write_wait_for_its_end() -> None:
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
    Fault(bench.broker.tiering.promotion, "_settle")
    disk.hangs, disk.waiting = False, [first]
    disk.answer()
    assert bench.killed == [0]
    assert bench.table().space.free_slots == free
    assert not disk.tier.up
    bench.turn(40.0)  # longer than anybody waits for a slot that a tier fills
    bench.carry_out(bench.broker.tick(bench.now))
    slots = bench.table().slots
    assert slots.stats()["draining"] >= 1
    assert set(slots._draining) >= set(second.slots.tolist())
    assert bench.lookup(b"a", b"b") == [MISS, MISS]
    disk.end()
    assert slots.stats()["draining"] == slots.stats()["writing"] == 0
    bench.check()


def test_another_tier_goes_on() -> None:
    """Only the one whose answer could not be handled is set aside."""
    bench = TierBench(f"{DISK},keep=all", "memory:,keep=all")
    first, second = bench.fakes
    bench.keep(b"a")
    bench.evict()
    Fault(bench.broker.tiering.promotion, "done")
    bench.seek(b"a")
    bench.run(0.2)
    assert bench.killed == [0]
    assert (first.tier.in_use, second.tier.in_use) == (False, True)
    bench.seek(b"a")
    bench.run(0.2)
    assert any(isinstance(order, Get) for order in second.told)
    assert not first.tier.in_use
    bench.store(b"b")
    bench.run(0.2)
    assert b"b" in [key for order in second.told if isinstance(order, Put) for key in order.keys]


def test_what_is_told_of_a_fault_shows_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception, or an answer, that holds a key is told of without it: log, trace and status."""
    bench = TierBench(DISK)
    (disk,) = bench.fakes
    bench.keep(b"a")
    bench.evict()

    def fault(*_: object) -> None:
        raise KeyError(b"SECRET")

    with monkeypatch.context() as patch:
        patch.setattr(bench.broker.tiering.promotion, "done", fault)
        bench.seek(b"a")
        bench.run(0.2)
    disk_told = [disk.tier.child.last_error, disk.tier.breaker.why]
    live(bench, 8.0)
    unknown = Ask(number=99, namespace=bench.namespace.id, keys=(b"SECRET",), deadline_ms=1)
    disk.say(replace(done(unknown, [Outcome.OK]), descriptions=(b"SECRET",)))
    told = [f"{event.text}\n{event.trace}" for event in bench.events]
    assert any("KeyError(b'…')" in text for text in disk_told)
    assert any("KeyError: b'…'" in text for text in told)
    assert any("fits no order" in text for text in told)
    assert_hidden([*told, *disk_told], b"SECR")


@pytest.mark.parametrize("name", ["_look", "_rest_of_turn"])
def test_a_fault_that_stays_is_told_after_growing_pauses(name: str) -> None:
    """The broker neither ends nor does anything else all the time, and engines miss."""
    bench = TierBench(DISK)
    bench.keep(b"a")
    bench.evict()
    Fault(bench.broker.tiering, name, times=10**6)
    live(bench, 60.0)
    assert 5 <= len(faults_told(bench)) <= 20
    bench.seek(b"a")
    assert bench.lookup(b"a") == [MISS]
    bench.check()


def test_what_was_sought_and_nobody_asked_for_is_counted() -> None:
    """Keys that found no room within two seconds."""
    bench = TierBench(f"{DISK},late=60")
    (disk,) = bench.fakes
    keys = [bytes([i]) for i in range(40)]
    namespace = bench.namespace
    disk.say(held(namespace.id, namespace.epoch, dict.fromkeys(keys, (0, 1, 0, b""))))
    bench.turn(0.1)
    disk.hangs = True
    bench.seek(*keys)
    asked = sum(len(order.keys) for order in disk.told if isinstance(order, Get))
    assert 0 < asked < 40
    bench.turn(2.5)
    assert bench.table().counts.sought_dropped == 40 - asked
