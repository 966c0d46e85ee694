"""Small hits that are loaded within the step: a load that is late costs time, and nothing else."""

import os
import signal
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    TransferJob,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvd_client.routes import EXPORT, STAGING
from kvd_client.vllm.metrics import LOAD_FAILURES, STEP_LOADS, STEP_LOADS_LATE
from kvd_client.vllm.scheduler import KvdWorkerMetadata
from kvd_client.vllm.step_loads import why_impossible
from kvd_tools.vllm_engine import VllmServer
from tests.conftest import Daemon, StartDaemon
from tests.engine_answers import TEST_SECONDS, ask_all, check, check_equal
from tests.vllm.configs import BLOCK as SHORT_BLOCK
from tests.vllm.configs import configured, full, window
from tests.vllm.conftest import StartEngine
from tests.vllm.stepping import WAITS, Lender, Stepping, hits
from tests.vllm.support import (
    CACHED_TOKENS,
    SHORT,
    References,
    Setting,
    ask_found,
    check_transfer,
    chunks_of,
    compute_references,
    results,
    wait_served,
    with_kvd,
)
from tests.vllm.test_rank import FakeWorker, chunks, half_of, offloading
from tests.vllm.test_rank import blocks as rank_blocks
from tests.waiting import eventually

pytestmark = [
    pytest.mark.timeout(TEST_SECONDS),
    pytest.mark.skipif(
        not hasattr(OffloadingConnectorScheduler, "_reserve_sync_load"),
        reason="this vLLM cannot load within a step",
    ),
]

BUDGET = 2**30
NUM_BLOCKS = 20


@pytest.fixture(
    scope="module",
    params=[
        (1, EXPORT),
        (1, STAGING),
        pytest.param((2, EXPORT), marks=pytest.mark.nightly),
        pytest.param((2, STAGING), marks=pytest.mark.nightly),
    ],
    ids=lambda param: f"TP {param[0]}, {param[1]}",
)
def engine(
    request: pytest.FixtureRequest, models: Path, module_dir: Path, start_engine: StartEngine
) -> Iterator[VllmServer]:
    """An engine that loads every hit within the step, and waits for it patiently."""
    ranks, transfer = request.param
    options = with_kvd(
        Setting("dense", ranks).options(models),
        module_dir,
        sync_load_budget_bytes=BUDGET,
        sync_load_timeout=1.0,
        transfer=transfer,
    )
    engine = start_engine(replace(options, args=["--no-async-scheduling"]))
    engine.wait_ready()
    check_transfer(engine, transfer)
    yield engine
    engine.kill()


@pytest.fixture(scope="module")
def known(engine: VllmServer) -> References:
    """What the answers should be: asked before the first daemon starts."""
    return compute_references(engine, 8)


@pytest.fixture
def daemon(
    engine: VllmServer, module_dir: Path, start_daemon: StartDaemon, tmp_path: Path
) -> Daemon:
    """A daemon that serves the engine, and leaves alone a lane that stands still."""
    config = tmp_path / "kvd.toml"
    config.write_text("lane_timeout_seconds = 600.0\n")
    daemon = start_daemon("--config", str(config), cpu_bytes="64MiB", where=module_dir)
    wait_served(daemon, engine)
    return daemon


class Blocks:
    """A scheduler with vLLM's own block pool, whose requests load within the step.

    Attributes:
        stepping: the scheduler's half.
        pool: of vLLM.
        lender: the daemon.
    """

    def __init__(self, stepping: Stepping, lender: Lender) -> None:
        self.stepping, self.lender = stepping, lender
        self.pool = BlockPool(NUM_BLOCKS, enable_caching=True, hash_block_size=SHORT_BLOCK)
        stepping.half.bind_gpu_block_pool(self.pool)

    def come(self, name: str, tokens: list[int] | None = None) -> Request:
        """A request of three blocks, all found, and one token; with these tokens if given."""
        request = self.stepping.come(name, 3)
        if tokens is not None:
            request = self.stepping.requests[name] = Request(
                name, tokens, SamplingParams(), None, block_hasher=self.stepping.hasher
            )
            self.stepping.half.on_new_request(request)
        self.lender.present.update(self.stepping.keys(name)[:2])
        return request

    def admit(self, name: str) -> list[KVCacheBlock]:
        """Its blocks, the first two of which are loaded; vLLM caches all three."""
        request, half = self.stepping.requests[name], self.stepping.half
        assert self.stepping.ask(name) == (2 * SHORT_BLOCK, False)
        blocks: list[KVCacheBlock] = self.pool.get_new_blocks(3)
        self.pool.cache_full_blocks(request, blocks, 0, 3, SHORT_BLOCK, 0)
        half.update_state_after_alloc(request, KVCacheBlocks((blocks,)), 2 * SHORT_BLOCK)
        ids = ([block.block_id for block in blocks],)
        self.stepping.new.append(NewRequestData.from_request(request, ids))
        request.status = RequestStatus.RUNNING
        self.stepping.vllm_scheduler.requests[name] = request
        self.stepping.vllm_scheduler.running.append(request)
        return blocks

    def report(self, *ended: int, late: Collection[int] = (), failed: Collection[int] = ()) -> None:
        """The rank has reported these loads."""
        report = KvdWorkerMetadata(
            completed_jobs=dict.fromkeys(ended, 1), failed_jobs=set(failed), late_loads=set(late)
        )
        self.stepping.half.update_connector_output(
            KVConnectorOutput(kv_connector_worker_meta=report)
        )


