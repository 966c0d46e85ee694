"""When the service manager is told what: the timing, on a clock of the test's own."""

import itertools

import pytest

from kvd.server.notify import Notifier


def said(notices: Notifier, seconds: float, *, step: float = 0.25) -> list[tuple[float, str]]:
    """Everything said by a loop that turns every `step` for `seconds`, with its time."""
    return [
        (turn * step, line)
        for turn in range(int(seconds / step) + 1)
        if notices.due(turn * step)
        for line in notices.lines(turn * step, "ready", None)
    ]


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


def test_time_is_asked_for_only_while_the_pool_grows() -> None:
    """Progress since the last beat asks for one interval more; standing still and ready do not."""
    notices = Notifier(watchdog_seconds=10.0)
    extend = "EXTEND_TIMEOUT_USEC=10000000"
    assert extend in notices.lines(0.0, "0 %", 0.0)
    assert extend in notices.lines(5.0, "10 %", 10.0)
    assert extend not in notices.lines(10.0, "10 %", 10.0)
    assert extend in notices.lines(15.0, "11 %", 11.0)
    assert extend not in notices.lines(20.0, "ready", None)


def test_the_status_is_sent_when_it_changes_and_stays_one_line() -> None:
    """A new text is said within about a second, on one line of bounded length."""
    notices = Notifier(watchdog_seconds=60.0)
    notices.lines(0.0, "ready", None)
    assert not notices.due(0.5)
    assert notices.lines(1.0, "lane\nhost\nis down", None) == ["STATUS=lane host is down"]
    (line,) = notices.lines(2.0, "x" * 5000, None)
    assert len(line) < 500
