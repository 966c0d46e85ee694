"""Random models for vLLM, small enough to run on CPU: a folder of `config.json` and weights.

The weights are large enough that an answer depends on every key and value
before it. With vLLM's own dummy weights it hardly does, and a damaged cache
would go unseen.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["dense", "hybrid", "mla"]

WEIGHT_SCALE = 1.6  # a weight's standard deviation, times the root of its fan-in
MARK = "kvd_shape"  # where config.json says what the folder was made from
CONFIG = "config.json"
WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The figures of a model; what a kind does not have is ignored.

    window: tokens that a sliding-window layer sees (hybrid).
    window_pattern: every so many layers one attends to everything (hybrid).
    kv_lora_rank, rope_dim: numbers that one token's KV consists of, per layer (mla).
    seed: of the weights.
    """

    layers: int = 4
    hidden: int = 256
    intermediate: int = 512
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32
    vocab: int = 1024
    max_positions: int = 32768
    window: int = 128
    window_pattern: int = 3
    kv_lora_rank: int = 512
    rope_dim: int = 64
    seed: int = 0


# Six layers of which every third is full: groups of two full and twice two window layers.
DEFAULTS: Mapping[Kind, ModelShape] = {
    "dense": ModelShape(),
    "hybrid": ModelShape(layers=6),
    "mla": ModelShape(layers=2),
}


def write_model(path: Path, kind: Kind, **shape: int) -> Path:
    """Make `path` a model's folder, unless it holds just this model; returns `path`.

    Args:
        path: the folder; made where it is not there.
        kind: "dense" (Llama), "hybrid" (Gemma 3, full and window layers), "mla" (DeepSeek V2).
        shape: fields of `ModelShape` that differ from the kind's defaults.
    """
    wanted = replace(DEFAULTS[kind], **shape)
    config = _CONFIGS[kind](wanted) | {MARK: {"kind": kind, **asdict(wanted)}}
    config_file = path / CONFIG
    if config_file.exists() and json.loads(config_file.read_text()) == config:
        return path
    config_file.unlink(missing_ok=True)
    path.mkdir(parents=True, exist_ok=True)
    _write_weights(path / WEIGHTS, config, kind, wanted.seed)
    # Last: a folder with this file is complete.
    config_file.write_text(json.dumps(config, indent=2) + "\n")
    return path


def _dense(shape: ModelShape) -> dict[str, Any]:
    return _common(shape) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


def _hybrid(shape: ModelShape) -> dict[str, Any]:
    return _common(shape) | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        # Its queries and keys are normalized; this makes the scores as large as Llama's here.
        "query_pre_attn_scalar": max(1, round(shape.head_dim / WEIGHT_SCALE**4)),
        "sliding_window": shape.window,
        "sliding_window_pattern": shape.window_pattern,
        "tie_word_embeddings": False,  # tied, it would repeat its last token for ever
    }


def _mla(shape: ModelShape) -> dict[str, Any]:
    return _common(shape) | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": shape.heads,
        "hidden_act": "silu",
        "q_lora_rank": None,
        "kv_lora_rank": shape.kv_lora_rank,
        "qk_nope_head_dim": shape.head_dim,
        "qk_rope_head_dim": shape.rope_dim,
        "v_head_dim": shape.head_dim,
        # The engine wants experts in the figures; every layer is dense all the same.
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": shape.intermediate,
        "first_k_dense_replace": shape.layers,
        "tie_word_embeddings": False,
    }


_CONFIGS = {"dense": _dense, "hybrid": _hybrid, "mla": _mla}


def _common(shape: ModelShape) -> dict[str, Any]:
    return {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": shape.max_positions,
        "dtype": "bfloat16",
    }


def _write_weights(file: Path, config: dict[str, Any], kind: Kind, seed: int) -> None:
    """Write seeded weights, bfloat16: an engine of a wider type computes with the same numbers."""
    import torch  # noqa: PLC0415  # a parent process that only names a model needs no torch
    from safetensors.torch import save_file  # noqa: PLC0415  # the same
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415  # the same

    fields = {name: value for name, value in config.items() if name not in {"model_type", MARK}}
    with torch.device("meta"):  # only names and shapes are asked for
        description = AutoConfig.for_model(config["model_type"], **fields)
        model = AutoModelForCausalLM.from_config(description)
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # a norm; Gemma's multiply by one plus the weight
            weight = torch.full(parameter.shape, 0.0 if kind == "hybrid" else 1.0)
        else:
            scale = WEIGHT_SCALE / math.sqrt(parameter.shape[-1])
            weight = torch.empty(parameter.shape).normal_(0.0, scale, generator=generator)
        weights[name] = weight.to(torch.bfloat16)
    save_file(weights, file, {"format": "pt"})
