"""Real vLLM engines on one pool, and what Dynamo's real indexer promises of each.

A pair is a prompt and an engine. Its promise is what the indexer knows of the prompt on that
engine; it must equal the tokens that the engine then does not compute (`num_cached_tokens`).
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvd_client.vllm.metrics import (
    CHUNKS_REFUSED,
    STORE_FAILURES,
)
from kvd_tools.models import COMMON
from kvd_tools.vllm_engine import VllmServer
from tests.conftest import Daemon
from tests.routers.indexer import NOTHING, DynamoIndexer, Matched
from tests.vllm.conftest import StartEngine
from tests.vllm.support import BLOCK, Setting, prompts, results, wait_stored, with_kvd
from tests.waiting import eventually

MODEL = "dense"
MEMORY = "host_pinned"  # as Dynamo calls it
HEADS, TAILS = 3, 4  # prompts that begin alike, and how many of each
HEAD_TOKENS, TAIL_TOKENS = 4 * BLOCK, 8 * BLOCK + BLOCK // 2
NOT_STORED: dict[str, Any] = {"kv_transfer_params": {"max_offload_tokens": 0}}
ROUNDS = 5  # of asking again, each of which may take long


@dataclass
class Pairs:
    """What one scenario compared.

    Attributes:
        compared: pairs.
        pooled: of them, pairs with blocks that only the pool has.
        differences: pairs whose promise was not what the engine found, in words.
    """

    compared: int = 0
    pooled: int = 0
    differences: list[str] = field(default_factory=list)

    def add(self, engine: int, promised: Matched, found: int) -> None:
        """Compare one pair."""
        self.compared += 1
        self.pooled += promised.longest > promised.gpu
        if promised.longest != found:
            self.differences.append(f"engine {engine}: {promised} promised, {found} found")


class RoutedEngine:
    """An engine whose events the indexer follows.

    Args:
        instance: its number for the indexer.
        process: the engine.
        folder: of its sockets.
        indexer: that follows it.
    """

    def __init__(
        self, instance: int, process: VllmServer, folder: Path, indexer: DynamoIndexer
    ) -> None:
        self.instance = instance
        self.process = process
        self.endpoint, self.replay = endpoints(folder, instance)
        self.topic = topic(instance)
        self.indexer = indexer
        self._random = random.Random(instance)

    def follow(self) -> None:
        """Have the indexer follow the engine, and ask it for what it has missed."""
        self.process.wait_ready()
        self.indexer.register(self.instance, self.endpoint, MODEL, BLOCK, self.replay)
        self.publish_all()

    def promise(self, prompt: Sequence[int]) -> Matched:
        """Return what the indexer knows of a prompt on this engine."""
        return self.indexer.settled_query(prompt, MODEL).get(self.instance, NOTHING)

    def blocks_in_memory(self) -> set[int]:
        """Return the blocks that the indexer knows of the engine in the host's memory."""
        return self.indexer.dump_blocks().get(self.instance, {}).get(MEMORY, set())

    def publish_all(self) -> None:
        """Return when the indexer has taken what the engine could publish before this call.

        The engine computes markers: prompts that fill one block, and are not stored. What was
        known before is published with its block or earlier. More changes than one step takes need
        several steps. What the indexer has lost it requests when it receives more.
        """
        for _ in range(3):
            self.indexer.await_events(self.instance, MODEL, lambda _: self._compute_marker())

    def store_something(self, daemon: Daemon) -> None:
        """Return when a chunk of the engine is stored: a new daemon has lent it slots."""
        before = wait_stored(daemon, at_least=0)

        def stored() -> bool:
            self.process.generate([self._marker()], 1)
            return wait_stored(daemon, at_least=0) > before

        eventually(stored)

    def check(self, asked: Sequence[list[int]], pairs: Pairs) -> None:
        """Ask the indexer, then the engine, prompt by prompt.

        The pool is at rest, and what the engine finds is not stored again.
        """
        for prompt in asked:
            self.publish_all()
            promised = self.promise(prompt)
            (answer,) = self.process.generate([prompt], 1, **NOT_STORED)
            pairs.add(self.instance, promised, answer.cached_tokens)

    def _compute_marker(self) -> list[int]:
        marker = self._marker()
        self.process.generate([marker], 1, **NOT_STORED)
        return marker

    def _marker(self) -> list[int]:
        return self._random.choices(range(2, COMMON["vocab_size"]), k=BLOCK + 1)


@dataclass
class Fleet:
    """Engines on one daemon's pool, and the indexer that follows all of them."""

    runtime_dir: Path
    models: Path
    start_engine: StartEngine
    indexer: DynamoIndexer
    engines: list[RoutedEngine] = field(default_factory=list)

    def start(self, **extra: Any) -> RoutedEngine:
        """Start one more engine, which is not ready yet; it has these connector's options."""
        instance = len(self.engines) + 1
        endpoint, replay = endpoints(self.runtime_dir.parent, instance)
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": endpoint,
            "replay_endpoint": replay,
            "topic": topic(instance),
        }
        options = with_kvd(Setting("dense").options(self.models), self.runtime_dir, **extra)
        options = replace(options, args=["--kv-events-config", json.dumps(events)])
        process = self.start_engine(options)
        engine = RoutedEngine(instance, process, self.runtime_dir.parent, self.indexer)
        self.engines.append(engine)
        return engine

    def leave(self, engine: RoutedEngine, end: Callable[[VllmServer], None]) -> None:
        """End an engine, which the router is told by what runs the engines."""
        end(engine.process)
        self.indexer.unregister(engine.instance, MODEL)
        self.engines.remove(engine)


def topic(instance: int) -> str:
    """Return what an engine's messages begin with, as llm-d expects it."""
    return f"kv@engine-{instance}@{MODEL}"


def endpoints(folder: Path, instance: int) -> tuple[str, str]:
    """Return where an engine publishes, and where it replays."""
    return f"ipc://{folder}/events-{instance}", f"ipc://{folder}/replay-{instance}"


def family(seed: int) -> list[list[int]]:
    """Return prompts of which some begin alike, in a random order."""
    heads = prompts(HEADS, seed, HEAD_TOKENS)
    tails = iter(prompts(HEADS * TAILS, seed + 1, TAIL_TOKENS))
    asked = [head + next(tails) for head in heads for _ in range(TAILS)]
    random.Random(seed).shuffle(asked)
    return asked


def churn(daemon: Daemon, engines: Sequence[RoutedEngine], asked: Sequence[list[int]]) -> None:
    """Ask all engines for all prompts at once; return when everything stored is READY.

    Chunks that found no slot are stored or given up in the steps after the daemon's answer.
    """
    results([engine.process.submit(prompt) for prompt in asked for engine in engines])
    wait_stored(daemon)
    for engine in engines:
        engine.publish_all()
    wait_stored(daemon)


def store_all(daemon: Daemon, engines: Sequence[RoutedEngine], asked: Sequence[list[int]]) -> None:
    """Churn until no chunk was given up: the pool has room for all of the prompts."""

    def given_up() -> float:
        names = CHUNKS_REFUSED, STORE_FAILURES
        return sum(engine.process.metric(name) for engine in engines for name in names)

    def complete() -> bool:
        before = given_up()
        churn(daemon, engines, asked)
        return given_up() == before

    assert any(complete() for _ in range(ROUNDS))
