"""What the demos with a real engine ask: a model, and prompts that share nothing."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kvd_tools.models import LLAMA, write_model

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
