"""What counts as a standstill of a loop, and what the log says of it."""

import pytest

from kvd.machine.process import StallDetector


def turns(*durations: tuple[float, float, float, float | None]) -> list[str]:
    """Lines of a loop: of each turn its seconds, those at work, those it waited and might wait."""
    now, cpu = 100.0, 5.0
    loop = StallDetector("broker", lambda: cpu)
    loop.waits(now, 0.25)
    lines = [loop.woke(now)]
    for turn, worked, waited, patience in durations:
        now, cpu = now + turn, cpu + worked
        loop.waits(now, patience)
        now += waited
        lines.append(loop.woke(now))
    return lines


@pytest.mark.parametrize(
    ("turn", "seconds", "cause"),
    [
        ((3.2, 3.1, 0.25, 0.25), "3.2 s, 3.1 s of it at work", "a bug in kvd"),
        ((3.2, 0.1, 0.25, 0.25), "3.2 s, 0.1 s of it at work", "swaps"),
        ((0.0, 0.0, 2.5, 0.5), "2.0 s, 0.0 s of it at work", "was stopped"),
        ((0.6, 0.6, 0.9, 0.25), "1.2 s, 0.6 s of it at work", "swaps"),
        ((1.5, 0.0, 3600.0, None), "1.5 s, 0.0 s of it at work", "swaps"),
    ],
    ids=["work", "in the turn", "while waiting", "both", "endless wait"],
)
def test_a_standstill_is_logged_once(
    turn: tuple[float, float, float, float | None], seconds: str, cause: str
) -> None:
    """With what it took and of what kind it was; the turns after it are ordinary ones."""
    before, line, *after = turns(turn, (0.001, 0.001, 0.25, 0.25), (0.001, 0.001, 0.25, 0.25))
    assert not before
    assert f"stood still for {seconds}" in line
    assert cause in line
    assert not any(after)
