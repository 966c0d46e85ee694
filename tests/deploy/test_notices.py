"""When the service manager is told what: the timing, on a clock of the test's own."""

import itertools

import pytest

from kvd.server.notify import MAX_BEAT_SECONDS, Notifier


def said(notices: Notifier, seconds: float, *, step: float = 0.25) -> list[tuple[float, str]]:
    """Everything said by a loop that turns every `step` for `seconds`, with its time."""
    return [
        (turn * step, line)
        for turn in range(int(seconds / step) + 1)
        if notices.is_due(turn * step)
        for line in notices.lines(turn * step, "ready", None)
    ]


def test_ready_is_said_once_and_first() -> None:
    """The first turn says READY, with the status; no later one does."""
    lines = said(Notifier(watchdog_seconds=30.0), 120.0)
    assert lines[:2] == [(0.0, "READY=1"), (0.0, "STATUS=ready")]
    assert [line for _, line in lines].count("READY=1") == 1


@pytest.mark.parametrize("watchdog", [2.0, 30.0, 600.0])
def test_the_watchdog_is_fed_at_half_its_interval(watchdog: float) -> None:
    """A loop that turns feeds the watchdog every half interval, within one turn."""
    times = [
        at
        for at, line in said(Notifier(watchdog_seconds=watchdog), 4 * watchdog)
        if line == "WATCHDOG=1"
    ]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert all(watchdog / 2 <= gap <= watchdog / 2 + 0.25 for gap in gaps)
    assert len(gaps) >= 6


def test_without_a_watchdog_nothing_is_fed() -> None:
    """No WATCHDOG_USEC: READY and STATUS only."""
    assert {line for _, line in said(Notifier(), 60.0)} == {"READY=1", "STATUS=ready"}


def test_a_loop_that_stands_says_nothing_and_then_once() -> None:
    """Beats missed while the loop stood are not made up for."""
    notices = Notifier(watchdog_seconds=10.0)
    notices.lines(0.0, "ready", None)
    assert notices.lines(100.0, "ready", None) == ["WATCHDOG=1"]
    assert notices.lines(100.25, "ready", None) == []


def test_time_is_asked_for_only_while_the_pool_grows() -> None:
    """Progress since the last beat asks for one interval more; standing still and ready do not."""
    notices = Notifier(watchdog_seconds=10.0)
    extend = "EXTEND_TIMEOUT_USEC=10000000"
    assert extend in notices.lines(0.0, "0 %", 0.0)
    assert extend in notices.lines(5.0, "10 %", 10.0)
    assert extend not in notices.lines(10.0, "10 %", 10.0)
    assert extend in notices.lines(15.0, "11 %", 11.0)
    assert extend not in notices.lines(20.0, "ready", None)


def test_progress_is_told_also_without_a_watchdog() -> None:
    """A unit without WatchdogSec gets its extensions at the slowest beat."""
    notices = Notifier()
    assert notices.period == MAX_BEAT_SECONDS
    assert any(line.startswith("EXTEND_TIMEOUT") for line in notices.lines(0.0, "0 %", 0.0))


def test_the_status_is_sent_when_it_changes_and_stays_one_line() -> None:
    """A new text is said within about a second, on one line of bounded length."""
    notices = Notifier(watchdog_seconds=60.0)
    notices.lines(0.0, "ready", None)
    assert not notices.is_due(0.5)
    assert notices.lines(1.0, "lane\nhost\nis down", None) == ["STATUS=lane host is down"]
    (line,) = notices.lines(2.0, "x" * 5000, None)
    assert len(line) < 500
