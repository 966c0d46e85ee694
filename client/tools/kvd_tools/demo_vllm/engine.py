"""vLLM's HTTP server on a CPU; vLLM is not imported here."""

import json
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvd_tools.demo_vllm.options import EngineOptions
from kvd_tools.engine_server import LOOK_SECONDS, Answer, EngineServer
from kvd_tools.errors import DemoError

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
