"""What to buy, from the forecast of a namespace: memory, a tier, or neither."""

from kvd.metrics.schema import Forecast, ForecastSize
from kvd.metrics.words import number, percent, size

WORTHWHILE = 0.02  # of the looked-up tokens
EQUAL = 0.005
BIGGER = ("+25%", "+50%", "+100%", "+200%")


def advice(forecast: Forecast) -> str:
    """One sentence for people: buy memory, add a tier, or neither; with the figures.

    1. Without limit fewer than `WORTHWHILE` more tokens would be found: neither.
    2. Sizes beyond +200 % bring more than +200 % does: a tier.
    3. Otherwise memory: the smallest size with half of the gain of +200 %.
    """
    sizes = {each.pool: each for each in forecast.sizes}
    now, most, unlimited = (sizes[pool] for pool in ("now", BIGGER[-1], "unlimited"))
    found, at_most = percent(now.hit_ratio), percent(unlimited.hit_ratio)
    if unlimited.hit_ratio - now.hit_ratio < WORTHWHILE:
        if now.hit_ratio - sizes["-50%"].hit_ratio < EQUAL:
            return f"Buy neither: half of the pool would also find {found} of the prompt tokens."
        return (
            f"Buy neither memory nor a tier: {found} of the prompt tokens are found, {at_most}"
            " would be without limit."
        )
    gain, beyond = most.hit_ratio - now.hit_ratio, unlimited.hit_ratio - most.hit_ratio
    if gain < WORTHWHILE or beyond > gain:
        return (
            f"Add a tier, or enlarge it: without limit {at_most} of the prompt tokens would be"
            f" found instead of {found}, with three times the memory {percent(most.hit_ratio)}."
        )
    least = now.hit_ratio + max(WORTHWHILE, gain / 2)
    bigger = next(sizes[pool] for pool in BIGGER if sizes[pool].hit_ratio >= least)
    return (
        f"Buy memory: +{size((bigger.bytes or 0) - (now.bytes or 0))} would {_saving(now, bigger)}"
        f"find {percent(bigger.hit_ratio)} of the prompt tokens instead of {found}."
    )


def _saving(now: ForecastSize, bigger: ForecastSize) -> str:
    if now.prefill_seconds_per_hour is None or bigger.prefill_seconds_per_hour is None:
        return ""
    seconds = now.prefill_seconds_per_hour - bigger.prefill_seconds_per_hour
    return f"save {number(seconds)} prefill seconds an hour and "
