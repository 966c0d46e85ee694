"""vLLM's engine in a process of its own, as its user sees it; vLLM is not imported here."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from kvd_tools.demo_vllm.group import kill_group
from kvd_tools.demo_vllm.options import EngineOptions
from kvd_tools.demo_vllm.wire import Answer, Command, Method
from kvd_tools.errors import DemoError, EngineDied

START_SECONDS = 300.0  # on a busy machine; it takes a fraction of that on an idle one
ANSWER_SECONDS = 120.0
END_SECONDS = 12.0  # longer than the child gives itself
LOOK_SECONDS = 0.02
LOG_TAIL_BYTES = 4000
ENGINE_MAIN = "kvd_tools.demo_vllm.engine_main"


class EngineProcess:
    """One engine: starts, serves many prompts at once, ends with all its processes.

    It never outlives its parent: the pipe to it closes then. Thread-safe but for
    starting and ending it.

    Args:
        options: how to build it.
        log: the file that takes what it prints.
        python: of an environment with vLLM.
    """

    def __init__(self, options: EngineOptions, log: Path, python: str = sys.executable) -> None:
        self.options = options
        self.log = log
        self._python = python
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # of what follows, and of writing
        self._pending: dict[int, Future[Any]] = {}
        self._commands: Connection | None = None
        self._ready: Future[Any] | None = None
        self._ended = False

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Start the process; `wait_ready` says when it serves."""
        if self._process is not None:
            raise DemoError(f"{self!r} was started before; make a new one")
        their_commands, self._commands = Pipe(duplex=False)
        replies, their_replies = Pipe(duplex=False)
        with their_commands, their_replies, self.log.open("wb") as sink:
            fds = [their_commands.fileno(), their_replies.fileno()]
            self._process = subprocess.Popen(
                [self._python, "-m", ENGINE_MAIN, *map(str, fds)],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                pass_fds=fds,
                env=self.options.environment(),
                start_new_session=True,
            )
        self._reader = threading.Thread(
            target=self._read, args=[replies], name="engine replies", daemon=True
        )
        self._reader.start()
        transfer = None if self.options.kv_transfer is None else dict(self.options.kv_transfer)
        arguments = self.options.engine_arguments()
        self._ready = self._send("start", engine=arguments, kv_transfer=transfer)

    def wait_ready(self, timeout: float = START_SECONDS) -> None:
        """Wait until it serves.

        Raises:
            EngineDied: it ended, or is not ready after so many seconds and was killed.
        """
        if self._ready is None:
            raise DemoError("the engine was not started; call start() first")
        try:
            self._ready.result(timeout)
        except TimeoutError:
            error = self._died(f"the engine was not ready after {timeout:g} s")
            self.kill()
            raise error from None

    def kill(self) -> None:
        """Kill all its processes, as a crash would; returns when none is left."""
        if self._process is None or self._ended:
            return
        group = self._process.pid
        kill_group(group)
        self._process.wait()
        end = time.monotonic() + END_SECONDS
        while kill_group(group) and time.monotonic() < end:
            time.sleep(LOOK_SECONDS)  # nothing tells the end of a process that is no child
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        self._finish()

    def close(self) -> None:
        """End it in order, and kill what is left. May be called again."""
        if self._process is None or self._ended:
            return
        with self._lock:
            self._close_commands()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self.kill()

    def _finish(self) -> None:
        self._ended = True
        with self._lock:
            self._close_commands()
        if self._reader is not None:
            self._reader.join(END_SECONDS)

    def _close_commands(self) -> None:
        if self._commands is not None:
            self._commands.close()
            self._commands = None

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ commands

    def submit(
        self, prompt: Sequence[int], max_tokens: int = 8, logprobs: int = 3
    ) -> Future[Answer]:
        """Send a prompt; its answer comes later. Fails with EngineDied when the engine ends.

        Args:
            prompt: token ids.
            max_tokens: so many are generated, always.
            logprobs: for each of them, so many of the most likely ones are told.
        """
        return self._send("generate", prompt=list(prompt), max_tokens=max_tokens, logprobs=logprobs)

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int = 8, logprobs: int = 3
    ) -> list[Answer]:
        """Answers to prompts that are sent at once, in their order.

        Raises:
            EngineDied: it ended meanwhile.
        """
        answers = [self.submit(prompt, max_tokens, logprobs) for prompt in prompts]
        return [answer.result(ANSWER_SECONDS) for answer in answers]

    def reset(self) -> None:
        """Drop the GPU's prefix cache, so that nothing is found there again.

        Raises:
            DemoError: blocks are still in use, by a running request or its stores.
        """
        self._send("reset").result(ANSWER_SECONDS)

    def metrics(self) -> dict[str, float]:
        """Return its metrics, by vLLM's names: value by name{label="value",...}."""
        values: dict[str, float] = self._send("metrics").result(ANSWER_SECONDS)
        return values

    def _send(self, method: Method, **arguments: Any) -> Future[Any]:
        """Send a command; the future has its result."""
        command = Command(next(self._numbers), method, arguments)
        result: Future[Any] = Future()
        with self._lock:
            gone = self._commands is None
            if self._commands is not None:
                self._pending[command.number] = result
                with contextlib.suppress(OSError):  # it is gone; the reader says so
                    self._commands.send(command)
        if gone:
            result.set_exception(self._died("the engine is not there"))
        return result

    # ------------------------------------------------------------ replies

    def _read(self, replies: Connection) -> None:
        with replies, contextlib.suppress(EOFError, OSError):  # its end, or in the midst of one
            while True:
                number, result, error = replies.recv()
                with self._lock:
                    future = self._pending.pop(number)
                if error:
                    future.set_exception(DemoError(error))
                else:
                    future.set_result(result)
        with self._lock:
            self._close_commands()  # from now on nothing is taken
            pending, self._pending = self._pending, {}
        error = self._died("the engine ended")
        for future in pending.values():
            future.set_exception(error)

    def _died(self, why: str) -> EngineDied:
        tail = b""
        with contextlib.suppress(OSError):
            tail = self.log.read_bytes()[-LOG_TAIL_BYTES:]
        return EngineDied(f"{why}; the end of {self.log}:\n{tail.decode(errors='replace')}")

    def __repr__(self) -> str:
        pid = None if self._process is None else self._process.pid
        return f"<EngineProcess pid {pid}, {len(self._pending)} commands in flight>"
