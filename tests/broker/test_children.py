"""Processes that the broker cannot start."""

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from kvd.broker.http import HttpProcess
from kvd.broker.lanes import Lanes
from kvd.settings import Settings

SECONDS = 100
LONGEST_PAUSE = 5.0
Turn = Callable[[float], None]


@pytest.fixture(params=["lane", "http"])
def turn(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Turn]:
    """The loop's turn for one kind of child."""
    poller = zmq.Poller()
    if request.param == "lane":
        core: Any = SimpleNamespace(state=SimpleNamespace(settings=Settings()))
        lanes = Lanes(tmp_path, core, poller, lambda _: None)
        lanes.add("host")
        pool: Any = SimpleNamespace(fd=0, nbytes=4096)
        yield lambda now: lanes.start_due(pool, now)
        return
    http = HttpProcess(tmp_path, tmp_path / "http.sock", "127.0.0.1:0")
    yield lambda now: http.turn(poller, {}, now)
    http.close()


def test_a_child_that_cannot_be_started_is_tried_with_growing_pauses(
    turn: Turn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Soon at first, then every 5 s, with a line each."""
    monkeypatch.setattr(sys, "executable", str(tmp_path))
    tries: list[float] = []
    for step in range(SECONDS * 100):
        caplog.clear()
        turn(step / 100)
        if caplog.records:
            assert "cannot be started" in caplog.text
            tries.append(step / 100)
    pauses = [round(after - before, 1) for before, after in itertools.pairwise(tries)]
    assert pauses == sorted(pauses)
    assert pauses[0] < 1.0
    assert pauses[-1] == pytest.approx(LONGEST_PAUSE, abs=0.02)
