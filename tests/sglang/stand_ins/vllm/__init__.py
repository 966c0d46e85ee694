"""Stands for vLLM, of which SGLang needs one function on a CPU."""
