"""Requests that wait for chunks from tiers below the daemon's memory.

vLLM asks about one chunk at a time; whether it is worth to wait depends on all of them. So the
first time that a request's search comes upon chunks in tiers, it is made twice more: without these
chunks, and as if they were in memory. The difference is what would be computed otherwise. All of
them are sought in one step, and the request waits for as long as `kvd_client.vllm.tiers` says;
then it loads what has come by then. A request waits once, until it is admitted.
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

from kvd_client import NOT_BELOW, UNKNOWN, Scheduler
from kvd_client import LookupResult as Found
from kvd_client.arguments import Blocks
from kvd_client.vllm import metrics
from kvd_proto.messages import MAX_KEYS, TierInfo
from kvd_proto.tier_table import TierStatus

TRY_SECONDS = 1.0  # between chunks that are sought to see whether a tier has become faster
TRIED_CHUNKS = 16

Search = Callable[[], int | None]
"""vLLM's search for what a request can load: tokens, or None where it is to be asked again."""

_HIT_PENDING = Found.HIT_PENDING
_REFUSED = -3  # beside NOT_BELOW and UNKNOWN


@dataclass(slots=True)
class Waiting:
    """A request's wait for tiers.

    Attributes:
        since: when it began.
        seconds: that it lasts; 0: it is not worth it.
        asking: whether it began with chunks of which nobody knew whether a shared tier has them.
    """

    since: float
    seconds: float
    asking: bool

    def lasts(self, now: float, most: float) -> bool:
        """Whether it goes on, where it lasts `most` seconds at the most."""
        return now - self.since < min(self.seconds, most)


