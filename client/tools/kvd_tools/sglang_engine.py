"""SGLang's HTTP server on a CPU, as a child process. SGLang is not imported here."""

import contextlib
import json
import os
import random
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvd_tools.engine_server import POLL_SECONDS, Completion, EngineServer
from kvd_tools.errors import DemoError, RequestAborted


@dataclass(frozen=True, slots=True)
class SglangServerOptions:
    """How to start SGLang.

    Attributes:
        model: a folder made by `write_model`.
        max_tokens: size of the engine's KV memory.
        page_size: tokens of a page.
        tensor_parallel: number of ranks.
        chunked_prefill: prompt tokens that one step computes at most.
        threads: of each rank, on any core.
        linker: `linker_extra_config` of kvd's linker; None: no external cache.
        env: environment variables beside those that every engine gets here.
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
        """Return the environment variables of the engine's process."""
        cores = sorted(os.sched_getaffinity(0))
        ranks = range(self.tensor_parallel)
        return {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(self.threads),
            # Without it SGLang refuses more ranks than NUMA nodes. It binds no threads here, for
            # its kernels, which do that, have no CPU wheel.
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[r % len(cores)]) for r in ranks),
            "TOKENIZERS_PARALLELISM": "false",
            **self.env,
        }

    def arguments(self, port: int) -> list[str]:
        """Return the server's command line."""
        arguments = f"--model-path {self.model} --host 127.0.0.1 --port {port}".split()
        arguments += ["--device", "cpu", "--attention-backend", "torch_native"]
        arguments += ["--skip-tokenizer-init", "--skip-server-warmup", "--sleep-on-idle"]
        arguments += f"--random-seed 0 --dtype {self.dtype} --page-size {self.page_size}".split()
        # The size is max-total-tokens. The share of memory is low, as others use the machine too.
        arguments += f"--max-total-tokens {self.max_tokens} --mem-fraction-static 0.5".split()
        arguments += f"--chunked-prefill-size {self.chunked_prefill}".split()
        arguments += f"--tp-size {self.tensor_parallel}".split()
        if self.linker is not None:
            arguments += kvd_linker(**self.linker)
        return [*arguments, *self.args]


def kvd_linker(**extra: Any) -> list[str]:
    """Return the arguments of an engine that uses a kvd daemon.

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


# Below the kernel's ephemeral ports (from 32768) and the ports of SGLang's ranks (from 22000).
PORTS = range(10_000, 22_000)
RESET_SECONDS = 30.0  # pages of ended requests stay in use until their stores have ended


class SglangServer(EngineServer):
    """A running SGLang.

    Args:
        options: how to start it.
        log: file for its output.
        python: interpreter of an environment with SGLang.

    Attributes:
        url: the server's URL.
    """

    def __init__(
        self, options: SglangServerOptions, log: Path, python: str = sys.executable
    ) -> None:
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        module = ["kvd_tools.forked_server", "sglang", *options.arguments(self._port)]
        super().__init__(module, options.environment(), log, python)

    def reset(self) -> None:
        """Drop the engine's own cache.

        Raises:
            DemoError: a running request or its stores still use pages.
        """
        end = time.monotonic() + RESET_SECONDS
        while True:
            try:
                self._text("POST", "/flush_cache")
            except DemoError:
                if not self.running or time.monotonic() > end:
                    raise
                time.sleep(POLL_SECONDS)
            else:
                return

    def _connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._port))

    def _complete(
        self, prompt: list[int], max_tokens: int, logprobs: int, fields: dict[str, Any]
    ) -> Completion:
        request = {
            **fields,
            "input_ids": prompt,
            "sampling_params": {
                "max_new_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
            },
            "return_logprob": True,
            "top_logprobs_num": logprobs,
            "stream": True,
        }
        started = time.perf_counter()
        first_token_seconds = 0.0
        answer: dict[str, Any] = {}
        for event in self._events("/generate", request):  # each one repeats the previous ones
            first_token_seconds = first_token_seconds or time.perf_counter() - started
            answer = event
        meta = answer.get("meta_info", {})
        reason = meta.get("finish_reason") or {}
        if reason.get("type") == "abort":
            raise RequestAborted(f"the engine aborted the request: {reason.get('message')}")
        tokens: list[int] = answer.get("output_ids", [])
        if len(tokens) != max_tokens:
            raise DemoError(f"the engine ended the request after {len(tokens)} tokens")
        top_logprobs = [
            {token: value for value, token, _ in (*top, own)}
            for top, own in zip(
                meta["output_top_logprobs"], meta["output_token_logprobs"], strict=True
            )
        ]
        seconds = time.perf_counter() - started
        return Completion(tokens, top_logprobs, meta["cached_tokens"], first_token_seconds, seconds)


def free_port() -> int:
    """Return a port that is probably still free when the server binds it, some seconds later.

    It is a random one: the kernel may give a port that `bind` chose to any other process once it is
    closed, and of two servers with one port the second one ends.
    """
    while True:
        port = random.choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
