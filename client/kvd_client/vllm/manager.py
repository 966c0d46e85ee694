"""The scheduler's side of vLLM's offloading interface, on a kvd `Scheduler`.

Whatever happens to the daemon, no method raises and none waits longer than the
deadline: a lookup misses, a store is not begun, a load is marked as missing so
that every rank reports it as failed and the request is computed.
"""

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    get_offload_group_idx,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvd_client import LoadTicket, Scheduler, StoreAnswer, StoreTicket
from kvd_client import LookupResult as Found
from kvd_client.arguments import Blocks
from kvd_client.vllm import metrics
from kvd_client.vllm.ranges import BlockRanges
from kvd_client.vllm.upstream import ALLOCATION_FAILURE
from kvd_proto.messages import MAX_KEYS

_USED = (StoreAnswer.ACCEPTED, StoreAnswer.PRESENT)
RESET_SECONDS = 0.04  # the engine stands still meanwhile


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
        pending_timeout: seconds that a request waits for a chunk that is being stored.
        events: whether `take_events` reports stored and removed chunks.
    """

    ranges: BlockRanges  # set by the connector's half, which has vLLM's state of the requests

    def __init__(
        self, scheduler: Scheduler, *, pending_timeout: float, events: bool = False
    ) -> None:
        self.scheduler = scheduler
        self._pending_timeout = pending_timeout
        self._events: list[OffloadingEvent] | None = [] if events else None
        self._tickets: dict[str, LoadTicket] = {}  # by request: it has one load at a time
        self._no_loads: set[str] = set()  # requests whose load failed
        self._pending_since: dict[str, float] = {}
        self._failed: set[OffloadKey] = set()
        self._used: dict[str, dict[OffloadKey, None]] = {}  # by request, in order
        self._finished: list[list[OffloadKey]] = []  # used by requests that have finished
        self._lacking: set[OffloadKey] = set()
        self._needed: dict[str, Mapping[OffloadKey, Blocks]] = {}
        self._stats = OffloadingConnectorStats()

    # -------------------------------------------------------------- requests

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Keep nothing: a request has no state before its first lookup."""
        del req_context
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget the request, but for a load that is still running.

        What it used is told to the daemon by `tell_finished`.
        """
        keys = list(self._used.pop(req_context.req_id, ()))
        ends = {key: req_context.get_offload_key_position(key) for key in keys}
        if None not in ends.values():  # a prompt's head first, groups side by side
            keys.sort(key=lambda key: (ends[key], get_offload_group_idx(key)))
        if keys:
            self._finished.append(keys)
        self._no_loads.discard(req_context.req_id)
        self._pending_since.pop(req_context.req_id, None)
        self._needed.pop(req_context.req_id, None)

    def tell_finished(self) -> None:
        """Tell the daemon which chunks finished requests used: one message for all.

        As with vLLM's own manager a chunk that a request loaded, stored, or offered while it was
        present is as recent as the request's end, and a prompt's head more recent than its tail.
        """
        latest_first = reversed(self._finished)
        keys = list(dict.fromkeys(key for used in latest_first for key in used))[:MAX_KEYS]
        self._finished.clear()
        if keys and self.scheduler.attached:
            self.scheduler.request_finished(keys)

    def stop_loading(self, req_id: str) -> None:
        """After a failed load, let the request's lookups miss, so that it cannot loop."""
        self._no_loads.add(req_id)
        self._stats.increase_counter(metrics.LOAD_FAILURES)

    # --------------------------------------------------------------- lookups

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Look the key up in the mapped directory, without a message."""
        found = self.scheduler.lookup(key, *self.ranges.least(key))
        if found is Found.MISS or req_context.req_id in self._no_loads or key in self._lacking:
            return LookupResult.MISS
        if found is Found.HIT:
            return LookupResult.HIT
        now = time.monotonic()
        since = self._pending_since.setdefault(req_context.req_id, now)
        waiting = now - since < self._pending_timeout
        return LookupResult.HIT_PENDING if waiting else LookupResult.MISS

    def lacking(self, needed: Mapping[OffloadKey, Blocks]) -> set[OffloadKey]:
        """Return the chunks that lack some of the blocks that are needed of them."""
        lookup = self.scheduler.lookup
        return {key for key, blocks in needed.items() if lookup(key, *blocks) is not Found.HIT}

    @contextmanager
    def missing(self) -> Iterator[set[OffloadKey]]:
        """Let lookups of the keys in the yielded set miss within the context."""
        self._lacking = lacking = set[OffloadKey]()
        yield lacking
        self._lacking = set()

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """Return that hits come from host memory."""
        del key, req_context
        return CacheHitSource.HOST

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
        blocks = [needed.get(key, self.ranges.whole) for key in wanted]
        prepare = self.scheduler.prepare_load
        ticket = prepare(wanted, blocks=blocks) if wanted else LoadTicket()
        missing = len(wanted) - len(ticket)
        if missing:
            self.scheduler.complete_load(ticket)
            return ChunkSlots(missing=missing)
        self._tickets[req_context.req_id] = ticket
        self._use(wanted, req_context)
        return ChunkSlots(ticket.slots, ticket.generations, _per_group(wanted))

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
        """Ask for slots; some keys may get none.

        Never None: vLLM would ask again for the same chunks in every step.
        """
        wanted = list(keys)[:MAX_KEYS]
        # While no daemon serves this engine nothing is asked: the answer is known.
        served = self.scheduler.attached
        blocks = [self.ranges.offered(key, req_context) for key in wanted]
        ticket = self.scheduler.prepare_store(wanted, blocks) if served else StoreTicket()
        accepted = [OffloadKey(key) for key in ticket.keys]
        evicted = [OffloadKey(key) for key in self.scheduler.take_evicted()]
        pairs = zip(wanted, ticket.answers, strict=False)
        self._use((key for key, answer in pairs if answer in _USED), req_context)
        refused = ticket.answers.count(StoreAnswer.FULL)
        if refused or (served and not ticket.served):
            self._stats.increase_counter(ALLOCATION_FAILURE)
        if refused:
            self._stats.increase_counter(metrics.CHUNKS_REFUSED, refused)
        self._report(evicted, removed=True)
        return PrepareStoreOutput(
            keys_to_store=accepted,
            store_spec=ChunkSlots(ticket.slots, ticket.generations, _per_group(accepted)),
            evicted_keys=evicted,
        )

    def mark_failed(self, keys: Collection[OffloadKey]) -> None:
        """Let the coming `complete_store` of these keys, which some rank did not store, fail."""
        self._failed.update(keys)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """Give up what failed. The daemon knows from its lanes what was stored."""
        del req_context
        failed = [key for key in keys if not success or key in self._failed]
        stored = [key for key in keys if success and key not in self._failed]
        if failed:
            self._failed.difference_update(failed)
            self.scheduler.complete_store(failed, success=False)
            self._stats.increase_counter(metrics.STORE_FAILURES)
        self._report(stored, removed=False)

    # ----------------------------------------------------------------- others

    def reset_cache(self) -> None:
        """Drop every chunk of the namespace, for all engines that share it.

        Where the daemon does not answer at once, nothing is found until it has; the engine
        does not wait for that.
        """
        self.scheduler.reset(RESET_SECONDS)
        for ticket in self._tickets.values():
            self.scheduler.complete_load(ticket)
        self._tickets.clear()
        self._failed.clear()
        self._used.clear()
        self._finished.clear()

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return chunks stored by this engine, and removed to make room for its stores."""
        events, self._events = self._events, None if self._events is None else []
        return events or ()

    def get_stats(self) -> OffloadingConnectorStats:
        """Return counters since the last call, and whether chunks can be found now."""
        stats, self._stats = self._stats, OffloadingConnectorStats()
        stats.set_gauge(metrics.ATTACHED, int(self.scheduler.attached and self.scheduler.connected))
        return stats

    def shutdown(self) -> None:
        """End the session."""
        self.scheduler.close()

    def _use(self, keys: Iterable[OffloadKey], request: ReqContext) -> None:
        self._used.setdefault(request.req_id, {}).update(dict.fromkeys(keys))

    def _report(self, keys: list[OffloadKey], *, removed: bool) -> None:
        if self._events is not None and keys:
            self._events.append(OffloadingEvent(keys=keys, medium=Medium.CPU, removed=removed))


def _per_group(keys: Iterable[Any]) -> dict[int, int]:
    return dict(Counter(map(get_offload_group_idx, keys)))
