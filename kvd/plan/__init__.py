"""From a model's config.json to what its KV cache takes, before anything runs; no I/O."""
