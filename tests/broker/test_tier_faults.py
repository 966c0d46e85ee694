"""Tiers that hang, err or end, faults of the broker in what it does for them, and the breaker."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.broker.tiers.breaker import (
    FIRST_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    QUIET_SECONDS,
    TRANSITIONS,
    Breaker,
    BreakerState,
)
from kvd.broker.tiers.promotion import Promotion
from kvd.broker.tiers.tiering import STUCK_SECONDS, Tiering
from kvd.outcomes import Outcome
from kvd_proto.directory import LookupResult
from tests.broker.benches import STEP, FakeTier, TierBench, result_of
from tests.daemon.hidden import assert_hidden

DISK = "disk:/a"
HIT, PENDING, MISS = LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.MISS


def test_a_tier_that_moves_slowly_stays_in_use(bench: TierBench, disk: FakeTier) -> None:
    """Progress of single chunks counts, however long the batch takes."""
    bench.load(bench.store(b"a", b"b"))
    for _ in range(40):
        disk.progress += 1
        bench.turn(STEP)
    assert disk.tier.in_use


def test_one_that_is_stuck_is_killed_and_its_slots_are_free_when_it_is_dead(
    bench: TierBench, disk: FakeTier
) -> None:
    """Misses after 0.2 s, the end after 10 s; until then it may still write into its slots."""
    bench.keep(b"a")
    bench.evict()
    disk.hangs = True
    bench.seek(b"a")
    assert bench.lookup(b"a") == [PENDING]
    assert bench.namespace.directory.tiers.health(0).usable
    bench.woken.clear()
    bench.turn(0.2 + 2 * STEP)
    assert disk.tier.breaker.state is BreakerState.OPEN
    assert bench.lookup(b"a") == [MISS]
    assert not bench.namespace.directory.tiers.health(0).usable
    assert bench.woken == [bench.engine().number]
    assert not bench.killed
    bench.turn(2 * STUCK_SECONDS)
    assert bench.killed == [0]
    assert bench.table.slots.stats()["draining"] == 1
    disk.end()
    assert bench.table.slots.stats()["draining"] == 0
    bench.turn()
    assert bench.below(b"a") is None
    disk.hangs = False
    disk.start()
    bench.run(6.0)
    assert disk.tier.in_use
    assert bench.below(b"a") == 1
    assert disk.tier.counts.restarts == 1
    bench.check()


def inject(
    patch: pytest.MonkeyPatch, owner: type, name: str, error: Exception, times: int = 1
) -> None:
    """Have a method raise the first `times` that it is called, when it has done its part."""
    left, whole = iter(range(times)), getattr(owner, name)

    def method(*arguments: Any, **named: Any) -> Any:
        result = whole(*arguments, **named)
        if next(left, None) is not None:
            raise error
        return result

    patch.setattr(owner, name, method)


def live(bench: TierBench, seconds: float) -> None:
    """Time passes; processes that are killed end, and are replaced."""
    for _ in range(int(seconds / 0.25)):
        bench.run(0.25)
        killed, bench.killed = bench.killed, []
        for index in killed:
            bench.fakes[index].end()
            bench.fakes[index].start()


def test_what_is_told_of_a_fault_shows_no_key(
    bench: TierBench, disk: FakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception, or an answer, that holds a key is told of without it: log, trace and status."""
    bench.keep(b"a")
    bench.evict()
    inject(monkeypatch, Promotion, "get_ended", KeyError(b"SECRET"))
    bench.seek(b"a")
    bench.run(0.2)
    shown = [disk.tier.child.last_error, disk.tier.breaker.reason]
    live(bench, 8.0)
    bench.load(bench.store(b"SECRET", b"b"))
    bench.turn(STEP)
    (order,) = disk.orders
    disk.say(result_of(order, [Outcome.OK], [(0, 1, 0, b"SECRET")]))  # of one chunk, not of two
    assert bench.killed == [0]
    disk.end()
    assert bench.below(b"SECRET") is None
    logged = [f"{event.text}\n{event.trace}" for event in bench.events]
    assert any("KeyError(b'…')" in text for text in shown)
    assert any("KeyError: b'…'" in text for text in logged)
    assert any("fits no order" in text for text in logged)
    assert_hidden([*logged, *shown], b"SECR")


