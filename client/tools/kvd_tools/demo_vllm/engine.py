"""vLLM's HTTP server on a CPU; vLLM is not imported here."""

import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvd_tools.engine_server import LOOK_SECONDS, Answer, EngineServer
from kvd_tools.errors import DemoError


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


RESET_SECONDS = 10.0  # blocks of ended requests are held until their stores have ended
SERVER = ("kvd_tools.demo_vllm.server", "--model")


class EngineProcess(EngineServer):
    """vLLM.

    Args:
        options: how to start it.
        log: the file that takes what it prints.
        python: of an environment with vLLM.
        server: the module and its arguments up to the model's folder.
    """

    def __init__(
        self,
        options: EngineOptions,
        log: Path,
        python: str = sys.executable,
        server: Sequence[str] = SERVER,
    ) -> None:
        # Paths of sockets are short.
        self._folder = tempfile.TemporaryDirectory(prefix="kvd-vllm-", ignore_cleanup_errors=True)
        self._socket = f"{self._folder.name}/http"
        module = [*server, *options.arguments(), "--uds", self._socket]
        super().__init__(module, options.environment(), log, python)

    def kill(self) -> None:
        """Kill all its processes, as a crash would; returns when none is left."""
        super().kill()
        self._folder.cleanup()

    def reset(self, *, external: bool = False) -> None:
        """Drop the GPU's prefix cache, and what the connector has if asked.

        Raises:
            DemoError: blocks are still in use, by a running request or its stores.
        """
        end = time.monotonic() + RESET_SECONDS
        path = f"/reset_prefix_cache?reset_external={external}"
        while not json.loads(self._text("POST", path))["success"]:
            if time.monotonic() > end:
                raise DemoError(
                    f"blocks are still in use after {RESET_SECONDS:g} s;"
                    " reset when no request is running"
                )
            time.sleep(LOOK_SECONDS)

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric of vLLM's, over all labels but these."""
        total = 0.0
        for line in self._text("GET", "/metrics").splitlines():
            key, _, value = line.rpartition(" ")
            wanted = all(f'{label}="{text}"' in key for label, text in labels.items())
            if wanted and key.partition("{")[0] in {name, f"{name}_total"}:
                total += float(value)
        return total

    def _connect(self) -> socket.socket:
        connected = socket.socket(socket.AF_UNIX)
        try:
            connected.connect(self._socket)
        except OSError:
            connected.close()
            raise
        return connected

    def _answer(
        self, prompt: list[int], max_tokens: int, logprobs: int, fields: dict[str, Any]
    ) -> Answer:
        request = {
            **fields,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": logprobs,
            "return_tokens_as_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started = time.perf_counter()
        tokens: list[int] = []
        likely: list[dict[int, float]] = []
        first, cached = 0.0, 0
        for event in self._events("/v1/completions", request):
            first = first or time.perf_counter() - started
            for choice in event["choices"]:
                tokens += map(_token, choice["logprobs"]["tokens"])
                likely += [
                    {_token(name): value for name, value in top.items()}
                    for top in choice["logprobs"]["top_logprobs"]
                ]
            if usage := event.get("usage"):
                cached = usage["prompt_tokens_details"]["cached_tokens"]
        if len(tokens) != max_tokens:
            raise DemoError(f"the engine ended the request after {len(tokens)} tokens")
        return Answer(tokens, likely, cached, first, time.perf_counter() - started)


def _token(name: str) -> int:
    return int(name.removeprefix("token_id:"))
