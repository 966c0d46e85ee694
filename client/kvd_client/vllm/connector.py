"""KvdConnector: vLLM's offloading connector, changed so that jobs may fail.

vLLM's own worker asserts that every job succeeds. Here a failed store is given
up, and a failed load is reported for its request, which vLLM then computes.
"""

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
    TransferJob,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
    RequestOffloadState,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvd_client.adapters import OptionsError
from kvd_client.errors import get_logger
from kvd_client.vllm.descriptions import ChunkDescriber
from kvd_client.vllm.events import PoolEvents, groups_in_tiers
from kvd_client.vllm.identity import random_hash_seed
from kvd_client.vllm.idle import IdlePublisher, calling_engine_core
from kvd_client.vllm.manager import KvdOffloadingManager
from kvd_client.vllm.options import read_options
from kvd_client.vllm.promotions import Search
from kvd_client.vllm.ranges import BlockRanges
from kvd_client.vllm.refused import RefusedChunks
from kvd_client.vllm.spec import KvdOffloadingSpec
from kvd_client.vllm.upstream import CONFIG, GROUP, check, require
from kvd_client.vllm.versions import untested
from kvd_client.vllm.wish import wanted_layout
from kvd_client.vllm.worker import KvdOffloadingWorker
from kvd_proto.messages import MAX_KEYS

log = get_logger("kvd_client.vllm")


@dataclass
class KvdWorkerMetadata(OffloadingWorkerMetadata):
    """What ranks report to the scheduler: ended jobs, and which of them failed.

    Attributes:
        failed_jobs: jobs that failed in at least one rank.
    """

    failed_jobs: set[int] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "KvdWorkerMetadata":
        """Return the report of two ranks: a job that failed for one has failed."""
        assert isinstance(other, KvdWorkerMetadata)  # noqa: S101  # all ranks run this connector
        both = super().aggregate(other)
        return KvdWorkerMetadata(
            completed_jobs=both.completed_jobs,
            transfer_stats=both.transfer_stats,
            failed_jobs=self.failed_jobs | other.failed_jobs,
        )