class Promotions:
    """The waiting requests of one engine.

    Args:
        scheduler: the session with the daemon.
        pending_timeout: seconds that a request waits at the most.
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
        self._waiting: dict[str, Waiting] = {}
        # Of each request the chunks that it has waited for, and the tier of each.
        self._sources: dict[str, dict[OffloadKey, int]] = {}
        self._met: dict[OffloadKey, int] = {}  # by this search: chunks in tiers
        self._rehearsing: bool | None = None  # whether chunks in tiers count as hits; None: neither
        self._sought: dict[int, int] = {}  # in this step, bytes by tier
        self._tried = -TRY_SECONDS

    # ---------------------------------------------------------------- searches

    def search(self, request: ReqContext, search: Search) -> int | None:
        """Return what the search finds, or None while the request is to wait for tiers."""
        found = self._search(search)
        if found is not None or not self._met:
            return found
        met, waiting = self._met, self._waiting.get(request.req_id)
        asking = UNKNOWN in met.values()
        if waiting is None or (waiting.asking and not asking):
            seconds = self._decide(request, search)
            if seconds is None:
                return None
            if waiting is None:
                waiting = Waiting(time.monotonic(), seconds, asking)
                self._waiting[request.req_id] = waiting
                self._counts[metrics.TIER_WAITS] += bool(seconds)
            else:  # now it is known what is there
                waiting.seconds, waiting.asking = seconds, False
            if not seconds:
                self._try(request, [key for key, number in met.items() if number != UNKNOWN])
                return self._search(search)
        self._seek(request, list(met), MAX_KEYS)
        return None

    def _seek(self, request: ReqContext, keys: list[OffloadKey], most: int) -> None:
        """Seek these, a prompt's head first."""
        ends = [request.get_offload_key_position(key) or 0 for key in keys]
        order = sorted(range(len(keys)), key=ends.__getitem__)[:most]
        self._scheduler.seek([keys[at] for at in order])

    def _try(self, request: ReqContext, keys: list[OffloadKey]) -> None:
        """Seek some chunks, now and then, that nobody waits for.

        A tier's figures come from promotions: one that was slow once would never be used again.
        """
        now = time.monotonic()
        if keys and now >= self._tried + TRY_SECONDS:
            self._tried = now
            self._seek(request, keys, TRIED_CHUNKS)

    def _search(self, search: Search) -> int | None:
        self._met = {}
        return search()

    def _decide(self, request: ReqContext, search: Search) -> float | None:
        """Return for how many seconds the request waits; None: it cannot be told in this step."""
        with self._rehearsal(hits=False):
            without = search()
        with self._rehearsal(hits=True):
            everything = search()
            coming = self._bytes(request)
        if without is None or everything is None:
            return None
        if everything <= without:
            return 0.0
        scheduler = self._scheduler
        status = [scheduler.tier_status(number) for number in range(len(scheduler.tiers))]
        queued = {number: size + self._sought.get(number, 0) for number, size in coming.items()}
        seconds = patience(
            promotion_seconds(status, queued),
            self.speed.seconds(everything - without),
            self._pending_timeout,
        )
        if seconds:
            self._sought |= queued
        return seconds

    @contextmanager
    def _rehearsal(self, *, hits: bool) -> Iterator[None]:
        self._met, before = {}, self._met
        self._rehearsing = hits
        try:
            yield
        finally:
            self._met, self._rehearsing = before, None

    def _bytes(self, request: ReqContext) -> dict[int, int]:
        """Count bytes by tier of what the search has met. Unknown chunks: of the first shared."""
        shared = self._askable(request)
        sizes: dict[int, int] = {}
        for number in self._met.values():
            tier = shared if number == UNKNOWN else number
            sizes[tier] = sizes.get(tier, 0) + self._scheduler.bytes_per_chunk
        return sizes

    # ----------------------------------------------------------------- lookups

    def lookup(
        self, key: OffloadKey, blocks: Blocks | tuple[()], found: Found, request: ReqContext
    ) -> LookupResult | None:
        """Return how a chunk that is no hit counts; None: as if there were no tiers.

        Args:
            key: of the chunk.
            blocks: that are needed of it at the least; empty: all.
            found: MISS or HIT_PENDING, as the directory says.
            request: that looks it up.
        """
        number = self._tier(key, blocks, found, request)
        if number == _REFUSED:
            return LookupResult.MISS
        if self._rehearsing is not None:
            if number == NOT_BELOW:
                return LookupResult.HIT if found is _HIT_PENDING else None
            self._met[key] = number
            return LookupResult.HIT if self._rehearsing else LookupResult.MISS
        if number == NOT_BELOW:
            return None
        waiting = self._waiting.get(request.req_id)
        if waiting is not None:
            most = self._seek_timeout if number == UNKNOWN else self._pending_timeout
            if not waiting.lasts(time.monotonic(), most):
                return LookupResult.MISS
        self._met[key] = number
        self._sources.setdefault(request.req_id, {})[key] = number
        return LookupResult.RETRY if number == UNKNOWN else LookupResult.HIT_PENDING

    def _tier(
        self, key: OffloadKey, blocks: Blocks | tuple[()], found: Found, request: ReqContext
    ) -> int:
        """Return the tier from which the chunk would come, or comes.

        Or `NOT_BELOW`, `UNKNOWN`, or `_REFUSED` where the request may not load from that tier.
        """
        number = self._scheduler.below(key, *blocks)
        if found is _HIT_PENDING and number < 0:  # a store, or the promotion of what was unknown
            number = self._sources.get(request.req_id, {}).get(key, NOT_BELOW)
            return self._askable(request) if number == UNKNOWN else number
        if number == UNKNOWN:
            return number if self._askable(request) != NOT_BELOW else NOT_BELOW
        tiers = self._scheduler.tiers
        if number == NOT_BELOW or number >= len(tiers):
            return NOT_BELOW
        return number if allowed(tiers[number], request.load_tier_filter) else _REFUSED

    def _askable(self, request: ReqContext) -> int:
        """Return the first shared tier that the request may load from, or `NOT_BELOW`."""
        for number, tier in enumerate(self._scheduler.tiers):
            if tier.shared and allowed(tier, request.load_tier_filter):
                return number
        return NOT_BELOW

    def rehearsed(self, key: OffloadKey, blocks: Blocks) -> bool:
        """Whether, in a search as if chunks in tiers were in memory, these blocks are."""
        return bool(self._rehearsing) and self._scheduler.below(key, *blocks) != NOT_BELOW

    def source(self, key: OffloadKey, request: ReqContext) -> CacheHitSource:
        """Return where the chunk came from: memory, or the tier that the request waited for."""
        number = self._sources.get(request.req_id, {}).get(key)
        if number is None:
            return CacheHitSource.HOST
        if number == UNKNOWN:
            number = self._askable(request)
        tiers = self._scheduler.tiers
        known = 0 <= number < len(tiers)
        return source(tiers[number]) if known else CacheHitSource.EXTERNAL_UNSPECIFIED

    # ---------------------------------------------------------------- requests

    def admitted(self, req_id: str) -> None:
        """The request has its blocks: it waits no more."""
        waiting = self._waiting.pop(req_id, None)
        if waiting is not None and waiting.seconds:
            over = not waiting.lasts(time.monotonic(), self._pending_timeout)
            self._counts[metrics.TIER_WAITS_OVER] += over

    def finished(self, req_id: str) -> None:
        """Forget the request."""
        self._waiting.pop(req_id, None)
        self._sources.pop(req_id, None)

    def take_counts(self) -> dict[str, int]:
        """Return what was counted since the last call, by metric."""
        counts, self._counts = self._counts, Counter()
        return dict(+counts)

    def end_step(self) -> None:
        """The daemon is told of what was sought, and soon says itself what waits."""
        self._sought.clear()

    def clear(self) -> None:
        """Nothing is in a tier any more."""
        self._waiting.clear()
        self._sources.clear()

    def __repr__(self) -> str:
        return f"<Promotions {len(self._waiting)} requests waiting, {self.speed!r}>"


# TODO prefill.py
# """How long this engine takes to compute a prompt, measured from its own steps.
#
# A step's time goes from when it was scheduled, or the step before it had ended, whichever is later,
# to its own end. So neither idle time nor that of other steps counts, also where vLLM schedules the
# next step while one is running.
# """

SAMPLES = 9  # of each size, of which the median counts: one slow step changes nothing
MOST_OPEN = 32  # steps under way; more than vLLM has, so that a lost one cannot stay


