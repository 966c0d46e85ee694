"""vLLM's HTTP server on a CPU, as a child process. vLLM is not imported here."""

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

from kvd_tools.engine_server import POLL_SECONDS, Completion, EngineServer
from kvd_tools.errors import DemoError


@dataclass(frozen=True, slots=True)
class VllmServerOptions:
    """How to start vLLM.

    Attributes:
        model: a folder made by `write_model`.
        num_gpu_blocks: size of the engine's KV memory.
        max_model_len: tokens of the longest prompt with its answer.
        threads: of each worker, on any core. A model of few layers computes fastest with one.
        kv_transfer: vLLM's --kv-transfer-config, see `kvd_transfer`; None: no connector.
        env: environment variables beside those that every engine gets here.
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
        """Return the environment variables of the engine's process."""
        return {
            **os.environ,
            # vLLM's own choice of cores depends on whether there is a connector. With another
            # number of threads, answers would not be comparable.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(self.threads),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_SERVER_DEV_MODE": "1",  # for `reset`
            # A limit in GiB, which spares vLLM a trial run. Less is allocated.
            "VLLM_CPU_KVCACHE_SPACE": "2",
            # Without it vLLM's processes wait for each other with sched_yield in a loop, which
            # on some kernels, such as Linux 6.18, blocks two cores for minutes.
            "VLLM_USE_SPINLOOP_EXT": "1",
            **self.env,
        }

    def arguments(self) -> list[str]:
        """Return the server's command line, beginning with the model's folder."""
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
    """Return the --kv-transfer-config of an engine that uses the daemon at `runtime_dir`.

    Args:
        runtime_dir: the daemon's runtime directory.
        extra: further settings of kvd's connector.
    """
    return {
        "kv_connector": "KvdConnector",
        "kv_connector_module_path": "kvd_client.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"runtime_dir": str(runtime_dir), **extra},
    }


RESET_SECONDS = 10.0  # blocks of ended requests stay in use until their stores have ended
SERVER = ("kvd_tools.forked_server", "vllm", "--model")


class VllmServer(EngineServer):
    """A running vLLM.

    Args:
        options: how to start it.
        log: file for its output.
        python: interpreter of an environment with vLLM.
        server: the server's module and its arguments before the model's folder.
    """

    def __init__(
        self,
        options: VllmServerOptions,
        log: Path,
        python: str = sys.executable,
        server: Sequence[str] = SERVER,
    ) -> None:
        # In /tmp: the path of a socket must be short.
        self._folder = tempfile.TemporaryDirectory(prefix="kvd-vllm-", ignore_cleanup_errors=True)
        self._socket = f"{self._folder.name}/http"
        module = [*server, *options.arguments(), "--uds", self._socket]
        super().__init__(module, options.environment(), log, python)

    def kill(self) -> None:
        """Kill all processes of the engine, as a crash would, and wait for their end."""
        super().kill()
        self._folder.cleanup()

    def reset(self, *, external: bool = False) -> None:
        """Drop the engine's own prefix cache, with `external` also all chunks of its namespace.

        Raises:
            DemoError: a running request or its stores still use blocks after RESET_SECONDS.
        """
        end = time.monotonic() + RESET_SECONDS
        path = f"/reset_prefix_cache?reset_external={external}"
        while not json.loads(self._text("POST", path))["success"]:
            if time.monotonic() > end:
                raise DemoError(
                    f"blocks are still in use after {RESET_SECONDS:g} s;"
                    " reset when no request is running"
                )
            time.sleep(POLL_SECONDS)

    def pause(self) -> None:
        """Freeze all requests, keep the caches; requests that come are queued until `resume`."""
        self._text("POST", "/pause?mode=keep&clear_cache=false")

    def resume(self) -> None:
        """End a pause: all queued requests are scheduled at once."""
        self._text("POST", "/resume")

    def metric(self, name: str, **labels: str) -> float:
        """Return a metric of vLLM, summed over its series that have these labels."""
        total = 0.0
        for line in self._text("GET", "/metrics").splitlines():
            key, _, value = line.rpartition(" ")
            matches = all(f'{label}="{text}"' in key for label, text in labels.items())
            if matches and key.partition("{")[0] in {name, f"{name}_total"}:
                total += float(value)
        return total

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(self._socket)
        except OSError:
            connection.close()
            raise
        return connection

    def _complete(
        self, prompt: list[int], max_tokens: int, logprobs: int, fields: dict[str, Any]
    ) -> Completion:
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
        top_logprobs: list[dict[int, float]] = []
        first_token_seconds, cached_tokens = 0.0, 0
        for event in self._events("/v1/completions", request):
            first_token_seconds = first_token_seconds or time.perf_counter() - started
            for choice in event["choices"]:
                tokens += map(_token_id, choice["logprobs"]["tokens"])
                top_logprobs += [
                    {_token_id(name): value for name, value in top.items()}
                    for top in choice["logprobs"]["top_logprobs"]
                ]
            if usage := event.get("usage"):
                cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        if len(tokens) != max_tokens:
            raise DemoError(f"the engine ended the request after {len(tokens)} tokens")
        seconds = time.perf_counter() - started
        return Completion(tokens, top_logprobs, cached_tokens, first_token_seconds, seconds)


def _token_id(name: str) -> int:
    return int(name.removeprefix("token_id:"))
