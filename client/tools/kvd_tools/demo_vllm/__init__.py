"""The real engine as a controllable process: vLLM on CPU with a small random model."""
