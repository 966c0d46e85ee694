"""The lane: one process per device that moves the bytes between workers' memory and the pool."""
