"""Scenarios of `vllm_ttft.py` with several vLLM engines that share a cache.

`engines`: four engines compute and store prompts of their own, then each asks for those that the
others stored, all engines at once. `killed`: two engines ask for prompts that their own caches are
too small for, while the cache's server is killed (SIGKILL) and started again.

Every answer is compared with the one of an engine that computed the prompt itself.
"""

import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from harness import Daemon, median
from lmcache_server import LmcacheServer, lmcache_python
from rich.console import Console
from rich.table import Table
from variants import BLOCK_TOKENS, CPU_BYTES, MODEL, Way, engine_options

from kvd_tools.engine_server import Completion
from kvd_tools.errors import DemoError
from kvd_tools.models import write_model
from kvd_tools.vllm_engine import VllmServer, kvd_transfer

SMALL_MODEL = MODEL | {"num_hidden_layers": 4, "dtype": "float32"}
FOUND_TOKENS, TAIL_TOKENS = 1024, 16
VOCABULARY = 2000
MAX_TOKENS = 4
SETTLE_SECONDS = 3.0  # the last stores end

ENGINES, PREFIXES = 4, 4  # of `engines`; prefixes of each engine

KILLED_ENGINES, KILLED_PROMPTS = 2, 8
KILLED_GPU_BLOCKS = 80  # two prompts
BEFORE_SECONDS, DEAD_SECONDS, AFTER_SECONDS = 6.0, 12.0, 20.0
RETRY_SECONDS = 0.5
ERROR_LETTERS = 300
LATE_SECONDS = 15.0  # then a request has no answer

Prompt = list[int]


class Cache(Protocol):
    """What engines keep KV in, started with its context."""

    def transfer(self) -> dict[str, Any]:
        """VLLM's --kv-transfer-config of an engine that uses it."""

    def kill(self) -> None:
        """Kill its server as a crash would."""

    def __enter__(self) -> object: ...

    def __exit__(self, *_: object) -> None: ...


class KvdCache(Daemon):
    """kvd's daemon; what it keeps outlives it, as by default."""

    def __init__(self, place: Path) -> None:
        super().__init__(CPU_BYTES, place=place)

    def transfer(self) -> dict[str, Any]:
        """The default settings."""
        return kvd_transfer(self.runtime_dir, required=True)

    def kill(self) -> None:
        """Its lanes end with it."""
        self.__exit__()


@dataclass(frozen=True, slots=True)
class Shared:
    """Running engines and their cache; none where each has its own cache only."""

    engines: list[VllmServer]
    cache: Cache | None


@contextmanager
def _shared(way: Way, engines: int, gpu_blocks: int | None = None) -> Iterator[Shared]:
    """All engines start at once."""
    with ExitStack() as stack:
        # In shared memory, as a daemon's pool is.
        context = tempfile.TemporaryDirectory(prefix="kvd-bench-", dir="/dev/shm")
        place = Path(stack.enter_context(context))
        model = write_model(place / "model", SMALL_MODEL)
        cache: Cache | None = None
        python: dict[str, str] = {}
        if way is Way.KVD:
            cache = KvdCache(place)
        elif way is Way.LMCACHE:
            python = {"python": lmcache_python()}
            cache = LmcacheServer(python["python"], BLOCK_TOKENS, CPU_BYTES, place / "server.log")
        if cache is not None:
            stack.enter_context(cache)
        options = engine_options(model, None if cache is None else cache.transfer())
        options = replace(options, dtype="float32", threads=1)
        if gpu_blocks is not None:
            options = replace(options, num_gpu_blocks=gpu_blocks)
        started = []
        for number in range(engines):
            engine = VllmServer(options, place / f"engine-{number}.log", **python)
            stack.callback(engine.close)
            started.append(engine)
        for engine in started:
            engine.wait_ready()
        yield Shared(started, cache)


def _tokens(*seed: int, count: int) -> Prompt:
    tokens: Prompt = np.random.default_rng(seed).integers(0, VOCABULARY, count).tolist()
    return tokens


