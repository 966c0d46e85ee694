"""The scheduler's side of vLLM's interface, on a real daemon."""

from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    make_offload_key,
)

from kvd_client.vllm import KvdOffloadingManager, metrics
from kvd_client.vllm.chunks import ChunkDescriber
from kvd_client.vllm.manager import ChunkLoadStoreSpec
from tests.conftest import Daemon, StartDaemon
from tests.daemon.engines import FACTOR, Engine, lend, make_layout
from tests.vllm.configs import BLOCK, WholeChunks
from tests.waiting import eventually

SMALL_POOL = 16  # chunks
REQUEST = ReqContext("request")
OTHER = ReqContext("other")


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[Engine]:
    """An engine of one rank; its scheduler is the manager's."""
    with Engine(daemon.runtime_dir, world_size=1, steps=True).wait_attached() as engine:
        yield engine


@pytest.fixture
def small(start_daemon: StartDaemon) -> Iterator[Engine]:
    """The same with a pool of sixteen chunks."""
    daemon = start_daemon(cpu_bytes="4MiB")
    layout = make_layout(page=64 * 1024)
    small = Engine(daemon.runtime_dir, world_size=1, layout=layout, steps=True)
    with small.wait_attached() as engine:
        assert engine.scheduler.num_chunks == SMALL_POOL
        yield engine


def manager_of(engine: Engine, *, pending_timeout: float = 1.0) -> KvdOffloadingManager:
    """A manager on the engine's session; chunks are whole."""
    manager = KvdOffloadingManager(
        engine.scheduler, pending_timeout=pending_timeout, seek_timeout=0.05
    )
    manager.ranges = WholeChunks(FACTOR)
    groups: Any = SimpleNamespace(kv_group_configs=(), tokens_per_hash=BLOCK)
    manager.describer = ChunkDescriber(groups, {})  # it knows no request: nothing is described
    return manager


def keys_of(name: str, count: int) -> list[OffloadKey]:
    """Keys as vLLM makes them, and says which chunk of a request each is of."""
    keys = [
        make_offload_key(f"{name}-{index:04d}".encode().ljust(32, b"."), 0)
        for index in range(count)
    ]
    for number, key in enumerate(keys, 1):
        REQUEST.set_offload_key_position(key, number * FACTOR * BLOCK)
    return keys


def chunks(engine: Engine) -> dict[str, int]:
    """The daemon's chunks by state, after what was decided until now."""
    engine.scheduler.end_step()
    (namespace,) = engine.scheduler.status()["namespaces"]
    counts: dict[str, int] = namespace["chunks"]
    return counts


def looked_up(
    manager: KvdOffloadingManager, keys: Sequence[OffloadKey], request: ReqContext = REQUEST
) -> set[LookupResult]:
    """What the keys are, all together."""
    return {manager.lookup(key, request) for key in keys}


def store(manager: KvdOffloadingManager, engine: Engine, keys: Sequence[OffloadKey]) -> None:
    """Store all by the only rank, in as many steps as it takes to get slots."""
    rest = list(keys)
    while rest:
        lend(engine.scheduler, 1)
        output = manager.prepare_store(rest, REQUEST)
        wanted: list[OffloadKey] = output.keys_to_store
        spec = output.store_spec
        assert isinstance(spec, ChunkLoadStoreSpec)
        if wanted:
            blocks = engine.fill(wanted, 1)
            sent = engine.submit("store", [0], blocks, spec.slots, spec.generations)
            manager.end_step()  # a lane begins once the broker has read the step
            engine.results(sent)
            manager.complete_store(wanted, REQUEST)
        manager.end_step()
        eventually(partial(looked_up, manager, wanted), {LookupResult.HIT}.issuperset)
        rest = [keys[chunk] for _, chunk in sorted(manager.refused.pop(REQUEST.req_id, ()))]
    engine.scheduler.status()  # all that the daemon was told of until now is answered
    assert engine.scheduler.loans is not None


def counted(manager: KvdOffloadingManager) -> dict[str, float]:
    """The statistics since the last time, by name and labels."""
    figures: dict[str, float] = manager.get_stats().reduce()
    return figures


def test_chunks_that_went_since_the_lookup_are_counted(small: Engine) -> None:
    """Some are gone: the load says how many, and pins nothing."""
    manager = manager_of(small)
    old = keys_of("old", SMALL_POOL // 2)
    store(manager, small, old)
    store(manager, small, keys_of("new", SMALL_POOL // 2 + 3))
    gone = [manager.lookup(key, REQUEST) for key in old].count(LookupResult.MISS)
    assert 0 < gone < len(old)
    spec = manager.prepare_load(old, REQUEST)
    assert spec.missing == gone
    assert len(spec.slots) == len(spec.generations) == 0
    assert chunks(small)["pinned"] == 0
    manager.complete_load(old, REQUEST)


def test_a_request_whose_load_failed_loads_no_more(engine: Engine) -> None:
    """Its lookups miss until it is finished, other requests' do not."""
    manager = manager_of(engine)
    keys = keys_of("stopped", 3)
    store(manager, engine, keys)
    manager.stop_loading(REQUEST.req_id)
    assert looked_up(manager, keys) == {LookupResult.MISS}
    assert looked_up(manager, keys, OTHER) == {LookupResult.HIT}
    assert counted(manager)[metrics.LOAD_FAILURES] == 1
    manager.on_request_finished(REQUEST)
    assert looked_up(manager, keys) == {LookupResult.HIT}


def test_a_chunk_that_is_being_stored_is_waited_for_so_long(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is pending, and a miss when the request has waited its time; others begin anew."""
    clock = SimpleNamespace(now=100.0)
    fake_time = SimpleNamespace(monotonic=lambda: clock.now)
    monkeypatch.setattr("kvd_client.vllm.manager.time", fake_time)
    manager = manager_of(engine, pending_timeout=0.25)
    keys = keys_of("pending", 2)
    assert manager.prepare_store(keys, OTHER).keys_to_store == keys
    assert looked_up(manager, keys) == {LookupResult.HIT_PENDING}
    clock.now += 0.125
    assert looked_up(manager, keys) == {LookupResult.HIT_PENDING}
    clock.now += 0.125
    assert looked_up(manager, keys) == {LookupResult.MISS}
    assert looked_up(manager, keys, OTHER) == {LookupResult.HIT_PENDING}
    manager.on_request_finished(REQUEST)
    assert looked_up(manager, keys) == {LookupResult.HIT_PENDING}


@pytest.mark.parametrize("by_a_rank", [True, False])
def test_what_was_not_stored_is_given_up(engine: Engine, by_a_rank: bool) -> None:
    """Chunks that a rank or vLLM calls failed lose their slots; stored again, they stay."""
    manager = manager_of(engine)
    keys = keys_of("failed", 4)
    assert manager.prepare_store(keys, REQUEST).keys_to_store == keys
    assert chunks(engine)["writing"] == 4
    if by_a_rank:
        manager.mark_failed(keys[:3])
        manager.complete_store(keys[:3], REQUEST)
    else:
        manager.complete_store(keys[:3], REQUEST, success=False)
    eventually(lambda: chunks(engine)["draining"] == 0)
    assert chunks(engine)["writing"] == 1
    assert looked_up(manager, keys[:3]) == {LookupResult.MISS}
    assert looked_up(manager, keys[3:]) == {LookupResult.HIT_PENDING}
    assert counted(manager)[metrics.STORE_FAILURES] == 1
    store(manager, engine, keys[:3])
    assert metrics.STORE_FAILURES not in counted(manager)