class PrefillSpeed:
    """Measured times of steps, by the number of prompt tokens in them.

    A step has a fixed cost, so small ones say little about large ones: sizes are kept apart by
    powers of two.
    """

    def __init__(self) -> None:
        self._open: deque[tuple[int, float]] = deque()  # prompt tokens of a step, and when it began
        self._ended = 0.0  # the latest step
        self._sizes: dict[int, deque[float]] = {}  # by bits of the size: seconds a token

    def scheduled(self, output: SchedulerOutput) -> None:
        """A step is scheduled.

        Of one without tokens vLLM reports the end only where it has something to report: whose the
        next end is cannot be told then, so what is under way is not measured.
        """
        if not output.total_num_scheduled_tokens or len(self._open) >= MOST_OPEN:
            self._open.clear()
        if output.total_num_scheduled_tokens:
            self._open.append((prompt_tokens(output), time.monotonic()))

    def ended(self) -> None:
        """The oldest step under way has ended."""
        if not self._open:
            return
        now = time.monotonic()
        tokens, began = self._open.popleft()
        if tokens:
            size = self._sizes.setdefault(tokens.bit_length(), deque(maxlen=SAMPLES))
            size.append((now - max(began, self._ended)) / tokens)
        self._ended = now

    def seconds(self, tokens: int) -> float | None:
        """Return how long it takes to compute so many tokens of a prompt; None: not measured yet.

        By the steps of the same size, or else by smaller ones, as large as there are: a long prompt
        is computed in several steps. Where all were larger, by the smallest.
        """
        if not self._sizes:
            return None
        bits = tokens.bit_length()
        size = max((known for known in self._sizes if known <= bits), default=min(self._sizes))
        return tokens * median(self._sizes[size])

    @property
    def seconds_per_token(self) -> float | None:
        """How long a token of a long prompt takes; None: not measured yet.

        By the largest steps: a long prompt fills them.
        """
        return median(self._sizes[max(self._sizes)]) if self._sizes else None

    def __repr__(self) -> str:
        sizes = (
            f"{1 << bits - 1}+: {median(self._sizes[bits]) * 1e6:.0f}"
            for bits in sorted(self._sizes)
        )
        return f"<PrefillSpeed us a token by tokens a step: {', '.join(sizes)}>"


def prompt_tokens(output: SchedulerOutput) -> int:
    """Return how many tokens of prompts are computed in a step."""
    scheduled = output.num_scheduled_tokens
    tokens: int = sum(scheduled.get(new.req_id, 0) for new in output.scheduled_new_reqs)
    cached = output.scheduled_cached_reqs
    for req_id, answered in zip(cached.req_ids, cached.num_output_tokens, strict=True):
        if not answered:
            tokens += scheduled.get(req_id, 0)
    return tokens


# TODO tiers.py
# """Whether a request waits for chunks that are below the daemon's memory, and for how long.
#
# Pure: from what a tier's promotions take, and what computing takes.
# """

# What vLLM calls a tier's medium; of others it is not known.
_PLACES = {
    "memory": (Medium.CPU, Locality.LOCAL),
    "disk": (Medium.STORAGE, Locality.LOCAL),
    "remote": (Medium.STORAGE, Locality.REMOTE),
}
_SOURCES = {"memory": CacheHitSource.HOST, "disk": CacheHitSource.DISK}


def allowed(tier: TierInfo, wanted: TierFilter) -> bool:
    """Whether a request loads from this tier: its `kv_load_tiers`.

    As in vLLM's own tiers they are about what is below the memory, not about the memory.
    """
    medium, locality = _PLACES.get(tier.medium, (None, None))
    allows: bool = wanted.allows(medium, locality)
    return allows


def source(tier: TierInfo) -> CacheHitSource:
    """Return where vLLM's metrics say that tokens from this tier come from."""
    return _SOURCES.get(tier.medium, CacheHitSource.EXTERNAL_UNSPECIFIED)


def promotion_seconds(
    status: Sequence[TierStatus | None], coming: Mapping[int, int]
) -> float | None:
    """Return how long promotions take: tiers work side by side, the slowest counts.

    A tier's latency, and what waits there and what comes now by its speed.

    Args:
        status: of every tier.
        coming: bytes by the tier's number.

    Returns:
        Seconds; None where a tier has not measured anything yet.
    """
    longest = 0.0
    for number, size in coming.items():
        tier = status[number]
        if tier is None or not tier.bytes_per_second:
            return None
        copying = (tier.queued_bytes + size) / tier.bytes_per_second
        longest = max(longest, tier.latency_us / 1e6 + copying)
    return longest


def patience(promoting: float | None, computing: float | None, limit: float) -> float:
    """Return for how many seconds a request waits; 0: it does not.

    It waits where promoting is faster than computing, or where one of them is not known, and
    never longer than computing takes.

    Args:
        promoting: seconds.
        computing: seconds that the same tokens take.
        limit: seconds at the most.
    """
    if computing is None:
        return limit
    if promoting is not None and promoting >= computing:
        return 0.0
    return min(computing, limit)
