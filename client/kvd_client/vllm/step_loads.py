"""Loads within a step: a small hit is loaded in the step that computes the rest of its prompt.

vLLM 0.33 admits such a request at once (`sync_load_budget_bytes`), hashes its blocks for other
requests, and has each rank wait for the load before the forward pass. A rank of kvd waits for a
limited time only. If a load fails or is late, the pass computes from wrong blocks, so nothing of it
may be used:

- vLLM drops the pass's token, because the ranks report the load's blocks as invalid.
- The request starts over: it is preempted, and its blocks lose their hashes. What was late is then
  loaded beside the steps, what has failed is computed.
- No other request is admitted on these blocks in the same step.
- The ranks drop the stores of the pass (`KvdConnectorWorker`).
- A load that is late may still write. Its blocks are held until all ranks have reported it.

vLLM reports invalid blocks without their group, and a request that another batch computes already
cannot start over. So loads within a step need one group, and one batch at a time. Where ranks store
the same KV for one another, the rank that stores a chunk may not be the one whose load was late.
"""

import inspect
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
    RequestOffloadState,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request, RequestStatus


def why_impossible(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, replicated: bool
) -> str:
    """Return why this engine cannot load within a step; "" if it can.

    Args:
        vllm_config: of the engine.
        kv_cache_config: of its KV cache.
        replicated: all ranks hold the same KV, and one of them stores a chunk.
    """
    parallel = vllm_config.parallel_config
    aux_output = getattr(vllm_config, "aux_output_config", None)
    obstacles = {
        "it needs vLLM 0.33": not hasattr(OffloadingConnectorScheduler, "_reserve_sync_load"),
        "this model has several groups of KV caches": len(kv_cache_config.kv_cache_groups) > 1,
        "it needs --no-async-scheduling": vllm_config.scheduler_config.async_scheduling,
        "pipeline stages compute several batches at a time": (
            vllm_config.max_concurrent_batches > 1
        ),
        "all ranks hold the same KV, and store it for one another": replicated,
        "the engine records more than tokens": aux_output is not None and aux_output.enabled,
        "its ranks do not report together": (
            parallel.distributed_executor_backend == "external_launcher"
            or parallel.enable_fault_tolerance
        ),
    }
    return next((obstacle for obstacle, is_so in obstacles.items() if is_so), "")


@dataclass(slots=True)
class _StepLoad:
    """A load within a step whose ranks have not all reported it.

    Attributes:
        req_id: of the request.
        first_token: whose KV is loaded.
        block_hash: of the block that holds this token, with all tokens before it.
        blocks: into which it is loaded.
        pending: ranks that have not reported it.
    """

    req_id: str
    first_token: int
    block_hash: bytes
    blocks: list[KVCacheBlock]
    pending: int


@dataclass(slots=True)
class StepLoads:
    """The loads within steps of one engine.

    Args:
        scheduler: vLLM's.
        num_ranks: that report each job.
        tokens_per_hash: of the requests' block hashes.
        requests: vLLM's state of every request, by request id.
    """

    scheduler: Scheduler
    num_ranks: int
    tokens_per_hash: int
    requests: MutableMapping[str, RequestOffloadState]
    pool: BlockPool | None = None
    _late: set[str] = field(default_factory=set)  # requests that have started over
    _unreported: dict[int, _StepLoad] = field(default_factory=dict)
    _step: list[_StepLoad] = field(default_factory=list)

    def may_begin(self, request: Request) -> bool:
        """Return whether the request may load within the step.

        No load is late, nor was its own. Its sampling can be repeated: a seeded generator, and
        log-probabilities of the prompt, cannot be taken back.
        """
        sampling = request.sampling_params
        if sampling is not None and (
            sampling.seed is not None or sampling.prompt_logprobs is not None
        ):
            return False
        is_late = len(self._unreported) > len(self._step) or request.request_id in self._late
        return self.pool is not None and not is_late

    def shares_blocks(self, request: Request, num_computed_tokens: int) -> bool:
        """Return whether the engine's own cache has given the request blocks of this step's loads.

        It is admitted in a later step, when the blocks are known to be loaded.
        """
        return any(
            num_computed_tokens > load.first_token
            and request.block_hashes[load.first_token // self.tokens_per_hash] == load.block_hash
            for load in self._step
        )

    def begin(self, request: Request, first_token: int, jobs: dict[int, TransferJob]) -> None:
        """Hold the blocks of the load that begins with the request's admission.

        Args:
            request: that is admitted.
            first_token: that is loaded.
            jobs: the loads of this step.
        """
        assert self.pool is not None  # noqa: S101  # `may_begin`
        job_id, job = next(reversed(jobs.items()))
        blocks = [self.pool.blocks[block] for block in job.dst_spec.block_ids]
        self.pool.touch(blocks)
        block_hash = request.block_hashes[first_token // self.tokens_per_hash]
        load = _StepLoad(request.request_id, first_token, block_hash, blocks, self.num_ranks)
        self._step.append(load)
        self._unreported[job_id] = load

    def end_step(self) -> None:
        """Forget which loads began in this step: all requests of it are admitted."""
        self._step.clear()

    def start_over(self, job_id: int) -> str | None:
        """Let the request of a load start over that has failed or is late; return its name.

        Called before the report with the load is counted. None: there is no such load.
        """
        load = self._unreported.get(job_id)
        if load is None:
            return None
        self._take_back(load)
        return load.req_id

    def forget(self, req_id: str) -> None:
        """Forget a request that has ended."""
        self._late.discard(req_id)

    def _take_back(self, load: _StepLoad) -> None:
        assert self.pool is not None  # noqa: S101  # `may_begin`
        wrong = {block.block_id for block in load.blocks}
        if (status := self.requests.get(load.req_id)) is not None:
            block_ids = status.group_states[0].block_ids
            first = next((i for i, block in enumerate(block_ids) if block in wrong), len(block_ids))
            wrong.update(block_ids[first:])
            block_ids[first:] = [0] * len(block_ids[first:])  # if it was aborted: not stored
        self.pool.evict_blocks(wrong - {0})
        request = self.scheduler.requests.get(load.req_id)
        if request is not None and request.status == RequestStatus.RUNNING:
            self._late.add(load.req_id)
            self.scheduler.running.remove(request)
            self.scheduler._preempt_request(request, time.monotonic())  # noqa: SLF001
            # As after a reset of running requests: ranks get the whole request anew.
            self.scheduler.prev_step_scheduled_req_ids.discard(load.req_id)

    def count_reports(self, completed_jobs: Mapping[int, int]) -> None:
        """Release the blocks of loads that all ranks have reported."""
        if self.pool is None:
            return
        for job_id, num_ranks in completed_jobs.items():
            load = self._unreported.get(job_id)
            if load is not None:
                load.pending -= num_ranks
                if load.pending <= 0:
                    del self._unreported[job_id]
                    self.pool.free_blocks(reversed(load.blocks))


def calling_scheduler() -> Scheduler | None:
    """Return vLLM's scheduler, whose constructor is on the stack while it creates the connector."""
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(caller := frame.f_locals.get("self"), Scheduler):
            return caller
        frame = frame.f_back
    return None