class KvdConnectorWorker(OffloadingConnectorWorker):
    """vLLM's half of the connector in a rank, for jobs that may fail."""

    spec: KvdOffloadingSpec

    def __init__(
        self, spec: KvdOffloadingSpec, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        require(self, "worker", "_load_jobs", "_connector_worker_meta")
        self._connector_worker_meta = KvdWorkerMetadata()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register the layers' views as they are.

        vLLM's own way takes a state's padded page for the distance of its blocks, and whole blocks
        for the pages of every group where blocks hold all layers.
        """
        self.worker = self.spec.serve(kv_caches)

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """Collect the ended jobs; a failed load is both finished and failed."""
        assert self.worker is not None  # noqa: S101  # made by register_kv_caches
        results = KVConnectorTransferResults()
        meta: KvdWorkerMetadata = self._connector_worker_meta
        for ended in self.worker.get_finished():
            meta.mark_completed(ended.job_id)
            request = self._load_jobs.pop(ended.job_id, None)
            if request is not None:
                results.finished_recving.add(request)
            if not ended.success:
                meta.failed_jobs.add(ended.job_id)
                if request is not None:
                    results.failed_recving.add(request)
            elif ended.transfer_size is not None and ended.transfer_time is not None:
                stats = meta.transfer_stats
                direction = stats.load if request is not None else stats.store
                direction.record(ended.transfer_size, ended.transfer_time)
        return results

    def build_connector_worker_meta(self) -> KvdWorkerMetadata | None:
        """Return what has ended since the last call, for the scheduler."""
        meta: KvdWorkerMetadata = self._connector_worker_meta
        if not meta.completed_jobs:
            return None
        self._connector_worker_meta = KvdWorkerMetadata()
        return meta


class KvdConnectorScheduler(OffloadingConnectorScheduler):
    """vLLM's half of the connector in the scheduler, for jobs that may fail."""

    manager: KvdOffloadingManager

    def __init__(
        self, spec: KvdOffloadingSpec, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        require(self, "manager", "config", "_jobs", "_req_status")
        require(self, "_current_batch_allocated_block_ids")
        require(self.config, *CONFIG)
        for group in self.config.kv_group_configs:
            require(group, *GROUP)
        self._ranges = self.manager.ranges = BlockRanges(self.config, self._req_status)
        self.manager.describer = ChunkDescriber(
            self.config,
            self._req_status,
            lookahead_tokens=getattr(vllm_config, "num_hash_lookahead_tokens", 0),
        )
        self.events: PoolEvents | None = None
        self._idle_publisher: IdlePublisher | None = None
        self._refused = RefusedChunks(self.manager, self.config, self._req_status)
        self._asked: dict[str, int] = {}  # prompt tokens, by request that is not admitted yet
        self._missed: set[str] = set()  # running requests whose missed chunks are reported
        if spec.publishes:
            self._start_publishing(spec.options.repeat_events)

    def _start_publishing(self, repeat_seconds: float) -> None:
        """Publish what changes in the pool, also while the engine is idle."""
        tier_groups = groups_in_tiers(self.config.kv_group_configs)
        self.events = PoolEvents(self.manager.scheduler, tier_groups, repeat_seconds)
        core = calling_engine_core()
        if core is not None:
            take_idle_events = partial(self._take_events, idle=True)
            self._idle_publisher = IdlePublisher(core, self.events.is_due, take_idle_events)

    def shutdown(self) -> None:
        """End the session, and the thread that wakes an idle engine."""
        if self._idle_publisher is not None:
            self._idle_publisher.close()
        super().shutdown()

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int, max_num_new_tokens: int | None = None
    ) -> tuple[int | None, bool]:
        """Look up; vLLM asks again in every step until the request is admitted."""
        self._asked[request.request_id] = request.num_tokens - num_computed_tokens
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens, max_num_new_tokens
        )
        return found

    def _lookup(
        self, req_status: RequestOffloadState, max_num_new_tokens: int | None = None
    ) -> int | None:
        """Return how many tokens can be loaded; None while the request waits, such as for tiers."""
        search: Search = partial(super()._lookup, req_status, max_num_new_tokens)
        if not self.manager.scheduler.tiers:
            return search()
        return self.manager.promotions.search(req_status.req_context, search)

    def _lookup_complete_chunks(
        self, req_status: RequestOffloadState, max_num_new_tokens: int | None = None
    ) -> int | None:
        """Return how many tokens can be loaded; of windows only chunks with the needed blocks.

        vLLM searches for chunks of which any block is cached. A chunk that lacks a block which the
        found end needs is of no use for an earlier end either: the search is repeated without it.
        """
        if not self._ranges.parts:
            found: int | None = super()._lookup_complete_chunks(req_status, max_num_new_tokens)
            return found
        with self.manager.missing() as missing:
            while True:
                found = super()._lookup_complete_chunks(req_status, max_num_new_tokens)
                if not found:
                    return found
                needed = self._ranges.needed(req_status.req.request_id, found)
                lacking = self.manager.lacking(needed)
                if not lacking:
                    return found
                if lacking <= missing:  # vLLM did not look at what it would load
                    return 0
                missing.update(lacking)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """The request is admitted: count its last lookup and what of it is loaded."""
        asked = self._asked.pop(request.request_id, None)
        if asked is not None:
            self.manager.scheduler.count_tokens(asked, min(asked, num_external_tokens))
            self._report_missed(request, num_external_tokens)
        self.manager.promotions.admitted(request.request_id)
        if num_external_tokens and self._ranges.parts:
            needed = self._ranges.needed(request.request_id, num_external_tokens)
            self.manager.need(request.request_id, needed)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def _report_missed(self, request: Request, num_external_tokens: int) -> None:
        """Report the prompt's chunks that neither the engine's own cache nor kvd had.

        Once for each request: a preempted one, or one whose load has failed, is looked up again.
        """
        req_id = request.request_id
        if req_id in self._missed or request.skip_reading_prefix_cache:
            return
        self._missed.add(req_id)
        found = self._req_status[req_id].num_locally_computed_tokens + num_external_tokens
        if missed := self._ranges.missed(req_id, found):
            self.manager.scheduler.report_missed(missed[:MAX_KEYS])

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Forget what was noted for the request's lookups."""
        self._asked.pop(request.request_id, None)
        self._missed.discard(request.request_id)
        kept: tuple[bool, dict[str, Any] | None] = super().request_finished(request)
        return kept

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return a step's jobs. At its end it is known which requests have finished."""
        meta = super().build_connector_meta(scheduler_output)
        self.manager.promotions.speed.scheduled(scheduler_output)
        self.manager.end_step()
        return meta

    def _build_store_jobs(self, scheduler_output: SchedulerOutput) -> dict[int, TransferJob]:
        """Begin what requests of the step can store, and what got no slot before."""
        allocated = self._current_batch_allocated_block_ids
        again = scheduler_output
        if self.manager.refused:
            again = self._refused.offer_again(scheduler_output, allocated)
        jobs: dict[int, TransferJob] = super()._build_store_jobs(again)
        if self.manager.refused or again is not scheduler_output:
            self._refused.keep(allocated)
        return jobs

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Process the jobs that ended in this step."""
        speed = self.manager.promotions.speed
        speed.ended()
        if (seconds := speed.seconds_per_token) is not None:
            self.manager.scheduler.set_prefill_seconds(seconds)
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, KvdWorkerMetadata):
            for job_id in meta.failed_jobs:
                self.manager.mark_failed(self._store_keys(job_id))
        super().update_connector_output(connector_output)
        # After a failed load the request is computed, and all its chunks are offered again.
        for req_id in connector_output.failed_recving or ():
            if req_id in self._req_status:  # it was not aborted meanwhile
                for group in self._req_status[req_id].group_states:
                    group.next_stored_chunk_idx = 0
                self.manager.stop_loading(req_id)

    def reset_cache(self) -> None:
        """Drop every chunk; running requests offer again the blocks that are still theirs.

        vLLM offers all chunks from the first one on, but checks whether a window's blocks became
        another request's only from the next chunk to store on: those before it are taken out.
        """
        size = self.config.blocks_per_chunk
        for status in self._req_status.values():
            for config, group in zip(
                self.config.kv_group_configs, status.group_states, strict=True
            ):
                if config.sliding_window_size_in_chunks is not None:
                    passed = min(group.next_stored_chunk_idx * size, len(group.block_ids))
                    group.block_ids[:passed] = [0] * passed
        super().reset_cache()

    def has_pending_push_work(self) -> bool:
        """Return whether vLLM is to step without requests; before that publish what waits."""
        if self._idle_publisher is not None:
            self._idle_publisher.publish()
        pending: bool = super().has_pending_push_work()
        return pending

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return what is found in the pool since the last call, and what is not any more."""
        return self._take_events()

    def _take_events(self, *, idle: bool = False) -> Iterable[KVCacheEvent]:
        if self.events is None:
            return ()
        try:
            return self.events.take(idle=idle)
        except Exception:  # an engine that publishes nothing serves all the same
            log.exception(
                "KV events of the pool cannot be made; this engine publishes none of them until it"
                " is restarted, and routers keep what they know"
            )
            self.events = None
            if self._idle_publisher is not None:
                self._idle_publisher.close()
            return ()

    def _store_keys(self, job_id: int) -> Collection[OffloadKey]:
        """Return the keys of this store; none of a load, or of a job that was dropped."""
        job = self._jobs.get(job_id)
        return job.keys if job is not None and job.is_store else ()


