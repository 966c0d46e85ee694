"""`kvd demo-sglang`: SGLang on a CPU with a private daemon, cold, warm, and after a restart.

An engine that finds a prompt's pages computes only what is behind them. So that a cold prompt
computes these last tokens in a step of their own as well, and with the same rounding, one step
takes as many tokens as can be found.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import click
from rich.console import Console

from kvd_tools.demo_sglang.engine import EngineOptions, EngineProcess
from kvd_tools.engine_demo import EngineDemo, workload_options
from kvd_tools.engine_server import Answer
from kvd_tools.models import ANSWER_TOKENS, Workload

PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Scenario(Workload):
    """A model and its prompts, for SGLang with float32.

    Without SGLang's kernels many CPUs compute several times as slowly with bfloat16.
    """

    NUMBER_BYTES: ClassVar[int] = 4

    @property
    def device_tokens(self) -> int:
        """Of the device cache: two prompts, one served and one still stored, and a page more."""
        return 2 * (self.longest + PAGE_TOKENS)

    @property
    def findable(self) -> int:
        """Tokens of a prompt that can be found: whole pages, but not the last token."""
        return (self.prompt_tokens - 1) // PAGE_TOKENS * PAGE_TOKENS

    def write_options(self, place: Path, runtime_dir: Path) -> EngineOptions:
        """Write the model; an engine with this device cache and the daemon at `runtime_dir`."""
        return EngineOptions(
            model=self.write_model(place),
            max_tokens=self.device_tokens,
            page_size=PAGE_TOKENS,
            dtype="float32",
            chunked_prefill=self.findable,
            threads=len(os.sched_getaffinity(0)),
            linker={"runtime_dir": str(runtime_dir), "required": True},
        )


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
