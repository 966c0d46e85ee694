"""SGLang's HTTP server on a CPU; SGLang is not imported here."""

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

from kvd_tools.engine_server import LOOK_SECONDS, Answer, EngineServer
from kvd_tools.errors import DemoError, RequestAborted


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


# Below what the system gives to connections (32768 on) and SGLang to its ranks (22000 on).
PORTS = range(10_000, 22_000)
RESET_SECONDS = 30.0  # pages of ended requests are held until their stores have ended


class EngineProcess(EngineServer):
    """SGLang.

    Args:
        options: how to start it.
        log: the file that takes what it prints.
        python: of an environment with SGLang.

    Attributes:
        url: of its server.
    """

    def __init__(self, options: EngineOptions, log: Path, python: str = sys.executable) -> None:
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        module = ["kvd_tools.demo_sglang.server", *options.arguments(self._port)]
        super().__init__(module, options.environment(), log, python)

    def reset(self) -> None:
        """Drop the engine's own cache.

        Raises:
            DemoError: a request is running, or its store.
        """
        end = time.monotonic() + RESET_SECONDS
        while True:
            try:
                self._text("POST", "/flush_cache")
            except DemoError:
                if not self.running or time.monotonic() > end:
                    raise
                time.sleep(LOOK_SECONDS)
            else:
                return

    def _connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._port))

    def _answer(
        self, prompt: list[int], max_tokens: int, logprobs: int, fields: dict[str, Any]
    ) -> Answer:
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
        first = 0.0
        last: dict[str, Any] = {}
        for event in self._events("/generate", request):
            first = first or time.perf_counter() - started
            last = event
        meta = last.get("meta_info", {})
        reason = meta.get("finish_reason") or {}
        if reason.get("type") == "abort":
            raise RequestAborted(f"the engine aborted the request: {reason.get('message')}")
        tokens: list[int] = last.get("output_ids", [])
        if len(tokens) != max_tokens:
            raise DemoError(f"the engine ended the request after {len(tokens)} tokens")
        likely = [
            {token: value for value, token, _ in (*top, own)}
            for top, own in zip(
                meta["output_top_logprobs"], meta["output_token_logprobs"], strict=True
            )
        ]
        seconds = time.perf_counter() - started
        return Answer(tokens, likely, meta["cached_tokens"], first, seconds)


def free_port() -> int:
    """Return a port that is still free when the server takes it, some seconds later.

    Of two servers with one port the second ends. A port that `bind` chooses may be chosen again, by
    any other process, as soon as it is closed.
    """
    while True:
        port = random.choice(PORTS)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
