"""An inference engine's HTTP server as a child process, and requests to it.

`vllm_engine.py` and `sglang_engine.py` are the two engines.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, Self

import psutil

from kvd_tools.errors import DemoError

START_SECONDS = 300.0  # enough for a busy machine
ANSWER_SECONDS = 120.0
END_SECONDS = 12.0
POLL_SECONDS, START_POLL_SECONDS = 0.02, 0.2
LOG_TAIL_BYTES = 4000
MAX_REQUESTS = 256  # at the same time
# Removes the shared memory and semaphores of ended processes, then ends by itself.
RESOURCE_TRACKER = "multiprocessing.resource_tracker"


@dataclass(frozen=True, slots=True)
class Completion:
    """An engine's complete answer to one prompt.

    Attributes:
        tokens: the generated token ids.
        logprobs: by token id, for each generated token: of the token and of the most likely ones.
        cached_tokens: prompt tokens that were not computed: found on the device or loaded.
        first_token_seconds, seconds: since the request was sent.
    """

    tokens: list[int]
    logprobs: list[dict[int, float]]
    cached_tokens: int
    first_token_seconds: float
    seconds: float


class EngineServer(ABC):
    """A running engine. Entering the context waits until it is ready; leaving it ends it.

    If this process dies, the engine's server gets SIGTERM. Requests may be sent from any thread.

    Args:
        module: the server's module and its arguments.
        environment: environment variables of the server.
        log: file for the server's output.
        python: interpreter of an environment with the engine.
    """

    def __init__(
        self,
        module: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        python: str = sys.executable,
    ) -> None:
        self.log = log
        self._killed = False
        self._requests = ThreadPoolExecutor(MAX_REQUESTS, "engine request")
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                [python, "-m", "kvd_tools.tether", str(os.getpid()), *module],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env=environment,
                start_new_session=True,
            )
        self.pid = self._process.pid

    # ------------------------------------------------------------ life

    @property
    def running(self) -> bool:
        """Whether the server's first process is alive."""
        return self._process.poll() is None

    def wait_ready(self) -> None:
        """Wait until the engine serves requests.

        Raises:
            DemoError: the engine ended, or was not ready after START_SECONDS.
        """
        end = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(DemoError):
                self._text("GET", "/health")
                return
            if not self.running:
                raise self._error("the engine ended")
            if time.monotonic() > end:
                raise self._error(f"the engine was not ready after {START_SECONDS:g} s")
            time.sleep(START_POLL_SECONDS)

    def kill(self) -> None:
        """Kill all processes of the engine, as a crash would, and wait for their end."""
        while not self._killed and kill_group(self.pid):
            time.sleep(POLL_SECONDS)  # only children can be waited for, and some are not ours
        self._killed = True  # from now on the kernel may reuse the group's number
        self._process.wait()
        self._requests.shutdown()

    def close(self) -> None:
        """Terminate the server, then kill what is left of it. May be called again."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self.kill()

    def __enter__(self) -> Self:
        try:
            self.wait_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ requests

    def submit(
        self, prompt: Sequence[int], max_tokens: int = 8, logprobs: int = 3, **fields: Any
    ) -> Future[Completion]:
        """Send a prompt. The future fails with DemoError if there is no complete answer.

        Args:
            prompt: token ids.
            max_tokens: number of tokens to generate.
            logprobs: number of most likely tokens to return for each of them.
            fields: further fields of the request.
        """
        return self._requests.submit(self._complete, list(prompt), max_tokens, logprobs, fields)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 8,
        logprobs: int = 3,
        **fields: Any,
    ) -> list[Completion]:
        """Send all prompts at the same time; return their completions in order.

        Raises:
            DemoError: a prompt got no complete answer.
        """
        futures = [self.submit(prompt, max_tokens, logprobs, **fields) for prompt in prompts]
        return [future.result() for future in futures]

    @abstractmethod
    def _connect(self) -> socket.socket:
        """Connect to the server. Raises OSError if that fails."""

    @abstractmethod
    def _complete(
        self, prompt: list[int], max_tokens: int, logprobs: int, fields: dict[str, Any]
    ) -> Completion:
        """Send a request and wait for the complete answer."""

    def _events(self, path: str, request: Any) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed answer."""
        with self._request("POST", path, request) as reply:
            if reply.status != 200:
                raise DemoError(f"POST {path}: {reply.status} {reply.read().decode()}")
            for line in reply:
                event = line.removeprefix(b"data: ").strip()
                if event in {b"", b"[DONE]"}:
                    continue
                fields: dict[str, Any] = json.loads(event)
                if "error" in fields:
                    raise DemoError(f"the engine gave no answer: {event.decode()}")
                yield fields

    def _text(self, method: str, path: str) -> str:
        with self._request(method, path) as reply:
            text = reply.read().decode()
        if reply.status != 200:
            raise DemoError(f"{method} {path}: {reply.status} {text}")
        return text

    @contextmanager
    def _request(self, method: str, path: str, body: Any = None) -> Iterator[HTTPResponse]:
        connection = HTTPConnection("engine")
        try:
            connection.sock = self._connect()
            connection.sock.settimeout(ANSWER_SECONDS)
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": "application/json"})
            yield connection.getresponse()
        except (OSError, HTTPException) as error:
            raise self._error(f"the engine does not answer: {error!r}") from error
        finally:
            connection.close()

    def _error(self, reason: str) -> DemoError:
        tail = b""
        with contextlib.suppress(OSError):
            tail = self.log.read_bytes()[-LOG_TAIL_BYTES:]
        return DemoError(f"{reason}; the end of {self.log}:\n{tail.decode(errors='replace')}")


def kill_group(group: int) -> bool:
    """Kill a process group, except Python's resource trackers, which end by themselves.

    Returns:
        Whether the group had any process that is no zombie, resource trackers included.
    """
    members = [process for process in psutil.process_iter() if _is_member(process, group)]
    for process in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            if not any(RESOURCE_TRACKER in word for word in process.cmdline()):
                process.kill()
    return bool(members)


def _is_member(process: psutil.Process, group: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    return False