def _ask(engine: VllmServer, prompt: Prompt) -> Completion:
    (answer,) = engine.generate([prompt], max_tokens=MAX_TOKENS)
    return answer


def _fill(table: Table, ways: Sequence[Way], row: Callable[[Way], list[str]]) -> None:
    """Add a row for each way and print the table, also where the run is ended before."""
    try:
        for way in ways:
            table.add_row(str(way), *row(way))
    finally:
        Console(width=140).print(table)


# ------------------------------------------------------------------ engines


def engines(ways: Sequence[Way]) -> None:
    """What one engine stored the others ask for, all at once."""
    table = Table(
        "KV shared by",
        "found",
        "first token p50, ms",
        "p99, ms",
        "while they compute: p50, ms",
        "same answers",
        title=f"{ENGINES} engines at once, prompts of {FOUND_TOKENS:,} + {TAIL_TOKENS} tokens",
    )
    _fill(table, ways, _engines_row)


def _engines_row(way: Way) -> list[str]:
    with _shared(way, ENGINES) as shared:
        pool = ThreadPoolExecutor(ENGINES)

        def at_once(ask: Callable[[int], list[Completion]]) -> list[list[Completion]]:
            return list(pool.map(ask, range(ENGINES)))

        def prompts(owner: int, reader: int) -> list[Prompt]:
            return [
                _tokens(owner, number, count=FOUND_TOKENS)
                + _tokens(owner, number, reader, 1, count=TAIL_TOKENS)
                for number in range(PREFIXES)
            ]

        def ask_all(reader: int, owner: int) -> list[Completion]:
            return [_ask(shared.engines[reader], prompt) for prompt in prompts(owner, reader)]

        at_once(lambda i: [_ask(shared.engines[i], _tokens(i, 99, count=FOUND_TOKENS))])  # untimed
        computed = list(chain.from_iterable(at_once(lambda i: ask_all(i, i))))
        time.sleep(SETTLE_SECONDS)
        asked: list[Completion] = []
        same = 0
        for shift in range(1, ENGINES):
            read = at_once(lambda i: ask_all(i, (i + shift) % ENGINES))  # noqa: B023
            asked += chain.from_iterable(read)
            # The owners have the beginnings that they computed in their own caches.
            owned = at_once(
                lambda i: [
                    _ask(shared.engines[i], prompt)
                    for prompt in prompts(i, (i - shift) % ENGINES)  # noqa: B023
                ]
            )
            for i in range(ENGINES):
                pairs = zip(read[i], owned[(i + shift) % ENGINES], strict=True)
                same += sum(one.tokens == other.tokens for one, other in pairs)
        pool.shutdown()
    first = [1e3 * answer.first_token_seconds for answer in asked]
    found = sum(answer.cached_tokens >= FOUND_TOKENS for answer in asked)
    cold = median(1e3 * answer.first_token_seconds for answer in computed)
    return [
        f"{found} of {len(asked)}",
        f"{median(first):,.0f}",
        f"{np.percentile(first, 99):,.0f}",
        f"{cold:,.0f}",
        f"{same} of {len(asked)}",
    ]


# ------------------------------------------------------------------- killed


@dataclass(frozen=True, slots=True)
class Asked:
    """One request; moments in seconds since the first one; an answer, or why there is none."""

    engine: int
    prompt: int
    begin: float
    end: float
    answer: Completion | None
    error: str = ""

    @property
    def first(self) -> float:
        """Seconds until its first token; of one that failed, until then."""
        return self.end - self.begin if self.answer is None else self.answer.first_token_seconds


def killed(ways: Sequence[Way]) -> None:
    """The cache's server dies and comes back while engines serve."""
    table = Table(
        "KV kept by",
        "requests: before, dead, back",
        "found",
        "failed",
        "longest first token, s",
        "first one found after restart, s",
        "engines that serve then",
        "same answers",
        title=f"{KILLED_ENGINES} engines serve, their cache's server is killed",
    )
    _fill(table, [way for way in ways if way is not Way.GPU], _killed_row)


