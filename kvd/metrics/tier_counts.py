"""What is counted of tiers below the pool."""

from dataclasses import dataclass

from kvd.metrics.counts import STAGE_BOUNDS, Counts
from kvd.metrics.declare import counter, counters, histogram
from kvd.metrics.histogram import Histogram

PUT_OUTCOMES = ("ok", "full", "failed", "late", "gone")
GET_OUTCOMES = ("ok", "absent", "corrupt", "failed", "late", "gone")
ASK_OUTCOMES = ("ok", "absent", "failed", "late")
"""How chunks of a tier's batches end: `kvd.outcomes.Outcome` in small letters."""
BREAKER_REASONS = ("late", "failed", "corrupt", "lost", "wrong")
"""Why a tier is set aside."""


@dataclass(slots=True)
class TierCounts(Counts):
    """What a tier has done, all its processes together."""

    puts: dict[str, int] = counters(
        "Chunks that were given to the tier to keep, by outcome: `ok` (kept), `full`, `failed` (an"
        " error of the medium), `late` (the deadline passed), `gone` (the chunk had left the pool)",
        "put_chunks_total",
        "outcome",
        keys=PUT_OUTCOMES,
    )
    gets: dict[str, int] = counters(
        "Chunks that were asked of the tier, by outcome: `ok` (its hits: they became READY in the"
        " pool), `absent`, `corrupt` (not what was kept, and dropped), `failed`, `late`, `gone`"
        " (not wanted any more)",
        "get_chunks_total",
        "outcome",
        keys=GET_OUTCOMES,
    )
    asks: dict[str, int] = counters(
        "Chunks of which a shared tier was asked whether it has them, by answer",
        "asked_chunks_total",
        "outcome",
        keys=ASK_OUTCOMES,
    )
    put_bytes: int = counter("Bytes of chunks that it kept", "bytes_total", direction="put")
    get_bytes: int = counter("Bytes of chunks that it gave back", "bytes_total", direction="get")
    put_seconds: float = counter(
        "Time in which puts were under way, one or several: `put_bytes` by this is its rate",
        "busy_seconds_total",
        start=0.0,
        direction="put",
    )
    get_seconds: float = counter(
        "Time in which gets were under way, one or several: `get_bytes` by this is its rate",
        "busy_seconds_total",
        start=0.0,
        direction="get",
    )
    put_latency: Histogram = histogram(
        "Seconds from the broker's order to the tier's answer, for each batch of puts",
        "put_seconds",
        STAGE_BOUNDS,
    )
    get_latency: Histogram = histogram(
        "Seconds from the broker's order to the tier's answer, for each batch of gets",
        "get_seconds",
        STAGE_BOUNDS,
    )
    opened: dict[str, int] = counters(
        "How often the breaker has set the tier aside, by reason: `late` (no progress), `failed`"
        " (half of the last batches), `corrupt`, `lost` (its process ended), `wrong` (the broker"
        " could not handle it: a bug in kvd, the log has it)",
        "breaker_opened_total",
        "reason",
        keys=BREAKER_REASONS,
    )
    unkept: int = counter(
        "Chunks that `keep` names and that left memory before the tier had taken them, or came"
        " late: stores are faster than the tier",
        "unkept_chunks_total",
    )
    dropped: int = counter(
        "Chunks that the tier dropped by itself to make room for others", "dropped_chunks_total"
    )
    damaged_records: int = counter(
        "Records of its index that were damaged when one of its processes began, and were dropped"
        " with their chunks",
        "damaged_records_total",
    )
    restarts: int = counter("Processes that were lost and replaced", "restarts_total")
