"""SGLang's HTTP server on a CPU; SGLang is not imported here."""

import contextlib
import random
import socket
import sys
import time
from pathlib import Path
from typing import Any

from kvd_tools.demo_sglang.options import EngineOptions
from kvd_tools.engine_server import LOOK_SECONDS, Answer, EngineServer
from kvd_tools.errors import DemoError, RequestAborted

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
