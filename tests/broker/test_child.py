"""The one rule by which a process counts as dead."""

from kvd.broker.children import ChildState

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
