"""No call of a step waits: not for the daemon, not for another thread that waits for it.

The deadlines here are an hour: a call that waited would not return. Where one is short, the keeper
alone notices.
"""

import threading
from collections.abc import Callable, Iterator

import pytest

from kvd_client import Label, LookupResult, Scheduler, session
from kvd_proto.messages import Hello, Ping, Reset, Status, Step
from tests.client.fake_daemon import FakeDaemon
from tests.client.test_steps import steps
from tests.waiting import DEADLINE, PATIENCE, eventually

HOUR = 3600.0


@pytest.fixture
def patient(daemon: FakeDaemon) -> Iterator[Scheduler]:
    """An attached scheduler that would wait for an hour."""
    with Scheduler(daemon.runtime_dir, "engine", deadline=HOUR, steps=True) as one:
        daemon.attach(one)
        yield one
        one.deadline = DEADLINE
        daemon.thaw()


def step(scheduler: Scheduler, name: str) -> None:
    """All that an engine calls in a step; it decides from shared memory alone."""
    key = name.encode()
    assert scheduler.lookup(b"ready") is LookupResult.HIT
    store = scheduler.prepare_store([key, b"ready"])
    assert store.keys == (key,)
    load = scheduler.prepare_load([b"ready"])
    assert load.keys == (b"ready",)
    scheduler.complete_load(load)
    scheduler.complete_store(store)
    scheduler.complete_store([b"failed"], success=False)
    scheduler.request_finished([key], prompt=1, label=Label.DONE)
    scheduler.label([key], Label.LATER)
    scheduler.report_missed([key])
    scheduler.give_up([b"no slot"])
    scheduler.take_changes()
    scheduler.count_tokens(10, 5)
    scheduler.count_aborted(1)
    scheduler.count_hints(1, 1, 1)
    scheduler.set_prefill_seconds(1e-4)
    scheduler.end_step()
    assert scheduler.lookup(key) is LookupResult.HIT_PENDING


def test_what_waits_for_a_daemon_is_bounded(daemon: FakeDaemon, patient: Scheduler) -> None:
    """So many messages are on their way; what comes then is collected, and told as one."""
    daemon.freeze()
    for i in range(200):
        patient.request_finished([b"k%d" % i])
        patient.end_step()
    daemon.thaw()

    def told() -> list[bytes]:
        patient.end_step()
        return [key for each in steps(daemon) for key in each.used]

    assert len(eventually(told, lambda used: len(used) >= 200)) == 200
    assert len(steps(daemon)) < 100


def test_what_does_not_fit_is_not_begun(daemon: FakeDaemon, patient: Scheduler) -> None:
    """A store that the daemon could not be told of has no slot, a load no lease."""
    daemon.freeze()
    keys = [b"%d" % i for i in range(60_000)]
    for _ in range(100):
        patient.request_finished(keys)
    assert not patient.prepare_store(keys).keys
    assert not patient.prepare_load([b"ready"] * 60_000).keys


@pytest.mark.parametrize(
    ("request_kind", "call"),
    [
        (Status, lambda scheduler: scheduler.status()),
        (Reset, lambda scheduler: scheduler.reset(HOUR)),
        (Step, lambda scheduler: scheduler.reserve(10_000, HOUR)),
        (Ping, lambda scheduler: scheduler.close()),
    ],
    ids=["status", "reset", "reserve", "close"],
)
def test_a_thread_that_waits_for_the_daemon_holds_no_other_one_up(
    daemon: FakeDaemon,
    patient: Scheduler,
    monkeypatch: pytest.MonkeyPatch,
    request_kind: type,
    call: Callable[[Scheduler], object],
) -> None:
    """While one waits for an answer that does not come, others decide, tell and are answered."""
    monkeypatch.setattr(session, "LAST_REPORT_SECONDS", HOUR)
    monkeypatch.setattr(session, "REPORT_SECONDS", HOUR)  # `close` tells, not the keeper
    good = daemon.replies[request_kind]
    asked = len([m for m in daemon.received if isinstance(m, request_kind)])
    if request_kind is not Step:
        daemon.replies[request_kind] = lambda _: None
    patient.lookup(b"ready")  # so that there is something to tell
    waiting = threading.Thread(target=call, args=(patient,))
    waiting.start()
    daemon.wait_for(request_kind, asked + 1)
    if request_kind is Reset:  # nothing is found until it is answered, and nothing waits
        assert not patient.prepare_store([b"k"]).served
        assert patient.lookup(b"ready") is LookupResult.MISS
    else:
        for i in range(3):
            step(patient, f"k{i}")
        eventually(lambda: steps(daemon), lambda told: any(b"k2" in each.keys for each in told))
    assert waiting.is_alive()
    daemon.replies[request_kind] = good
    daemon.kill()  # which ends all waiting
    waiting.join(PATIENCE)
    assert not waiting.is_alive()


def test_a_step_without_an_answer_ends_the_session(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper notices, also where the engine makes no more steps; then all is a miss."""
    monkeypatch.setattr(session, "REPORT_SECONDS", 0.05)
    with Scheduler(daemon.runtime_dir, "engine", deadline=DEADLINE, steps=True) as scheduler:
        daemon.attach(scheduler)
        scheduler.deadline = 0.2
        daemon.freeze()
        scheduler.request_finished([b"ready"])  # after a lookup the keeper would have a question
        scheduler.end_step()
        eventually(lambda: not scheduler.attached)
        assert not scheduler.prepare_store([b"k"]).served
        assert scheduler.lookup(b"k") is LookupResult.MISS
        scheduler.deadline = DEADLINE
        daemon.thaw()
        daemon.wait_for(Hello, 2)
        eventually(lambda: scheduler.connected)
        daemon.attach(scheduler)
        step(scheduler, "k")
