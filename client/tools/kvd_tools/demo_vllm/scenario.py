"""The workload of `kvd demo-vllm`, and a GPU cache that is too small for it.

An engine that finds a prompt's chunks computes only what is behind them. So that a cold prompt
computes these last tokens in a step of their own as well, and with the same rounding, one step
takes as many tokens as can be found.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kvd_tools.demo_vllm.options import EngineOptions, kvd_transfer
from kvd_tools.workload import Workload

BLOCK_TOKENS = 32
BLOCKS_PER_CHUNK = 2
CHUNK_TOKENS = BLOCK_TOKENS * BLOCKS_PER_CHUNK
MAX_SEQUENCES = 4  # one is asked at a time; a step must not be smaller than this


@dataclass(frozen=True, slots=True)
class Scenario(Workload):
    """A model and its prompts, for vLLM with bfloat16."""

    NUMBER_BYTES: ClassVar[int] = 2

    @property
    def gpu_blocks(self) -> int:
        """Of the GPU cache: two prompts, one served and one still stored, and a null block."""
        return 1 + 2 * -(-self.longest // BLOCK_TOKENS)

    def write_options(self, place: Path, runtime_dir: Path) -> EngineOptions:
        """Write the model; an engine with this GPU cache and the daemon at `runtime_dir`."""
        findable = (self.prompt_tokens - 1) // CHUNK_TOKENS * CHUNK_TOKENS  # the last is computed
        return EngineOptions(
            model=self.write_model(place),
            num_gpu_blocks=self.gpu_blocks,
            max_model_len=self.longest,
            block_size=BLOCK_TOKENS,
            dtype="bfloat16",
            threads=len(os.sched_getaffinity(0)),
            kv_transfer=kvd_transfer(runtime_dir, blocks_per_chunk=BLOCKS_PER_CHUNK, required=True),
            args=f"--max-num-batched-tokens {findable} --max-num-seqs {MAX_SEQUENCES}".split(),
        )
