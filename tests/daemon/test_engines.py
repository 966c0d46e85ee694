"""Engines on a real daemon: what is stored comes back, to whom it may, and only complete."""

from collections.abc import Callable
from functools import partial

import numpy as np
import psutil
import pytest

from kvd_client import Fingerprint, HostMemory, LookupResult, RegistrationError, StoreAnswer, Worker
from tests.conftest import Daemon, StartDaemon
from tests.daemon.engines import Engine, keys_of, make_layout, wait_hit
from tests.waiting import DEADLINE, eventually

MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine(shared_daemon: Daemon, label: str) -> MakeEngine:
    """An engine of this test's on the daemon of all, of a model that is this test's too."""
    return partial(Engine, shared_daemon.runtime_dir, name=label, model=label)


def test_two_ranks_store_and_load_every_byte(make_engine: MakeEngine) -> None:
    """Both groups of both ranks come back, from other blocks, over poisoned memory."""
    with make_engine().wait_attached() as engine:
        full, window = keys_of("full", 10), keys_of("window", 6)
        assert engine.store(full) == full
        assert engine.store(window, first_block=21, group=1) == window
        wait_hit(engine, full + window)
        assert engine.load(full) == (10, 0)
        assert engine.load(window, group=1) == (6, 0)


def test_a_chunk_is_ready_only_with_the_share_of_every_rank(make_engine: MakeEngine) -> None:
    """After one of two ranks a key is pending, for loads it is a miss; after both it is a hit."""
    with make_engine().wait_attached() as engine:
        keys = keys_of("half", 3)
        ticket = engine.scheduler.prepare_store(keys)
        blocks = engine.fill(keys, 1)
        arrays = (blocks, ticket.slots, ticket.generations)
        engine.results(engine.submit("store", [0], *arrays))
        engine.scheduler.status()
        assert engine.scheduler.lookup_many(keys) == [LookupResult.HIT_PENDING] * 3
        assert not engine.scheduler.prepare_load(keys).keys
        engine.results(engine.submit("store", [1], *arrays))
        wait_hit(engine, keys)
        assert engine.load(keys) == (3, 0)


def test_engines_with_the_same_fingerprint_share_chunks(
    make_engine: MakeEngine, label: str
) -> None:
    """What one engine stored, its twin loads; it is offered only once."""
    keys = keys_of("shared", 5)
    with (
        make_engine().wait_attached() as one,
        make_engine(name=f"{label} too").wait_attached() as two,
    ):
        one.store(keys)
        wait_hit(two, keys)
        assert two.load(keys) == (5, 0)
        assert two.scheduler.prepare_store(keys).answers == (StoreAnswer.PRESENT,) * 5


@pytest.mark.parametrize(
    "other",
    [
        {"model": "another"},
        {"layout": make_layout(factor=4)},
        {"layout": make_layout(page=8192)},
        {"world_size": 1},
    ],
)
def test_engines_that_differ_never_share(
    make_engine: MakeEngine, shared_daemon: Daemon, label: str, other: dict[str, object]
) -> None:
    """Another model, factor, page size or world size is another namespace."""
    keys = keys_of("private", 4)
    with (
        make_engine().wait_attached() as one,
        make_engine(name=f"{label} too", **other).wait_attached() as two,
    ):
        one.store(keys)
        wait_hit(one, keys)
        assert two.scheduler.lookup_many(keys) == [LookupResult.MISS] * 4
        assert not two.scheduler.prepare_load(keys).keys
        spaces = {
            engine["name"]: engine["namespace"] for engine in shared_daemon.status()["engines"]
        }
        assert spaces[one.name] != spaces[two.name]


@pytest.mark.parametrize("blocks", [64, 128])
def test_a_restarted_engine_hits_its_old_chunks(make_engine: MakeEngine, blocks: int) -> None:
    """The pool outlives the engine, also where the next one has more GPU blocks."""
    keys = keys_of("again", 8)
    with make_engine().wait_attached() as engine:
        engine.store(keys)
        wait_hit(engine, keys)
    layout = make_layout(blocks=blocks)
    with make_engine(layout=layout).wait_attached() as engine:
        assert engine.scheduler.lookup_many(keys) == [LookupResult.HIT] * 8
        assert engine.load(keys) == (8, 0)


def test_models_share_one_budget(start_daemon: StartDaemon) -> None:
    """A second model gets room in a pool that the first has filled."""
    daemon = start_daemon(cpu_bytes="4MiB")
    with Engine(daemon.runtime_dir, name="one").wait_attached() as one:
        first = keys_of("first", 128)
        for at in range(0, 128, 16):
            one.store(first[at : at + 16])
        wait_hit(one, first[-1:])
        with Engine(
            daemon.runtime_dir, name="two", model="other", layout=make_layout(factor=4)
        ).wait_attached() as two:
            second = keys_of("second", 6)
            assert two.store(second) == second
            wait_hit(two, second)
            assert two.load(second, first_block=33) == (6, 0)
        kept = [key for key in first if one.scheduler.lookup(key) is LookupResult.HIT]
        assert 0 < len(kept) < 128
        assert one.load(kept[:15]) == (15, 0)
    stats = daemon.status()
    assert stats["pool"]["cpu_bytes"] == 4 * 2**20


