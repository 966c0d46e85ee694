"""No call of an engine's step waits: not for broker or lane, not for another thread that waits."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvd_client import (
    HostMemory,
    JobResult,
    JobStatus,
    Label,
    LookupResult,
    Scheduler,
    Worker,
    lane_link,
    session,
)
from kvd_proto.messages import Hello, LaneUp, Load, Ping, Register, Reset, Status, Step, Store
from tests.client.conftest import FINGERPRINT, LAYOUT
from tests.client.fake_daemon import SECONDS, FakeDaemon
from tests.client.test_steps import steps
from tests.client.test_worker import JOB, results
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

    def used_keys() -> list[bytes]:
        patient.end_step()
        return [key for step in steps(daemon) for key in step.used]

    assert len(eventually(used_keys, lambda keys: len(keys) >= 200)) == 200
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
        eventually(lambda: steps(daemon), lambda sent: any(b"k2" in step.keys for step in sent))
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


JOBS = 20_000  # more than any connection keeps


@pytest.fixture(autouse=True)
def small_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections keep little that was not sent, so that they are soon full; nothing is slow."""
    monkeypatch.setattr(lane_link, "MAX_UNSENT_BYTES", 2000)


def returns(action: Callable[[], object]) -> None:
    """Run it in a thread of its own, which ends although nothing else goes on."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive()


def fill(worker: Worker) -> list[int]:
    """Submit loads until the connection takes no more; the numbers of those that it took."""
    for number in range(100, 100 + JOBS):
        if not worker.submit(Load, number, JOB):
            return list(range(100, number))
    raise AssertionError("the connection takes everything")


def work(worker: Worker) -> list[JobResult]:
    """Every call of a step, first with room on the connection and then without."""
    worker.submit(Store, 1, JOB)
    worker.submit(Load, 2, JOB)
    got = worker.get_finished()
    worker.cancel([1, 2])
    taken = fill(worker)
    worker.submit(Store, 3, JOB)
    worker.cancel(taken)
    got += worker.get_finished()
    worker.fileno()
    assert worker.registered
    assert not worker.attached
    return got


def check(got: list[JobResult], worker: Worker) -> None:
    """Nothing has ended but what the lane did not take; `wait` ends the stores, on time."""
    assert {result.status for result in got} == {JobStatus.FAILED}
    assert all("the lane takes no message" in result.text for result in got)
    returns(lambda: worker.wait([1, 2], timeout=0.0))
    (void,) = worker.get_finished()
    assert (void.job_id, void.status) == (1, JobStatus.VOID)


@contextlib.contextmanager
def silent_lane(daemon: FakeDaemon, worker: Worker, path: Path, *, full: bool) -> Iterator[None]:
    """The worker's lane in here accepts no connection, or has so many that no other is made."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(str(path))
    listening.listen(0)
    before = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if full:
        before.connect(str(path))
    lifeline = os.pipe()
    up = LaneUp(device="host", incarnation=9, endpoint=f"ipc://{path}", token=bytes(16))
    daemon.notify(up, (lifeline[0],))
    eventually(lambda: worker._jobs._lane, lambda lane: lane and lane.endpoint == up.endpoint)
    yield
    for fd in lifeline:
        os.close(fd)
    before.close()
    listening.close()


@pytest.mark.parametrize("full", [False, True])
def test_a_lane_that_accepts_no_connection(
    daemon: FakeDaemon, worker: Worker, runtime_dir: Path, full: bool
) -> None:
    """Jobs are kept up to the connection's bound; where no connection is made, each one fails."""
    got: list[JobResult] = []
    with silent_lane(daemon, worker, runtime_dir / "silent.sock", full=full):
        returns(lambda: got.extend(work(worker)))
        if full:
            assert {result.status for result in got} == {JobStatus.FAILED}
            assert [result.job_id for result in got] == [1, 2, 100, 3]
        else:
            check(got, worker)


def test_a_lane_and_a_broker_that_read_nothing(daemon: FakeDaemon, worker: Worker) -> None:
    """Both stand still, with connections that were open and served before."""
    assert worker.submit(Load, 1, JOB)
    assert results(worker)[0].success
    got: list[JobResult] = []
    daemon.freeze()
    returns(lambda: got.extend(work(worker)))
    check(got, worker)
    daemon.thaw()


def test_a_registration_that_is_not_answered(daemon: FakeDaemon, memory: HostMemory) -> None:
    """While the keeper waits for the broker, jobs fail at once."""
    daemon.replies[Register] = lambda _message: None
    got: list[JobResult] = []

    def calls(worker: Worker) -> None:
        assert not worker.submit(Store, 1, JOB)
        assert not worker.submit(Load, 2, JOB)
        worker.cancel([1, 2])
        got.extend(worker.get_finished())
        worker.wait([1, 2])

    with Worker(daemon.runtime_dir, "engine", 0, 1, deadline=DEADLINE) as worker:
        registering = threading.Thread(
            target=lambda: worker.register([memory], LAYOUT, FINGERPRINT, timeout=3600.0)
        )
        registering.start()
        daemon.wait_for(Register)
        returns(lambda: calls(worker))
        assert registering.is_alive()
        assert [result.job_id for result in got] == [1, 2]
        worker.close()
        registering.join(SECONDS)
        assert not registering.is_alive()
