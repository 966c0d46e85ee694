"""The workload of `kvd demo-vllm`: a model, prompts, and a GPU cache that is too small for them.

An engine that finds a prompt's chunks computes only what is behind them. So that a cold prompt
computes these last tokens in a step of their own as well, and with the same rounding, one step
takes as many tokens as can be found.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvd_tools.demo_vllm.models import Kind
from kvd_tools.demo_vllm.options import EngineOptions, kvd_transfer
from kvd_tools.errors import DemoError

BLOCK_TOKENS = 32
BLOCKS_PER_CHUNK = 2
CHUNK_TOKENS = BLOCK_TOKENS * BLOCKS_PER_CHUNK
ANSWER_TOKENS = 8
MAX_SEQUENCES = 4  # one is asked at a time; a step must not be smaller than this
NUMBER_BYTES = 2  # bfloat16
# Not "mla": on a CPU without AMX vLLM turns its prefix cache and prompts in steps off for it. A
# found prompt is then computed in other steps than a cold one; answers were seen to differ.
KINDS: tuple[Kind, ...] = ("dense", "hybrid")
WINDOW_PATTERN = 3  # hybrid: one layer of three attends to everything, and makes one group of three
POOL_MARGIN = 1.1
# Little to compute with, much to remember: loading is cheap, computing is not, on two cores.
SHAPE = {
    "hidden": 512,
    "intermediate": 1024,
    "heads": 8,
    "kv_heads": 8,
    "head_dim": 128,
    "vocab": 2048,
}


@dataclass(frozen=True, slots=True)
class Scenario:
    """A model and its prompts; the other figures follow from them.

    prompts: that are measured; one more comes before, so that no first time is measured.
    prompt_tokens: of each.
    """

    kind: Kind
    layers: int
    prompts: int
    prompt_tokens: int

    def __post_init__(self) -> None:
        if self.kind == "hybrid" and self.layers % WINDOW_PATTERN:
            raise DemoError(
                f"{self.layers} layers do not make a hybrid model, of which every third attends"
                f" to everything; give --layers a multiple of {WINDOW_PATTERN}"
            )

    @property
    def shape(self) -> dict[str, int]:
        """The fields of `ModelShape` that the demo chooses."""
        return SHAPE | {"layers": self.layers, "window_pattern": WINDOW_PATTERN}

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token in all layers."""
        return self.layers * 2 * SHAPE["kv_heads"] * SHAPE["head_dim"] * NUMBER_BYTES

    @property
    def findable_tokens(self) -> int:
        """Of one prompt, those that can be found: whole chunks; its last token is computed."""
        return (self.prompt_tokens - 1) // CHUNK_TOKENS * CHUNK_TOKENS

    @property
    def longest(self) -> int:
        """Tokens of a prompt with its answer."""
        return self.prompt_tokens + ANSWER_TOKENS

    @property
    def gpu_blocks(self) -> int:
        """The GPU cache's blocks, with vLLM's null block.

        Room for two prompts: one is served, one is still being stored. A hybrid model's every
        group needs its own blocks while a prompt is computed, one more where its window is cut;
        behind the window they are free again, so that room for one is room for more.
        """
        blocks = -(-self.longest // BLOCK_TOKENS)
        return 1 + (WINDOW_PATTERN * (blocks + 1) if self.kind == "hybrid" else 2 * blocks)

    @property
    def pool_bytes(self) -> int:
        """A pool that keeps every prompt."""
        return int(POOL_MARGIN * (self.prompts + 1) * self.longest * self.token_bytes)

    def make_prompts(self) -> list[list[int]]:
        """Random prompts that share nothing, the first one to warm up with."""
        source = random.Random(0)
        vocabulary = range(SHAPE["vocab"])
        return [source.choices(vocabulary, k=self.prompt_tokens) for _ in range(self.prompts + 1)]

    def options(self, model: Path, runtime_dir: Path) -> EngineOptions:
        """An engine with this GPU cache and the daemon at `runtime_dir` behind it."""
        args: dict[str, Any] = {
            "max_num_batched_tokens": self.findable_tokens,
            "max_num_seqs": MAX_SEQUENCES,
        }
        return EngineOptions(
            model=model,
            num_gpu_blocks=self.gpu_blocks,
            max_model_len=self.longest,
            block_size=BLOCK_TOKENS,
            dtype="bfloat16",
            kv_transfer=kvd_transfer(runtime_dir, blocks_per_chunk=BLOCKS_PER_CHUNK, required=True),
            args=args,
        )