def test_replicated_shares_are_stored_once(daemon: Daemon) -> None:
    """Ranks that hold the same bytes take turns to write one share, and all load it."""
    layout = make_layout(replicated=True)
    with Engine(daemon.runtime_dir, layout=layout).wait_attached() as engine:
        keys = keys_of("mla", 9)
        engine.store(keys)
        wait_hit(engine, keys)
        assert engine.load(keys) == (9, 0)
        assert engine.scheduler.bytes_per_chunk == 2 * 2 * 4096
    # The lane's counters come with its next heartbeat.
    assert eventually(lambda: daemon.status()["counters"]["store_bytes"]) == 9 * 2 * 2 * 4096


def test_blocks_that_were_not_stored_are_a_miss(make_engine: MakeEngine) -> None:
    """A chunk at a window's edge holds its last block only; a load of the first one fails."""
    with make_engine().wait_attached() as engine:
        keys, scheduler = keys_of("edge", 1), engine.scheduler
        ticket = scheduler.prepare_store(keys, [(1, 1)])
        engine.fill(keys, 2)  # block 3 holds the second block of the chunk
        arrays = (ticket.slots, ticket.generations)
        engine.results(engine.submit("store", [0, 1], [3], *arrays, index=7))
        eventually(lambda: scheduler.lookup(keys[0], 1, 1) is LookupResult.HIT)
        engine.poison([40, 41])
        assert scheduler.lookup(keys[0]) is LookupResult.MISS
        assert not scheduler.prepare_load(keys)
        found = scheduler.prepare_load(keys, blocks=[(1, 1)])
        arrays = (found.slots, found.generations)
        late = engine.results(engine.submit("load", [0, 1], [41], *arrays, index=7))
        assert all(result.success for result in late.values())
        assert np.array_equal(engine.page(1, 0, 41), engine.page(1, 0, 3))
        early = engine.results(engine.submit("load", [0, 1], [40, 41], *arrays, index=6))
        assert not any(result.success for result in early.values())


def test_the_pool_is_sized_from_what_workers_report(start_daemon: StartDaemon) -> None:
    """With auto: ratio x bytes that all ranks report, and the log shows the arithmetic."""
    daemon = start_daemon("--host-ratio", "3", cpu_bytes="auto", ready=False)
    with Engine(daemon.runtime_dir, at_once=True).wait_attached() as engine:
        reported = sum(engine.layout.storages)
        report = daemon.wait_ready()
        assert report["pool"]["cpu_bytes"] == 3 * reported * 2
        assert engine.scheduler.num_chunks == 3 * reported * 2 // engine.scheduler.bytes_per_chunk
        daemon.wait_log("3 x 512 KiB GPU KV x 2 ranks = 3 MiB")


def test_an_odd_rank_is_named(make_engine: MakeEngine) -> None:
    """A rank that reports other num_blocks is refused with both figures; the other one stays."""
    with make_engine(ranks=[0]) as engine:
        layout = make_layout(blocks=32)
        memory = [HostMemory.allocate(size) for size in layout.storages]
        with (
            Worker(engine.runtime_dir, engine.name, 1, 2, deadline=DEADLINE) as odd,
            pytest.raises(RegistrationError, match=r"rank 1 reports num_blocks = 32.*64"),
        ):
            odd.register(memory, layout, Fingerprint(model=engine.model))
        engine.add(1)
        engine.wait_attached()
        assert engine.store(keys_of("fine", 2))
        for item in memory:
            item.close()


def shared_files(daemon: Daemon) -> set[str]:
    """Files that this process, the daemon or a lane has mapped."""
    serving = psutil.Process(daemon.process.pid)
    return {
        mapped.path
        for process in (psutil.Process(), serving, *serving.children(recursive=True))
        for mapped in process.memory_maps()
    }


def test_files_of_an_engine_leave_no_names(make_engine: MakeEngine, shared_daemon: Daemon) -> None:
    """Nothing that it shares with the daemon has a name in /dev/shm."""
    before = shared_files(shared_daemon)
    with make_engine().wait_attached() as engine:
        engine.store(keys_of("nameless", 2))
        new = shared_files(shared_daemon) - before
    assert any(path.startswith("/memfd:kvd") for path in new)
    assert not [path for path in new if path.startswith("/dev/shm/") and "kvd" in path]


def test_a_request_of_a_hundred_thousand_tokens_is_one_job(make_engine: MakeEngine) -> None:
    """6,250 blocks of 16 tokens are stored by one job, loaded by another, and are all right."""
    blocks, page = 6_250, 512
    layout = make_layout(blocks=2 * blocks + 1, page=page)
    keys = keys_of("long", blocks // layout.blocks_per_chunk)
    with make_engine(world_size=1, layout=layout).wait_attached() as engine:
        assert len(engine.store(keys)) == len(keys)
        wait_hit(engine, keys)
        assert engine.load(keys, first_block=blocks + 1) == (len(keys), 0)
