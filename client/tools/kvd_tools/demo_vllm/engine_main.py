"""The engine's process: builds vLLM's AsyncLLM and serves commands.

Started as `python -m kvd_tools.demo_vllm.engine_main COMMAND_FD REPLY_FD` by
`EngineProcess`; everything that vLLM prints goes to the log. Ends when the pipe of
commands does.
"""

import asyncio
import contextlib
import os
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from prometheus_client import REGISTRY
from vllm import SamplingParams, TokensPrompt
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.outputs import RequestOutput
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from kvd_tools.demo_vllm.group import kill_group
from kvd_tools.demo_vllm.wire import Answer, Command, Reply

END_SECONDS = 8.0  # for an orderly end, before all is killed
RESET_SECONDS = 10.0  # blocks of ended requests are held until their stores have ended
LOOK_SECONDS = 0.01
COMPLETE = {"length", "stop"}


class Commands:
    """Commands from a pipe, read by a thread from the start.

    The engine's process must not outlive who commands it, also while it is
    busy starting: some seconds after the pipe's end it kills its whole group.
    """

    def __init__(self, source: Connection, loop: asyncio.AbstractEventLoop) -> None:
        self._source = source
        self._loop = loop
        self._queue: asyncio.Queue[Command | None] = asyncio.Queue()
        threading.Thread(target=self._read, name="commands", daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(EOFError):
            while True:
                self._put(self._source.recv())
        killer = threading.Timer(END_SECONDS, kill_group, [os.getpid()])
        killer.daemon = True
        killer.start()
        self._put(None)

    def _put(self, command: Command | None) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, command)

    async def next(self) -> Command | None:
        """The next command; None when there will be no more."""
        return await self._queue.get()


class Server:
    """Carries out commands, many at a time."""

    def __init__(self, engine: AsyncLLM, replies: Connection) -> None:
        self._engine = engine
        self._replies = replies
        self._running: set[asyncio.Task[None]] = set()

    async def serve(self, commands: Commands) -> None:
        """Serve until there are no more commands.

        Raises:
            ExceptionGroup: the engine is dead; there is nothing left to serve with.
        """
        async with asyncio.TaskGroup() as tasks:
            while (command := await commands.next()) is not None:
                task = tasks.create_task(self._carry_out(command))
                self._running.add(task)
                task.add_done_callback(self._running.discard)
            for task in self._running:
                task.cancel()

    async def _carry_out(self, command: Command) -> None:
        result: Any = None
        error = ""
        match command.method:
            case "generate":
                result = await self._answer(str(command.number), **command.arguments)
            case "reset":
                error = await self._reset()
            case "metrics":
                result = _metrics()
            case "start":
                error = "the engine has been started already"
        self._replies.send(Reply(command.number, result, error))

    async def _answer(self, name: str, prompt: list[int], max_tokens: int, logprobs: int) -> Answer:
        parameters = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            logprobs=logprobs,
            ignore_eos=True,
            detokenize=False,
        )
        tokens = TokensPrompt(prompt_token_ids=prompt)
        started = time.perf_counter()
        first = 0.0
        output: RequestOutput | None = None
        error = ""
        try:
            async for latest in self._engine.generate(tokens, parameters, name):
                output = latest  # all tokens so far
                first = first or time.perf_counter() - started
        except EngineDeadError:
            raise
        except Exception as failure:  # noqa: BLE001  # whatever it is, this request failed, not the engine
            error = f"{type(failure).__name__}: {failure}"
        if output is None or not output.outputs:
            return Answer([], [], len(prompt), 0, 0.0, 0.0, error or "no output")
        completion = output.outputs[0]
        if not error and completion.finish_reason not in COMPLETE:
            error = f"the engine ended the request early: {completion.finish_reason}"
        return Answer(
            tokens=list(completion.token_ids),
            logprobs=[
                {token: entry.logprob for token, entry in position.items()}
                for position in completion.logprobs or []
            ],
            prompt_tokens=len(prompt),
            cached_tokens=output.num_cached_tokens or 0,
            first_token_seconds=first,
            seconds=time.perf_counter() - started,
            error=error,
        )

    async def _reset(self) -> str:
        end = time.monotonic() + RESET_SECONDS
        while not await self._engine.reset_prefix_cache():
            if time.monotonic() > end:
                return (
                    f"blocks are still in use after {RESET_SECONDS:g} s;"
                    " reset when no request is running"
                )
            await asyncio.sleep(LOOK_SECONDS)
        return ""


def _metrics() -> dict[str, float]:
    values: dict[str, float] = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name.startswith("vllm:"):
                labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
                values[f"{sample.name}{{{labels}}}"] = sample.value
    return values


def _engine_config(engine: dict[str, Any], kv_transfer: dict[str, Any] | None) -> VllmConfig:
    further: dict[str, Any] = {}
    if kv_transfer is not None:
        further["kv_transfer_config"] = KVTransferConfig(**kv_transfer)
    config = AsyncEngineArgs(**engine, **further).create_engine_config(UsageContext.ENGINE_CONTEXT)
    if os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind":
        # With a CPU the configuration sets "spawn", so that each process reads which threads it
        # gets, and imports vLLM for ten seconds before. Unbound, all get the same.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    return config


async def run(source: Connection, replies: Connection) -> None:
    """Build the engine that the first command asks for, and serve the others."""
    commands = Commands(source, asyncio.get_running_loop())
    start = await commands.next()
    if start is None or start.method != "start":
        sys.exit(f"the first command must be start, this was {start!r}")
    engine = AsyncLLM.from_vllm_config(_engine_config(**start.arguments))
    try:
        replies.send(Reply(start.number))
        await Server(engine, replies).serve(commands)
    finally:
        engine.shutdown()


def main() -> None:
    """Entry point of the engine's process."""
    command_fd, reply_fd = map(int, sys.argv[1:])
    source = Connection(command_fd, writable=False)
    # Closed by the process's end: who reads it finds the last words in the log by then.
    replies = Connection(reply_fd, readable=False)
    for ours in (source, replies):  # vLLM's processes must not hold the pipes open
        os.set_inheritable(ours.fileno(), False)
        os.register_at_fork(after_in_child=ours.close)
    asyncio.run(run(source, replies))
    os._exit(0)  # the engine is shut down; what vLLM leaves to the interpreter's end takes seconds


if __name__ == "__main__":
    main()
