"""Processes that the broker starts or serves, and how they end; loops that stand still."""

import itertools
import os
import re
import select
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from kvd.config.settings import Settings
from kvd.machine.process import LoopUsage, StallDetector
from kvd.server.children import Children, HttpProcess, LaneProcess
from kvd_proto.channel import close_all
from kvd_proto.messages import (
    MAX_TEXT,
    Detached,
    Error,
    Ping,
    Pong,
    Unregister,
    Welcome,
)
from tests.broker.brokers import hello
from tests.raw_client import RawClient, registration
from tests.server.rig import Rig
from tests.waiting import DEADLINE

SECONDS = 100
LONGEST_PAUSE = 5.0
Turn = Callable[[float], None]


def children_of(runtime_dir: Path, poller: select.epoll, reasons: list[str]) -> Children:
    """A broker's children; `reasons` gets why one is lost."""
    core: Any = SimpleNamespace(
        state=SimpleNamespace(settings=Settings(), boot_id=bytes(16), tiers=()),
        supervision=SimpleNamespace(lost=lambda _, reason: reasons.append(reason)),
    )
    return Children(runtime_dir, core, poller, lambda _: None)


@pytest.fixture(params=["lane", "http"])
def turn(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Turn]:
    """The loop's turn for one kind of child."""
    poller = select.epoll()
    if request.param == "lane":
        children = children_of(tmp_path, poller, [])
        children.add_lane("host")
        pool: Any = SimpleNamespace(fd=0, nbytes=4096, ready=False)
        yield lambda now: children.start_due(pool, now)
        return
    http = HttpProcess(tmp_path, tmp_path / "http.sock", "127.0.0.1:0", poller)
    yield lambda now: http.turn({}, now)
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
        lines = [record for record in caplog.records if record.name.startswith("kvd.")]
        if lines:
            assert "cannot be started" in lines[0].getMessage()
            tries.append(step / 100)
    pauses = [round(after - before, 1) for before, after in itertools.pairwise(tries)]
    assert pauses == sorted(pauses)
    assert pauses[0] < 1.0
    assert pauses[-1] == pytest.approx(LONGEST_PAUSE, abs=0.02)


_EXITS = """\
import os, sys, time
os.close(int(sys.argv[-1]))
time.sleep(0.3)
os._exit(3)
"""
_WAITS = "import signal; signal.pause()"
_SENDS_NO_ZMTP = """\
import os, signal, sys
os.write(int(sys.argv[-1]), b"ready")
signal.pause()
"""


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Runs a program as a lane, does something to it, and returns why it is lost."""
    program = tmp_path / "program"
    monkeypatch.setattr(sys, "executable", str(program))
    reasons: list[str] = []
    poller = select.epoll()
    children = children_of(tmp_path, poller, reasons)
    process = children.add_lane("host")

    def run(text: str, act: Callable[[LaneProcess], object] = lambda _: None) -> str:
        program.write_text(f"#!{sys.base_prefix}/bin/python3\n{text}")
        program.chmod(0o700)
        assert process.start(0.0)
        act(process)
        while process.running:
            process.turn(dict(poller.poll(DEADLINE)), 0.0)
        return reasons.pop()

    yield run
    children.close()


def test_the_reason_of_an_end_says_who_ended_the_process(lost: Callable[..., str]) -> None:
    """By kvd and why; by a signal from elsewhere; by itself, though its link closed before."""
    assert lost(_WAITS, lambda process: process.kill("hung")) == "killed by kvd: hung"
    assert lost(_WAITS, lambda process: os.kill(process.pid, 9)) == "killed by signal 9"
    assert lost(_EXITS) == "exit status 3"
    assert lost(_SENDS_NO_ZMTP).startswith("killed by kvd: sent what is no message: ")


def test_an_http_process_that_does_not_report_is_replaced_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The line says for how long nothing came; that the broker itself stood still counts not."""
    poller = select.epoll()
    http = HttpProcess(tmp_path, tmp_path / "http.sock", "127.0.0.1:0", poller)
    for now in (0.0, 10.0, 90.0):  # it begins, starts the process, stands still
        http.turn({}, now)
    pid = http.pid
    for now in range(91, 122):
        assert http.pid == pid
        http.turn({}, float(now))
    while http.pid >= 0:
        http.turn(dict(poller.poll(DEADLINE)), 121.0)
    http.close()
    lines = [record.getMessage() for record in caplog.records if record.levelname != "INFO"]
    assert lines == ["the HTTP process has ended: killed by kvd: did not report for 31.0 s"]


