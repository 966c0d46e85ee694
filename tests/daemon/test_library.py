"""What the client library saves an engine's author, against a real daemon."""

import select
from collections.abc import Callable
from functools import partial

import pytest
from msgspec.structs import replace

from kvd_client import (
    ChunkBlocks,
    JobBlocks,
    JobResult,
    Load,
    LookupResult,
    Scheduler,
    UsageError,
    Worker,
)
from tests.conftest import Daemon
from tests.daemon.engines import Engine, keys_of, make_layout, wait_hit
from tests.waiting import DEADLINE, PATIENCE, eventually


@pytest.fixture
def engine(shared_daemon: Daemon, label: str) -> Engine:
    """One rank, attached."""
    return Engine(shared_daemon.runtime_dir, label, world_size=1, model=label).wait_attached()


def readable(source: Scheduler | Worker, seconds: float = PATIENCE) -> bool:
    """Whether its descriptor is, within so long."""
    return bool(select.select([source], [], [], seconds)[0])


def test_a_job_of_the_null_block_is_the_callers_mistake(shared_daemon: Daemon, label: str) -> None:
    """Stores and loads that name the layout's null block raise at once, and move nothing."""
    layout = replace(make_layout(), null_block=0)
    with Engine(shared_daemon.runtime_dir, label, 1, label, layout).wait_attached() as engine:
        worker, keys, nothing = engine.workers[0], keys_of("chunk", 2), ChunkBlocks([], [])
        engine.store(keys)
        wait_hit(engine, keys)
        named = [ChunkBlocks(keys, [0, 12, 13, 14]), nothing]
        refusal = pytest.raises(UsageError, match=r"groups\[0\]\.blocks has block 0, .* null block")
        with engine.scheduler.prepare_load(keys) as found, refusal:
            worker.load(101, found, named)
        refusal = pytest.raises(UsageError, match=r"groups\[0\]\.blocks has block 0, .* null block")
        with engine.begin(keys_of("new", 2)) as ticket, refusal:
            worker.store(102, ticket, [ChunkBlocks(keys_of("new", 2), [12, 13, 14, 0]), nothing])
        torn = JobBlocks.of([0, 0], [2, 0], [0, 0], [0], [1])
        with pytest.raises(UsageError, match="all places of chunk 0 of the job are left out"):
            worker.submit(Load, 103, torn)
        assert worker.get_finished() == []


def test_descriptors_tell_of_ended_jobs_and_ready_chunks(engine: Engine) -> None:
    """Each is readable when its call has news, and quiet when the call has taken them."""
    with engine:
        worker, scheduler = engine.workers[0], engine.scheduler
        for source, take in ((worker, worker.get_finished), (scheduler, scheduler.take_ready)):
            quieten(source, take)
        keys = keys_of("chunk", 4)
        ticket = scheduler.prepare_store(keys)
        blocks = engine.fill(keys, 1)
        worker.store(70, ticket, [ChunkBlocks(keys, blocks), ChunkBlocks([], [])])
        finished: list[JobResult] = []
        while not finished:
            assert readable(worker)
            finished = worker.get_finished()
        assert [(result.job_id, result.success) for result in finished] == [(70, True)]
        told = False
        while scheduler.lookup_many(keys) != [LookupResult.HIT] * 4:
            assert readable(scheduler)
            told |= scheduler.take_ready()
        if not told:  # the directory said so before the descriptor
            assert readable(scheduler)
            told = scheduler.take_ready()
        for source, take in ((worker, worker.get_finished), (scheduler, scheduler.take_ready)):
            quieten(source, take)
        assert told


def quieten(source: Scheduler | Worker, take: Callable[[], object]) -> None:
    """Take the news in, until there are none."""

    def quiet() -> bool:
        take()
        return not readable(source, 0.0)

    eventually(quiet)


def test_waiting_says_why_an_engine_is_not_attached(shared_daemon: Daemon) -> None:
    """No daemon, no rank, a missing rank: each is said, and attached is true."""
    with Scheduler(shared_daemon.runtime_dir.parent / "nowhere", "engine") as lonely:
        waited = lonely.wait_attached(0.0)
        assert not waited
        assert "no daemon answers in" in waited.why
    with Scheduler(shared_daemon.runtime_dir, "engine", deadline=DEADLINE) as early:
        eventually(lambda: "no rank of engine 'engine' is registered" in why(early))
    with Engine(shared_daemon.runtime_dir, world_size=2, ranks=[0]) as half:
        for part in (half.scheduler, half.workers[0]):
            eventually(partial(why, part), "engine 'engine' lacks rank 1 of 2".__eq__)
        half.add(1)
        assert half.scheduler.wait_attached(PATIENCE).why == ""
        with Worker(shared_daemon.runtime_dir, "engine", 1, 2, deadline=DEADLINE) as idle:
            eventually(lambda: "nothing is registered" in why(idle))


def why(client: Scheduler | Worker) -> str:
    """Why it is not attached; it may be about to connect, too."""
    return client.wait_attached(0.0).why
