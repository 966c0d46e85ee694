"""A rank's half of the connector: results with failures in them."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
)

from kvd_client.vllm.upstream import RankSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvd_client.vllm.spec import KvdOffloadingSpec


@dataclass
class KvdWorkerMetadata(OffloadingWorkerMetadata):
    """What ranks tell the scheduler: ended jobs, and which of them did not succeed.

    Attributes:
        failed_jobs: of some rank at least.
    """

    failed_jobs: set[int] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "KvdWorkerMetadata":
        """Of two ranks: a job that failed for one has failed."""
        assert isinstance(other, KvdWorkerMetadata)  # noqa: S101  # all ranks run this connector
        both = super().aggregate(other)
        return KvdWorkerMetadata(
            completed_jobs=both.completed_jobs,
            transfer_stats=both.transfer_stats,
            failed_jobs=self.failed_jobs | other.failed_jobs,
        )


class KvdConnectorWorker(RankSide):
    """vLLM's worker side, for jobs that may fail."""

    def __init__(
        self,
        spec: "KvdOffloadingSpec",
        vllm_config: "VllmConfig",
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        self.report = KvdWorkerMetadata()

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """Take in what has ended; a failed load is both finished and failed."""
        assert self.worker is not None  # noqa: S101  # made by register_kv_caches
        results = KVConnectorTransferResults()
        meta: KvdWorkerMetadata = self.report
        for ended in self.worker.get_finished():
            meta.mark_completed(ended.job_id)
            request = self.take_load(ended.job_id)
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
        """What has ended since the last call, for the scheduler."""
        meta: KvdWorkerMetadata = self.report
        if not meta.completed_jobs:
            return None
        self.report = KvdWorkerMetadata()
        return meta