def test_a_fault_that_stays_is_told_after_growing_pauses(
    bench: TierBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker neither ends nor does anything else all the time, and engines miss."""
    bench.keep(b"a")
    bench.evict()
    inject(monkeypatch, Tiering, "_work", KeyError("a fault"), times=10**6)
    live(bench, 60.0)
    assert 5 <= sum(bool(event.trace) for event in bench.events) <= 20
    bench.seek(b"a")
    assert bench.lookup(b"a") == [MISS]
    bench.check()


LATE = 0.2


@pytest.mark.parametrize(("failed", "opens"), [(3, False), (4, True)])
def test_half_of_the_last_batches_open_it(failed: int, opens: bool) -> None:
    """Four at least, so that one error of a tier that is used little costs nothing."""
    breaker = Breaker(LATE)
    for _ in range(4):
        breaker.batch_ended(1.0, failed=False)
    for _ in range(failed):
        breaker.batch_ended(2.0, failed=True)
    assert (breaker.state is BreakerState.OPEN) is opens


def test_three_corrupt_chunks_in_a_minute_open_it() -> None:
    """Three in more than a minute do not."""
    breaker = Breaker(LATE)
    for now in (0.0, 31.0, 62.0, 93.0):
        breaker.chunk_corrupt(now)
    assert breaker.closed
    breaker.chunk_corrupt(123.0)
    assert breaker.closed
    breaker.chunk_corrupt(124.0)
    assert (breaker.state, breaker.opened) == (BreakerState.OPEN, {"corrupt": 1})


def test_pauses_double_up_to_five_seconds_and_begin_anew_after_a_quiet_time() -> None:
    """A probe that fails, or one that closes it for a moment only, makes the next one later."""
    breaker, now, pauses = Breaker(LATE), 100.0, []
    breaker.trip("late", now, "a test")
    for _ in range(8):
        pauses.append(breaker.retry_at - now)
        now = breaker.retry_at
        breaker.check(now, outstanding=False)
        breaker.batch_ended(now, failed=True)
    assert pauses == [min(FIRST_PAUSE_SECONDS * 2**i, LONGEST_PAUSE_SECONDS) for i in range(8)]
    assert breaker.opened == {"late": 1}
    now = breaker.retry_at
    breaker.check(now, outstanding=False)
    breaker.batch_ended(now, failed=False)
    assert breaker.closed
    breaker.trip("lost", now + 1, "it ended")
    assert breaker.retry_at == now + 1 + LONGEST_PAUSE_SECONDS
    now = breaker.retry_at
    breaker.check(now, outstanding=False)
    breaker.batch_ended(now, failed=False)
    breaker.trip("lost", now + QUIET_SECONDS, "it ended")
    assert breaker.retry_at == now + QUIET_SECONDS + FIRST_PAUSE_SECONDS


@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                ["moved", "good", "bad", "corrupt", "lost", "busy", "idle", "away", "nothing"]
            ),
            st.floats(0.0, 3.0),
        ),
        max_size=60,
    )
)
def test_it_is_never_used_but_by_way_of_a_probe(events: list[tuple[str, float]]) -> None:
    """It closes from half-open only, opens at once for what is bad, and pauses within bounds."""
    breaker, now = Breaker(LATE), 100.0
    for what, seconds in events:
        now += seconds
        before, due = breaker.state, breaker.retry_at
        match what:
            case "moved":
                breaker.moved_at = now
            case "good" | "bad":
                breaker.batch_ended(now, failed=what == "bad")
            case "corrupt":
                breaker.chunk_corrupt(now)
            case "lost":
                breaker.trip("lost", now, "it ended")
            case "busy" | "idle":
                breaker.check(now, outstanding=what == "busy")
            case "nothing":
                breaker.skip_probe(now)
            case _:
                breaker.excuse(seconds, now)
        after = breaker.state
        assert breaker.moved_at <= now
        if what == "lost":
            assert after is BreakerState.OPEN
        if after is not before:
            assert (before, after) in {(a, b) for (a, _), b in TRANSITIONS.items()}
            assert breaker.since == now or BreakerState.CLOSED not in {before, after}
        if after is BreakerState.HALF_OPEN and before is BreakerState.OPEN:
            assert now >= due
        if after is BreakerState.OPEN and before is not BreakerState.OPEN:
            assert (
                FIRST_PAUSE_SECONDS <= breaker.retry_at - now + 1e-9 <= LONGEST_PAUSE_SECONDS + 1e-6
            )
            assert breaker.reason
