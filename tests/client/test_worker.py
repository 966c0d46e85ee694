"""The worker's side against a fake daemon and lane."""

import itertools
import mmap
import os
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvd.wire import server
from kvd_client import (
    AttachState,
    HostMemory,
    JobBlocks,
    JobResult,
    JobStatus,
    RegistrationError,
    Unavailable,
    UsageError,
    Worker,
    lane_link,
)
from kvd_proto.messages import (
    Detached,
    Error,
    ErrorCode,
    Hello,
    HostHandle,
    Join,
    LaneUp,
    Load,
    Register,
    Store,
    Unregister,
    Wait,
)
from tests.client.conftest import FINGERPRINT, LAYOUT
from tests.client.fake_daemon import SECONDS, FakeDaemon
from tests.descriptors import open_on
from tests.waiting import DEADLINE, eventually

NUMBERS = itertools.count(1000)
JOB = JobBlocks.of([3, 4, 5], [3], [1], [0, 2], [5, 6])


def results(worker: Worker, count: int = 1) -> list[JobResult]:
    """Poll as an engine does, until so many jobs were reported."""
    got: list[JobResult] = []
    end = time.monotonic() + SECONDS
    while len(got) < count:
        assert time.monotonic() < end, got
        got += worker.get_finished()
    worker.check_integrity()
    return got


def until_registered(worker: Worker, value: bool) -> None:
    """Wait until the keeper has noticed."""
    eventually(lambda: worker.registered is value)


def test_after_names_the_timeline(daemon: FakeDaemon, worker: Worker) -> None:
    """A reserved number is waited for; None means what has been reached already."""
    first = worker.timeline.reserve()
    worker.timeline.signal(first)
    later = worker.timeline.reserve()
    worker.submit(Store, 1, JOB, after=later)
    worker.submit(Store, 2, JOB)
    assert [job.after for job in daemon.wait_for(Store, 2)] == [later, first]
    assert worker.timeline.reached == first
    with pytest.raises(UsageError, match="reserve"):
        worker.submit(Store, 3, JOB, after=later + 1)
    with pytest.raises(UsageError, match="reserve"):
        worker.timeline.signal(later + 1)


def test_without_daemon_jobs_fail_at_once(runtime_dir: Path, memory: HostMemory) -> None:
    """No daemon: registration is false, submissions are reported as failed, nothing blocks."""
    with Worker(runtime_dir, "engine", 0, 1, deadline=60.0) as worker:
        assert not worker.register([memory], LAYOUT, FINGERPRINT, timeout=60.0)
        assert not worker.submit(Store, 1, JOB)
        assert not worker.submit(Load, 2, JOB)
        assert [(r.job_id, r.success) for r in worker.get_finished()] == [(1, False), (2, False)]
        assert worker.wait([1, 2], timeout=60.0) == frozenset()
        with FakeDaemon(runtime_dir) as daemon:
            daemon.wait_for(Register)
            until_registered(worker, value=True)
            assert worker.submit(Store, 1, JOB)
            assert results(worker)[0].success


def test_required_registration_raises_in_time(runtime_dir: Path, memory: HostMemory) -> None:
    """Without a daemon it says what to start; one that is there and refuses is quoted."""
    with Worker(runtime_dir, "engine", 0, 1, deadline=DEADLINE) as worker:
        with pytest.raises(Unavailable, match="kvd serve"):
            worker.register([memory], LAYOUT, FINGERPRINT, required=True, timeout=0.05)
        assert not worker.register([memory], LAYOUT, FINGERPRINT)
    with FakeDaemon(runtime_dir) as daemon:
        daemon.replies[Register] = lambda _: Error(code=ErrorCode.LANE_LOST, text="no lane yet")
        with (
            Worker(runtime_dir, "engine", 0, 1, deadline=DEADLINE) as worker,
            pytest.raises(Unavailable, match=r"no registration within 1 s; .*no lane yet"),
        ):
            worker.register([memory], LAYOUT, FINGERPRINT, required=True, timeout=1)


