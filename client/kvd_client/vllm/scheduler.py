"""vLLM's half of the connector in the scheduler, changed so that jobs may fail."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
    TransferJob,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
    RequestOffloadState,
    SchedulerOffloadConfig,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvd_client.errors import get_logger
from kvd_client.vllm import metrics
from kvd_client.vllm.chunks import BlockRanges, ChunkDescriber, SharedLoads
from kvd_client.vllm.events import (
    IdlePublisher,
    PoolEvents,
    calling_engine_core,
    groups_in_tiers,
)
from kvd_client.vllm.manager import KvdOffloadingManager
from kvd_client.vllm.promotions import Search
from kvd_client.vllm.refused_chunks import RefusedChunks
from kvd_client.vllm.spec import KvdOffloadingSpec
from kvd_client.vllm.step_loads import StepLoads, calling_scheduler, why_impossible
from kvd_client.vllm.upstream import (
    CONFIG_FIELDS,
    GROUP_FIELDS,
    STEP_LOAD_METHODS,
    check_parameters,
    require,
)
from kvd_proto.messages import MAX_KEYS

log = get_logger("kvd_client.vllm")


@dataclass
class KvdWorkerMetadata(OffloadingWorkerMetadata):
    """What ranks report to the scheduler: ended jobs, and which of them failed.

    Attributes:
        failed_jobs: jobs that failed in at least one rank.
        late_loads: loads of this step that were not loaded when its forward pass began, failed or
            late, in at least one rank. They are reported when they have ended.
    """

    failed_jobs: set[int] = field(default_factory=set)
    late_loads: set[int] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "KvdWorkerMetadata":
        """Return the common report of two ranks: a job that failed for one has failed."""
        assert isinstance(other, KvdWorkerMetadata)  # noqa: S101  # all ranks run this connector
        both = super().aggregate(other)
        return KvdWorkerMetadata(
            completed_jobs=both.completed_jobs,
            transfer_stats=both.transfer_stats,
            failed_jobs=self.failed_jobs | other.failed_jobs,
            late_loads=self.late_loads | other.late_loads,
        )


class KvdConnectorScheduler(OffloadingConnectorScheduler):
    """vLLM's scheduler logic for offloading, for jobs that may fail."""

    manager: KvdOffloadingManager
    config: SchedulerOffloadConfig
    _chunks_being_loaded: set[OffloadKey] | None

    def __init__(
        self, spec: KvdOffloadingSpec, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        require(self, "manager", "config", "_jobs", "_req_status")
        require(self, "_current_batch_allocated_block_ids", "_current_batch_load_jobs")
        require(self, "_chunks_being_loaded")
        require(self.config, *CONFIG_FIELDS)
        for group in self.config.kv_group_configs:
            require(group, *GROUP_FIELDS)
        self._ranges = self.manager.ranges = BlockRanges(self.config, self._req_status)
        self.manager.describer = ChunkDescriber(
            self.config,
            self._req_status,
            lookahead_tokens=getattr(vllm_config, "num_hash_lookahead_tokens", 0),
        )
        self.events: PoolEvents | None = None
        self._idle_publisher: IdlePublisher | None = None
        self._refused = RefusedChunks(self.manager, self.config, self._req_status)
        self._step_loads = self._make_step_loads(spec, vllm_config, kv_cache_config)
        self._lookup_tokens: dict[str, int] = {}  # tokens of the last lookup, until admission
        self._missed_reported: set[str] = set()  # running requests
        self._shared_loads = SharedLoads(self.config, self._jobs)
        if spec.publishes:
            self._start_publishing(spec.options.repeat_events)

    def _make_step_loads(
        self, spec: KvdOffloadingSpec, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> StepLoads | None:
        """Return what keeps loads within a step right; None: this engine has none."""
        if not spec.options.sync_load_budget_bytes:
            return None
        obstacle = why_impossible(
            vllm_config, kv_cache_config, replicated=spec.config.replicated_layout
        )
        scheduler = calling_scheduler()
        if scheduler is None:
            obstacle = obstacle or "the connector was not created by vLLM's scheduler"
        if obstacle or scheduler is None:
            log.warning("sync_load_budget_bytes has no effect: %s", obstacle)
            if "sync_load_budget_bytes" in self.config._fields:
                self.config = self.config._replace(sync_load_budget_bytes=0)
            return None
        check_parameters(STEP_LOAD_METHODS)
        require(self, "_current_batch_sync_loads")
        return StepLoads(
            scheduler, self.config.num_workers, self.config.tokens_per_hash, self._req_status
        )

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Use the engine's block pool, which is made after the connector."""
        if self.events is not None:
            self.events.watch(gpu_block_pool)
        if self._step_loads is not None:
            scheduler = self._step_loads.scheduler
            require(scheduler, "requests", "running", "prev_step_scheduled_req_ids")
            self._step_loads.pool = gpu_block_pool

    def _start_publishing(self, repeat_seconds: float) -> None:
        """Publish the pool's changes, also while the engine is idle."""
        tier_groups = groups_in_tiers(self.config.kv_group_configs)
        self.events = PoolEvents(self.manager.scheduler, tier_groups, repeat_seconds)
        core = calling_engine_core()
        if core is not None:
            take_idle_events = partial(self.take_events, idle=True)
            self._idle_publisher = IdlePublisher(core, self.events.is_due, take_idle_events)

    def shutdown(self) -> None:
        """End the session, and the thread that wakes an idle engine."""
        if self._idle_publisher is not None:
            self._idle_publisher.close()
        super().shutdown()

    # --------------------------------------------------------------- lookups

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int, max_num_new_tokens: int | None = None
    ) -> tuple[int | None, bool]:
        """Look up a request's chunks. vLLM calls this in every step until it admits the request."""
        if self._step_loads is not None and self._step_loads.shares_blocks(
            request, num_computed_tokens
        ):
            return None, False
        self._lookup_tokens[request.request_id] = request.num_tokens - num_computed_tokens
        matched: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens, max_num_new_tokens
        )
        return matched

    def _reserve_sync_load(
        self,
        req_status: RequestOffloadState,
        num_computed_tokens: int,
        num_hit_tokens: int | None,
    ) -> bool:
        """Return whether the hit is loaded within the step: it fits vLLM's limit, and may begin."""
        if self._step_loads is None or not self._step_loads.may_begin(req_status.req):
            return False
        reserved: bool = super()._reserve_sync_load(req_status, num_computed_tokens, num_hit_tokens)
        return reserved

    def _lookup(
        self, req_status: RequestOffloadState, max_num_new_tokens: int | None = None
    ) -> int | None:
        """Return how many tokens can be loaded; None: the request waits, such as for tiers."""
        being_loaded = self._chunks_being_loaded
        if not being_loaded:
            return self._search(req_status, max_num_new_tokens)
        self._chunks_being_loaded = self._shared_loads.usable(being_loaded, req_status.req)
        try:
            return self._search(req_status, max_num_new_tokens)
        finally:
            self._chunks_being_loaded = being_loaded

    def _search(
        self, req_status: RequestOffloadState, max_num_new_tokens: int | None
    ) -> int | None:
        """Return how many tokens vLLM finds, in memory and in tiers; None: the request waits."""
        if not self.manager.scheduler.tiers:
            num_tokens: int | None = super()._lookup(req_status, max_num_new_tokens)
            return num_tokens
        search: Search = partial(super()._lookup, req_status, max_num_new_tokens)
        return self.manager.tier_waits.search(req_status.req_context, search)

    def _lookup_complete_chunks(
        self, req_status: RequestOffloadState, max_num_new_tokens: int | None = None
    ) -> int | None:
        """Return how many tokens can be loaded, from windows' chunks that have all needed blocks.

        vLLM's search accepts a chunk if any of its blocks is cached. A chunk that lacks a block for
        the found end is of no use for an earlier end either. So the search is repeated with this
        chunk hidden, until all chunks are complete.
        """
        if not self._ranges.has_partial_chunks:
            num_tokens: int | None = super()._lookup_complete_chunks(req_status, max_num_new_tokens)
            return num_tokens
        with self.manager.hiding() as hidden:
            while True:
                num_tokens = super()._lookup_complete_chunks(req_status, max_num_new_tokens)
                if not num_tokens:
                    return num_tokens
                needed = self._ranges.needed(req_status.req.request_id, num_tokens)
                incomplete = self.manager.incomplete(needed)
                if not incomplete:
                    return num_tokens
                if incomplete <= hidden:  # vLLM did not look up what it would load
                    return 0
                hidden.update(incomplete)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Admit the request: count the tokens of its last lookup, and how many are loaded."""
        lookup_tokens = self._lookup_tokens.pop(request.request_id, None)
        if lookup_tokens is not None:
            self.manager.scheduler.count_tokens(
                lookup_tokens, min(lookup_tokens, num_external_tokens)
            )
            self._report_missed(request, num_external_tokens)
        self.manager.tier_waits.end_wait(request.request_id)
        if num_external_tokens and self._ranges.has_partial_chunks:
            needed = self._ranges.needed(request.request_id, num_external_tokens)
            self.manager.set_needed(request.request_id, needed)
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if (
            num_external_tokens
            and self._step_loads is not None
            and request.request_id in self._current_batch_sync_loads
        ):
            first_token = self._req_status[request.request_id].num_locally_computed_tokens
            self._step_loads.begin(request, first_token, self._current_batch_load_jobs)
            self.manager.count(metrics.STEP_LOADS)
        if num_external_tokens and self._chunks_being_loaded:
            computed = self._req_status[request.request_id].num_locally_computed_tokens
            job_id = next(reversed(self._current_batch_load_jobs))
            self._shared_loads.add(job_id, request, computed + num_external_tokens)

    def _report_missed(self, request: Request, num_external_tokens: int) -> None:
        """Report the prompt's chunks that neither the engine's own cache nor kvd had.

        Once for each request. Preempted requests and those whose load failed are looked up again.
        """
        req_id = request.request_id
        if req_id in self._missed_reported or request.skip_reading_prefix_cache:
            return
        self._missed_reported.add(req_id)
        num_cached = self._req_status[req_id].num_locally_computed_tokens + num_external_tokens
        if missed := self._ranges.missed(req_id, num_cached):
            self.manager.scheduler.report_missed(missed[:MAX_KEYS])

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request's lookups."""
        self._lookup_tokens.pop(request.request_id, None)
        self._missed_reported.discard(request.request_id)
        if self._step_loads is not None:
            self._step_loads.forget(request.request_id)
        result: tuple[bool, dict[str, Any] | None] = super().request_finished(request)
        return result

    # ------------------------------------------------------------------ steps

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return a step's jobs, and end the step: now all of its finished requests are known."""
        meta = super().build_connector_meta(scheduler_output)
        self.manager.tier_waits.speed.step_scheduled(scheduler_output)
        self.manager.end_step()
        if self._step_loads is not None:
            self._step_loads.end_step()
        return meta

    def _build_store_jobs(self, scheduler_output: SchedulerOutput) -> dict[int, TransferJob]:
        """Return the stores of this step: new chunks, and refused chunks offered again."""
        allocated = self._current_batch_allocated_block_ids
        output = scheduler_output
        if self.manager.refused:
            output = self._refused.offer_again(scheduler_output, allocated)
        jobs: dict[int, TransferJob] = super()._build_store_jobs(output)
        if self.manager.refused or output is not scheduler_output:
            self._refused.after_store_jobs(allocated)
        return jobs

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Process the jobs that ended in this step."""
        speed = self.manager.tier_waits.speed
        speed.step_ended()
        if (seconds := speed.seconds_per_token) is not None:
            self.manager.scheduler.set_prefill_seconds(seconds)
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, KvdWorkerMetadata):
            for job_id in meta.failed_jobs:
                self.manager.mark_failed(self._store_keys(job_id))
            if self._step_loads is not None:
                for job_id in meta.late_loads:
                    self._start_over(job_id, has_failed=job_id in meta.failed_jobs)
                self._step_loads.count_reports(meta.completed_jobs)
        super().update_connector_output(connector_output)
        # After a failed load the request is computed, and all its chunks are offered again.
        for req_id in connector_output.failed_recving or ():
            if req_id in self._req_status:  # it was not aborted meanwhile
                for group in self._req_status[req_id].group_states:
                    group.next_stored_chunk_idx = 0
                self.manager.stop_loading(req_id)

    def _start_over(self, job_id: int, *, has_failed: bool) -> None:
        """Let a request start over whose load was not done when its step began."""
        assert self._step_loads is not None  # noqa: S101  # it has begun the load
        req_id = self._step_loads.start_over(job_id)
        if req_id is not None:
            self.manager.count(metrics.STEP_LOADS_LATE)
            if has_failed:
                self.manager.stop_loading(req_id)

    def _store_keys(self, job_id: int) -> Collection[OffloadKey]:
        """Return the keys of a store; empty for a load or a dropped job."""
        job = self._jobs.get(job_id)
        return job.keys if job is not None and job.is_store else ()

    def reset_cache(self) -> None:
        """Drop every chunk. Running requests offer the blocks that they still have again.

        vLLM offers all chunks from the first one on, but checks whether a window's blocks belong to
        another request only from the next chunk to store on. So the blocks before it are removed.
        """
        size = self.config.blocks_per_chunk
        for status in self._req_status.values():
            for config, group in zip(
                self.config.kv_group_configs, status.group_states, strict=True
            ):
                if config.sliding_window_size_in_chunks is not None:
                    num_passed = min(group.next_stored_chunk_idx * size, len(group.block_ids))
                    group.block_ids[:num_passed] = [0] * num_passed
        super().reset_cache()

    # ----------------------------------------------------------------- events

    def has_pending_push_work(self) -> bool:
        """Return whether vLLM must step without requests. Publish waiting changes before."""
        if self._idle_publisher is not None:
            self._idle_publisher.publish()
        pending: bool = super().has_pending_push_work()
        return pending

    def take_events(self, *, idle: bool = False) -> Iterable[KVCacheEvent]:
        """Return events for the pool's changes since the last call; vLLM passes no `idle`."""
        if self.events is None:
            return ()
        try:
            return self.events.take(idle=idle)
        except Exception:  # an engine without events still serves
            log.exception(
                "KV events of the pool cannot be made; this engine publishes none of them until it"
                " is restarted, and routers keep what they know"
            )
            self.events = None
            if self._idle_publisher is not None:
                self._idle_publisher.close()
            return ()
