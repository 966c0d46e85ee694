"""The scheduler's half of the connector: what follows from a failed job."""

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)

from kvd_client.vllm.manager import KvdOffloadingManager
from kvd_client.vllm.rank import KvdWorkerMetadata

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput


class KvdConnectorScheduler(OffloadingConnectorScheduler):
    """vLLM's scheduler side, for jobs that may fail."""

    manager: KvdOffloadingManager

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Take in what has ended in this step."""
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, KvdWorkerMetadata):
            for job_id in meta.failed_jobs:
                job = self._jobs.get(job_id)
                if job is not None and job.is_store:
                    self.manager.mark_failed(job.keys)
        super().update_connector_output(connector_output)
        for req_id in connector_output.failed_recving or ():
            self._compute(req_id)

    def _compute(self, req_id: str) -> None:
        """The request's load failed: it is computed, and what it computes is stored again."""
        status = self._req_status.get(req_id)
        if status is not None:  # it was not aborted meanwhile
            self.manager.stop_loading(req_id)
            for group in status.group_states:
                group.next_stored_chunk_idx = 0