@pytest.mark.parametrize(
    ("turn", "usage", "waited", "patience", "line"),
    [
        (3.2, (3.1, 0.0, 0), 0.25, 0.25, "3.2 s, 3.1 s of it at work.* a bug in kvd"),
        (
            3.2,
            (0.1, 2.9, 0),
            0.25,
            0.25,
            "3.2 s, 0.1 s .* worked 2.9 s.*, its loop .* a bug in",
        ),
        (3.2, (0.1, 0.2, 7), 0.25, 0.25, "3.2 s, 0.1 s .* worked 0.2 s, 7 page faults .* stopped"),
        (0.0, (0.0, 0.0, 0), 2.5, 0.5, "2.0 s, 0.0 s of it at work.* was stopped"),
        (0.6, (0.6, 0.0, 0), 0.9, 0.25, "1.2 s, 0.6 s of it at work.* waited for a processor"),
        (1.5, (0.0, 0.0, 0), 3600.0, None, "1.5 s, 0.0 s of it at work.* or the system$"),
    ],
    ids=["work", "other threads", "in the turn", "while waiting", "both", "endless wait"],
)
def test_a_standstill_is_logged_once(
    turn: float,
    usage: tuple[float, float, int],
    waited: float,
    patience: float | None,
    line: str,
) -> None:
    """With what was measured meanwhile and of what kind it was; the turns after are ordinary ones.

    It is no bug where neither the loop nor another thread of the process was at work.
    """
    now, used = 100.0, LoopUsage(5.0, 9.0, 3)
    loop, lines = StallDetector("broker", lambda: used), []
    ordinary = (0.001, (0.001, 0.0, 0), 0.25, 0.25)
    for took, (own, others, faults), wait, longest in (
        ordinary,
        (turn, usage, waited, patience),
        ordinary,
        ordinary,
    ):
        now += took
        used = LoopUsage(used[0] + own, used[1] + own + others, used[2] + faults)
        loop.waits(now, longest)
        now += wait
        lines.append(loop.woke(now))
    stall = lines.pop(1)
    assert re.search(f"stood still for {line}", stall)
    assert ("a bug" in line) == ("a bug" in stall)
    assert not any(lines)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """Without any session."""
    with Rig(tmp_path) as made:
        yield made


def test_a_process_that_has_ended_ends_its_session_though_a_child_has_its_socket(
    rig: Rig,
) -> None:
    """The end of the process is enough; what it sent before is served."""
    reading, writing = os.pipe()
    if not (process := os.fork()):  # it connects, and leaves the connection to a child
        client = RawClient(rig.runtime_dir)
        client.ask(hello())
        client.request(Unregister())
        if not os.fork():
            os.close(writing)
            os.read(reading, 1)
        os._exit(0)
    while not os.waitpid(process, os.WNOHANG)[0]:
        rig.turn()
    rig.settle()
    assert rig.core.state.counts.requests["Unregister"] == 1
    assert len(rig.sessions) == 0
    close_all((reading, writing))


def test_a_peer_that_does_not_take_its_notices_is_disconnected(rig: Rig) -> None:
    """What waits for it is bounded; its session ends in the next turn, not among the effects."""
    with RawClient(rig.runtime_dir):
        rig.turn()
        (number,) = rig.core.state.registry.sessions
        while rig.sessions.due() > rig.now:
            rig.sessions.notify(number, Detached(reason="x" * MAX_TEXT), ())
        assert len(rig.sessions) == 1
        rig.turn()
        assert len(rig.sessions) == 0
        assert not rig.core.state.registry.sessions


def test_descriptors_of_a_refused_registration_are_closed(rig: Rig) -> None:
    """The session goes on."""
    with RawClient(rig.runtime_dir) as client:
        assert isinstance(rig.ask(client, hello()), Welcome)
        before = psutil.Process().num_fds()
        memory = [os.memfd_create("m") for _ in range(3)]
        refused = rig.ask(client, registration(), memory)
        close_all(memory)
        assert isinstance(refused, Error)  # no lane is there for its device
        assert psutil.Process().num_fds() == before
        assert isinstance(rig.ask(client, Ping()), Pong)