def test_refused_registration_raises(daemon: FakeDaemon, memory: HostMemory) -> None:
    """A refusal carries the daemon's code and whole sentence, and is not tried again by itself.

    A lane that is being replaced delays the registration; it does not fail it.
    """
    good = daemon.replies[Register]
    text = "; ".join(f"a worker of uid {uid} and a daemon of another" for uid in range(90))
    bad = Error(code=ErrorCode.BAD_LAYOUT, text=text)
    refusals = iter([Error(code=ErrorCode.LANE_LOST, text="wait"), bad])
    daemon.replies[Register] = lambda _: next(refusals, bad)
    with Worker(daemon.runtime_dir, "engine", 0, 1, deadline=DEADLINE) as worker:
        with pytest.raises(RegistrationError) as caught:
            worker.register([memory], LAYOUT, FINGERPRINT, required=True)
        assert caught.value.code is ErrorCode.BAD_LAYOUT
        assert text in str(caught.value)
        daemon.replies[Register] = good
        assert worker.register([memory], LAYOUT, FINGERPRINT)
        assert len(daemon.wait_for(Register)) == 3
        assert worker.unregister()


def test_a_worker_whose_lane_has_died_is_not_attached(daemon: FakeDaemon, worker: Worker) -> None:
    """The lifeline says so before the daemon does; the next lane is used without registration."""
    daemon.attach(worker)
    daemon.hold_jobs = True
    worker.submit(Load, 1, JOB)
    daemon.wait_for(Load)
    daemon.kill_lane()
    assert not worker.registered
    assert not worker.wait_attached(0.0)
    daemon.hold_jobs = False
    daemon.start_lane()
    assert worker.wait_attached(SECONDS)
    assert not results(worker)[0].success
    assert worker.submit(Load, 1, JOB)
    assert results(worker)[0].success
    assert len(daemon.wait_for(Register)) == 1
    daemon.notify(Detached(reason="rank 1 is gone"))
    eventually(lambda: not worker.attached)


def test_wait_hurries_and_returns_when_done(daemon: FakeDaemon, worker: Worker) -> None:
    """wait() tells the lane and returns with its answer, also where another thread took it in."""
    daemon.hold_jobs = True
    worker.submit(Store, 1, JOB)
    got: list[JobResult] = []

    def answer() -> None:
        daemon.wait_for(Wait)
        daemon.finish()
        got.extend(results(worker))

    answering = threading.Thread(target=answer)
    answering.start()
    assert worker.wait([1, 99], timeout=3600.0) == frozenset()
    answering.join(SECONDS)
    assert daemon.wait_for(Wait)[0].jobs == (1,)
    assert got == [JobResult(1, JobStatus.OK, bytes=64, seconds=0.002)]
    assert got[0].success


def words(daemon: FakeDaemon) -> memoryview:
    """The worker's control page, as a lane sees it."""
    return memoryview(mmap.mmap(daemon.worker_fds()[0], 64 * 1024)).cast("Q")


def void(daemon: FakeDaemon, page: memoryview) -> list[int]:
    """Numbers of the stores so far that a lane takes for void."""
    stores = [message for message in daemon.received if isinstance(message, Store)]
    return [store.job for store in stores if page[store.word] != store.epoch]


def test_wait_out_of_time_voids_its_stores(daemon: FakeDaemon, worker: Worker) -> None:
    """A store's word moves on; a load stays unfinished until the lane says otherwise.

    The worker's other jobs go on, and a store that comes later is good as well.
    """
    daemon.hold_jobs = True
    kinds: list[type[Store | Load]] = [Store, Store, Load, Load, Store]
    for number, kind in enumerate(kinds, 1):
        worker.submit(kind, number, JOB)
    daemon.wait_for(Store, 3)
    page = words(daemon)
    assert void(daemon, page) == []
    assert worker.wait([2, 3], timeout=0.01) == frozenset({3})
    worker.submit(Store, 6, JOB)
    daemon.wait_for(Store, 4)
    assert void(daemon, page) == [2]
    assert [(r.job_id, r.status) for r in worker.get_finished()] == [(2, JobStatus.VOID)]
    daemon.finish()
    assert worker.wait([3], timeout=SECONDS) == frozenset()
    assert {r.job_id for r in results(worker, 5) if r.success} == {1, 3, 4, 5, 6}


