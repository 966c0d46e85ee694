"""A tier's process: it moves chunks between the pool and its medium, and decides nothing."""
