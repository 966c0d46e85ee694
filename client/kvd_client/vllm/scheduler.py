"""vLLM's half of the connector in the scheduler, changed so that jobs may fail.

`KvdConnectorScheduler` extends vLLM's own scheduler logic. `RefusedChunks` lets vLLM offer chunks
again that got no slot.
"""

from collections.abc import Collection, Iterable, MutableMapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
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
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvd_client.errors import get_logger
from kvd_client.vllm.chunks import BlockRanges, ChunkDescriber
from kvd_client.vllm.events import (
    IdlePublisher,
    PoolEvents,
    calling_engine_core,
    groups_in_tiers,
)
from kvd_client.vllm.manager import KvdOffloadingManager
from kvd_client.vllm.promotions import Search
from kvd_client.vllm.spec import KvdOffloadingSpec
from kvd_client.vllm.upstream import CONFIG_FIELDS, GROUP_FIELDS, require
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
        """Return the common report of two ranks: a job that failed for one has failed."""
        assert isinstance(other, KvdWorkerMetadata)  # noqa: S101  # all ranks run this connector
        both = super().aggregate(other)
        return KvdWorkerMetadata(
            completed_jobs=both.completed_jobs,
            transfer_stats=both.transfer_stats,
            failed_jobs=self.failed_jobs | other.failed_jobs,
        )


class KvdConnectorScheduler(OffloadingConnectorScheduler):
    """vLLM's scheduler logic for offloading, for jobs that may fail."""

    manager: KvdOffloadingManager

    def __init__(
        self, spec: KvdOffloadingSpec, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        require(self, "manager", "config", "_jobs", "_req_status")
        require(self, "_current_batch_allocated_block_ids")
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
        self._lookup_tokens: dict[str, int] = {}  # tokens of the last lookup, until admission
        self._missed_reported: set[str] = set()  # running requests
        if spec.publishes:
            self._start_publishing(spec.options.repeat_events)

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
        self._lookup_tokens[request.request_id] = request.num_tokens - num_computed_tokens
        matched: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens, max_num_new_tokens
        )
        return matched

    def _lookup(
        self, req_status: RequestOffloadState, max_num_new_tokens: int | None = None
    ) -> int | None:
        """Return how many tokens can be loaded; None: the request waits, such as for tiers."""
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
        result: tuple[bool, dict[str, Any] | None] = super().request_finished(request)
        return result

    # ------------------------------------------------------------------ steps

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return a step's jobs, and end the step: now all of its finished requests are known."""
        meta = super().build_connector_meta(scheduler_output)
        self.manager.tier_waits.speed.step_scheduled(scheduler_output)
        self.manager.end_step()
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
        super().update_connector_output(connector_output)
        # After a failed load the request is computed, and all its chunks are offered again.
        for req_id in connector_output.failed_recving or ():
            if req_id in self._req_status:  # it was not aborted meanwhile
                for group in self._req_status[req_id].group_states:
                    group.next_stored_chunk_idx = 0
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


