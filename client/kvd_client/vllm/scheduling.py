"""The scheduler's half of the connector: what follows from a failed job."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvd_client.vllm.manager import KvdOffloadingManager
from kvd_client.vllm.ranges import BlockRanges
from kvd_client.vllm.rank import KvdWorkerMetadata
from kvd_client.vllm.upstream import SchedulerSide

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class KvdConnectorScheduler(SchedulerSide):
    """vLLM's scheduler side, for jobs that may fail."""

    manager: KvdOffloadingManager

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ranges = BlockRanges(self.config, self.requests)
        self.manager.ranges = self._ranges
        self._asked: dict[str, int] = {}  # prompt tokens, by request that was not admitted yet

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int, max_num_new_tokens: int | None = None
    ) -> tuple[int | None, bool]:
        """Look up; vLLM asks again in every step until the request is admitted."""
        self._asked[request.request_id] = request.num_tokens - num_computed_tokens
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens, max_num_new_tokens
        )
        return found

    def search(self, req_id: str, find: Callable[[], int | None]) -> int | None:
        """Tokens that can be loaded: a window's chunks hold all blocks that are needed then.

        vLLM looks for chunks of which there is anything. Where one lacks what the end that was
        found needs, it is of no use for any earlier end either: the search goes on without it.
        """
        with self.manager.missing() as missing:
            while found := find():
                lacking = self.manager.lacking(self._ranges.needed(req_id, found))
                if not lacking:
                    break
                if lacking <= missing:  # vLLM did not look at what it would load
                    return 0
                missing.update(lacking)
            return found

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """The request is admitted: what was asked for last counts, and what is loaded of it."""
        asked = self._asked.pop(request.request_id, None)
        if asked is not None:
            self.manager.scheduler.count_tokens(asked, min(asked, num_external_tokens))
        if num_external_tokens:
            needed = self._ranges.needed(request.request_id, num_external_tokens)
            self.manager.need(request.request_id, needed)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def request_finished(self, request: "Request") -> tuple[bool, dict[str, Any] | None]:
        """Forget a request that was never admitted."""
        self._asked.pop(request.request_id, None)
        kept: tuple[bool, dict[str, Any] | None] = super().request_finished(request)
        return kept

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> "KVConnectorMetadata":
        """A step's jobs. At its end it is known which requests have finished."""
        meta = super().build_connector_meta(scheduler_output)
        self.manager.tell_finished()
        return meta

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Take in what has ended in this step."""
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, KvdWorkerMetadata):
            for job_id in meta.failed_jobs:
                self.manager.mark_failed(self.store_keys(job_id))
        super().update_connector_output(connector_output)
        for req_id in connector_output.failed_recving or ():
            self._compute(req_id)

    def _compute(self, req_id: str) -> None:
        """The request's load failed: it is computed, and what it computes is stored again."""
        if self.store_again(req_id):  # it was not aborted meanwhile
            self.manager.stop_loading(req_id)
