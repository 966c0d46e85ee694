"""How an SGLang engine is started: its server's command line and environment, with kvd or not."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to start an engine.

    model: a folder that `write_model` made.
    max_tokens: of the KV memory that the engine has on its device.
    page_size: tokens of a page.
    tensor_parallel: number of ranks.
    chunked_prefill: tokens of a prompt that one step computes at the most.
    threads: of every rank, on any core.
    linker: `linker_extra_config` of kvd's linker; None: no external cache.
    env: environment variables, on top of those an engine needs here.
    args: further arguments of the server.
    """

    model: Path
    max_tokens: int = 4096
    page_size: int = 16
    tensor_parallel: int = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    chunked_prefill: int = 8192
    threads: int = 1
    linker: Mapping[str, Any] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    args: Sequence[str] = ()

    def environment(self) -> dict[str, str]:
        """The environment of the engine's process."""
        cores = sorted(os.sched_getaffinity(0))
        ranks = range(self.tensor_parallel)
        return {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(self.threads),
            # Without it each rank needs a NUMA node of its own. Without SGLang's kernels, which
            # have no CPU wheel, none is bound.
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[r % len(cores)]) for r in ranks),
            "TOKENIZERS_PARALLELISM": "false",
            **self.env,
        }

    def arguments(self, port: int) -> list[str]:
        """The server's command line."""
        arguments = f"--model-path {self.model} --host 127.0.0.1 --port {port}".split()
        arguments += ["--device", "cpu", "--attention-backend", "torch_native"]
        arguments += ["--skip-tokenizer-init", "--skip-server-warmup", "--sleep-on-idle"]
        arguments += f"--random-seed 0 --dtype {self.dtype} --page-size {self.page_size}".split()
        # The first is what it gets; the second is a share of the machine that others may use too.
        arguments += f"--max-total-tokens {self.max_tokens} --mem-fraction-static 0.5".split()
        arguments += f"--chunked-prefill-size {self.chunked_prefill}".split()
        arguments += f"--tp-size {self.tensor_parallel}".split()
        if self.linker is not None:
            arguments += kvd_linker(**self.linker)
        return [*arguments, *self.args]


def kvd_linker(**extra: Any) -> list[str]:
    """The arguments that make an engine use a kvd daemon.

    Args:
        extra: settings of kvd's linker, such as runtime_dir.
    """
    config = {
        "linker": "KvdLinker",
        "linker_module_path": "kvd_client.sglang.linker",
        "linker_extra_config": extra,
    }
    return [
        "--enable-unified-cache-external-linker",
        *("--unified-cache-external-linker-backend", "dynamic"),
        *("--unified-cache-external-linker-config", json.dumps(config)),
    ]
