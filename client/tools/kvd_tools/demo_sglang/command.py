"""`kvd demo-sglang`: SGLang on a CPU with a private daemon, cold, warm, and after a restart."""

from collections.abc import Callable
from pathlib import Path

import click
from rich.console import Console

from kvd_tools.demo_sglang.engine import EngineProcess
from kvd_tools.demo_sglang.scenario import PAGE_TOKENS, Scenario
from kvd_tools.engine_demo import EngineDemo, workload_options
from kvd_tools.engine_server import Answer
from kvd_tools.workload import ANSWER_TOKENS


@click.command("demo-sglang")
@workload_options
def demo_sglang(*, prompts: int, prompt_tokens: int, layers: int) -> None:
    """Show what kvd does for SGLang: time to first token of new prompts and of known ones.

    Starts a private daemon and SGLang on the CPU with a generated model and a device cache
    too small for the prompts. Serves them, serves them again, starts SGLang anew, and again.
    Exit status 1 if nothing was found or an answer changed.

    \b
    Examples:
      kvd demo-sglang
      kvd demo-sglang --prompts 10 --prompt-tokens 1000
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    scenario = Scenario(layers, prompts, prompt_tokens)
    SglangDemo(scenario, Console(highlight=False, soft_wrap=True)).show()


class SglangDemo(EngineDemo[EngineProcess]):
    """With SGLang."""

    MODULE, COMMAND, NUMBERS, CACHE = "sglang", "demo-sglang", "float32", "device cache"
    workload: Scenario

    def describe(self) -> str:
        """The device cache's size, in tokens."""
        return (
            "SGLang: on the CPU; its own KV cache (the device cache) has"
            f" {self.workload.device_tokens:,} tokens in pages of {PAGE_TOKENS}"
        )

    def prepare(self, place: Path, runtime_dir: Path) -> Callable[[Path], EngineProcess]:
        """See `EngineDemo`."""
        options = self.workload.write_options(place, runtime_dir)
        return lambda log: EngineProcess(options, log)

    def settle(self, engine: EngineProcess, first: list[int]) -> None:
        """The daemon serves it from its start: it is required."""
        engine.generate([first], ANSWER_TOKENS)

    def hits(self, engine: EngineProcess) -> Callable[[list[Answer]], int]:
        """What the answers say; the engine's own cache has none of these prompts any more."""
        del engine
        return lambda answers: sum(answer.cached_tokens for answer in answers)
