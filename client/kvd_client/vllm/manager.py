"""The scheduler's side of vLLM's offloading interface, on a kvd `Scheduler`.

Whatever happens to the daemon, no method raises or waits: a lookup misses, a store does not begin,
and a load is marked as missing, so that every rank reports a failure and the request is computed.
One message at the end of a step tells the daemon what was decided in it.
"""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvd_client import Label, LoadTicket, Scheduler, StoreAnswer
from kvd_client import LookupResult as DirectoryResult
from kvd_client.adapters import read_hint
from kvd_client.tickets import BlockRange
from kvd_client.vllm import metrics
from kvd_client.vllm.chunks import BlockRanges, ChunkDescriber
from kvd_client.vllm.promotions import TierWaits
from kvd_client.vllm.upstream import ALLOCATION_FAILURE
from kvd_proto.messages import MAX_KEYS

REPORT_SERVED_SECONDS = 1.0

_FULL = StoreAnswer.FULL
_MISS, _HIT = DirectoryResult.MISS, DirectoryResult.HIT


@dataclass(slots=True)
class ChunkLoadStoreSpec(LoadStoreSpec):
    """Slots of the chunks of one job, group by group; pickled to every rank.

    Attributes:
        slots: u4[chunks].
        generations: u8[chunks].
        chunks: number of chunks of each group, by the group's number in vLLM's keys.
        missing: number of chunks that were evicted before they could be pinned; such a job fails.
    """

    slots: npt.NDArray[Any] = field(default_factory=lambda: np.empty(0, "<u4"))
    generations: npt.NDArray[Any] = field(default_factory=lambda: np.empty(0, "<u8"))
    chunks: dict[int, int] = field(default_factory=dict)
    missing: int = 0


