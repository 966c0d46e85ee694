"""What Dynamo's indexer promises of a prompt is what the engine then finds, whatever happened.

Real vLLM engines share a pool. A pair is a prompt and an engine. Its promise is what the indexer
knows of the prompt on that engine; it must equal the tokens that the engine then does not compute
(`num_cached_tokens`).
"""

import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from kvd_client.vllm.metrics import CHUNKS_REFUSED, STORE_FAILURES
from kvd_tools.models import COMMON
from kvd_tools.vllm_engine import VllmServer
from tests.conftest import Daemon, StartDaemon
from tests.engine_answers import TEST_SECONDS
from tests.routers.indexer import NOTHING, DynamoIndexer, Matched, endpoints
from tests.vllm.conftest import StartEngine
from tests.vllm.support import (
    BLOCK,
    Setting,
    chunks_of,
    prompts,
    results,
    wait_served,
    wait_stored,
    with_kvd,
)
from tests.waiting import eventually

MODEL: Literal["dense"] = "dense"
POOL = "4MiB"  # 64 chunks; a family of prompts has 108, and each engine has 64 blocks of its own
LARGE_POOL = "64MiB"
HEADS, TAILS = 3, 4  # prompts that begin alike, and how many of each
HEAD_TOKENS, TAIL_TOKENS = 4 * BLOCK, 8 * BLOCK + BLOCK // 2
NOT_STORED: dict[str, Any] = {"kv_transfer_params": {"max_offload_tokens": 0}}
ROUNDS = 5  # of asking again, each of which may take long
REPEAT_SECONDS = 3.0
POLL_SECONDS, RECEIVE_SECONDS = 0.1, 1.0
PROMPT_TOKENS = "vllm:prompt_tokens"

pytestmark = pytest.mark.timeout(TEST_SECONDS)


@dataclass
class Pairs:
    """What one scenario compared."""

    compared: int = 0
    pooled: int = 0  # pairs with blocks that only the pool has
    differences: list[str] = field(default_factory=list)  # promised is not what the engine found

    def add(self, engine: int, promised: Matched, found: int) -> None:
        """Compare one pair."""
        self.compared += 1
        self.pooled += promised.longest > promised.gpu
        if promised.longest != found:
            self.differences.append(f"engine {engine}: {promised} promised, {found} found")


class RoutedEngine:
    """An engine, and the indexer that follows its events once it is ready."""

    def __init__(
        self, instance: int, process: VllmServer, folder: Path, indexer: DynamoIndexer
    ) -> None:
        self.instance = instance
        self.process = process
        self.endpoint, self.replay = endpoints(folder, f"engine-{instance}")
        self.indexer = indexer
        self._random = random.Random(instance)

    def follow(self) -> None:
        """Have the indexer follow the engine, and ask it for what it has missed."""
        self.process.wait_ready()
        self.indexer.register(self.instance, self.endpoint, MODEL, BLOCK, self.replay)
        self.publish_all()

    def known(self, prompt: Sequence[int]) -> Matched:
        """Return what the indexer knows of a prompt on this engine now."""
        return self.indexer.query(self.instance, prompt, MODEL)

    def promise(self, prompt: Sequence[int]) -> Matched:
        """Return what it knows when two answers are the same: it takes events by and by."""
        answers = [self.known(prompt)]

        def settled() -> bool:
            time.sleep(POLL_SECONDS)
            answers.append(self.known(prompt))
            return answers[-1] == answers[-2]

        eventually(settled)
        return answers[-1]

    def promised_from_pool(self, prompt: Sequence[int]) -> int:
        """Return the tokens of a prompt that the router expects below the engine's device."""
        promised = self.promise(prompt)
        return promised.longest - promised.gpu

    def blocks_in_memory(self) -> set[int]:
        """Return the blocks that the indexer knows of the engine in the host's memory."""
        blocks = self.indexer.dump_blocks().get(self.instance, set())
        return {number for tier, number in blocks if tier == "host_pinned"}

    def publish_all(self) -> None:
        """Return when the indexer has taken what the engine could publish before this call.

        The engine computes markers: prompts that fill one block, and are not stored. What was
        known before is published with its block or earlier. More changes than one step takes need
        several steps. What the indexer has lost it requests when it receives more.
        """

        def is_received() -> bool:
            marker = self._marker()
            self.process.generate([marker], 1, **NOT_STORED)
            end = time.monotonic() + RECEIVE_SECONDS
            while time.monotonic() < end:
                if self.known(marker).longest:
                    return True
                time.sleep(POLL_SECONDS)
            return False

        for _ in range(3):
            eventually(is_received)

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
        folder = self.runtime_dir.parent
        endpoint, replay = endpoints(folder, f"engine-{instance}")
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": endpoint,
            "replay_endpoint": replay,
            "topic": f"kv@engine-{instance}@{MODEL}",
        }
        options = with_kvd(Setting(MODEL).options(self.models), self.runtime_dir, **extra)
        options = replace(options, args=["--kv-events-config", json.dumps(events)])
        engine = RoutedEngine(instance, self.start_engine(options), folder, self.indexer)
        self.engines.append(engine)
        return engine

    def serve(self, start_daemon: StartDaemon, size: str = POOL) -> Daemon:
        """Start a new daemon, in which all engines can store."""
        daemon = start_daemon(cpu_bytes=size, where=self.runtime_dir)
        wait_served(daemon, *(engine.process for engine in self.engines))
        for engine in self.engines:
            engine.store_something(daemon)
        return daemon


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


