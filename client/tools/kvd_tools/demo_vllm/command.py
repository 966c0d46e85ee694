"""`kvd demo-vllm`: vLLM on a CPU with a private daemon, cold, warm, and warm after a restart.

An engine that finds a prompt's chunks computes only what is behind them. So that a cold prompt
computes these last tokens in a step of their own as well, and with the same rounding, one step
takes as many tokens as can be found.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import click
from rich.console import Console

from kvd_tools.demo_vllm.engine import EngineOptions, EngineProcess, kvd_transfer
from kvd_tools.engine_demo import EngineDemo, workload_options
from kvd_tools.engine_server import Answer
from kvd_tools.errors import DemoError
from kvd_tools.models import ANSWER_TOKENS, Workload

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


ATTACH_SECONDS = 30.0
ATTACHED = "vllm:kv_offload_kvd_attached"
HITS = "vllm:external_prefix_cache_hits"


@click.command("demo-vllm")
@workload_options
def demo_vllm(*, prompts: int, prompt_tokens: int, layers: int) -> None:
    """Show what kvd does for vLLM: time to first token of new prompts and of known ones.

    Starts a private daemon and vLLM on the CPU with a generated model and a GPU cache too
    small for the prompts. Serves them, serves them again, starts vLLM anew, and again.
    Exit status 1 if nothing was found or an answer changed.

    \b
    Examples:
      kvd demo-vllm
      kvd demo-vllm --prompts 10 --prompt-tokens 1000
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    scenario = Scenario(layers, prompts, prompt_tokens)
    VllmDemo(scenario, Console(highlight=False, soft_wrap=True)).show()


class VllmDemo(EngineDemo[EngineProcess]):
    """With vLLM."""

    MODULE, COMMAND, NUMBERS, CACHE = "vllm", "demo-vllm", "bfloat16", "GPU cache"
    workload: Scenario

    def describe(self) -> str:
        """The GPU cache's size, in vLLM's blocks."""
        return (
            "vLLM:   on the CPU; its own KV cache (the GPU cache) has"
            f" {self.workload.gpu_blocks} blocks of {BLOCK_TOKENS} tokens"
        )

    def prepare(self, place: Path, runtime_dir: Path) -> Callable[[Path], EngineProcess]:
        """See `EngineDemo`."""
        options = self.workload.write_options(place, runtime_dir)
        return lambda log: EngineProcess(options, log)

    def settle(self, engine: EngineProcess, first: list[int]) -> None:
        """Until the engine's metric says so, which vLLM renews with every step."""
        end = time.monotonic() + ATTACH_SECONDS
        engine.generate([first], ANSWER_TOKENS)
        while not engine.metric(ATTACHED):
            if time.monotonic() > end:
                raise DemoError(f"the daemon does not serve the engine after {ATTACH_SECONDS:g} s")
            engine.generate([first], ANSWER_TOKENS)

    def hits(self, engine: EngineProcess) -> Callable[[list[Answer]], int]:
        """As vLLM counts them."""
        before = engine.metric(HITS)
        return lambda _: int(engine.metric(HITS) - before)
