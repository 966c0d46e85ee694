"""The scheduler's side of vLLM's offloading interface, on a kvd `Scheduler`.

Whatever happens to the daemon, no method raises and none waits: a lookup misses, a
store is not begun, a load is marked as missing so that every rank reports it as failed
and the request is computed. The daemon is told of a step at its end, in one message.
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
from kvd_client import LookupResult as Found
from kvd_client.arguments import Blocks
from kvd_client.hints import read_hint
from kvd_client.vllm import metrics
from kvd_client.vllm.chunks import BlockRanges, ChunkDescriber
from kvd_client.vllm.promotions import Promotions
from kvd_client.vllm.upstream import ALLOCATION_FAILURE
from kvd_proto.messages import MAX_KEYS

_FULL = StoreAnswer.FULL
_MISS, _HIT = Found.MISS, Found.HIT


@dataclass(slots=True)
class ChunkSlots(LoadStoreSpec):
    """Slots of the chunks of one job, group by group; pickled to every rank.

    Attributes:
        slots: u4[chunks].
        generations: u8[chunks].
        chunks: how many of them each group has, by the group's number in vLLM's keys.
        missing: chunks that were evicted before they could be pinned; such a job fails.
    """

    slots: npt.NDArray[Any] = field(default_factory=lambda: np.empty(0, "<u4"))
    generations: npt.NDArray[Any] = field(default_factory=lambda: np.empty(0, "<u8"))
    chunks: dict[int, int] = field(default_factory=dict)
    missing: int = 0


class KvdOffloadingManager(OffloadingManager):
    """Answers what vLLM's scheduler asks about chunks.

    Args:
        scheduler: the session with the daemon; closed by `shutdown`.
        pending_timeout: seconds that a request waits for chunks that are being stored, or come from
            a tier below the daemon's memory.
        seek_timeout: seconds that it waits for shared tiers to say whether they have a chunk.

    Attributes:
        refused: by request, the chunks that were offered while no slot was at hand, to be offered
            again or given up: by group and number, their keys.
        promotions: requests that wait for tiers.
    """

    # Set by the connector's half, which has vLLM's state of the requests.
    ranges: BlockRanges
    describer: ChunkDescriber

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        pending_timeout: float,
        seek_timeout: float,
    ) -> None:
        self.scheduler = scheduler
        self.promotions = Promotions(
            scheduler, pending_timeout=pending_timeout, seek_timeout=seek_timeout
        )
        self._pending_timeout = pending_timeout
        self._tickets: dict[str, LoadTicket] = {}  # by request: it has one load at a time
        self._no_loads: set[str] = set()  # requests whose load failed
        self._pending_since: dict[str, float] = {}
        self._failed: set[OffloadKey] = set()
        self._reports = RequestReports(scheduler)
        self.refused: dict[str, dict[tuple[int, int], OffloadKey]] = {}
        self._lacking: set[OffloadKey] = set()
        self._needed: dict[str, Mapping[OffloadKey, Blocks]] = {}
        self._stats = OffloadingConnectorStats()

    # -------------------------------------------------------------- requests

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Read the request's hints; its context keeps the label until it has ended."""
        if req_context.req_id in self.refused:  # of an earlier request with the same name
            self.give_up(req_context.req_id)
        hint = read_hint(req_context.kv_transfer_params, req_context.kv_hints)
        if hint.given:
            self.scheduler.count_hints(1, hint.ignored, hint.cut)
            req_context.set_state(hint.label)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget the request, but for a load that is still running.

        Its chunks are reported by `end_step`, once none of them waits for a slot. May be called
        again for chunks that were stored later.
        """
        req_id = req_context.req_id
        self._reports.end(req_context, self.ranges, settled=req_id not in self.refused)
        self._no_loads.discard(req_id)
        self._pending_since.pop(req_id, None)
        self._needed.pop(req_id, None)
        self.promotions.finished(req_id)

    def end_step(self) -> None:
        """Send the daemon what was decided in this step, without waiting for an answer."""
        self._reports.send()
        self.promotions.end_step()
        self.scheduler.end_step()

    def stop_loading(self, req_id: str) -> None:
        """After a failed load, let the request's lookups miss, so that it cannot loop."""
        self._no_loads.add(req_id)
        self._stats.increase_counter(metrics.LOAD_FAILURES)

    # --------------------------------------------------------------- lookups

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Look the key up in the mapped directory, without a message.

        A chunk in a tier below the daemon's memory is pending where it is worth to wait for it.
        """
        scheduler, blocks = self.scheduler, self.ranges.least(key)
        found = scheduler.lookup(key, *blocks)
        if found is _MISS and not scheduler.tiers:
            return LookupResult.MISS
        if key in self._lacking or req_context.req_id in self._no_loads:
            return LookupResult.MISS
        if found is _HIT:
            return LookupResult.HIT
        if scheduler.tiers:
            below = self.promotions.lookup(key, blocks, found, req_context)
            if below is not None:
                return below
        if found is _MISS:
            return LookupResult.MISS
        now = time.monotonic()
        since = self._pending_since.setdefault(req_context.req_id, now)
        waiting = now - since < self._pending_timeout
        return LookupResult.HIT_PENDING if waiting else LookupResult.MISS

    def lacking(self, needed: Mapping[OffloadKey, Blocks]) -> set[OffloadKey]:
        """Return the chunks that lack some of the blocks that are needed of them."""
        lookup, rehearsed = self.scheduler.lookup, self.promotions.rehearsed
        return {
            key
            for key, blocks in needed.items()
            if lookup(key, *blocks) is not _HIT and not rehearsed(key, blocks)
        }

    @contextmanager
    def missing(self) -> Iterator[set[OffloadKey]]:
        """Let lookups of the keys in the yielded set miss within the context."""
        self._lacking = lacking = set[OffloadKey]()
        yield lacking
        self._lacking = set()

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """Return where a hit came from: host memory, or the tier that the request waited for."""
        return self.promotions.source(key, req_context)

    # ----------------------------------------------------------------- loads

    def need(self, req_id: str, needed: Mapping[OffloadKey, Blocks]) -> None:
        """Set the blocks that the request's coming load needs of its chunks."""
        self._needed[req_id] = needed

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> ChunkSlots:
        """Pin the chunks. Those evicted since the lookup are counted as `missing`."""
        wanted = list(keys)
        needed = self._needed.pop(req_context.req_id, {})
        if len(wanted) > MAX_KEYS:  # more than one message holds
            return ChunkSlots(missing=len(wanted))
        whole = self.ranges.whole
        blocks = [needed.get(key, whole) for key in wanted] if needed else None
        ticket = self.scheduler.prepare_load(wanted, blocks=blocks) if wanted else LoadTicket()
        missing = len(wanted) - len(ticket)
        if missing:
            self.scheduler.complete_load(ticket)
            return ChunkSlots(missing=missing)
        self._tickets[req_context.req_id] = ticket
        self._reports.add(req_context.req_id, wanted)
        return ChunkSlots(ticket.slots, ticket.generations, self.ranges.per_group(wanted))

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
        """Give slots to the keys that need one; some may get none, and are then in `refused`.

        Never None: vLLM would ask again for the same chunks in every step.
        """
        offered = list(keys)
        if not self.scheduler.attached:  # nothing is asked: the answer is known
            return PrepareStoreOutput([], ChunkSlots(), [])
        wanted = offered[:MAX_KEYS]
        ranges = self.ranges
        blocks = [ranges.offered(key, req_context) for key in wanted] if ranges.parts else None
        describe = partial(self._description, wanted, req_context)
        ticket = self.scheduler.prepare_store(
            wanted, blocks, describe if self.scheduler.describes else None
        )
        accepted = [OffloadKey(key) for key in ticket.keys]
        self._reports.add(req_context.req_id, offered)
        if len(accepted) < len(offered):
            answers = zip(wanted, ticket.answers, strict=False)
            refused = [key for key, answer in answers if answer is _FULL]
            self._refuse([*refused, *offered[MAX_KEYS:]], req_context)
        return PrepareStoreOutput(
            keys_to_store=accepted,
            store_spec=ChunkSlots(ticket.slots, ticket.generations, ranges.per_group(accepted)),
            evicted_keys=[],
        )

    def _refuse(self, keys: list[OffloadKey], req_context: ReqContext) -> None:
        if not keys:
            return
        self._stats.increase_counter(ALLOCATION_FAILURE)
        refused, unstored = {}, []
        for key in keys:
            chunk = self.ranges.chunk_of(key, req_context)
            if chunk is None:
                unstored.append(key)
            else:
                refused[chunk] = key
        if refused:
            self.refused.setdefault(req_context.req_id, {}).update(refused)
        self._leave_out(unstored)

    def loans(self) -> int | None:
        """How many slots are at hand; None where none is, and the daemon has yet to answer."""
        return self.scheduler.loans

    def give_up(self, req_id: str, chunks: AbstractSet[tuple[int, int]] | None = None) -> None:
        """Leave refused chunks of the request, these or all of them, out of the cache."""
        refused = self.refused[req_id]
        gone = refused.keys() if chunks is None else refused.keys() & chunks
        self._leave_out([refused.pop(chunk) for chunk in list(gone)])
        if not refused:
            del self.refused[req_id]
            self._reports.settle(req_id)

    def _leave_out(self, keys: list[OffloadKey]) -> None:
        """Count refused chunks that are not offered again."""
        if keys:
            self._stats.increase_counter(metrics.CHUNKS_REFUSED, len(keys))
            self.scheduler.give_up(keys[:MAX_KEYS])

    def has_pending_work(self) -> bool:
        """Whether vLLM is to go on stepping without requests: refused chunks wait for slots."""
        return bool(self.refused)

    def mark_failed(self, keys: Collection[OffloadKey]) -> None:
        """Let the coming `complete_store` of these keys, which some rank did not store, fail."""
        self._failed.update(keys)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """Give up what failed. The daemon knows from its lanes what was stored."""
        del req_context
        failed = []
        if not success or self._failed:
            failed = [key for key in keys if not success or key in self._failed]
        if failed:
            self._failed.difference_update(failed)
            self.scheduler.complete_store(failed, success=False)
            self._stats.increase_counter(metrics.STORE_FAILURES)

    # ----------------------------------------------------------------- others

    def reset_cache(self) -> None:
        """Drop every chunk of the namespace, for all engines that share it.

        Nothing is found and nothing stored until the daemon has done it; the engine does not wait
        for that.
        """
        self.scheduler.reset(0)
        for ticket in self._tickets.values():
            self.scheduler.complete_load(ticket)
        self._tickets.clear()
        self._failed.clear()
        self._reports.clear()
        self.refused.clear()
        self.promotions.clear()

    def get_stats(self) -> OffloadingConnectorStats:
        """Return counters since the last call, and whether chunks can be found now."""
        stats, self._stats = self._stats, OffloadingConnectorStats()
        for name, waits in self.promotions.take_counts().items():
            stats.increase_counter(name, waits)
        stats.set_gauge(metrics.ATTACHED, int(self.scheduler.attached and self.scheduler.connected))
        return stats

    def shutdown(self) -> None:
        """End the session."""
        self.scheduler.close()

    def _description(self, keys: list[OffloadKey], request: ReqContext, number: int) -> bytes:
        return self.describer.encoded(keys[number], request)


