"""Requests that wait for chunks from tiers below the daemon's memory.

vLLM looks up one chunk at a time, but whether waiting is worthwhile depends on all of a request's
chunks. So the first time that a request's search meets chunks in tiers:

1. the search is simulated twice: as if these chunks were missing, and as if they were in memory.
   The difference is the number of tokens that promoting the chunks saves computing;
2. `worthwhile_wait` compares the time to promote with the time to compute;
3. promotion of all these chunks is requested in one step, and the request waits up to this long.
   Then it loads what has arrived.

A request waits once, until vLLM admits it.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    TierFilter,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvd_client import NO_TIER, TIER_UNKNOWN, Scheduler
from kvd_client import LookupResult as DirectoryResult
from kvd_client.tickets import BlockRange
from kvd_client.vllm import metrics
from kvd_proto.messages import MAX_KEYS, TierInfo
from kvd_proto.tier_table import TierHealth

PROBE_SECONDS = 1.0  # between probes whether a tier has become faster
PROBE_CHUNKS = 16

Search = Callable[[], int | None]
"""vLLM's search for what a request can load: tokens; None: vLLM asks again in the next step."""

_HIT_PENDING = DirectoryResult.HIT_PENDING
_NOT_ALLOWED = -3  # a tier's number, beside NO_TIER and TIER_UNKNOWN


@dataclass(slots=True)
class TierWait:
    """A request's wait for tiers.

    Attributes:
        started: by time.monotonic.
        seconds: its length; 0: waiting is not worthwhile.
        querying: for some chunks a shared tier had yet to say whether it has them.
    """

    started: float
    seconds: float
    querying: bool

    def is_running(self, now: float, limit: float) -> bool:
        """Return whether it still lasts, if it lasts `limit` seconds at most."""
        return now - self.started < min(self.seconds, limit)


