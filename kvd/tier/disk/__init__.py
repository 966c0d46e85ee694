"""The tier `disk`: chunks in preallocated files of a local file system."""

from kvd.tier.disk.tier import DiskTier

__all__ = ["DiskTier"]
