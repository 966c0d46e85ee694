"""`kvd demo-vllm`: vLLM on a CPU with a private daemon, cold, warm, and warm after a restart."""

import time
from collections.abc import Callable
from pathlib import Path

import click
from rich.console import Console

from kvd_tools.demo_vllm.engine import EngineProcess
from kvd_tools.demo_vllm.scenario import BLOCK_TOKENS, Scenario
from kvd_tools.engine_demo import EngineDemo, workload_options
from kvd_tools.engine_server import Answer
from kvd_tools.errors import DemoError
from kvd_tools.workload import ANSWER_TOKENS

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