def _killed_row(way: Way) -> list[str]:
    prompts = [
        _tokens(number, count=FOUND_TOKENS + TAIL_TOKENS) for number in range(KILLED_PROMPTS)
    ]
    with _shared(way, KILLED_ENGINES, KILLED_GPU_BLOCKS) as shared:
        assert shared.cache is not None
        known = [_ask(shared.engines[0], prompt).tokens for prompt in prompts]
        _ask(shared.engines[1], _tokens(KILLED_PROMPTS, count=FOUND_TOKENS))  # untimed, compiles
        time.sleep(SETTLE_SECONDS)
        asking = Asking(shared.engines, prompts)
        time.sleep(BEFORE_SECONDS)
        killed_at = asking.now()
        shared.cache.kill()
        time.sleep(DEAD_SECONDS)
        back_at = asking.now()
        shared.cache.__enter__()
        time.sleep(AFTER_SECONDS)
        requests = asking.finish()
    phases = [
        [r for r in requests if r.end < killed_at],
        [r for r in requests if r.end >= killed_at and r.begin < back_at],
        [r for r in requests if r.begin >= back_at],
    ]
    serving = {r.engine for r in phases[2] if r.answer is not None}
    for why in {r.error[:ERROR_LETTERS]: None for r in requests if r.error}:
        print(f"{way}: {why}", file=sys.stderr)
    recovered = [r.end for r in phases[2] if _found(r)]
    answered = [r for r in requests if r.answer is not None]
    same = sum(r.answer is not None and r.answer.tokens == known[r.prompt] for r in answered)
    return [
        ", ".join(f"{len(phase)}" for phase in phases),
        ", ".join(f"{sum(map(_found, phase))}" for phase in phases),
        ", ".join(f"{sum(r.answer is None for r in phase)}" for phase in phases),
        ", ".join(f"{max((r.first for r in phase), default=0):.2f}" for phase in phases),
        f"{min(recovered) - back_at:.1f}" if recovered else "never",
        f"{len(serving)} of {KILLED_ENGINES}",
        f"{same} of {len(answered)}",
    ]


def _found(request: Asked) -> bool:
    return request.answer is not None and request.answer.cached_tokens >= FOUND_TOKENS


class Asking:
    """A thread for each engine that asks for one prompt after another, until `finish`."""

    def __init__(self, engines: Sequence[VllmServer], prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts
        self._begin = time.monotonic()
        self._ending = threading.Event()
        self._requests: list[Asked] = []
        self._engines = engines
        self._threads = [
            threading.Thread(target=self._serve, args=(number, engine))
            for number, engine in enumerate(engines)
        ]
        for thread in self._threads:
            thread.start()

    def now(self) -> float:
        """Seconds since the first request."""
        return time.monotonic() - self._begin

    def finish(self) -> list[Asked]:
        """All requests; those that have no answer LATE_SECONDS from now have failed."""
        self._ending.set()
        end = time.monotonic() + LATE_SECONDS
        for thread, engine in zip(self._threads, self._engines, strict=True):
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                engine.kill()  # ends its request
                thread.join()
        return self._requests

    def _serve(self, number: int, engine: VllmServer) -> None:
        at = number * len(self._prompts) // KILLED_ENGINES
        while not self._ending.is_set() and engine.running:
            prompt = at % len(self._prompts)
            begin = self.now()
            answer, why = None, ""
            try:
                answer = _ask(engine, self._prompts[prompt])
            except DemoError as error:
                why = str(error)
            self._requests.append(Asked(number, prompt, begin, self.now(), answer, why))
            if answer is None:
                self._ending.wait(RETRY_SECONDS)
            at += 1


SCENARIOS: dict[str, Callable[[Sequence[Way]], None]] = {"engines": engines, "killed": killed}