def test_more_stores_than_there_are_words_are_shed(daemon: FakeDaemon, worker: Worker) -> None:
    """They are failures that say so; loads go on, and stores when others have ended."""
    del worker._jobs._free_words[2:]  # else it would take thousands of stores
    daemon.hold_jobs = True
    assert worker.submit(Store, 1, JOB)
    assert worker.submit(Store, 2, JOB)
    assert not worker.submit(Store, 3, JOB)
    assert worker.submit(Load, 4, JOB)
    (shed,) = worker.get_finished()
    assert (shed.job_id, shed.status) == (3, JobStatus.SHED)
    assert "stores are running already" in shed.text
    worker.wait([1], timeout=0)
    assert worker.submit(Store, 3, JOB)


@pytest.mark.parametrize("in_a_loop", [False, True])
def test_a_lane_that_closes_the_connection(
    daemon: FakeDaemon, worker: Worker, in_a_loop: bool
) -> None:
    """What it was told before ends when the lane has answered Join; later jobs are done."""
    if in_a_loop:
        worker.fileno()
    daemon.hold_jobs = True
    worker.submit(Load, 1, JOB)
    daemon.wait_for(Load)
    daemon.cut(loses_jobs=True)
    (result,) = results(worker)
    assert (result.job_id, result.status) == (1, JobStatus.FAILED)
    assert "connection to the lane was lost" in result.text
    daemon.hold_jobs = False
    daemon.cut()
    lost = itertools.takewhile(lambda number: not done(worker, number), itertools.count(2))
    assert len(list(lost)) <= 2  # with the connection, and to find out that it is no more


def done(worker: Worker, number: int) -> bool:
    """Whether a load of this number is done."""
    worker.submit(Load, number, JOB)
    (result,) = results(worker)
    return result.success


@pytest.mark.parametrize("unregistered", [False, True])
def test_a_lane_that_refuses_the_worker(
    daemon: FakeDaemon, worker: Worker, unregistered: bool
) -> None:
    """It has let go of the memory, and says so on a later connection, which any link makes.

    A worker whose session was lost does not say that its memory is free: a lane may have it yet.
    """
    daemon.hold_jobs = True
    worker.submit(Load, 1, JOB)
    daemon.wait_for(Load)
    daemon.replies[Join] = lambda _: Error(code=ErrorCode.BAD_SESSION, text="who?")
    if unregistered:
        daemon.replies[Register] = lambda _: Error(code=ErrorCode.NOT_READY, text="later")
        daemon.disconnect()
        until_registered(worker, value=False)
    daemon.cut()
    (result,) = results(worker)
    assert (result.job_id, result.status) == (1, JobStatus.FAILED)
    assert worker.unregister() is not unregistered


