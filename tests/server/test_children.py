"""Processes that the broker cannot start."""

import itertools
import os
import resource
import select
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvd.config.settings import Settings
from kvd.server.children import Children, HttpProcess, LaneProcess
from kvd.wire.link import LINK, LanePing
from kvd_proto.zmtp import frame_header, opening
from tests.waiting import DEADLINE

SECONDS = 100
LONGEST_PAUSE = 5.0
MORE_THAN_A_SOCKET_TAKES = 6000  # pings
Turn = Callable[[float], None]


def children_of(
    runtime_dir: Path, poller: select.epoll, lost: list[tuple[str, str]] | None = None
) -> Children:
    """A broker's children; those that are `lost` are noted with the reason."""
    ends = lost if lost is not None else []
    core: Any = SimpleNamespace(
        state=SimpleNamespace(settings=Settings(), boot_id=bytes(16), tiers=()),
        supervision=SimpleNamespace(lost=lambda device, reason: ends.append((device, reason))),
    )
    return Children(runtime_dir, core, poller, lambda _: None)


@pytest.fixture(params=["lane", "http"])
def turn(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Turn]:
    """The loop's turn for one kind of child."""
    poller = select.epoll()
    if request.param == "lane":
        children = children_of(tmp_path, poller)
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
_SENDS_A_DESCRIPTOR = f"""\
import signal, socket, sys
with socket.socket(fileno=int(sys.argv[-1])) as link:
    link.send({opening(b"DEALER")!r})
    socket.send_fds(link, [{frame_header(5) + b"ready"!r}], [0])
    signal.pause()
"""
_SENDS_NO_ZMTP = """\
import os, signal, sys
os.write(int(sys.argv[-1]), b"ready")
signal.pause()
"""
_READS_LATE = """\
import os, sys, time
left = {nbytes}
time.sleep(0.3)
while left:
    left -= len(os.read(int(sys.argv[-1]), left))
"""


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Runs a program as a lane, does something to it, and returns why it is lost."""
    program = tmp_path / "program"
    monkeypatch.setattr(sys, "executable", str(program))
    reasons: list[tuple[str, str]] = []
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
        return reasons.pop()[1]

    yield run
    children.close()


def test_the_reason_of_an_end_says_who_ended_the_process(lost: Callable[..., str]) -> None:
    """By kvd and why; by a signal from elsewhere; by itself, though its link closed before."""
    assert lost(_WAITS, lambda process: process.kill("hung")) == "killed by kvd: hung"
    assert lost(_WAITS, lambda process: os.kill(process.pid, 9)) == "killed by signal 9"
    assert lost(_EXITS) == "exit status 3"
    assert lost(_SENDS_NO_ZMTP).startswith("killed by kvd: sent what is no message: ")


def test_orders_that_wait_are_sent_as_soon_as_the_child_reads(lost: Callable[..., str]) -> None:
    """The poller reports the room; a child that has read nothing at first gets all of them."""
    ping = LINK.encode(LanePing())
    messages = MORE_THAN_A_SOCKET_TAKES * (len(frame_header(len(ping))) + len(ping))

    def send(process: LaneProcess) -> None:
        for _ in range(MORE_THAN_A_SOCKET_TAKES):
            process.send(ping)
        assert process.link is not None
        assert process.link.wants_write

    begin = time.monotonic()
    program = _READS_LATE.format(nbytes=len(opening(b"ROUTER")) + messages)
    assert lost(program, send) == "exit status 0"
    assert time.monotonic() - begin < DEADLINE


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


def test_a_lane_whose_lifeline_the_broker_cannot_receive_is_killed(
    lost: Callable[..., str],
) -> None:
    """The reason is the limit of descriptors and the remedy."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def use_up(process: LaneProcess) -> None:
        assert process.link is not None
        select.select([process.link], [], [], DEADLINE)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))

    try:
        reason = lost(_SENDS_A_DESCRIPTOR, use_up)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert reason.startswith("killed by kvd: the broker could not receive descriptors: ")
    assert "raise LimitNOFILE (ulimit -n), now " in reason


def test_a_lane_that_ends_before_it_has_read_its_orders_is_followed_by_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What still waits to be sent to it delays nothing; its end is reported."""
    deaf = tmp_path / "deaf"
    deaf.write_text("#!/bin/sh\nexec sleep 600\n")
    deaf.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(deaf))
    lost: list[tuple[str, str]] = []
    poller = select.epoll()
    children = children_of(tmp_path, poller, lost)
    lane = children.add_lane("host")
    with (tmp_path / "pool").open("wb") as file:
        pool: Any = SimpleNamespace(fd=file.fileno(), nbytes=4096, ready=False)
        children.start_due(pool, 0.0)
    for _ in range(MORE_THAN_A_SOCKET_TAKES):
        children.send_to_lane("host", LanePing(), [])
    assert not poller.poll(0)
    lane.kill()
    while lane.running:
        lane.turn(dict(poller.poll(DEADLINE)), 0.0)
    assert lost == [("host", "killed by kvd: the daemon stops")]
