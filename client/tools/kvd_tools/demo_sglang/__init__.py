"""The real engine as a controllable process: SGLang on CPU with a small random model."""