def test_a_lane_that_takes_no_connection(
    daemon: FakeDaemon, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event loop has nothing to do meanwhile; jobs fail with what the lane has said."""
    monkeypatch.setattr(lane_link, "MIN_PAUSE_SECONDS", 3600.0)
    monkeypatch.setattr(lane_link, "MAX_PAUSE_SECONDS", 3600.0)
    worker.submit(Load, 1, JOB)
    assert results(worker)[0].success  # so it has joined
    monkeypatch.setattr(server, "free_descriptors", lambda: 0)
    daemon.cut()
    eventually(lambda: "too few files are left" in lack(worker))
    for _ in range(100):
        worker.get_finished()
    assert daemon.lane is not None
    assert daemon.lane.limits["open_files"] == 1


def lack(worker: Worker) -> str:
    """Why the lane gets no job; empty where it has got one."""
    worker.submit(Load, next(NUMBERS), JOB)
    return "".join(result.text for result in worker.get_finished())


def test_a_lane_that_fails_to_answer_join(
    daemon: FakeDaemon, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may write yet: they end when a later Join is answered."""
    monkeypatch.setattr(lane_link, "MIN_PAUSE_SECONDS", 3600.0)
    monkeypatch.setattr(lane_link, "MAX_PAUSE_SECONDS", 3600.0)
    daemon.hold_jobs = True
    worker.submit(Load, 1, JOB)
    daemon.wait_for(Load)
    daemon.replies[Join] = lambda _: Error(code=ErrorCode.INTERNAL, text="a bug")
    daemon.cut()
    eventually(lambda: "there is no connection" in lack(worker))
    assert worker.wait([1], timeout=0) == {1}


def test_an_event_loop_hears_of_overdue_stores(daemon: FakeDaemon, memory: HostMemory) -> None:
    """The blocks are free, and nothing else would say so."""
    daemon.hold_jobs = True
    with Worker(daemon.runtime_dir, "e", 0, 1, deadline=0.1, job_timeout=0.1) as worker:
        worker.register([memory], LAYOUT, FINGERPRINT)
        worker.submit(Store, 1, JOB)
        daemon.wait_for(Store)
        daemon.freeze()
        while worker.connected:
            worker.wait_attached(0)
        ended: list[JobResult] = []
        while not ended:
            assert select.select([worker], [], [], SECONDS)[0]
            ended = worker.get_finished()
    assert [(result.job_id, result.status) for result in ended] == [(1, JobStatus.VOID)]


def test_a_lane_that_cannot_be_reached(daemon: FakeDaemon, worker: Worker) -> None:
    """It is asked for again with a new session, as often as it takes."""
    read, write = os.pipe()
    daemon.notify(
        LaneUp(device="host", incarnation=7, endpoint="nonsense", token=bytes(16)), (read,)
    )
    daemon.wait_for(Hello, 2)
    assert open_on(read) == {read, write}
    os.close(read)
    os.close(write)
    until_registered(worker, True)


def test_close_takes_the_memory_back(daemon: FakeDaemon, worker: Worker) -> None:
    """close() unregisters, and stores under way are void."""
    daemon.hold_jobs = True
    worker.submit(Store, 1, JOB)
    daemon.wait_for(Store)
    page = words(daemon)
    worker.close()
    assert void(daemon, page) == [1]
    assert daemon.wait_for(Unregister)


def test_a_daemon_that_does_not_release(
    daemon: FakeDaemon, worker: Worker, memory: HostMemory
) -> None:
    """Its refusal, silence and death are not taken for an answer; what is registered next holds."""
    daemon.replies[Unregister] = lambda _: Error(code=ErrorCode.INTERNAL, text="no")
    assert not worker.unregister()
    assert worker.register([memory], LAYOUT, FINGERPRINT, required=True)
    daemon.freeze()
    assert not worker.unregister(timeout=0.01)
    daemon.kill()
    assert not worker.register([memory], LAYOUT, FINGERPRINT, timeout=0.0)
    with FakeDaemon(daemon.runtime_dir) as second:
        until_registered(worker, True)
        assert len(second.wait_for(Register)) == 1
        assert worker.unregister()


def test_unregister_while_it_is_registered(daemon: FakeDaemon, memory: HostMemory) -> None:
    """The registration is on its way; once it holds, it is undone, and the next one is made."""
    asked, answer = threading.Event(), threading.Event()
    registered = daemon.replies[Register]

    def late(message: Register) -> Any:
        asked.set()
        assert answer.wait(SECONDS)
        return registered(message)

    daemon.replies[Register] = late
    with Worker(daemon.runtime_dir, "engine", 0, 1, deadline=DEADLINE) as worker:

        def register() -> None:
            worker.register([memory], LAYOUT, FINGERPRINT)

        threading.Thread(target=register, daemon=True).start()
        assert asked.wait(SECONDS)
        assert not worker.unregister(timeout=0.0)
        again = threading.Thread(target=register, daemon=True)
        again.start()
        eventually(lambda: worker.device)
        answer.set()
        again.join(SECONDS)
        until_registered(worker, value=True)
        kinds = [type(m) for m in daemon.received if isinstance(m, (Register, Unregister))]
        assert kinds == [Register, Unregister, Register]


def test_close_ends_the_waiting_of_other_threads(runtime_dir: Path) -> None:
    """Also where no daemon is there, whose loss would end it."""
    worker = Worker(runtime_dir, "engine", 0, 1, deadline=DEADLINE)
    states: list[AttachState] = []
    waits, wait_for = threading.Event(), worker._changed.wait_for

    def wait(question: Callable[[], bool], seconds: float) -> bool:
        waits.set()  # `close` gets the lock when it is let go of, to wait
        return wait_for(question, seconds)

    worker._changed.wait_for = wait  # type: ignore[method-assign,assignment]
    waiting = threading.Thread(
        target=lambda: states.append(worker.wait_attached(3600.0)), daemon=True
    )
    waiting.start()
    assert waits.wait(SECONDS)
    worker.close()
    waiting.join(SECONDS)
    assert [str(state) for state in states] == ["this session was closed meanwhile"]


def test_wrong_jobs_raise(daemon: FakeDaemon, worker: Worker) -> None:
    """Blocks that were not registered, and a number in use, are the caller's mistake."""
    with pytest.raises(UsageError, match=r"block_ids 3\.\.8 are not within 0\.\.7"):
        worker.submit(Store, 1, JobBlocks.of([3, 4, 8], [3], [1], [0, 2], [5, 6]))
    assert worker.get_finished() == []  # it is no job
    daemon.hold_jobs = True
    worker.submit(Store, 1, JOB)
    with pytest.raises(UsageError, match="job 1 has not ended"):
        worker.submit(Store, 1, JOB)


def test_wrong_registrations_raise(runtime_dir: Path, memory: HostMemory) -> None:
    """What cannot be registered is refused before a daemon sees it."""
    with pytest.raises(UsageError, match="rank=2"):
        Worker(runtime_dir, "e", 2, 2)
    with Worker(runtime_dir, "e", 0, 1, deadline=DEADLINE) as worker:
        with pytest.raises(UsageError, match="memory has 0 items, the layout 1"):
            worker.register([], LAYOUT, FINGERPRINT)
        large = msgspec.structs.replace(LAYOUT, num_blocks=9)
        with pytest.raises(UsageError, match="num_blocks"):
            worker.register([memory], large, FINGERPRINT)
        with pytest.raises(UsageError, match="512 bytes"):
            worker.register([HostMemory.allocate(512)], LAYOUT, FINGERPRINT)
        worker.register([memory], LAYOUT, FINGERPRINT)
        with pytest.raises(UsageError, match="registered already"):
            worker.register([memory], LAYOUT, FINGERPRINT)


def test_many_storages_are_sent_at_once(daemon: FakeDaemon) -> None:
    """Each file has its descriptor; two storages at different offsets of one file share it."""
    memory = [HostMemory.allocate(1024) for _ in range(70)]
    memory.insert(1, HostMemory(os.dup(memory[0].fd), 512, 512))
    layout = msgspec.structs.replace(
        LAYOUT,
        num_blocks=1,
        storages=tuple(one.nbytes for one in memory),
        tensors=tuple(msgspec.structs.replace(LAYOUT.tensors[0], storage=i) for i in range(71)),
    )
    with Worker(daemon.runtime_dir, "e", 0, 1, deadline=DEADLINE) as worker:
        assert worker.register(memory, layout, FINGERPRINT)
        assert len(daemon.worker_fds()) == 71
    handles = daemon.wait_for(Register)[0].handles
    assert handles[:3] == (HostHandle(1), HostHandle(1, offset=512), HostHandle(2))
    for one in memory:
        one.close()
