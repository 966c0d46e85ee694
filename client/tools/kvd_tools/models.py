"""Random models for engines, small enough to run on a CPU.

A model is a folder of `config.json` and weights. The weights are so large that an answer depends
on every key and value before it. With the engines' own dummy weights it hardly does, and a damaged
cache would go unnoticed.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


WEIGHT_SCALE = 1.6  # a weight's standard deviation, times the root of its fan-in
# `config.json` of a small, fast model.
COMMON: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 32768,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
}
LLAMA = COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
}


# The model of the demos with a real engine: much KV for its size, so that loading is worthwhile.
ANSWER_TOKENS = 8
KV_HEADS, HEAD_DIM, VOCAB = 8, 128, 2048
MODEL = LLAMA | {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
}


def write_model(
    path: Path,
    config: dict[str, Any] = LLAMA,
    *,
    norm: float = 1.0,
    vectors: Mapping[str, float] | None = None,
) -> Path:
    """Write a model into the folder `path` unless it is there already; return `path`.

    Args:
        path: the folder, created if missing.
        config: the model's `config.json`.
        norm: the value of all weights that are vectors, such as norms.
        vectors: other values, by the end of the weight's name.
    """
    config_file = path / "config.json"
    if config_file.exists() and json.loads(config_file.read_text()) == config:
        return path
    path.mkdir(parents=True, exist_ok=True)
    config_file.unlink(missing_ok=True)
    _write_weights(path / "model.safetensors", config, norm, vectors or {})
    # Written last: a folder with this file is complete.
    config_file.write_text(json.dumps(config, indent=2) + "\n")
    return path


def _write_weights(
    file: Path, config: dict[str, Any], norm: float, vectors: Mapping[str, float]
) -> None:
    """Write seeded weights in bfloat16, which engines of a wider type represent exactly."""
    import torch  # noqa: PLC0415  # not needed if the model is there
    from safetensors.torch import save_file  # noqa: PLC0415  # the same
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415  # the same

    fields = {name: value for name, value in config.items() if name != "model_type"}
    with torch.device("meta"):  # no memory: only names and shapes are read
        description = AutoConfig.for_model(config["model_type"], **fields)
        model = AutoModelForCausalLM.from_config(description)
    generator = torch.Generator().manual_seed(0)
    weights: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            values = (value for suffix, value in vectors.items() if name.endswith(suffix))
            weight = torch.full(parameter.shape, next(values, norm))
        else:
            scale = WEIGHT_SCALE / math.sqrt(parameter.shape[-1])
            weight = torch.empty(parameter.shape).normal_(0.0, scale, generator=generator)
        weights[name] = weight.to(torch.bfloat16)
    save_file(weights, file, {"format": "pt"})
