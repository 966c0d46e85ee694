"""Forecasts of hits in a pool of another size, and advice on what to buy.

The miss-ratio curve is that of an LRU cache, and of engine and pool together: it counts a request's
chunks even if the engine had them in its own memory. So the share that engines did not look up is
taken off, and the rest is scaled to the measured hit ratio: smaller pools in proportion to it,
larger pools in proportion to the rest up to the ceiling.
"""

from collections.abc import Sequence

from kvd.cache.miss_curve import MissCurve
from kvd.cache.namespaces import Namespace
from kvd.metrics import schema
from kvd.metrics.reading import number, percent, size
from kvd.pool.pool import Pool

SIZES: tuple[tuple[str, float], ...] = (
    *(("-50%", 0.5), ("-25%", 0.75), ("now", 1.0), ("+25%", 1.25)),
    *(("+50%", 1.5), ("+100%", 2.0), ("+200%", 3.0)),
)
MIN_REQUESTS = 50
MAX_ENGINE_SHARE = 0.99
WORTHWHILE_GAIN = 0.02  # of the looked-up tokens
EQUAL_GAIN = 0.005  # smaller differences count as none
BIGGER = ("+25%", "+50%", "+100%", "+200%")
DEEP_TOKENS = 131_072 / 3
"""A token at this position of a prompt takes twice the prefill time of the first one."""


class Forecast:
    """Hits and prefill time by the pool's size.

    Args:
        curve: of the namespace.
        chunks: the number that the namespace can hold now.
    """

    def __init__(self, curve: MissCurve, chunks: float) -> None:
        self._curve = curve
        self._chunks = chunks
        prompt_tokens = curve.prompt_keys * (curve.tokens_per_key or 0.0)
        looked_up_share = 1.0
        if curve.lookup_tokens and prompt_tokens:
            looked_up_share = curve.lookup_tokens / prompt_tokens
        # Engines look up only what they do not hold: the rest is their own share.
        self._engine_share = min(max(0.0, 1.0 - looked_up_share), MAX_ENGINE_SHARE)
        # By the curve; hit_ratio_now is measured.
        self._curve_hit_ratio = self._beyond_engine(curve.hit_ratio(chunks))
        self._curve_ceiling = self._beyond_engine(curve.ceiling)
        measured = (
            curve.hit_tokens / curve.lookup_tokens if curve.lookup_tokens else self._curve_hit_ratio
        )
        self.hit_ratio_now = min(1.0, measured)
        self.ceiling = max(self.hit_ratio_now, self._curve_ceiling)

    @property
    def is_known(self) -> bool:
        """Whether enough requests have been seen, and the curve has any hits to anchor."""
        enough = self._curve.requests >= MIN_REQUESTS
        return enough and (self._curve_hit_ratio > 0 or not self.hit_ratio_now)

    def _beyond_engine(self, hit_ratio: float) -> float:
        """Convert a share of whole prompts into a share of what engines look up."""
        return max(0.0, hit_ratio - self._engine_share) / (1.0 - self._engine_share)

    def hit_ratio(self, chunks: float) -> float:
        """Return the share of looked-up tokens that a pool of this many chunks would find."""
        by_curve = self._beyond_engine(self._curve.hit_ratio(chunks))
        if by_curve <= self._curve_hit_ratio:
            return (
                self.hit_ratio_now * by_curve / self._curve_hit_ratio
                if self._curve_hit_ratio
                else 0.0
            )
        gained = (by_curve - self._curve_hit_ratio) / (self._curve_ceiling - self._curve_hit_ratio)
        return self.hit_ratio_now + gained * (self.ceiling - self.hit_ratio_now)

    def prefill_seconds(self, chunks: Sequence[float], per_token: float) -> list[float]:
        """Return the seconds per hour in which engines compute what pools of these sizes miss.

        Args:
            chunks: ascending.
            per_token: seconds in which an engine computes a token that it misses now.
        """
        curve = self._curve
        tokens_per_hour = curve.lookup_tokens / curve.seconds * 3600.0
        now = self._relative_cost(self._chunks)
        seconds = [
            tokens_per_hour
            * (1.0 - self.hit_ratio(size))
            * per_token
            * (self._relative_cost(size) / now)
            for size in chunks
        ]
        # Hits are scaled and positions are not: make sure that more memory never costs time.
        return [min(seconds[: index + 1]) for index in range(len(seconds))]

    def _relative_cost(self, chunks: float) -> float:
        """Return the mean cost of a missed token, relative to a prompt's first token."""
        depth = self._curve.missed_depth(chunks) * (self._curve.tokens_per_key or 0.0)
        return 1.0 + depth / DEEP_TOKENS


