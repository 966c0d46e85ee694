"""The CUDA backend of the lane: pinned pool, workers' memory by handle, streams and copies."""