# TODO requests.py
# """The chunks of each request, reported to the daemon when the request has ended.
#
# The daemon learns from whole requests: all chunks that a request's tokens fill, head first, how many
# of them are its prompt's, and its label. So a report has also chunks that got no slot, that others
# were storing, and those before the last one that vLLM's own cache had: the daemon ignores what it
# does not hold. Requests are reported one by one, in the order in which they ended.
# """


@dataclass(slots=True)
class EndedRequest:
    """A request that has ended.

    Attributes:
        keys: of its chunks, its head first, groups side by side.
        prompt: how many of them are its prompt's.
        label: when its chunks are expected to be used again.
    """

    keys: list[OffloadKey]
    prompt: int
    label: Label


class RequestReports:
    """What one engine's requests have offered and loaded, until it is reported.

    Args:
        scheduler: the session with the daemon.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._keys: dict[str, dict[OffloadKey, None]] = {}  # by request, offered or loaded
        self._unsettled: dict[str, EndedRequest] = {}  # some chunks may still get slots
        self._ended: list[EndedRequest] = []

    def add(self, req_id: str, keys: Iterable[OffloadKey]) -> None:
        """The request has offered or loads these chunks."""
        self._keys.setdefault(req_id, {}).update(dict.fromkeys(keys))

    def end(self, request: ReqContext, ranges: BlockRanges, *, settled: bool) -> None:
        """The request has ended; called again when its refused chunks were offered again.

        Args:
            request: of vLLM.
            ranges: knows vLLM's state of the request.
            settled: no chunk of it waits for a slot. Otherwise it is reported once that is so: a
                chunk is counted as used only while the daemon holds it.
        """
        req_id = request.req_id
        offered = self._keys.pop(req_id, None)
        if req_id not in self._unsettled:
            if not offered:
                return
            self._unsettled[req_id] = _ended_request(request, offered, ranges)
        if settled:
            self.settle(req_id)

    def settle(self, req_id: str) -> None:
        """No chunk of this request waits for a slot any more; it may still run."""
        ended = self._unsettled.pop(req_id, None)
        if ended is not None:
            self._ended.append(ended)

    def send(self) -> None:
        """Report the requests that have ended."""
        for ended in self._ended:
            keys = ended.keys[:MAX_KEYS]
            prompt = min(ended.prompt, len(keys))
            self._scheduler.request_finished(keys, prompt=prompt, label=ended.label)
        self._ended.clear()

    def clear(self) -> None:
        """Forget everything: no chunk is held any more."""
        self._keys.clear()
        self._unsettled.clear()
        self._ended.clear()

    def __repr__(self) -> str:
        return f"<RequestReports {len(self._keys)} running, {len(self._unsettled)} unsettled>"


def _ended_request(
    request: ReqContext, offered: dict[OffloadKey, None], ranges: BlockRanges
) -> EndedRequest:
    """Put the chunks of a request in order, with those before them of full attention."""

    def end_token(key: OffloadKey) -> int:
        return request.get_offload_key_position(key) or 0

    last = max(map(end_token, offered))
    before = ranges.full_attention_keys(request.req_id, last)
    keys = sorted(dict.fromkeys((*before, *offered)), key=end_token)
    tokens = ranges.prompt_tokens(request.req_id)
    prompt = len(keys) if tokens is None else sum(end_token(key) <= tokens for key in keys)
    return EndedRequest(keys, prompt, request.get_state(Label) or Label.NONE)
