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
    TIER_WAITS,
    TIER_WAITS_OVER,
)
from kvd_tools.models import COMMON
from kvd_tools.vllm_engine import VllmServer
from tests.conftest import Daemon
from tests.routers.indexer import NOTHING, DynamoIndexer, Matched
from tests.routers.subscriber import Subscriber
from tests.vllm.conftest import StartEngine
from tests.vllm.support import BLOCK, Setting, prompts, results, wait_stored, with_kvd
from tests.waiting import eventually

MODEL = "dense"
MEMORY, DISK = "host_pinned", "disk"  # as Dynamo calls them
HEADS, TAILS = 3, 4  # prompts that begin alike, and how many of each
HEAD_TOKENS, TAIL_TOKENS = 4 * BLOCK, 8 * BLOCK + BLOCK // 2
NOT_STORED: dict[str, Any] = {"kv_transfer_params": {"max_offload_tokens": 0}}
ROUNDS = 5  # of asking again, each of which may take long
PATIENT_SECONDS = 30.0  # for chunks on their way from a tier


@dataclass
class Pairs:
    """What one scenario compared.

    Attributes:
        compared: pairs.
        pooled: of them, pairs with blocks that only the pool or a tier has.
        computed: pairs of which the engine computed what a tier has, because that is faster there.
        from_tier: pairs whose last blocks came from a tier.
        differences: pairs whose promise was not what the engine found, in words.
    """

    compared: int = 0
    pooled: int = 0
    computed: int = 0
    from_tier: int = 0
    differences: list[str] = field(default_factory=list)

    def add(
        self, engine: int, promised: Matched, found: int, *, least_by_choice: int | None = None
    ) -> None:
        """Compare one pair.

        least_by_choice: the engine has decided against waiting for a tier, and finds so many tokens
            at the least.
        """
        self.compared += 1
        self.pooled += promised.longest > promised.gpu
        self.from_tier += found == promised.disk > promised.cpu
        if least_by_choice is not None and least_by_choice <= found < promised.disk:
            self.computed += 1
        elif promised.longest != found:
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

    def blocks_in(self, tier: str) -> set[int]:
        """Return the blocks that the indexer knows of the engine in one of Dynamo's tiers."""
        return self.indexer.dump_blocks().get(self.instance, {}).get(tier, set())

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

    def check(
        self,
        asked: Sequence[list[int]],
        pairs: Pairs,
        set_aside: Callable[[], object] = lambda: None,
    ) -> None:
        """Ask the indexer, then the engine, prompt by prompt.

        The pool is at rest, and what the engine finds is not stored again.

        Args:
            asked: prompts.
            pairs: compared.
            set_aside: returns how often a tier was: the engine misses what it has meanwhile.
        """
        for prompt in asked:
            setbacks = set_aside()
            self.publish_all()
            promised, memory = self.promise(prompt), self.blocks_in(MEMORY)
            waits, waits_over = (
                self.process.metric(TIER_WAITS),
                self.process.metric(TIER_WAITS_OVER),
            )
            (answer,) = self.process.generate([prompt], 1, **NOT_STORED)
            by_choice = (
                self.process.metric(TIER_WAITS) == waits
                or self.process.metric(TIER_WAITS_OVER) > waits_over
                or set_aside() != setbacks
            )
            found, least = answer.cached_tokens, promised.cpu if by_choice else None
            if least is not None and found < least:
                self.publish_all()
                if not memory <= self.blocks_in(MEMORY):  # what comes up evicts other chunks
                    least = promised.gpu
            pairs.add(self.instance, promised, found, least_by_choice=least)

    def _compute_marker(self) -> list[int]:
        marker = self._marker()
        self.process.generate([marker], 1, **NOT_STORED)
        return marker

    def _marker(self) -> list[int]:
        return self._random.choices(range(2, COMMON["vocab_size"]), k=BLOCK + 1)


@dataclass
class Fleet:
    """Engines on one daemon's pool, and the indexer that follows all of them.

    Attributes:
        subscriber: decodes all that they publish.
    """

    runtime_dir: Path
    models: Path
    start_engine: StartEngine
    indexer: DynamoIndexer
    subscriber: Subscriber
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
        extra = {"pending_timeout": PATIENT_SECONDS} | extra
        options = with_kvd(Setting("dense").options(self.models), self.runtime_dir, **extra)
        options = replace(options, args=["--kv-events-config", json.dumps(events)])
        process = self.start_engine(options)
        self.subscriber.follow(endpoint)
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
