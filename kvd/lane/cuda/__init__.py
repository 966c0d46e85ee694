"""The CUDA backend: pinned pool, workers' memory by handle, streams and copies."""