class KvdOffloadingManager(OffloadingManager):
    """Looks up, loads and stores chunks for vLLM's scheduler.

    Args:
        scheduler: the session with the daemon; `shutdown` closes it.
        pending_timeout: seconds that a request waits for chunks that are being stored or promoted
            from a tier.
        seek_timeout: seconds that it waits for shared tiers to say whether they have a chunk.
        config_info: values of `metrics.CONFIG_LABELS`.

    Attributes:
        refused: offered chunks that got no slot and are offered again or given up. By request, then
            by group and number of the chunk: its key.
        tier_waits: requests that wait for tiers.
    """

    # Set by the connector's scheduler half, which has vLLM's state of requests.
    ranges: BlockRanges
    describer: ChunkDescriber

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        pending_timeout: float,
        seek_timeout: float,
        config_info: Mapping[str, str | float],
    ) -> None:
        self.scheduler = scheduler
        self.tier_waits = TierWaits(
            scheduler, pending_timeout=pending_timeout, seek_timeout=seek_timeout
        )
        self._pending_timeout = pending_timeout
        self._tickets: dict[str, LoadTicket] = {}  # by request: it has one load at a time
        self._flushed: list[LoadTicket] = []  # of loads under way at a reset
        self._load_failed: set[str] = set()  # requests
        self._pending_since: dict[str, float] = {}  # by request
        self._failed_stores: set[OffloadKey] = set()
        self._reports = RequestReports(scheduler)
        self.refused: dict[str, dict[tuple[int, int], OffloadKey]] = {}
        self._hidden: set[OffloadKey] = set()  # keys whose lookups miss
        self._needed: dict[str, Mapping[OffloadKey, BlockRange]] = {}  # by request
        self._stats = OffloadingConnectorStats()
        self._config_info = config_info
        self._reported_served, self._report_served_at = False, 0.0

    # -------------------------------------------------------------- requests

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Read the request's hints into a label in its context."""
        if req_context.req_id in self.refused:  # of an earlier request with the same name
            self.give_up(req_context.req_id)
        hint = read_hint(req_context.kv_transfer_params, req_context.kv_hints)
        if hint.is_present:
            self.scheduler.count_hints(1, hint.ignored, hint.cut)
            req_context.set_state(hint.label)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget the request, except a load that is still running.

        `end_step` reports its chunks, once none of them waits for a slot. Called again for chunks
        that are stored later.
        """
        req_id = req_context.req_id
        self._reports.end(req_context, self.ranges, settled=req_id not in self.refused)
        self._load_failed.discard(req_id)
        self._pending_since.pop(req_id, None)
        self._needed.pop(req_id, None)
        self.tier_waits.forget(req_id)

    def end_step(self) -> None:
        """Send the daemon what was decided in this step. Does not wait for the reply."""
        self._reports.send()
        self.tier_waits.end_step()
        self.scheduler.end_step()

    def stop_loading(self, req_id: str) -> None:
        """After a failed load, let the request's lookups miss, so that it cannot loop."""
        self._load_failed.add(req_id)
        self._stats.increase_counter(metrics.LOAD_FAILURES)

    def count(self, metric: str) -> None:
        """Count one event of a metric."""
        self._stats.increase_counter(metric)

    # --------------------------------------------------------------- lookups

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Look a key up in the mapped directory, without a message.

        Returns:
            HIT: the chunk can be loaded. HIT_PENDING: it is being stored or promoted, and the
            request waits. RETRY: a shared tier is asked for it, and the request waits. MISS: none
            of these, or the wait has timed out.
        """
        scheduler, ranges = self.scheduler, self.ranges
        blocks = ranges.minimum(key) if ranges.has_partial_chunks else ()
        result = scheduler.lookup(key, *blocks) if blocks else scheduler.lookup(key)
        if result is _MISS and not scheduler.tiers:
            return LookupResult.MISS
        if key in self._hidden or req_context.req_id in self._load_failed:
            return LookupResult.MISS
        if result is _HIT:
            return LookupResult.HIT
        if scheduler.tiers:
            tier_result = self.tier_waits.lookup(key, blocks, result, req_context)
            if tier_result is not None:
                return tier_result
        if result is _MISS:
            return LookupResult.MISS
        now = time.monotonic()
        since = self._pending_since.setdefault(req_context.req_id, now)
        waiting = now - since < self._pending_timeout
        return LookupResult.HIT_PENDING if waiting else LookupResult.MISS

    def incomplete(self, needed: Mapping[OffloadKey, BlockRange]) -> set[OffloadKey]:
        """Return the keys of chunks that lack some of the needed blocks."""
        lookup, counts_as_hit = self.scheduler.lookup, self.tier_waits.counts_as_hit
        return {
            key
            for key, blocks in needed.items()
            if lookup(key, *blocks) is not _HIT and not counts_as_hit(key, blocks)
        }

    @contextmanager
    def hiding(self) -> Iterator[set[OffloadKey]]:
        """Within the context, let lookups of the keys in the yielded set miss."""
        self._hidden = hidden = set[OffloadKey]()
        yield hidden
        self._hidden = set()

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """Return the source of a hit: host memory, or the tier that the request waited for."""
        return self.tier_waits.source(key, req_context)

    # ----------------------------------------------------------------- loads

    def set_needed(self, req_id: str, needed: Mapping[OffloadKey, BlockRange]) -> None:
        """Set the blocks that the request's next load needs."""
        self._needed[req_id] = needed

    def prepare_load(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> ChunkLoadStoreSpec:
        """Pin the chunks. If some were evicted since the lookup, pin none and set `missing`."""
        chunks = list(keys)
        needed = self._needed.pop(req_context.req_id, {})
        if len(chunks) > MAX_KEYS:  # more than fit into one message
            return ChunkLoadStoreSpec(missing=len(chunks))
        all_blocks = self.ranges.all_blocks
        blocks = [needed.get(key, all_blocks) for key in chunks] if needed else None
        ticket = self.scheduler.prepare_load(chunks, blocks=blocks) if chunks else LoadTicket()
        missing = len(chunks) - len(ticket)
        if missing:
            self.scheduler.complete_load(ticket)
            return ChunkLoadStoreSpec(missing=missing)
        self._tickets[req_context.req_id] = ticket
        self._reports.add(req_context.req_id, chunks)
        return ChunkLoadStoreSpec(
            ticket.slots, ticket.generations, self.ranges.count_by_group(chunks)
        )

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Unpin the chunks of the request's load."""
        del keys  # the ticket has them
        ticket = self._tickets.pop(req_context.req_id, None)
        if ticket is not None:
            self.scheduler.complete_load(ticket)

    # ---------------------------------------------------------------- stores

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput:
        """Assign slots to the keys that need one; keys that get none are put into `refused`.

        Never returns None: vLLM would offer the same chunks again in every step.
        """
        offered = list(keys)
        if not self.scheduler.attached:
            return PrepareStoreOutput([], ChunkLoadStoreSpec(), [])
        sendable = offered[:MAX_KEYS]
        ranges = self.ranges
        blocks = (
            [ranges.offered(key, req_context) for key in sendable]
            if ranges.has_partial_chunks
            else None
        )
        describe = partial(self._description, sendable, req_context)
        ticket = self.scheduler.prepare_store(
            sendable, blocks, describe if self.scheduler.describes else None
        )
        accepted = [OffloadKey(key) for key in ticket.keys]
        self._reports.add(req_context.req_id, offered)
        if len(accepted) < len(offered):
            answers = zip(sendable, ticket.answers, strict=False)
            refused = [key for key, answer in answers if answer is _FULL]
            self._refuse([*refused, *offered[MAX_KEYS:]], req_context)
        return PrepareStoreOutput(
            keys_to_store=accepted,
            store_spec=ChunkLoadStoreSpec(
                ticket.slots, ticket.generations, ranges.count_by_group(accepted)
            ),
            evicted_keys=[],
        )

    def _refuse(self, keys: list[OffloadKey], req_context: ReqContext) -> None:
        """Put chunks into `refused`; give up those that vLLM would not offer again."""
        if not keys:
            return
        self._stats.increase_counter(ALLOCATION_FAILURE)
        refused, given_up = {}, []
        for key in keys:
            chunk = self.ranges.chunk_of(key, req_context)
            if chunk is None:
                given_up.append(key)
            else:
                refused[chunk] = key
        if refused:
            self.refused.setdefault(req_context.req_id, {}).update(refused)
        self._report_given_up(given_up)

    def give_up(self, req_id: str, chunks: AbstractSet[tuple[int, int]] | None = None) -> None:
        """Remove these refused chunks of the request, by default all: they are not stored."""
        refused = self.refused[req_id]
        given_up = refused.keys() if chunks is None else refused.keys() & chunks
        self._report_given_up([refused.pop(chunk) for chunk in list(given_up)])
        if not refused:
            del self.refused[req_id]
            self._reports.settle(req_id)

    def _report_given_up(self, keys: list[OffloadKey]) -> None:
        if keys:
            self._stats.increase_counter(metrics.CHUNKS_REFUSED, len(keys))
            self.scheduler.give_up(keys[:MAX_KEYS])

    def has_pending_work(self) -> bool:
        """Return whether vLLM must go on stepping without requests: refused chunks need slots."""
        return bool(self.refused)

    def mark_failed(self, keys: Collection[OffloadKey]) -> None:
        """Let the next `complete_store` of these keys, which some rank did not store, fail."""
        self._failed_stores.update(keys)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """Give failed stores up. Of successful ones the lanes have told the daemon."""
        del req_context
        failed = []
        if not success or self._failed_stores:
            failed = [key for key in keys if not success or key in self._failed_stores]
        if failed:
            self._failed_stores.difference_update(failed)
            self.scheduler.complete_store(failed, success=False)
            self._stats.increase_counter(metrics.STORE_FAILURES)

    def _description(self, keys: list[OffloadKey], request: ReqContext, index: int) -> bytes:
        return self.describer.encoded(keys[index], request)

    # ----------------------------------------------------------------- others

    def reset_cache(self) -> None:
        """Drop every chunk of the namespace, for all engines that share it.

        Returns at once. Until the daemon has answered, this engine's lookups miss and it stores
        nothing. vLLM forgets the loads under way: 0.33 calls `on_reset_flushed` once they have
        ended; with 0.32 their leases end now, and those that are not done fail.
        """
        self.scheduler.reset(0)
        self._flushed += self._tickets.values()
        self._tickets.clear()
        if not hasattr(super(), "on_reset_flushed"):
            self.on_reset_flushed()
        self._failed_stores.clear()
        self._reports.clear()
        self.refused.clear()
        self.tier_waits.clear()

    def on_reset_flushed(self) -> None:
        """Unpin the chunks of loads that were under way at the last reset."""
        for ticket in self._flushed:
            self.scheduler.complete_load(ticket)
        self._flushed.clear()

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return the counts since the last call; None: nothing. vLLM calls this in every step.

        Whether the daemon serves this engine is reported when it changes, and once a second.
        """
        now, is_served = time.monotonic(), self.scheduler.attached and self.scheduler.connected
        if is_served is not self._reported_served or now >= self._report_served_at:
            self._reported_served, self._report_served_at = is_served, now + REPORT_SERVED_SECONDS
            self._stats.set_gauge(metrics.ATTACHED, int(is_served))
        for name, count in self.tier_waits.take_counts().items():
            self._stats.increase_counter(name, count)
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, OffloadingConnectorStats()
        return stats

    def config_info(self) -> list[Mapping[str, str | float]]:
        """Return the labels of `vllm:kv_offload_config_info`, one mapping for its only series."""
        return [self._config_info]

    def shutdown(self) -> None:
        """End the session."""
        self.scheduler.close()


# ------------------------------------------------------- reports of requests


@dataclass(slots=True)
class EndedRequest:
    """The report of a request that has ended.

    Attributes:
        keys: of its chunks, in prompt order, those of several groups side by side.
        num_prompt: how many of them are the prompt's.
        label: when its chunks are expected to be used again.
    """

    keys: list[OffloadKey]
    num_prompt: int
    label: Label


class RequestReports:
    """Collects the chunks of each request, and reports them when the request has ended.

    A report has all chunks that a request's tokens fill, in prompt order. So it also has chunks
    that got no slot, chunks that others were storing, and chunks before the last one that only
    vLLM's own cache had; the daemon ignores what it does not hold. The requests of a step are
    reported one by one, in the order in which they ended.

    Args:
        scheduler: the session with the daemon.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._keys: dict[str, dict[OffloadKey, None]] = {}  # by request, offered or loaded
        self._unsettled: dict[str, EndedRequest] = {}  # some of their chunks may still get slots
        self._ended: list[EndedRequest] = []

    def add(self, req_id: str, keys: Iterable[OffloadKey]) -> None:
        """Add chunks that the request offers or loads."""
        self._keys.setdefault(req_id, {}).update(dict.fromkeys(keys))

    def end(self, request: ReqContext, ranges: BlockRanges, *, settled: bool) -> None:
        """End a request. Called again each time its refused chunks were offered again.

        Args:
            request: vLLM's.
            ranges: with vLLM's state of the request.
            settled: none of its chunks waits for a slot. Until then it is not reported, because a
                chunk counts as used only while the daemon holds it.
        """
        req_id = request.req_id
        keys = self._keys.pop(req_id, None)
        if req_id not in self._unsettled:
            if not keys:
                return
            self._unsettled[req_id] = _ended_request(request, keys, ranges)
        if settled:
            self.settle(req_id)

    def settle(self, req_id: str) -> None:
        """Report the request with the next `send` if it has ended: no chunk waits for a slot."""
        ended = self._unsettled.pop(req_id, None)
        if ended is not None:
            self._ended.append(ended)

    def send(self) -> None:
        """Report the settled requests."""
        for ended in self._ended:
            keys = ended.keys[:MAX_KEYS]
            num_prompt = min(ended.num_prompt, len(keys))
            self._scheduler.request_finished(keys, prompt=num_prompt, label=ended.label)
        self._ended.clear()

    def clear(self) -> None:
        """Forget all requests: after a reset the daemon holds none of their chunks."""
        self._keys.clear()
        self._unsettled.clear()
        self._ended.clear()


def _ended_request(
    request: ReqContext, offered: dict[OffloadKey, None], ranges: BlockRanges
) -> EndedRequest:
    """Return the report of a request: its chunks and the full-attention chunks before them."""

    def end_token(key: OffloadKey) -> int:
        return request.get_offload_key_position(key) or 0

    last = max(map(end_token, offered))
    full_attention = ranges.full_attention_keys(request.req_id, last)
    keys = sorted(dict.fromkeys((*full_attention, *offered)), key=end_token)
    num_tokens = ranges.num_prompt_tokens(request.req_id)
    num_prompt = (
        len(keys) if num_tokens is None else sum(end_token(key) <= num_tokens for key in keys)
    )
    return EndedRequest(keys, num_prompt, request.get_state(Label) or Label.NONE)
