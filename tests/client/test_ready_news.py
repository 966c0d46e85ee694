"""What a scheduler tells an event loop: every change of what is found, and none too early."""

import select

import pytest

from kvd_client import LookupResult, Scheduler
from kvd_proto.messages import Detached
from tests.client.conftest import frozen
from tests.client.fake_daemon import SECONDS, FakeDaemon
from tests.client.test_scheduler import found
from tests.waiting import eventually


def wait_for_news(scheduler: Scheduler) -> None:
    """As an event loop does, which looks at nothing before it is told."""
    assert select.select([scheduler], [], [], SECONDS)[0]
    assert scheduler.take_ready()


def quieten(scheduler: Scheduler) -> None:
    """Take in what has happened until now."""
    scheduler.fileno()
    scheduler.take_ready()


def test_news_come_with_what_they_tell_of(
    daemon: FakeDaemon, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who was told of an attachment finds what is there, and of its end, nothing."""
    daemon.keys = {b"ready": 2}
    quieten(scheduler)
    choose, early = scheduler._choose, []

    def look_first() -> None:
        early.append(scheduler.take_ready())
        choose()

    monkeypatch.setattr(scheduler, "_choose", look_first)
    for _ in range(3):
        daemon.attach()
        wait_for_news(scheduler)
        assert scheduler.lookup(b"ready") is LookupResult.HIT
        daemon.notify(Detached(reason="rank 0 is gone"))
        wait_for_news(scheduler)
        assert scheduler.lookup(b"ready") is LookupResult.MISS
    assert early == [False] * 6


def test_news_are_kept_for_who_asks_without_a_descriptor(
    daemon: FakeDaemon, scheduler: Scheduler
) -> None:
    """An engine may just call `take_ready` now and then: it is told once."""
    scheduler.take_ready()
    daemon.attach()
    assert scheduler.wait_attached(SECONDS)
    assert eventually(scheduler.take_ready)
    assert not scheduler.take_ready()


def test_the_answer_to_a_reset_is_told(daemon: FakeDaemon, quiet: Scheduler) -> None:
    """A chunk became READY meanwhile, and was a miss to who looked when the pipe said so."""
    found(daemon, quiet)
    quieten(quiet)
    with frozen(daemon, quiet):
        assert not quiet.reset(0.0)
        quiet.take_ready()
        assert quiet.lookup(b"ready") is LookupResult.MISS
    while quiet.lookup(b"ready") is not LookupResult.HIT:
        wait_for_news(quiet)
