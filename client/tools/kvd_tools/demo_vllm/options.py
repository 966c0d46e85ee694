"""How an engine is built: vLLM's arguments, its process's environment, and kvd behind it or not."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to build an engine.

    model: a folder that `write_model` made.
    num_gpu_blocks: blocks of KV memory that the engine has.
    max_model_len: tokens of the longest prompt with its answer.
    threads: of every worker, on any core; None: one on each of the cores, which workers share out.
        A model of few layers computes fastest with one: several wait longer for each other.
    kv_transfer: keywords of vLLM's KVTransferConfig, see `kvd_transfer`; None for none.
    env: environment variables, on top of those an engine needs here.
    args: further keywords of vLLM's AsyncEngineArgs.
    """

    model: Path
    num_gpu_blocks: int
    max_model_len: int
    block_size: int = 32
    tensor_parallel: int = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int | None = None
    kv_transfer: Mapping[str, Any] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    args: Mapping[str, Any] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """The environment of the engine's process."""
        if self.threads is None:
            threads = {"VLLM_CPU_OMP_THREADS_BIND": _cores(self.tensor_parallel)}
        else:
            threads = {
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": str(self.threads),
            }
        return {
            **os.environ,
            **threads,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
            # A limit in GiB, not what is allocated; with it vLLM need not measure by a trial run.
            "VLLM_CPU_KVCACHE_SPACE": "2",
            # Without it vLLM's processes wait for each other in a loop of sched_yield, which on
            # some kernels (Linux 6.18 was seen) keeps all others off two cores for minutes.
            "VLLM_USE_SPINLOOP_EXT": "1",
            **self.env,
        }

    def engine_arguments(self) -> dict[str, Any]:
        """Keywords of vLLM's AsyncEngineArgs, without the KV transfer."""
        return {
            "model": str(self.model),
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "seed": 0,
            "dtype": self.dtype,
            "block_size": self.block_size,
            "num_gpu_blocks_override": self.num_gpu_blocks,
            "max_model_len": self.max_model_len,
            "tensor_parallel_size": self.tensor_parallel,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            **self.args,
        }


def _cores(workers: int) -> str:
    """The cores of every worker, such as "0|1". The same with and without a connector.

    Left to itself vLLM chooses other cores where a connector is configured, and
    computes with another number of threads: answers would not be comparable.
    """
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // workers)
    parts = [
        [cores[index % len(cores)] for index in range(worker * share, (worker + 1) * share)]
        for worker in range(workers)
    ]
    return "|".join(",".join(map(str, part)) for part in parts)


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