def forecast(
    namespace: Namespace, pool: Pool, prefill_seconds: float | None
) -> schema.ForecastStatus | None:
    """Return a namespace's forecast for the report; None if too little is known.

    In a pool of another size the namespace gets the same part as now.

    Args:
        namespace: whose forecast.
        pool: its pool.
        prefill_seconds: in which its engines compute a missed token; None if not known.
    """
    curve = namespace.table.curve
    if curve is None:
        return None
    chunks = _reachable_chunks(namespace, pool)
    estimate = Forecast(curve, chunks)
    if not estimate.is_known:
        return None
    capacities = [*(factor * chunks for _, factor in SIZES), float("inf")]
    seconds: Sequence[float | None] = [None] * len(capacities)
    if prefill_seconds is not None and curve.lookup_tokens and curve.seconds:
        seconds = estimate.prefill_seconds(capacities, prefill_seconds)
    names = [
        *((name, int(factor * pool.cpu_bytes)) for name, factor in SIZES),
        ("unlimited", None),
    ]
    return schema.ForecastStatus(
        requests=int(curve.requests),
        first_time=curve.first_time,
        ceiling=estimate.ceiling,
        hit_ratio=estimate.hit_ratio_now,
        prefill_seconds_per_token=prefill_seconds,
        sizes=[
            schema.ForecastSize(
                pool=name,
                bytes=nbytes,
                hit_ratio=estimate.hit_ratio(capacity),
                prefill_seconds_per_hour=per_hour,
            )
            for (name, nbytes), capacity, per_hour in zip(names, capacities, seconds, strict=True)
        ],
    )


def _reachable_chunks(namespace: Namespace, pool: Pool) -> int:
    """Return the number of chunks that a namespace can hold while others keep theirs."""
    space, geometry = namespace.table.space, namespace.geometry
    free = pool.free_bytes
    if (group := pool.quotas.of(space)) is not None:
        free = min(free, max(0, group.num_left) * pool.extents.size)
    return min((pool.held_bytes(space) + free) // geometry.bytes_per_chunk, geometry.num_slots)


def advice(forecast: schema.ForecastStatus) -> str:
    """Return one sentence that advises to buy memory, a tier or neither, with the figures.

    1. A pool without limit would find less than `WORTHWHILE_GAIN` more: neither.
    2. Sizes beyond +200 % gain more than +200 % does: a tier.
    3. Otherwise memory: the smallest size with half of the gain of +200 %.
    """
    sizes = {entry.pool: entry for entry in forecast.sizes}
    now, largest, unlimited = (sizes[pool] for pool in ("now", BIGGER[-1], "unlimited"))
    now_text, limit_text = percent(now.hit_ratio), percent(unlimited.hit_ratio)
    if unlimited.hit_ratio - now.hit_ratio < WORTHWHILE_GAIN:
        if now.hit_ratio - sizes["-50%"].hit_ratio < EQUAL_GAIN:
            return f"Buy neither: half of the pool would also find {now_text} of the prompt tokens."
        return (
            f"Buy neither memory nor a tier: {now_text} of the prompt tokens are found,"
            f" {limit_text} would be without limit."
        )
    gain, beyond = largest.hit_ratio - now.hit_ratio, unlimited.hit_ratio - largest.hit_ratio
    if gain < WORTHWHILE_GAIN or beyond > gain:
        return (
            f"Add a tier, or enlarge it: without limit {limit_text} of the prompt tokens would be"
            f" found instead of {now_text}, with three times the memory"
            f" {percent(largest.hit_ratio)}."
        )
    min_ratio = now.hit_ratio + max(WORTHWHILE_GAIN, gain / 2)
    bigger = next(sizes[pool] for pool in BIGGER if sizes[pool].hit_ratio >= min_ratio)
    return (
        f"Buy memory: +{size((bigger.bytes or 0) - (now.bytes or 0))} would {_saving(now, bigger)}"
        f"find {percent(bigger.hit_ratio)} of the prompt tokens instead of {now_text}."
    )


def _saving(now: schema.ForecastSize, bigger: schema.ForecastSize) -> str:
    if now.prefill_seconds_per_hour is None or bigger.prefill_seconds_per_hour is None:
        return ""
    seconds = now.prefill_seconds_per_hour - bigger.prefill_seconds_per_hour
    return f"save {number(seconds)} prefill seconds an hour and "
