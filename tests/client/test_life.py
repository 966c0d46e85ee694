"""A client's process and a daemon that is absent, denied, lost or back; forks and exits."""

import grp
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd_client import HostMemory, LookupResult, Scheduler, Unavailable, UsageError, Worker, session
from tests.client.conftest import FINGERPRINT, LAYOUT
from tests.client.fake_daemon import SECONDS, FakeDaemon
from tests.daemon.users import OTHER_UID, as_stranger, needs_root
from tests.descriptors import open_files
from tests.processes import python
from tests.waiting import DEADLINE, PATIENCE, eventually

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


def test_a_process_that_closes_nothing_exits(runtime_dir: Path) -> None:
    """By itself, quietly, and without torch, in time for what it asked.

    While its keepers try to connect, with a daemon, and with one that accepts and never answers.
    """

    def run(deadline: float = DEADLINE) -> str:
        done = python("-W", "error", "-c", PROGRAM, runtime_dir, str(deadline))
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    assert run() == "{}\n"
    with FakeDaemon(runtime_dir) as daemon:
        eventually(run, lambda printed: "True" in printed)
        daemon.freeze()
        assert run(deadline=1.0) == "{}\n"


def test_an_absent_daemon_is_looked_for_twice_a_second(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it has been away: one that starts is found within half a second."""
    pauses: list[float] = []
    pause = session.ClientSession._pause

    def at_once(one: session.ClientSession, seconds: float) -> None:
        pauses.append(seconds)
        pause(one, 0.01)

    monkeypatch.setattr(session.ClientSession, "_pause", at_once)
    with Scheduler(runtime_dir, "engine", deadline=DEADLINE) as scheduler:
        eventually(lambda: len(pauses) > 20)
        assert 0.4 < max(pauses) <= 0.5
        assert sorted(pauses)[len(pauses) // 2] > 0.4
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
        failures = 0
        for call in (
            lambda: scheduler.lookup(b"ready"),
            lambda: scheduler.prepare_store([b"k"]),
            scheduler.end_step,
            scheduler.status,
            worker.get_finished,
        ):
            try:
                call()
                failures += 1
            except UsageError as error:
                failures += "forked" not in str(error)
        scheduler.close()
        worker.close()
        os._exit(failures)
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


GROUP = next((group for group in grp.getgrall() if group.gr_gid not in {0, 65534}), None)


@pytest.fixture
def denied(daemon: FakeDaemon) -> Iterator[str]:
    """What a stranger is told: the daemon's directory is its group's; all else on the way is open.

    Within the test this process is the stranger's.
    """
    assert GROUP is not None
    path = daemon.runtime_dir
    path.parent.chmod(0o711)
    os.chown(path, 0, GROUP.gr_gid)
    path.chmod(0o750)
    with as_stranger():
        yield (
            f"uid {OTHER_UID} may not enter {path} (mode 0750, group {GROUP.gr_name}):"
            f" usermod -aG {GROUP.gr_name} {OTHER_UID}, then log in again"
        )


@needs_root
@pytest.mark.skipif(GROUP is None, reason="there is no other group")
def test_who_may_not_connect_learns_why_and_the_remedy(
    daemon: FakeDaemon, memory: HostMemory, denied: str, caplog: pytest.LogCaptureFixture
) -> None:
    """By each call that waits, and once by the log, which also says when it may; no restart."""
    caplog.set_level(logging.INFO)
    began = time.monotonic()
    with Worker(daemon.runtime_dir, "engine", 0, 1, deadline=DEADLINE) as worker:
        with pytest.raises(Unavailable) as raised:
            worker.register([memory], LAYOUT, FINGERPRINT, required=True, timeout=PATIENCE)
        assert str(raised.value) == denied
    caplog.clear()
    with Scheduler(daemon.runtime_dir, "engine", deadline=DEADLINE) as scheduler:
        assert scheduler.wait_attached(PATIENCE).why == denied
        assert time.monotonic() - began < PATIENCE / 2
        os.seteuid(0)
        eventually(lambda: scheduler.connected)
    first, second = caplog.records
    assert first.getMessage() == f"kvd: not connected, every lookup misses: {denied}"
    assert second.getMessage().startswith("kvd: connected: ")
    assert [first.levelno, second.levelno] == [logging.WARNING, logging.WARNING]
