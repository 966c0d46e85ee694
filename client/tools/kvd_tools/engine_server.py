"""An inference engine's HTTP server, in processes of its own that are always ended."""

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

START_SECONDS = 300.0  # on a busy machine; it takes a fraction of that on an idle one
ANSWER_SECONDS = 120.0
END_SECONDS = 12.0
LOOK_SECONDS, START_LOOK_SECONDS = 0.02, 0.2
LOG_TAIL_BYTES = 4000
MAX_REQUESTS = 256  # at once
# It removes shared memory and semaphores whose owners are gone, and then ends by itself.
RESOURCE_TRACKER = "multiprocessing.resource_tracker"


@dataclass(frozen=True, slots=True)
class Answer:
    """An engine's complete answer to one prompt.

    tokens: the generated token ids.
    logprobs: for every generated token the most likely ones and itself, by token id.
    cached_tokens: of the prompt, how many were not computed: found on the device or loaded.
    first_token_seconds, seconds: from the request on.
    """

    tokens: list[int]
    logprobs: list[dict[int, float]]
    cached_tokens: int
    first_token_seconds: float
    seconds: float


class EngineServer(ABC):
    """One engine, started: serves many prompts at once, ends with all its processes.

    It is ready when the context is entered. It does not outlive its parent: the engine's server
    is then asked to end. Thread-safe but for ending it.

    Args:
        module: of the server, and its arguments.
        environment: of its process.
        log: the file that takes what it prints.
        python: of an environment with the engine.
    """

    def __init__(
        self,
        module: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        python: str = sys.executable,
    ) -> None:
        self.log = log
        self._gone = False
        self._requests = ThreadPoolExecutor(MAX_REQUESTS, "engine request")
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                [python, "-m", "kvd_tools.demo.tether", str(os.getpid()), *module],
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
        """Whether its first process is there."""
        return self._process.poll() is None

    def wait_ready(self) -> None:
        """Wait until it serves.

        Raises:
            DemoError: it ended, or is not ready after START_SECONDS.
        """
        end = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(DemoError):
                self._text("GET", "/health")
                return
            if not self.running:
                raise self._died("the engine ended")
            if time.monotonic() > end:
                raise self._died(f"the engine was not ready after {START_SECONDS:g} s")
            time.sleep(START_LOOK_SECONDS)

    def kill(self) -> None:
        """Kill all its processes, as a crash would; returns when none is left."""
        while not self._gone and kill_group(self.pid):
            time.sleep(LOOK_SECONDS)  # nothing tells the end of a process that is no child
        self._gone = True  # from now on the number may be another's
        self._process.wait()
        self._requests.shutdown()

    def close(self) -> None:
        """End it in order, and kill what is left. May be called again."""
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
    ) -> Future[Answer]:
        """Send a prompt; its answer comes later. Fails with DemoError where there is none.

        Args:
            prompt: token ids.
            max_tokens: so many are generated, always.
            logprobs: for each of them, so many of the most likely ones are told.
            fields: further ones of the request.
        """
        return self._requests.submit(self._answer, list(prompt), max_tokens, logprobs, fields)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 8,
        logprobs: int = 3,
        **fields: Any,
    ) -> list[Answer]:
        """Answers to prompts that are sent at once, in their order.

        Raises:
            DemoError: one of them has no complete answer.
        """
        answers = [self.submit(prompt, max_tokens, logprobs, **fields) for prompt in prompts]
        return [answer.result() for answer in answers]

    @abstractmethod
    def _connect(self) -> socket.socket:
        """Connect to its server; fails with OSError."""

    @abstractmethod
    def _answer(
        self, prompt: list[int], max_tokens: int, logprobs: int, fields: dict[str, Any]
    ) -> Answer:
        """Ask, and wait for the whole answer."""

    def _events(self, path: str, request: Any) -> Iterator[dict[str, Any]]:
        """The events of an answer that comes piece by piece."""
        with self._reply("POST", path, request) as reply:
            if reply.status != 200:
                raise DemoError(f"POST {path}: {reply.status} {reply.read().decode()}")
            for line in reply:
                event = line.removeprefix(b"data: ").strip()
                if event in {b"", b"[DONE]"}:
                    continue
                read: dict[str, Any] = json.loads(event)
                if "error" in read:
                    raise DemoError(f"the engine gave no answer: {event.decode()}")
                yield read

    def _text(self, method: str, path: str) -> str:
        with self._reply(method, path) as reply:
            text = reply.read().decode()
        if reply.status != 200:
            raise DemoError(f"{method} {path}: {reply.status} {text}")
        return text

    @contextmanager
    def _reply(self, method: str, path: str, body: Any = None) -> Iterator[HTTPResponse]:
        connection = HTTPConnection("engine")
        try:
            connection.sock = self._connect()
            connection.sock.settimeout(ANSWER_SECONDS)
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": "application/json"})
            yield connection.getresponse()
        except (OSError, HTTPException) as error:
            raise self._died(f"the engine does not answer: {error!r}") from error
        finally:
            connection.close()

    def _died(self, why: str) -> DemoError:
        tail = b""
        with contextlib.suppress(OSError):
            tail = self.log.read_bytes()[-LOG_TAIL_BYTES:]
        return DemoError(f"{why}; the end of {self.log}:\n{tail.decode(errors='replace')}")


def kill_group(group: int) -> bool:
    """Kill every process of a process group but Python's resource trackers.

    Returns:
        Whether the group had a process left, a resource tracker among others.
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
