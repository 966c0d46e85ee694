"""Whether a request waits for chunks that are below the daemon's memory, and for how long.

Pure: from what a tier's promotions take, and what computing takes.
"""

from collections.abc import Mapping, Sequence

from vllm.v1.kv_offload.base import Locality, Medium, TierFilter
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvd_proto.messages import TierInfo
from kvd_proto.tier_table import TierHealth

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
    status: Sequence[TierHealth | None], coming: Mapping[int, int]
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
