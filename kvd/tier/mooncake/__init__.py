"""The shared tier: an existing Mooncake Store, which other nodes fill and read, too."""

from kvd.tier.mooncake.tier import MooncakeTier

__all__ = ["MooncakeTier"]