class TierWaits:
    """The requests of one engine that wait for tiers.

    Args:
        scheduler: the session with the daemon.
        pending_timeout: seconds that a request waits at most.
        seek_timeout: seconds that it waits for shared tiers to say whether they have a chunk.

    Attributes:
        speed: how fast this engine computes prompts.
    """

    def __init__(
        self, scheduler: Scheduler, *, pending_timeout: float, seek_timeout: float
    ) -> None:
        self.speed = PrefillSpeed()
        self._counts: Counter[str] = Counter()
        self._scheduler = scheduler
        self._pending_timeout = pending_timeout
        self._seek_timeout = seek_timeout
        self._waits: dict[str, TierWait] = {}  # by request
        self._sources: dict[str, dict[OffloadKey, int]] = {}  # by request: tiers of its chunks
        self._tier_chunks: dict[OffloadKey, int] = {}  # met by the present search: their tiers
        # How a simulation counts them; None: no simulation.
        self._simulated_hits: bool | None = None
        self._requested_bytes: dict[int, int] = {}  # by tier, in this step
        self._last_probe = -PROBE_SECONDS

    # ---------------------------------------------------------------- searches

    def search(self, request: ReqContext, search: Search) -> int | None:
        """Return the search's result; None while the request waits for tiers."""
        result = self._search(search)
        if result is not None or not self._tier_chunks:
            return result
        tier_chunks, wait = self._tier_chunks, self._waits.get(request.req_id)
        querying = TIER_UNKNOWN in tier_chunks.values()
        if wait is None or (wait.querying and not querying):
            seconds = self._wait_seconds(request, search)
            if seconds is None:
                return None
            if wait is None:
                wait = TierWait(time.monotonic(), seconds, querying)
                self._waits[request.req_id] = wait
                self._counts[metrics.TIER_WAITS] += bool(seconds)
            else:  # the shared tiers have answered
                wait.seconds, wait.querying = seconds, False
            if not seconds:
                known = [key for key, number in tier_chunks.items() if number != TIER_UNKNOWN]
                self._probe(request, known)
                return self._search(search)
        self._request_promotion(request, list(tier_chunks), MAX_KEYS)
        return None

    def _search(self, search: Search) -> int | None:
        self._tier_chunks = {}
        return search()

    def _request_promotion(self, request: ReqContext, keys: list[OffloadKey], limit: int) -> None:
        """Request promotion of up to `limit` chunks, in prompt order."""
        ends = [request.get_offload_key_position(key) or 0 for key in keys]
        order = sorted(range(len(keys)), key=ends.__getitem__)[:limit]
        self._scheduler.request_promotion([keys[index] for index in order])

    def _probe(self, request: ReqContext, keys: list[OffloadKey]) -> None:
        """From time to time, request promotion of some chunks although no request waits for them.

        A tier's speed is measured by promotions. Without probes, a tier that was slow once would
        never be used again.
        """
        now = time.monotonic()
        if keys and now >= self._last_probe + PROBE_SECONDS:
            self._last_probe = now
            self._request_promotion(request, keys, PROBE_CHUNKS)

    def _wait_seconds(self, request: ReqContext, search: Search) -> float | None:
        """Return how long the request waits; None: unknown in this step."""
        with self._simulation(hits=False):
            tokens_without_tiers = search()
        with self._simulation(hits=True):
            tokens_with_tiers = search()
            nbytes = self._bytes_by_tier(request)
        if tokens_without_tiers is None or tokens_with_tiers is None:
            return None
        if tokens_with_tiers <= tokens_without_tiers:
            return 0.0
        scheduler = self._scheduler
        status = [scheduler.tier_status(number) for number in range(len(scheduler.tiers))]
        queued = {
            number: size + self._requested_bytes.get(number, 0) for number, size in nbytes.items()
        }
        seconds = worthwhile_wait(
            promotion_seconds(status, queued),
            self.speed.seconds(tokens_with_tiers - tokens_without_tiers),
            self._pending_timeout,
        )
        if seconds:
            self._requested_bytes |= queued
        return seconds

    @contextmanager
    def _simulation(self, *, hits: bool) -> Iterator[None]:
        """Within the context, let lookups of chunks in tiers hit or miss."""
        self._tier_chunks, outer = {}, self._tier_chunks
        self._simulated_hits = hits
        try:
            yield
        finally:
            self._tier_chunks, self._simulated_hits = outer, None

    def _bytes_by_tier(self, request: ReqContext) -> dict[int, int]:
        """Return the bytes of the met chunks, by tier; TIER_UNKNOWN counts as a shared one."""
        shared = self._first_shared_tier(request)
        nbytes: dict[int, int] = {}
        for number in self._tier_chunks.values():
            tier = shared if number == TIER_UNKNOWN else number
            nbytes[tier] = nbytes.get(tier, 0) + self._scheduler.bytes_per_chunk
        return nbytes

    # ----------------------------------------------------------------- lookups

    def lookup(
        self,
        key: OffloadKey,
        blocks: BlockRange | tuple[()],
        result: DirectoryResult,
        request: ReqContext,
    ) -> LookupResult | None:
        """Return the lookup result of a chunk that is not in memory.

        Args:
            key: of the chunk.
            blocks: that any load of it needs; (): all.
            result: of the directory: MISS or HIT_PENDING.
            request: that looks it up.

        Returns:
            HIT_PENDING: a tier has it, and the request waits. RETRY: a shared tier has yet to say
            whether it has it, and the request waits. MISS: the request may not load from its tier,
            or has waited long enough. None: no tier has it. A simulation has its own results.
        """
        number = self._tier_of(key, blocks, result, request)
        if number == _NOT_ALLOWED:
            return LookupResult.MISS
        if self._simulated_hits is not None:
            if number == NO_TIER:
                return LookupResult.HIT if result is _HIT_PENDING else None
            self._tier_chunks[key] = number
            return LookupResult.HIT if self._simulated_hits else LookupResult.MISS
        if number == NO_TIER:
            return None
        wait = self._waits.get(request.req_id)
        if wait is not None:
            limit = self._seek_timeout if number == TIER_UNKNOWN else self._pending_timeout
            if not wait.is_running(time.monotonic(), limit):
                return LookupResult.MISS
        self._tier_chunks[key] = number
        self._sources.setdefault(request.req_id, {})[key] = number
        return LookupResult.RETRY if number == TIER_UNKNOWN else LookupResult.HIT_PENDING

    def _tier_of(
        self,
        key: OffloadKey,
        blocks: BlockRange | tuple[()],
        result: DirectoryResult,
        request: ReqContext,
    ) -> int:
        """Return the number of the tier that has the chunk, or from which it is being promoted.

        Or NO_TIER: none. TIER_UNKNOWN: a shared tier has yet to say. _NOT_ALLOWED: the request may
        not load from its tier.
        """
        number = self._scheduler.find_tier(key, *blocks)
        if result is _HIT_PENDING and number < 0:  # a store, or a promotion of an unlisted chunk
            number = self._sources.get(request.req_id, {}).get(key, NO_TIER)
            return self._first_shared_tier(request) if number == TIER_UNKNOWN else number
        if number == TIER_UNKNOWN:
            return number if self._first_shared_tier(request) != NO_TIER else NO_TIER
        tiers = self._scheduler.tiers
        if number == NO_TIER or number >= len(tiers):
            return NO_TIER
        return number if is_allowed(tiers[number], request.load_tier_filter) else _NOT_ALLOWED

    def _first_shared_tier(self, request: ReqContext) -> int:
        """Return the number of the first shared tier that the request may use, or NO_TIER."""
        for number, tier in enumerate(self._scheduler.tiers):
            if tier.shared and is_allowed(tier, request.load_tier_filter):
                return number
        return NO_TIER

    def counts_as_hit(self, key: OffloadKey, blocks: BlockRange) -> bool:
        """Return whether the present simulation takes these blocks, in a tier, for hits."""
        return bool(self._simulated_hits) and self._scheduler.find_tier(key, *blocks) != NO_TIER

    def source(self, key: OffloadKey, request: ReqContext) -> CacheHitSource:
        """Return where the chunk came from: memory, or the tier that the request waited for."""
        number = self._sources.get(request.req_id, {}).get(key)
        if number is None:
            return CacheHitSource.HOST
        if number == TIER_UNKNOWN:
            number = self._first_shared_tier(request)
        tiers = self._scheduler.tiers
        known = 0 <= number < len(tiers)
        return hit_source(tiers[number]) if known else CacheHitSource.EXTERNAL_UNSPECIFIED

    # ---------------------------------------------------------------- requests

    def end_wait(self, req_id: str) -> None:
        """End the request's wait: vLLM has admitted it. Count a wait that has timed out."""
        wait = self._waits.pop(req_id, None)
        if wait is not None and wait.seconds:
            timed_out = not wait.is_running(time.monotonic(), self._pending_timeout)
            self._counts[metrics.TIER_WAITS_OVER] += timed_out

    def forget(self, req_id: str) -> None:
        """Forget the request."""
        self._waits.pop(req_id, None)
        self._sources.pop(req_id, None)

    def take_counts(self) -> dict[str, int]:
        """Return the counts since the last call, by metric."""
        if not self._counts:
            return {}
        counts, self._counts = self._counts, Counter()
        return dict(+counts)

    def end_step(self) -> None:
        """Forget the bytes requested in this step: the tiers' status will contain them."""
        self._requested_bytes.clear()

    def clear(self) -> None:
        """Forget all requests: after a reset no tier has their chunks."""
        self._waits.clear()
        self._sources.clear()


