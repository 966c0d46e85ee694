"""KvdConnector: vLLM's offloading connector, changed so that jobs may fail.

vLLM's own worker asserts that every job succeeds. Here a failed store is given
up, and a failed load is reported for its request, which vLLM then computes.
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
from kvd_client.vllm.events import IdlePublisher, PoolEvents, calling_engine_core, groups_in_tiers
from kvd_client.vllm.manager import KvdOffloadingManager
from kvd_client.vllm.promotions import Search
from kvd_client.vllm.spec import KvdOffloadingSpec
from kvd_client.vllm.upstream import CONFIG, GROUP, require
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


# TODO refused.py
# """Chunks that were offered while no slot was at hand: offered again, or given up.
#
# vLLM offers a chunk once: what a request stores next only grows, and a request that has ended is
# forgotten in the step after its end. Slots come on loan in the answer to a step's message, so where
# a step needs more than there were, they come one step late. Then the chunks are offered in that
# step: `next_stored_chunk_idx` of the request's groups is put back to them, and a request that has
# ended is shown to vLLM once more. Where the daemon has answered and lent nothing they are given up,
# so a pool that stays full costs nothing.
#
# Blocks of a request that has ended, and those that a window has passed, may be given to others
# meanwhile. What a block holds is there until the next forward pass, before which vLLM has such
# stores done; chunks whose blocks were given away in an earlier step are given up.
# """


class RefusedChunks:
    """What one scheduler's requests are to be offered again.

    Args:
        manager: has noted what was refused.
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
        self._size = config.blocks_per_chunk
        self._windows = [
            group.sliding_window_size_in_chunks is not None for group in config.kv_group_configs
        ]
        self._requests = requests
        self._ended: dict[str, RequestOffloadState] = {}  # with refused chunks
        self._again: list[RequestOffloadState] = []  # ended before, and shown in this step

    def offer_again(self, output: SchedulerOutput, allocated: AbstractSet[int]) -> SchedulerOutput:
        """Let vLLM offer refused chunks in this step, of as many requests as there are loans for.

        Args:
            output: what is scheduled.
            allocated: blocks that requests were given in this step.

        Returns:
            What vLLM is to see: requests that ended earlier have ended in this step.
        """
        refused, loans = self._manager.refused, self._manager.loans()
        for req_id, chunks in list(refused.items()):
            status = self._status(req_id)
            if loans == 0 or status is None:
                self._manager.give_up(req_id)
                continue
            ended = status.req.is_finished()
            if not ended:
                self._void(req_id, status, allocated, windows_only=True)
            if req_id not in refused or loans is None or loans < 0:
                continue  # nothing is left, or it is offered in a later step
            loans = loans - len(chunks) or -1  # the last one may need more than there are
            del refused[req_id]
            for number, chunk in chunks:
                group = status.group_states[number]
                group.next_stored_chunk_idx = min(group.next_stored_chunk_idx, chunk)
            if ended and req_id not in output.finished_req_ids:
                self._again.append(status)
                self._requests[req_id] = status
        if not self._again:
            return output
        names = {status.req.request_id for status in self._again}
        return replace(output, finished_req_ids=output.finished_req_ids | names)

    def keep(self, allocated: AbstractSet[int]) -> None:
        """The step's stores are built: keep requests that have ended and were refused chunks.

        Args:
            allocated: blocks that requests were given in this step; the forward pass writes them.
        """
        for status in self._again:
            self._manager.on_request_finished(status.req_context)
            if not status.transfer_jobs:  # else vLLM forgets it with the last of them
                self._requests.pop(status.req.request_id, None)
        self._again.clear()
        ended = {}
        for req_id in list(self._manager.refused):
            status = self._status(req_id)
            if status is not None and status.req.is_finished():
                ended[req_id] = status
                self._void(req_id, status, allocated, windows_only=False)
        self._ended = ended

    def _status(self, req_id: str) -> RequestOffloadState | None:
        return self._requests.get(req_id) or self._ended.get(req_id)

    def _void(
        self,
        req_id: str,
        status: RequestOffloadState,
        allocated: AbstractSet[int],
        *,
        windows_only: bool,
    ) -> None:
        """Take out blocks that others have, of windows only or of all groups.

        A window's chunk may lack its first blocks, as at a window's edge; any other is given up.
        """
        lost = set()
        for number, chunk in self._manager.refused[req_id]:
            window = self._windows[number]
            if windows_only and not window:
                continue
            blocks, first = status.group_states[number].block_ids, chunk * self._size
            held = blocks[first : first + self._size]
            gone = max((at for at, block in enumerate(held, 1) if block in allocated), default=0)
            if gone:
                end = gone if window else self._size
                blocks[first : first + end] = [0] * end
                if end == self._size:
                    lost.add((number, chunk))
        if lost:
            self._manager.give_up(req_id, lost)
