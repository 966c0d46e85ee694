"""KvdConnector: vLLM's offloading connector, changed so that jobs may fail.

vLLM's own worker asserts that every job succeeds. Here a failed store is given up, and a failed
load is reported for its request, which vLLM then computes.
"""

import logging
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvd_client.adapters import OptionsError
from kvd_client.errors import get_logger
from kvd_client.vllm.layout import requested_layout
from kvd_client.vllm.manager import KvdOffloadingManager
from kvd_client.vllm.options import read_options, untested_warning
from kvd_client.vllm.scheduler import KvdConnectorScheduler, KvdWorkerMetadata
from kvd_client.vllm.spec import KvdOffloadingSpec, hash_seed_warning
from kvd_client.vllm.upstream import check, require
from kvd_client.vllm.worker import KvdOffloadingWorker

log = get_logger("kvd_client.vllm")


class KvdConnectorWorker(OffloadingConnectorWorker):
    """vLLM's half of the connector in a rank, for jobs that may fail."""

    spec: KvdOffloadingSpec
    worker: KvdOffloadingWorker | None

    def __init__(
        self, spec: KvdOffloadingSpec, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        require(self, "worker", "_load_jobs", "_connector_worker_meta", "_unsubmitted_store_jobs")
        self._connector_worker_meta = KvdWorkerMetadata()
        self._lost_blocks: set[int] = set()  # of loads that are late in this step
        self._late_requests: set[str] = set()  # whose loads they are

    def start_kv_transfers(self, metadata: OffloadingConnectorMetadata) -> None:
        """Submit stores and loads, and wait for the loads of this step."""
        super().start_kv_transfers(metadata)
        assert self.worker is not None  # noqa: S101  # made by register_kv_caches
        late_loads = self.worker.take_late_loads()
        self._connector_worker_meta.late_loads |= late_loads
        late_jobs = [metadata.load_jobs[job_id] for job_id in late_loads]
        self._late_requests = {job.req_id for job in late_jobs}
        # 0 is the null block, which other requests have too.
        self._lost_blocks = {int(block) for job in late_jobs for block in job.dst_spec.block_ids}
        self._lost_blocks.discard(0)

    def prepare_store_kv(self, metadata: OffloadingConnectorMetadata) -> None:
        """Submit this step's stores with the next step, except what was computed without a load."""
        meta: KvdWorkerMetadata = self._connector_worker_meta
        for job_id, job in list(metadata.store_jobs.items()):
            if job.req_id in self._late_requests:
                del metadata.store_jobs[job_id]
                meta.mark_completed(job_id)
                meta.failed_jobs.add(job_id)
        super().prepare_store_kv(metadata)

    def take_lost_blocks(self) -> set[int]:
        """Return the blocks that were not loaded when this step's forward pass began."""
        lost_blocks, self._lost_blocks = self._lost_blocks, set()
        return lost_blocks

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register the layers' views unchanged.

        vLLM's own method misreads two layouts: it takes a state's padded page for the distance
        between blocks, and whole blocks for every group's pages if blocks hold all layers.
        """
        self.worker = self.spec.make_worker(kv_caches)
        self.worker.before_release = self._fail_unsubmitted_stores

    def _fail_unsubmitted_stores(self) -> None:
        """Fail the stores that the next step would submit: their blocks are about to be freed."""
        meta: KvdWorkerMetadata = self._connector_worker_meta
        for job_id, *_ in self._unsubmitted_store_jobs:
            meta.mark_completed(job_id)
            meta.failed_jobs.add(job_id)
        self._unsubmitted_store_jobs.clear()

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """Collect the ended jobs. A failed load is both finished and failed."""
        assert self.worker is not None  # noqa: S101  # made by register_kv_caches
        results = KVConnectorTransferResults()
        meta: KvdWorkerMetadata = self._connector_worker_meta
        for result in self.worker.get_finished():
            meta.mark_completed(result.job_id)
            is_load = result.job_id in self._load_jobs
            request = self._load_jobs.pop(result.job_id, None)  # None: its request runs already
            if request is not None:
                results.finished_recving.add(request)
            if not result.success:
                meta.failed_jobs.add(result.job_id)
                if request is not None:
                    results.failed_recving.add(request)
            elif result.transfer_size is not None and result.transfer_time is not None:
                stats = meta.transfer_stats
                direction = stats.load if is_load else stats.store
                direction.record(result.transfer_size, result.transfer_time)
        return results

    def build_connector_worker_meta(self) -> KvdWorkerMetadata | None:
        """Return the jobs that ended since the last call, for the scheduler."""
        meta: KvdWorkerMetadata = self._connector_worker_meta
        if not meta.completed_jobs and not meta.late_loads:
            return None
        self._connector_worker_meta = KvdWorkerMetadata()
        return meta


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
        # OffloadingConnector.__init__ is skipped: it makes halves in which a failed job stops the
        # engine.
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        self.connector_scheduler: KvdConnectorScheduler | None = None
        self.connector_worker: KvdConnectorWorker | None = None
        _log_as_vllm_does()
        _check_failure_policy(vllm_config)
        config = build_offloading_config(vllm_config, kv_cache_config)
        spec = KvdOffloadingSpec(config, vllm_config, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            for warning in (untested_warning(vllm.__version__), hash_seed_warning(vllm_config)):
                if warning:
                    log.warning(warning)
            self.connector_scheduler = KvdConnectorScheduler(spec, vllm_config, kv_cache_config)
        else:
            self.connector_worker = KvdConnectorWorker(spec, vllm_config, kv_cache_config)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Return the layout to request for the KV cache; vLLM drops it if it cannot use it."""
        if vllm_config.attention_config.hisparse_config is not None:  # supports one layout only
            required: str | None = super().get_required_kvcache_layout(vllm_config)
            return required
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        return requested_layout(vllm_config, read_options(extra))

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Use the engine's own block pool in the scheduler."""
        if self.connector_scheduler is not None:
            self.connector_scheduler.bind_gpu_block_pool(gpu_block_pool)

    def unregister_kv_caches(self) -> None:
        """Make the daemon release the KV cache. vLLM 0.33 calls this before it frees the memory."""
        if self._rank is not None:
            self._rank.release_memory()

    def restore_kv_caches(self) -> None:
        """Register the KV cache again, after vLLM has allocated it."""
        if self._rank is not None:
            self._rank.restore_memory()

    @property
    def _rank(self) -> KvdOffloadingWorker | None:
        return None if self.connector_worker is None else self.connector_worker.worker

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the loads that ended since the last step, and which of them failed."""
        del finished_req_ids
        assert self.connector_worker is not None  # noqa: S101  # a rank's connector has one
        return self.connector_worker.get_transfer_results()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return blocks from which this step has computed although they were not loaded."""
        assert self.connector_worker is not None  # noqa: S101  # a rank's connector has one
        return self.connector_worker.take_lost_blocks()

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
    """Send kvd's log lines to vLLM's handlers."""
    kvd_log, vllm_log = logging.getLogger("kvd_client"), logging.getLogger("vllm")
    if not kvd_log.handlers:
        for handler in vllm_log.handlers:
            kvd_log.addHandler(handler)
        kvd_log.setLevel(vllm_log.level)
        kvd_log.propagate = False