class KvdConnector(OffloadingConnector):
    """The connector of one process: the scheduler's, or one rank's.

    Raises:
        OptionsError: an invalid configuration.
        UnsupportedVllm: this vLLM lacks something that the connector needs.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        check(type(self), KvdOffloadingSpec, KvdOffloadingManager, KvdOffloadingWorker)
        # Not OffloadingConnector's: in the halves that it makes a failed job stops the engine.
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        self.connector_scheduler: KvdConnectorScheduler | None = None
        self.connector_worker: KvdConnectorWorker | None = None
        _log_as_vllm_does()
        _check_failure_policy(vllm_config)
        config = build_offloading_config(vllm_config, kv_cache_config)
        spec = KvdOffloadingSpec(config, vllm_config, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            for warning in (untested(vllm.__version__), random_hash_seed(vllm_config)):
                if warning:
                    log.warning(warning)
            self.connector_scheduler = KvdConnectorScheduler(spec, vllm_config, kv_cache_config)
        else:
            self.connector_worker = KvdConnectorWorker(spec, vllm_config, kv_cache_config)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Return the layout that the KV cache should have; vLLM drops it where it cannot be."""
        if vllm_config.attention_config.hisparse_config is not None:  # it knows one only
            required: str | None = super().get_required_kvcache_layout(vllm_config)
            return required
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        return wanted_layout(vllm_config, read_options(extra))

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Watch the engine's own prefix cache for resets, which routers take for the pool's."""
        half = self.connector_scheduler
        if half is not None and half.events is not None:
            half.events.watch(gpu_block_pool)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return loads that have ended since the last step, with those that failed."""
        del finished_req_ids
        assert self.connector_worker is not None  # noqa: S101  # a rank's connector has one
        return self.connector_worker.get_transfer_results()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Build vLLM's offloading metrics together with this spec's."""
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        extra.setdefault("spec_name", KvdOffloadingSpec.__name__)
        extra.setdefault("spec_module_path", "kvd_client.vllm")
        return super().build_prom_metrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues
        )


def _check_failure_policy(vllm_config: VllmConfig) -> None:
    policy = vllm_config.kv_transfer_config.kv_load_failure_policy
    if policy != "recompute":
        raise OptionsError(
            f'kv_load_failure_policy="{policy}" fails a request when its chunks cannot be loaded;'
            ' set kv_load_failure_policy="recompute" in --kv-transfer-config'
        )


def _log_as_vllm_does() -> None:
    """Print kvd's log lines where vLLM's are printed, in its format."""
    ours, theirs = logging.getLogger("kvd_client"), logging.getLogger("vllm")
    if not ours.handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.level)
        ours.propagate = False
