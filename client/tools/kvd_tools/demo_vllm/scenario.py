"""The workload of `kvd demo-vllm`: a model, prompts, and a GPU cache that is too small for them.

An engine that finds a prompt's chunks computes only what is behind them. So that a cold prompt
computes these last tokens in a step of their own as well, and with the same rounding, one step
takes as many tokens as can be found.
"""

import os
import random
from dataclasses import dataclass
from pathlib import Path

from kvd_tools.demo_vllm.options import EngineOptions, kvd_transfer
from kvd_tools.models import LLAMA, write_model

BLOCK_TOKENS = 32
BLOCKS_PER_CHUNK = 2
CHUNK_TOKENS = BLOCK_TOKENS * BLOCKS_PER_CHUNK
ANSWER_TOKENS = 8
MAX_SEQUENCES = 4  # one is asked at a time; a step must not be smaller than this
NUMBER_BYTES = 2  # bfloat16
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
class Scenario:
    """A model and its prompts; the other figures follow from them.

    prompts: that are measured; one more comes before, so that no first time is measured.
    prompt_tokens: of each.
    """

    layers: int
    prompts: int
    prompt_tokens: int

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token in all layers."""
        return self.layers * 2 * KV_HEADS * HEAD_DIM * NUMBER_BYTES

    @property
    def longest(self) -> int:
        """Tokens of a prompt with its answer."""
        return self.prompt_tokens + ANSWER_TOKENS

    @property
    def gpu_blocks(self) -> int:
        """Of the GPU cache: two prompts, one served and one still stored, and a null block."""
        return 1 + 2 * -(-self.longest // BLOCK_TOKENS)

    @property
    def pool_bytes(self) -> int:
        """A pool that keeps every prompt."""
        return int(POOL_MARGIN * (self.prompts + 1) * self.longest * self.token_bytes)

    def make_prompts(self) -> list[list[int]]:
        """Random prompts that share nothing, the first one to warm up with."""
        source = random.Random(0)
        return [source.choices(range(VOCAB), k=self.prompt_tokens) for _ in range(self.prompts + 1)]

    def write_options(self, place: Path, runtime_dir: Path) -> EngineOptions:
        """Write the model; an engine with this GPU cache and the daemon at `runtime_dir`."""
        findable = (self.prompt_tokens - 1) // CHUNK_TOKENS * CHUNK_TOKENS  # the last is computed
        return EngineOptions(
            model=write_model(place / "model", MODEL | {"num_hidden_layers": self.layers}),
            num_gpu_blocks=self.gpu_blocks,
            max_model_len=self.longest,
            block_size=BLOCK_TOKENS,
            dtype="bfloat16",
            threads=len(os.sched_getaffinity(0)),
            kv_transfer=kvd_transfer(runtime_dir, blocks_per_chunk=BLOCKS_PER_CHUNK, required=True),
            args=f"--max-num-batched-tokens {findable} --max-num-seqs {MAX_SEQUENCES}".split(),
        )
