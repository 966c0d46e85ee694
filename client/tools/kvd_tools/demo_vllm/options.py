"""How an engine is started: its server's command line and environment, with kvd or without."""

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
    num_gpu_blocks: blocks of KV memory that the engine has.
    max_model_len: tokens of the longest prompt with its answer.
    threads: of every worker, on any core. A model of few layers computes fastest with one:
        several wait longer for each other.
    kv_transfer: vLLM's --kv-transfer-config, see `kvd_transfer`; None for none.
    env: environment variables, on top of those an engine needs here.
    args: further arguments of the server.
    """

    model: Path
    num_gpu_blocks: int
    max_model_len: int
    block_size: int = 32
    tensor_parallel: int = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int = 1
    kv_transfer: Mapping[str, Any] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    args: Sequence[str] = ()

    def environment(self) -> dict[str, str]:
        """The environment of the engine's process."""
        return {
            **os.environ,
            # The same with and without a connector: vLLM's own choice of cores is not, and with
            # another number of threads answers would not be comparable.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(self.threads),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_SERVER_DEV_MODE": "1",  # for `reset`
            # A limit in GiB, not what is allocated; with it vLLM need not measure by a trial run.
            "VLLM_CPU_KVCACHE_SPACE": "2",
            # Without it vLLM's processes wait for each other in a loop of sched_yield, which on
            # some kernels (Linux 6.18 was seen) keeps all others off two cores for minutes.
            "VLLM_USE_SPINLOOP_EXT": "1",
            **self.env,
        }

    def arguments(self) -> list[str]:
        """The server's command line, from the model's folder on."""
        arguments = f"{self.model} --skip-tokenizer-init --enforce-eager --seed 0".split()
        arguments += f"--dtype {self.dtype} --block-size {self.block_size}".split()
        arguments += f"--num-gpu-blocks-override {self.num_gpu_blocks}".split()
        arguments += f"--max-model-len {self.max_model_len}".split()
        arguments += f"--tensor-parallel-size {self.tensor_parallel}".split()
        arguments += ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
        if self.kv_transfer is not None:
            arguments += ["--kv-transfer-config", json.dumps(self.kv_transfer)]
        return [*arguments, *self.args]


def kvd_transfer(runtime_dir: Path | str, **extra: Any) -> dict[str, Any]:
    """What makes an engine use the kvd daemon at `runtime_dir`.

    Args:
        runtime_dir: the daemon's.
        extra: further settings of kvd's connector.
    """
    return {
        "kv_connector": "KvdConnector",
        "kv_connector_module_path": "kvd_client.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"runtime_dir": str(runtime_dir), **extra},
    }
