"""What a scheduler tells the daemon of its lookups: totals of the session, nothing twice."""

from pathlib import Path

import pytest

from kvd_client import Scheduler, UsageError, Worker, session
from kvd_proto.messages import Lookups, Ping
from tests.client.fake_daemon import SECONDS, FakeDaemon
from tests.client.test_scheduler import until
from tests.waiting import DEADLINE, eventually

KEYS = {b"ready": 2, b"writing": 1}


@pytest.fixture
def told_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions tell when they are closed and not before, and wait for the answer."""
    monkeypatch.setattr(session, "REPORT_SECONDS", 3600.0)
    monkeypatch.setattr(session, "LAST_REPORT_SECONDS", DEADLINE)


def attach(daemon: FakeDaemon, scheduler: Scheduler) -> None:
    """The directory holds `KEYS`."""
    daemon.keys = KEYS
    daemon.attach()
    assert scheduler.wait_attached(SECONDS)


def last_told(daemon: FakeDaemon) -> Lookups | None:
    """What the daemon was told last."""
    return daemon.wait_for(Ping)[-1].lookups


def test_lookups_are_told_while_the_session_lasts(daemon: FakeDaemon, scheduler: Scheduler) -> None:
    """The keeper tells the totals by itself; only READY chunks are hits."""
    attach(daemon, scheduler)
    scheduler.lookup(b"ready")
    scheduler.lookup_many([b"ready", b"writing", b"no"])
    eventually(lambda: last_told(daemon), lambda told: told == Lookups(chunks=4, hit_chunks=2))


@pytest.mark.usefixtures("told_at_the_end")
def test_a_session_tells_before_it_leaves(
    daemon: FakeDaemon, scheduler: Scheduler, worker: Worker
) -> None:
    """The last lookups are told by `close`; without any, as in a worker, there is nothing to."""
    worker.close()
    with Scheduler(daemon.runtime_dir, "idle", deadline=DEADLINE):
        pass
    scheduler.lookup(b"no")
    scheduler.close()
    (ping,) = daemon.wait_for(Ping)
    assert ping.lookups == Lookups(chunks=1, hit_chunks=0)


@pytest.mark.usefixtures("told_at_the_end")
def test_a_new_session_begins_at_zero(daemon: FakeDaemon, scheduler: Scheduler) -> None:
    """After a restart of the daemon only what was looked up since then is told."""
    scheduler.lookup(b"no")
    daemon.kill()
    until(scheduler, connected=False)
    scheduler.lookup_many([b"no", b"nobody"])
    with FakeDaemon(daemon.runtime_dir) as other:
        until(scheduler, connected=True)
        attach(other, scheduler)
        scheduler.lookup_many([b"ready", b"no", b"ready"])
        scheduler.close()
        assert last_told(other) == Lookups(chunks=3, hit_chunks=2)


@pytest.mark.usefixtures("told_at_the_end")
def test_an_engine_may_count_tokens_itself(daemon: FakeDaemon) -> None:
    """With `counts_tokens` the tokens are those of `count_tokens`, and nothing else."""
    with Scheduler(
        daemon.runtime_dir, "engine", deadline=DEADLINE, counts_tokens=True
    ) as scheduler:
        attach(daemon, scheduler)
        scheduler.lookup(b"ready")
        scheduler.count_tokens(100, 48)
        scheduler.count_tokens(20, 0)
    assert last_told(daemon) == Lookups(chunks=1, hit_chunks=1, tokens=120, hit_tokens=48)


def test_impossible_tokens_are_refused(runtime_dir: Path) -> None:
    """More found than asked for is a mistake of the caller's."""
    with (
        Scheduler(runtime_dir, "engine", counts_tokens=True) as scheduler,
        pytest.raises(UsageError, match="asked=1, found=2"),
    ):
        scheduler.count_tokens(1, 2)