@pytest.fixture
def blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Blocks:
    """A scheduler that may load two requests' blocks in a step."""
    lender = Lender(100)
    extra = {"sync_load_budget_bytes": BUDGET}
    return Blocks(Stepping(tmp_path, monkeypatch, lender, extra=extra), lender)


def test_a_request_that_shares_blocks_with_a_load_waits_for_the_next_step(blocks: Blocks) -> None:
    """The load may fail; a request that shares none, or only blocks before it, does not wait."""
    first = blocks.come("first")
    blocks.come("twin", first.all_token_ids[:])
    blocks.admit("first")
    assert blocks.stepping.ask("twin", 2 * SHORT_BLOCK) == WAITS
    assert blocks.stepping.ask("twin") == (2 * SHORT_BLOCK, False)
    blocks.come("other")
    assert blocks.stepping.ask("other", SHORT_BLOCK) == (SHORT_BLOCK, False)
    (job,) = [*blocks.stepping.step(first=SHORT_BLOCK), *blocks.stepping.jobs][-1:]
    blocks.report(job)
    assert blocks.stepping.ask("twin", 2 * SHORT_BLOCK) == hits(0)


@pytest.mark.parametrize("aborted", [False, True])
def test_what_a_late_load_has_spoilt_is_not_used(blocks: Blocks, aborted: bool) -> None:
    """Its blocks and those computed from them lose their hashes, are not stored, and are held.

    The request starts over, unless it was aborted. No other load begins within a step until the
    late one has ended.
    """
    request = blocks.come("late")
    block_ids = blocks.admit("late")
    free = blocks.pool.get_num_free_blocks()
    stores = blocks.stepping.step(late=SHORT_BLOCK)
    (load,) = blocks.stepping.jobs.keys() - stores.keys()
    if aborted:
        blocks.stepping.finish("late")
    blocks.report(late=[load])
    assert blocks.stepping.statistics()[STEP_LOADS_LATE] == 1
    assert [block.block_hash for block in block_ids] == [None] * 3
    running = blocks.stepping.vllm_scheduler.running
    assert (running, request.status) == (
        ([request], RequestStatus.FINISHED_STOPPED) if aborted else ([], RequestStatus.PREEMPTED)
    )
    blocks.pool.free_blocks(block_ids)  # as vLLM does
    assert blocks.pool.get_num_free_blocks() == free + 1
    assert not blocks.stepping.step()
    blocks.come("next")
    assert blocks.stepping.ask("next") == (2 * SHORT_BLOCK, True)
    blocks.report(load)
    assert blocks.pool.get_num_free_blocks() == free + 3
    assert blocks.stepping.ask("next") == (2 * SHORT_BLOCK, False)
    if not aborted:
        assert blocks.stepping.ask("late") == (2 * SHORT_BLOCK, True)


def test_what_cannot_be_loaded_within_the_step_is_computed(blocks: Blocks) -> None:
    """A load that has failed is not tried again."""
    blocks.come("failed")
    blocks.admit("failed")
    stores = blocks.stepping.step(failed=SHORT_BLOCK)
    (load,) = blocks.stepping.jobs.keys() - stores.keys()
    blocks.report(load, late=[load], failed=[load])
    assert blocks.stepping.ask("failed") == hits(0)
    assert blocks.stepping.statistics()[LOAD_FAILURES] == 1


def test_a_rank_stores_nothing_that_was_computed_from_a_late_load() -> None:
    """The stores of that step fail for its request alone; its blocks are reported once."""
    half = half_of()
    lane = FakeWorker()
    half.worker = offloading(lane)
    loads = {1: TransferJob("late", chunks(2), rank_blocks(10), sync=True)}
    stores = {
        number: TransferJob(name, rank_blocks(number * 10), chunks(2))
        for number, name in ((2, "late"), (3, "other"))
    }
    half.start_kv_transfers(OffloadingConnectorMetadata(loads, {}))
    half.prepare_store_kv(OffloadingConnectorMetadata({}, dict(stores)))
    assert half.take_lost_blocks() == set(range(10, 18))
    assert half.take_lost_blocks() == set()
    report = half.build_connector_worker_meta()
    assert report is not None
    assert (report.late_loads, report.completed_jobs, report.failed_jobs) == ({1}, {2: 1}, {2})
    assert KvdWorkerMetadata(late_loads={5}).aggregate(report).late_loads == {1, 5}
    half.start_kv_transfers(OffloadingConnectorMetadata({}, {}))
    assert lane.submitted == [1, 3]
    half.prepare_store_kv(OffloadingConnectorMetadata({}, {4: stores[2]}))
    half.start_kv_transfers(OffloadingConnectorMetadata({}, {}))
    assert lane.submitted == [1, 3, 4]


