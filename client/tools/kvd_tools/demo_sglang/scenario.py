"""The workload of `kvd demo-sglang`, and a device cache that is too small for it.

An engine that finds a prompt's pages computes only what is behind them. So that a cold prompt
computes these last tokens in a step of their own as well, and with the same rounding, one step
takes as many tokens as can be found.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kvd_tools.demo_sglang.options import EngineOptions
from kvd_tools.workload import Workload

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