# ------------------------------------------------------------------- tiers

# vLLM's names for the media of tiers. Other media have none.
_MEDIA = {
    "memory": (Medium.CPU, Locality.LOCAL),
    "disk": (Medium.STORAGE, Locality.LOCAL),
    "remote": (Medium.STORAGE, Locality.REMOTE),
}
_SOURCES = {"memory": CacheHitSource.HOST, "disk": CacheHitSource.DISK}


def is_allowed(tier: TierInfo, tier_filter: TierFilter) -> bool:
    """Return whether a request's `kv_load_tiers` allow this tier.

    As with vLLM's own tiers, the filter applies below the memory, not to the memory itself.
    """
    medium, locality = _MEDIA.get(tier.medium, (None, None))
    allows: bool = tier_filter.allows(medium, locality)
    return allows


def hit_source(tier: TierInfo) -> CacheHitSource:
    """Return the source of tokens from this tier, for vLLM's metrics."""
    return _SOURCES.get(tier.medium, CacheHitSource.EXTERNAL_UNSPECIFIED)


def promotion_seconds(
    status: Sequence[TierHealth | None], nbytes: Mapping[int, int]
) -> float | None:
    """Return how long promotions take: the maximum over the tiers, which work in parallel.

    A tier needs its latency, and the time for queued and new bytes at its speed.

    Args:
        status: of every tier.
        nbytes: new bytes, by the tier's number.

    Returns:
        Seconds; None: a tier has not measured its speed yet.
    """
    longest = 0.0
    for number, size in nbytes.items():
        tier = status[number]
        if tier is None or not tier.bytes_per_second:
            return None
        transfer = (tier.queued_bytes + size) / tier.bytes_per_second
        longest = max(longest, tier.latency_us / 1e6 + transfer)
    return longest