def test_a_hit_that_is_not_taken_begins_no_load(blocks: Blocks) -> None:
    """A request may be admitted without the tokens that it was offered."""
    blocks.come("capped")
    assert blocks.stepping.ask("capped") == (2 * SHORT_BLOCK, False)
    request = blocks.stepping.requests["capped"]
    blocks.stepping.half.update_state_after_alloc(request, KVCacheBlocks(([],)), 0)
    blocks.come("next")
    blocks.admit("next")
    assert len(blocks.stepping.step(next=SHORT_BLOCK) | blocks.stepping.jobs) == 1


@pytest.mark.parametrize("field", ["seed", "prompt_logprobs"])
def test_what_cannot_be_sampled_again_is_loaded_beside_the_steps(
    blocks: Blocks, field: str
) -> None:
    """A seeded generator and the prompt's log-probabilities cannot be taken back."""
    request = blocks.come("once")
    setattr(request.sampling_params, field, 1)
    assert blocks.stepping.ask("once") == (2 * SHORT_BLOCK, True)


@pytest.mark.parametrize(
    ("change", "obstacle"),
    [
        ({"scheduler_config.async_scheduling": True}, "it needs --no-async-scheduling"),
        ({"parallel_config.pipeline_parallel_size": 2}, "pipeline stages"),
        ({"parallel_config.distributed_executor_backend": "external_launcher"}, "its ranks do not"),
        ({"parallel_config.enable_fault_tolerance": True}, "its ranks do not report together"),
        ({"aux_output_config": SimpleNamespace(enabled=True)}, "the engine records more"),
        ({}, "several groups"),
        ({}, "all ranks hold the same KV"),
        ({}, ""),
    ],
)
def test_an_engine_that_cannot_start_over_loads_as_before(
    tmp_path: Path, change: dict[str, Any], obstacle: str
) -> None:
    """Where vLLM could not take a failed load back there are no loads within a step."""
    groups = [window(["c", "d"])] if obstacle == "several groups" else []
    config, cache, _ = configured(tmp_path, full(["a", "b"]), *groups)
    config.scheduler_config.async_scheduling = False
    for path, value in change.items():
        owner, _, name = path.rpartition(".")
        setattr(getattr(config, owner) if owner else config, name, value)
    reason = why_impossible(config, cache, replicated=obstacle.startswith("all ranks hold"))
    assert obstacle in reason
    assert bool(reason) == bool(obstacle)


def wait_unpinned(daemon: Daemon) -> None:
    """Until no chunk is leased for a load."""
    eventually(lambda: chunks_of(daemon)["pinned"], lambda pinned: pinned == 0)


def test_hits_within_the_step_give_the_same_answers(
    engine: VllmServer, known: References, daemon: Daemon
) -> None:
    """Hits are loaded in the step of their prompts' rest; bits are those of the own cache's."""
    ask_found(engine, known.prompts)
    loads, failures = engine.metric(STEP_LOADS), engine.metric(LOAD_FAILURES)
    check_equal(ask_found(engine, known.prompts), known.warm)
    assert engine.metric(STEP_LOADS) >= loads + len(known.prompts)
    engine.reset()
    # Requests of one prompt come in pairs: the second finds what the first one loads.
    twice = [prompt for prompt in known.prompts for _ in range(2)]
    answers = results([engine.submit(prompt) for prompt in twice])
    check(answers, [warm for warm in known.warm for _ in range(2)])
    assert {answer.cached_tokens for answer in answers} == {CACHED_TOKENS}
    assert engine.metric(LOAD_FAILURES) == failures
    wait_unpinned(daemon)


def test_a_load_that_is_late_for_its_step_starts_over(
    engine: VllmServer, known: References, daemon: Daemon, request: pytest.FixtureRequest
) -> None:
    """Its request waits for the load's end; others are served, and nothing is spoilt.

    A staged load ends when it is stopped, whatever the lane does: its request need not wait.
    """
    _, transfer = request.node.callspec.params["engine"]
    ask_found(engine, known.prompts)
    engine.reset()
    number_before = engine.metric(STEP_LOADS_LATE)
    (lane,) = [lane["pid"] for lane in daemon.status()["lanes"] if lane["device"] == "host"]
    os.kill(lane, signal.SIGSTOP)
    try:
        # Few enough that blocks are left for others.
        late = [engine.submit(prompt) for prompt in known.prompts[:2] for _ in range(2)]

        def number_late() -> float:
            """How many loads were late so far; the short prompts let the engine step."""
            engine.generate([SHORT])
            return engine.metric(STEP_LOADS_LATE)

        eventually(number_late, number_before.__lt__)
        if transfer == EXPORT:
            assert not late[0].done()  # the lane could still write
    finally:
        os.kill(lane, signal.SIGCONT)
    check(results(late), [cold for cold in known.cold[:2] for _ in range(2)])
    check(ask_all(engine, known.prompts), known.warm)
    check_equal(ask_found(engine, known.prompts), known.warm)
    wait_unpinned(daemon)