@pytest.fixture(scope="module")
def fleet(
    models: Path,
    module_dir: Path,
    start_engine: StartEngine,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Fleet]:
    """Two engines, and the router that follows them; when they start there is no daemon."""
    with DynamoIndexer(tmp_path_factory.mktemp("indexer") / "log") as indexer:
        fleet = Fleet(module_dir, models, start_engine, indexer)
        for engine in [fleet.start(), fleet.start()]:
            engine.follow()
        yield fleet


@pytest.fixture
def pairs() -> Iterator[Pairs]:
    """What the test compares; every promise must be kept."""
    pairs = Pairs()
    yield pairs
    assert not pairs.differences
    assert pairs.compared


def test_what_one_engine_stores_is_promised_of_the_other(
    fleet: Fleet, start_daemon: StartDaemon, pairs: Pairs
) -> None:
    """A prefix that A has computed is promised of B from the pool, and B finds it there."""
    daemon = fleet.serve(start_daemon, LARGE_POOL)
    first, second = fleet.engines
    asked = family(seed=10)
    store_all(daemon, [first], asked)
    second.publish_all()
    assert all(second.promised_from_pool(prompt) for prompt in asked)
    second.check(asked, pairs)
    first.check(asked, pairs)


def test_evictions_by_both_engines(fleet: Fleet, start_daemon: StartDaemon, pairs: Pairs) -> None:
    """Two engines evict each other's chunks from a pool that is too small for their prompts."""
    daemon = fleet.serve(start_daemon)
    asked = family(seed=20)

    def evicted() -> int:
        churn(daemon, fleet.engines, asked)
        return int(daemon.status()["namespaces"][0]["counters"]["evicted"])

    assert any(evicted() for _ in range(ROUNDS))
    for engine in fleet.engines:
        engine.check(asked, pairs)
    assert 0 < pairs.pooled < pairs.compared


def test_no_daemon(fleet: Fleet, start_daemon: StartDaemon, pairs: Pairs) -> None:
    """Idle engines take all of the pool back by themselves, 10 s after the daemon has gone."""
    daemon = fleet.serve(start_daemon)
    asked = family(seed=70)[:6]
    churn(daemon, fleet.engines, asked)
    for engine in fleet.engines:
        engine.publish_all()
        assert engine.blocks_in_memory()
    daemon.stop()
    for engine in fleet.engines:
        eventually(engine.blocks_in_memory, lambda blocks: not blocks)
        engine.check(asked, pairs)
    assert not pairs.pooled


def test_an_idle_engine_tells_what_the_other_evicts(
    fleet: Fleet, start_daemon: StartDaemon, pairs: Pairs
) -> None:
    """And its own last stores; both without another request."""
    daemon = fleet.serve(start_daemon)
    idle, busy = fleet.engines
    (prompt,) = prompts(1, seed=80)
    chunks = len(prompt) // BLOCK + len(fleet.engines)

    def stored() -> bool:
        idle.process.generate([prompt], 1)
        return wait_stored(daemon, at_least=0) >= chunks

    assert any(stored() for _ in range(ROUNDS))
    # Its own last stores become READY after its last step.
    eventually(lambda: len(idle.blocks_in_memory()) == chunks_of(daemon)["ready"])
    idle.process.reset()  # of its own cache: the prompt is in the pool alone
    idle.publish_all()
    assert idle.promised_from_pool(prompt) == len(prompt) // BLOCK * BLOCK
    prompt_tokens = idle.process.metric(PROMPT_TOKENS)
    asked = [prompt, *family(seed=81)]

    def evicted() -> bool:
        churn(daemon, [busy], asked[1:])
        eventually(lambda: idle.blocks_in_memory() == busy.blocks_in_memory())
        return not idle.promised_from_pool(prompt)

    assert any(evicted() for _ in range(ROUNDS))
    promised = [idle.promise(prompt) for prompt in asked]
    assert idle.process.metric(PROMPT_TOKENS) == prompt_tokens
    answers = [idle.process.generate([prompt], 1, **NOT_STORED)[0] for prompt in asked[:3]]
    for promise, answer in zip(promised, answers, strict=False):
        pairs.add(idle.instance, promise, answer.cached_tokens)
    idle.check(asked, pairs)
    busy.check(asked, pairs)


def test_an_engine_that_comes_late_and_leaves(
    fleet: Fleet, start_daemon: StartDaemon, tmp_path: Path, pairs: Pairs
) -> None:
    """A new engine tells of every chunk in the pool; what it stored stays promised of the others.

    A router that comes when all of it was published long ago, and has no replay, is right after
    one round of repeated events.
    """
    daemon = fleet.serve(start_daemon, LARGE_POOL)
    asked = family(seed=100)
    store_all(daemon, fleet.engines, asked[:6])
    late = fleet.start(repeat_events=REPEAT_SECONDS)
    late.follow()
    wait_served(daemon, late.process)
    late.check(asked[:6], pairs)
    assert pairs.pooled
    store_all(daemon, [late], asked[6:])

    with DynamoIndexer(tmp_path / "late-router") as router:
        router.register(late.instance, late.endpoint, MODEL, BLOCK)
        for prompt in asked:  # of the device's blocks it has heard nothing: vLLM does not repeat
            pooled = len(prompt) // BLOCK * BLOCK
            assert late.promise(prompt).longest == pooled
            eventually(
                lambda: router.query(late.instance, prompt, MODEL).cpu,  # noqa: B023  # called here
                lambda tokens: tokens == pooled,  # noqa: B023  # called here
            )

    late.process.kill()
    fleet.engines.remove(late)
    fleet.indexer.unregister(late.instance, MODEL)
    for engine in fleet.engines:
        engine.check(asked, pairs)
    assert late.promise(asked[0]) == NOTHING
