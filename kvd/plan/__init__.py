"""The size of a model's KV cache, computed from its config.json before anything runs; no I/O."""