class RefusedChunks:
    """Lets vLLM offer refused chunks again, or gives them up.

    vLLM offers a chunk once: a request's `next_stored_chunk_idx` only grows, and an ended request
    is forgotten in the step after its end. Slots come on loan in the reply to a step's message, so
    if a step needs more than there are, they come one step late. In that step the index of the
    request's groups is set back to the refused chunks, and a request that has ended is shown to
    vLLM once more. If the daemon has replied and lent nothing, the chunks are given up, so that
    a full pool costs nothing.

    Blocks of ended requests, and blocks that a window has passed, may be allocated to other
    requests meanwhile. A block keeps its content until the next forward pass, and vLLM completes
    such stores before it. Chunks whose blocks were allocated in an earlier step are given up.

    Args:
        manager: with the refused chunks.
        config: vLLM's configuration of groups and chunks.
        requests: vLLM's state of every request, by request id.
    """

    def __init__(
        self,
        manager: KvdOffloadingManager,
        config: SchedulerOffloadConfig,
        requests: MutableMapping[str, RequestOffloadState],
    ) -> None:
        self._manager = manager
        self._blocks_per_chunk = config.blocks_per_chunk
        self._is_window = [
            group.sliding_window_size_in_chunks is not None for group in config.kv_group_configs
        ]
        self._requests = requests
        # State of ended requests that have refused chunks, by request id: vLLM forgets it.
        self._retained: dict[str, RequestOffloadState] = {}
        # Requests that ended in earlier steps, and are among this step's finished ones again.
        self._refinished: list[RequestOffloadState] = []

    def offer_again(self, output: SchedulerOutput, allocated: AbstractSet[int]) -> SchedulerOutput:
        """Let vLLM offer refused chunks in this step, of as many requests as there are loans for.

        Args:
            output: of this step.
            allocated: blocks that were allocated in this step.

        Returns:
            The output to show to vLLM: with ended requests among those that finished in this step.
        """
        refused, loans = self._manager.refused, self._manager.scheduler.loans
        for req_id, chunks in list(refused.items()):
            status = self._status(req_id)
            if loans == 0 or status is None:
                self._manager.give_up(req_id)
                continue
            ended = status.req.is_finished()
            if not ended:
                self._drop_reallocated_blocks(req_id, status, allocated, windows_only=True)
            if req_id not in refused or loans is None or loans < 0:
                continue  # nothing is left, or it is offered in a later step
            loans = loans - len(chunks) or -1  # below 0: all are planned, perhaps too few
            del refused[req_id]
            for number, chunk in chunks:
                group = status.group_states[number]
                group.next_stored_chunk_idx = min(group.next_stored_chunk_idx, chunk)
            if ended and req_id not in output.finished_req_ids:
                self._refinished.append(status)
                self._requests[req_id] = status
        if not self._refinished:
            return output
        req_ids = {status.req.request_id for status in self._refinished}
        return replace(output, finished_req_ids=output.finished_req_ids | req_ids)

    def after_store_jobs(self, allocated: AbstractSet[int]) -> None:
        """Settle the refused chunks of ended requests, once vLLM has built the step's store jobs.

        1. Finish again the ended requests that `offer_again` has shown to vLLM once more.
        2. Retain the state of ended requests that still have refused chunks: vLLM forgets it.
        3. Give up their chunks whose blocks this step has allocated to other requests.

        Args:
            allocated: blocks that were allocated in this step; the forward pass overwrites them.
        """
        for status in self._refinished:
            self._manager.on_request_finished(status.req_context)
            if not status.transfer_jobs:  # else vLLM removes it when its last transfer job ends
                self._requests.pop(status.req.request_id, None)
        self._refinished.clear()
        retained = {}
        for req_id in list(self._manager.refused):
            status = self._status(req_id)
            if status is not None and status.req.is_finished():
                retained[req_id] = status
                self._drop_reallocated_blocks(req_id, status, allocated, windows_only=False)
        self._retained = retained

    def _status(self, req_id: str) -> RequestOffloadState | None:
        return self._requests.get(req_id) or self._retained.get(req_id)

    def _drop_reallocated_blocks(
        self,
        req_id: str,
        status: RequestOffloadState,
        allocated: AbstractSet[int],
        *,
        windows_only: bool,
    ) -> None:
        """Drop blocks allocated to other requests from refused chunks, or give the chunks up.

        A window's chunk may lack its first blocks, as at the window's edge; it is given up if it
        has lost its last block. Any other chunk that has lost a block is given up.
        """
        given_up = set()
        for number, chunk in self._manager.refused[req_id]:
            is_window = self._is_window[number]
            if windows_only and not is_window:
                continue
            block_ids, first = status.group_states[number].block_ids, chunk * self._blocks_per_chunk
            chunk_ids = block_ids[first : first + self._blocks_per_chunk]
            num_lost = max(
                (end for end, block in enumerate(chunk_ids, 1) if block in allocated), default=0
            )
            if num_lost:
                num_dropped = num_lost if is_window else self._blocks_per_chunk
                block_ids[first : first + num_dropped] = [0] * num_dropped
                if num_dropped == self._blocks_per_chunk:
                    given_up.add((number, chunk))
        if given_up:
            self._manager.give_up(req_id, given_up)