def worthwhile_wait(promoting: float | None, computing: float | None, limit: float) -> float:
    """Return how many seconds a request waits; 0: computing is as fast as promoting.

    If one of the times is unknown, the request waits. It never waits longer than computing takes.

    Args:
        promoting: seconds to promote the chunks; None: unknown.
        computing: seconds to compute the same tokens; None: unknown.
        limit: seconds at most.
    """
    if computing is None:
        return limit
    if promoting is not None and promoting >= computing:
        return 0.0
    return min(computing, limit)


# ------------------------------------------------------------ prefill speed

SAMPLES = 9  # of each size; their median counts, so one slow step changes nothing
MAX_OPEN_STEPS = 32  # more than vLLM ever has in flight, so that a lost step cannot stay


class PrefillSpeed:
    """How long this engine takes to compute a prompt, measured from its own steps.

    A step's time begins when it was scheduled or when the step before it ended, whichever is later.
    So neither idle time nor other steps count, also if vLLM schedules a step while another runs.
    A step has a fixed cost, so sizes are kept apart by powers of two.

    Attributes:
        seconds_per_token: of a long prompt, by the largest steps; None: not measured yet.
    """

    def __init__(self) -> None:
        self._open: deque[tuple[int, float]] = deque()  # prompt tokens of a step, and its start
        self._last_end = 0.0
        self._sizes: dict[int, deque[float]] = {}  # by bits of the size: seconds a token
        self._largest = 0  # of the sizes
        self.seconds_per_token: float | None = None

    def step_scheduled(self, output: SchedulerOutput) -> None:
        """Start to measure a scheduled step.

        vLLM reports the end of a step without tokens only if it has something to report. Then the
        next end could be that of any step in flight, so none of them is measured.
        """
        if not output.total_num_scheduled_tokens or len(self._open) >= MAX_OPEN_STEPS:
            self._open.clear()
        if output.total_num_scheduled_tokens:
            self._open.append((prompt_tokens(output), time.monotonic()))

    def step_ended(self) -> None:
        """End the oldest step in flight."""
        if not self._open:
            return
        now = time.monotonic()
        num_tokens, started = self._open.popleft()
        if num_tokens:
            size = num_tokens.bit_length()
            samples = self._sizes.setdefault(size, deque(maxlen=SAMPLES))
            samples.append((now - max(started, self._last_end)) / num_tokens)
            if size >= self._largest:
                self._largest, self.seconds_per_token = size, median(samples)
        self._last_end = now

    def seconds(self, num_tokens: int) -> float | None:
        """Return how long computing so many tokens of a prompt takes; None: not measured yet.

        By steps of the same size, else by the next smaller size, because a long prompt is computed
        in several steps; else by the smallest size.
        """
        if not self._sizes:
            return None
        bits = num_tokens.bit_length()
        size = max((known for known in self._sizes if known <= bits), default=min(self._sizes))
        return num_tokens * median(self._sizes[size])


def prompt_tokens(output: SchedulerOutput) -> int:
    """Return how many prompt tokens a step computes."""
    scheduled = output.num_scheduled_tokens
    num_tokens: int = sum(scheduled.get(new.req_id, 0) for new in output.scheduled_new_reqs)
    cached = output.scheduled_cached_reqs
    for req_id, num_output in zip(cached.req_ids, cached.num_output_tokens, strict=True):
        if not num_output:
            num_tokens += scheduled.get(req_id, 0)
    return num_tokens
