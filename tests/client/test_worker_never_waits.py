"""What an engine calls in a step returns at once, whatever state lane and broker are in."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvd_client import HostMemory, JobResult, JobStatus, Worker, lane_link
from kvd_proto.messages import LaneUp, Load, Register, Store
from tests.client.conftest import FINGERPRINT, LAYOUT
from tests.client.fake_daemon import SECONDS, FakeDaemon
from tests.client.test_worker import JOB, results
from tests.waiting import DEADLINE, eventually

JOBS = 20_000  # more than any connection keeps


@pytest.fixture(autouse=True)
def small_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections keep little that was not sent, so that they are soon full; nothing is slow."""
    monkeypatch.setattr(lane_link, "MAX_UNSENT_BYTES", 2000)


def returns(action: Callable[[], object]) -> None:
    """Run it in a thread of its own, which ends while nobody lets anything go on."""
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


def steps(worker: Worker) -> list[JobResult]:
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
def silent_lane(daemon: FakeDaemon, worker: Worker, place: Path, *, full: bool) -> Iterator[None]:
    """The worker's lane in here accepts no connection, or has so many that no other is made."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(str(place))
    listening.listen(0)
    before = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if full:
        before.connect(str(place))
    lifeline = os.pipe()
    up = LaneUp(device="host", incarnation=9, endpoint=f"ipc://{place}", token=bytes(16))
    daemon.notify(up, (lifeline[0],))
    eventually(lambda: worker._jobs._lane, lambda lane: lane and lane.endpoint == up.endpoint)
    yield
    for fd in lifeline:
        os.close(fd)
    before.close()
    listening.close()


def test_a_lane_that_accepts_no_connection(
    daemon: FakeDaemon, worker: Worker, runtime_dir: Path
) -> None:
    """What is submitted is kept, up to the connection's bound, and refused from there on."""
    got: list[JobResult] = []
    with silent_lane(daemon, worker, runtime_dir / "silent.sock", full=False):
        returns(lambda: got.extend(steps(worker)))
        check(got, worker)


def test_a_lane_that_has_no_place_for_a_connection(
    daemon: FakeDaemon, worker: Worker, runtime_dir: Path
) -> None:
    """Every job fails at once."""
    got: list[JobResult] = []
    with silent_lane(daemon, worker, runtime_dir / "silent.sock", full=True):
        returns(lambda: got.extend(steps(worker)))
        assert [(r.job_id, r.status) for r in got] == [
            (number, JobStatus.FAILED) for number in (1, 2, 100, 3)
        ]


def test_a_lane_and_a_broker_that_read_nothing(daemon: FakeDaemon, worker: Worker) -> None:
    """Both stand still, with connections that were open and served before."""
    assert worker.submit(Load, 1, JOB)
    assert results(worker)[0].success
    got: list[JobResult] = []
    daemon.freeze()
    try:
        returns(lambda: got.extend(steps(worker)))
        check(got, worker)
    finally:
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
