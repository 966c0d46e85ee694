"""Forks, process exits and threads: what a client leaves behind."""

import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvd_client import LookupResult, Scheduler, UsageError, Worker, session
from tests.client.fake_daemon import SECONDS, FakeDaemon
from tests.descriptors import open_files
from tests.waiting import DEADLINE, eventually

PROGRAM = """
import sys
import threading
from kvd_client import Scheduler, Worker, HostMemory
from tests.client.conftest import FINGERPRINT, LAYOUT
deadline = float(sys.argv[2])
worker = Worker(sys.argv[1], "engine", 0, 1, deadline=deadline)
scheduler = Scheduler(sys.argv[1], "engine", deadline=deadline)
worker.register([HostMemory.allocate(4096)], LAYOUT, FINGERPRINT)
assert "torch" not in sys.modules
print(scheduler.status())
"""


def run_program(runtime_dir: Path, deadline: float = DEADLINE) -> str:
    """Run `PROGRAM`, which closes nothing, to its end."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, str(runtime_dir), str(deadline)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_process_that_closes_nothing_exits(runtime_dir: Path) -> None:
    """By itself, quietly, and without torch, in time for what it asked.

    While its keepers try to connect, with a daemon, and with one that accepts and never answers.
    """
    assert run_program(runtime_dir) == "{}\n"
    with FakeDaemon(runtime_dir) as daemon:
        eventually(lambda: run_program(runtime_dir), lambda told: "True" in told)
        daemon.freeze()
        assert run_program(runtime_dir, deadline=1.0) == "{}\n"


def test_an_absent_daemon_is_looked_for_twice_a_second(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it has been away: who comes is met within half a second, and for little."""
    wanted: list[float] = []
    pause = session.ClientSession._pause

    def at_once(one: session.ClientSession, seconds: float) -> None:
        wanted.append(seconds)
        pause(one, 0.01)

    monkeypatch.setattr(session.ClientSession, "_pause", at_once)
    with Scheduler(runtime_dir, "engine", deadline=DEADLINE) as scheduler:
        eventually(lambda: len(wanted) > 20)
        assert 0.4 < max(wanted) <= 0.5
        assert sorted(wanted)[len(wanted) // 2] > 0.4
        assert not scheduler.connected
        with FakeDaemon(runtime_dir):
            eventually(lambda: scheduler.connected)


def test_the_loss_of_a_daemon_and_its_return_are_warnings_that_name_kvd(
    runtime_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first connection is none: an engine's log at this level is whole without it."""
    caplog.set_level(logging.INFO)
    with FakeDaemon(runtime_dir) as first:
        scheduler = Scheduler(runtime_dir, "engine", deadline=DEADLINE)
        assert scheduler.connected
        first.kill()
    with scheduler:
        eventually(lambda: not scheduler.connected)
        with FakeDaemon(runtime_dir):
            eventually(lambda: scheduler.connected)
    lines = [(record.levelno, record.getMessage()[:16]) for record in caplog.records]
    assert lines[:3] == [
        (logging.INFO, "kvd: connected: "),
        (logging.WARNING, "kvd: connection "),
        (logging.WARNING, "kvd: connected: "),
    ]


def test_close_ends_the_keeper(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """After close() no thread and no descriptor of the session is left."""
    monkeypatch.setattr(session, "CLOSE_SECONDS", SECONDS)
    before, threads = len(open_files()), set(threading.enumerate())
    with Scheduler(daemon.runtime_dir, "engine", deadline=DEADLINE):
        (keeper,) = set(threading.enumerate()) - threads
        assert keeper.daemon
    assert not keeper.is_alive()
    # The daemon's ends are in this process too, and close later.
    eventually(lambda: len(open_files()) <= before)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_child_has_a_closed_session(
    daemon: FakeDaemon, scheduler: Scheduler, worker: Worker
) -> None:
    """In a fork every call says whose session it is, nothing hangs, and the parent's goes on."""
    daemon.attach(scheduler)
    child = os.fork()
    if child == 0:
        signal.alarm(int(SECONDS))  # a hang is a failure, not a test that never ends
        wrong = 0
        for call in (
            lambda: scheduler.lookup(b"ready"),
            lambda: scheduler.prepare_store([b"k"]),
            scheduler.end_step,
            scheduler.status,
            worker.get_finished,
        ):
            try:
                call()
                wrong += 1
            except UsageError as error:
                wrong += "forked" not in str(error)
        scheduler.close()
        worker.close()
        os._exit(wrong)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert scheduler.lookup(b"ready") is LookupResult.HIT
    assert len(scheduler.prepare_store([b"k"])) == 1
    assert worker.registered


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_fork_does_not_hold_the_connection_open(daemon: FakeDaemon, worker: Worker) -> None:
    """The daemon sees the parent's end although a child that was forked before lives on."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(int(SECONDS))
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    session.ClientSession.close(worker)
    eventually(lambda: not daemon.call(lambda: list(daemon.sessions)))
    os.close(write)
    os.waitpid(child, 0)
