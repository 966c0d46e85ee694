"""Random models for engines, small enough to run on CPU, and what the demos with a real engine ask.

A model is a folder of `config.json` and weights. The weights are large enough that an answer
depends on every key and value before it. With the engines' own dummy weights it hardly does, and a
damaged cache would go unseen.
"""

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import Tensor


WEIGHT_SCALE = 1.6  # a weight's standard deviation, times the root of its fan-in
# Of a model that computes fast. The names are those of `config.json`.
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


def write_model(
    path: Path,
    config: dict[str, Any] = LLAMA,
    *,
    norm: float = 1.0,
    vectors: Mapping[str, float] | None = None,
) -> Path:
    """Make `path` a model's folder, unless it holds just this model; returns `path`.

    Args:
        path: the folder; made where it is not there.
        config: the model's `config.json`.
        norm: the weights of its norms, and of all else that is a vector.
        vectors: other weights of those whose names end so.
    """
    config_file = path / "config.json"
    if config_file.exists() and json.loads(config_file.read_text()) == config:
        return path
    path.mkdir(parents=True, exist_ok=True)
    _write_weights(path / "model.safetensors", config, norm, vectors or {})
    # Last: a folder with this file is complete.
    config_file.write_text(json.dumps(config, indent=2) + "\n")
    return path


def _write_weights(
    file: Path, config: dict[str, Any], norm: float, vectors: Mapping[str, float]
) -> None:
    """Write seeded weights, bfloat16: an engine of a wider type computes with the same numbers."""
    import torch  # noqa: PLC0415  # a parent process that only names a model needs no torch
    from safetensors.torch import save_file  # noqa: PLC0415  # the same
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415  # the same

    fields = {name: value for name, value in config.items() if name != "model_type"}
    with torch.device("meta"):  # only names and shapes are asked for
        description = AutoConfig.for_model(config["model_type"], **fields)
        model = AutoModelForCausalLM.from_config(description)
    generator = torch.Generator().manual_seed(0)
    weights: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            given = [value for end, value in vectors.items() if name.endswith(end)]
            weight = torch.full(parameter.shape, given[0] if given else norm)
        else:
            scale = WEIGHT_SCALE / math.sqrt(parameter.shape[-1])
            weight = torch.empty(parameter.shape).normal_(0.0, scale, generator=generator)
        weights[name] = weight.to(torch.bfloat16)
    save_file(weights, file, {"format": "pt"})


ANSWER_TOKENS = 8
POOL_MARGIN = 1.5  # of a full pool up to a quarter is on loan to engines
# Little to compute with, much to remember: loading is cheap, computing is not, on two cores.
KV_HEADS, HEAD_DIM, VOCAB = 8, 128, 2048
MODEL = LLAMA | {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
}


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and its prompts; the other figures follow from them.

    prompts: that are measured; one more comes before, so that no first time is measured.
    prompt_tokens: of each.
    """

    NUMBER_BYTES: ClassVar[int]
    """Of the engine's numbers."""

    layers: int
    prompts: int
    prompt_tokens: int

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token in all layers."""
        return self.layers * 2 * KV_HEADS * HEAD_DIM * self.NUMBER_BYTES

    @property
    def longest(self) -> int:
        """Tokens of a prompt with its answer."""
        return self.prompt_tokens + ANSWER_TOKENS

    @property
    def pool_bytes(self) -> int:
        """A pool that keeps every prompt."""
        return int(POOL_MARGIN * (self.prompts + 1) * self.longest * self.token_bytes)

    def make_prompts(self) -> list[list[int]]:
        """Random prompts that share nothing, the first one to warm up with."""
        source = random.Random(0)
        return [source.choices(range(VOCAB), k=self.prompt_tokens) for _ in range(self.prompts + 1)]

    def write_model(self, place: Path) -> Path:
        """The model's folder, below `place`."""
        return write_model(place / "model", MODEL | {"num_hidden_layers": self.layers})
