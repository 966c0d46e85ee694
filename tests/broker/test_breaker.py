"""When a tier is set aside and tried again, and when a silent process counts as dead."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.broker.children import ChildState
from kvd.broker.tiers.breaker import (
    FIRST_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    QUIET_SECONDS,
    TRANSITIONS,
    Breaker,
    BreakerState,
)

LATE = 0.2


def opened() -> Breaker:
    """One that opened at 100 s."""
    breaker = Breaker(LATE)
    breaker.trip("late", 100.0, "a test")
    return breaker


def test_what_is_outstanding_and_does_not_move_opens_it() -> None:
    """After `late_seconds` without progress, and not while something moves or nothing is due."""
    breaker = Breaker(LATE)
    breaker.check(50.0, outstanding=False)
    breaker.moved_at = 100.0
    breaker.check(100.19, outstanding=True)
    breaker.moved_at = 100.19
    breaker.check(100.38, outstanding=True)
    assert breaker.closed
    breaker.check(100.4, outstanding=True)
    assert (breaker.state, breaker.reason) == (BreakerState.OPEN, "nothing moved for 0.21 s")
    assert breaker.opened == {"late": 1}


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
    breaker, now, pauses = opened(), 100.0, []
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


LIMIT = 8.0
STEP = 1.0


def killed_at(child: ChildState, begin: float, end: float) -> list[float]:
    """When the checks of a stretch of time say that it has to be killed."""
    times = [begin + STEP * number for number in range(int((end - begin) / STEP))]
    return [now for now in times if child.check(now, LIMIT)]


def test_a_process_that_never_says_anything_is_killed_once() -> None:
    """After the limit, counted from its start; the next one is given as long."""
    child = ChildState()
    assert not killed_at(child, 0.0, 100.0)  # none was started
    for start in (100.0, 200.0):
        child.started(start)
        assert killed_at(child, start, start + 50.0) == [start + LIMIT + STEP]


def test_only_what_is_owed_counts() -> None:
    """A process may be silent for as long as nobody has asked it; any message is an answer."""
    child = ChildState()
    child.started(0.0)
    child.heard(1.0)
    assert not killed_at(child, 2.0, 100.0)
    assert child.ping_due(100.0, STEP)
    assert not child.ping_due(100.5, STEP)
    assert child.ping_due(101.0, STEP)  # its answer is owed since the first
    assert child.silent(103.0) == 3.0
    child.heard(104.0)
    assert (child.silent(105.0), child.heard_at) == (0.0, 104.0)
    child.expect(106.0)
    assert killed_at(child, 106.0, 150.0) == [106.0 + LIMIT + STEP]


def test_a_broker_that_stood_still_counts_a_quarter_of_the_limit() -> None:
    """So a process is not killed for it, and one that never answers is in the end."""
    child = ChildState()
    child.started(0.0)
    child.check(0.0, LIMIT)
    pauses = [1000.0 * number for number in range(1, 10)]
    assert [now for now in pauses if child.check(now, LIMIT)] == [5000.0]
