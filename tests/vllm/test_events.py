"""KV events of real engines on one pool: each one's say what its next request finds."""

import json
import operator
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_GPU

from kvd_tools.demo_vllm.engine import EngineProcess
from kvd_tools.models import COMMON
from tests.conftest import Daemon, StartDaemon
from tests.vllm.conftest import StartEngine
from tests.vllm.event_index import EventIndex, Subscriber
from tests.vllm.support import (
    BLOCK,
    TEST_SECONDS,
    Setting,
    chunks_of,
    prompts,
    results,
    wait_served,
    wait_stored,
    with_kvd,
)
from tests.waiting import eventually

HEADS, TAILS = 3, 4  # prompts that begin alike, and how many of each
HEAD_TOKENS, TAIL_TOKENS = 4 * BLOCK, 8 * BLOCK + BLOCK // 2
POOL = "4MiB"  # 64 chunks; the prompts have 108, and each engine has 64 blocks of its own
NOT_STORED: dict[str, Any] = {"kv_transfer_params": {"max_offload_tokens": 0}}

pytestmark = pytest.mark.timeout(TEST_SECONDS)


@dataclass
class Observed:
    """An engine, and what its events say."""

    process: EngineProcess
    events: Subscriber
    seed: int

    def __post_init__(self) -> None:
        self._source = random.Random(self.seed)

    def step(self) -> None:
        """Have it publish what has changed: it does so in steps only.

        With a short prompt of its own, which fills one block and is not stored. When that block
        has been published, so has all that was known before.
        """
        prompt = self._prompt()
        self.process.generate([prompt], 1, **NOT_STORED)
        self.events.wait(lambda index: index.chain(prompt, BLOCK))

    def wait_stores(self, daemon: Daemon) -> None:
        """Until a chunk of it is stored: a daemon lends slots when it has filled its pool."""
        before = chunks_of(daemon)["ready"]

        def store() -> int:
            self.process.generate([self._prompt()], 1)
            return wait_stored(daemon, at_least=0)

        eventually(store, lambda ready: ready > before)

    def _prompt(self) -> list[int]:
        """A prompt of its own that fills one block."""
        return self._source.choices(range(2, COMMON["vocab_size"]), k=BLOCK + 1)

    def index(self) -> EventIndex:
        """What its events say when all is told: a snapshot may take several steps."""
        for _ in range(3):
            self.step()
        return self.events.index

    def in_pool(self) -> set[object]:
        """Of what its events say, what is in the pool."""
        return set(self.index().held[MEDIUM_CPU])

    def check(self, asked: Sequence[list[int]]) -> tuple[int, int]:
        """Compare what is promised of each prompt with what it then finds: just that.

        Returns:
            How many tokens were promised, and how many of them in the pool.
        """
        promised, found = [], []
        for prompt in asked:
            promised.append(self.index().promised(prompt, BLOCK))
            found += self.process.generate([prompt], 1, **NOT_STORED)
        assert list(map(sum, promised)) == [answer.cached_tokens for answer in found]
        return sum(map(sum, promised)), sum(pool for _, pool in promised)


@dataclass
class Fleet:
    """Engines that publish KV events, on one daemon's pool."""

    runtime_dir: Path
    models: Path
    start_engine: StartEngine
    stack: ExitStack
    engines: list[Observed]

    def start(self) -> Observed:
        """One more engine, which is not ready yet, and who reads its events from the first on."""
        number = len(self.engines)
        endpoint = f"ipc://{self.runtime_dir.parent}/events-{number}"
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
        options = with_kvd(Setting("dense").options(self.models), self.runtime_dir)
        options = replace(options, args=["--kv-events-config", json.dumps(events)])
        subscriber = self.stack.enter_context(Subscriber(endpoint))
        self.engines.append(Observed(self.start_engine(options), subscriber, number))
        return self.engines[-1]

    def serve(self, start_daemon: StartDaemon) -> Daemon:
        """A new daemon with a small pool, in which all engines store."""
        daemon = start_daemon(cpu_bytes=POOL, where=self.runtime_dir)
        wait_served(daemon, *(engine.process for engine in self.engines))
        for engine in self.engines:
            engine.wait_stores(daemon)
        return daemon


@pytest.fixture(scope="module")
def fleet(models: Path, module_dir: Path, start_engine: StartEngine) -> Iterator[Fleet]:
    """Two of them; when they start there is no daemon."""
    with ExitStack() as stack:
        fleet = Fleet(module_dir, models, start_engine, stack, [])
        for engine in [fleet.start(), fleet.start()]:
            engine.process.wait_ready()
        yield fleet


def family(seed: int) -> list[list[int]]:
    """Prompts of which some begin alike, in a random order."""
    heads = prompts(HEADS, seed, HEAD_TOKENS)
    tails = iter(prompts(HEADS * TAILS, seed + 1, TAIL_TOKENS))
    all_of_them = [head + next(tails) for head in heads for _ in range(TAILS)]
    random.Random(seed).shuffle(all_of_them)
    return all_of_them


def churn(daemon: Daemon, engines: Sequence[Observed], asked: Sequence[list[int]]) -> None:
    """Have all of them asked of all engines at once, and all that is stored be stored."""
    sent = [engine.process.submit(prompt) for prompt in asked for engine in engines]
    results(sent)
    wait_stored(daemon)
    counters = daemon.status()["namespaces"][0]["counters"]
    begun = counters["accepted"] - counters["stores_lost"] - counters["stores_raced"]
    assert counters["descriptions"] == begun > 0


def test_events_say_what_the_next_request_finds(fleet: Fleet, start_daemon: StartDaemon) -> None:
    """After two engines have evicted each other's chunks, and after `kvd clear`."""
    daemon = fleet.serve(start_daemon)
    asked = family(seed=10)
    churn(daemon, fleet.engines, asked)
    for engine in fleet.engines:
        promised, in_pool = engine.check(asked)
        assert 0 < in_pool < promised < len(asked) * (HEAD_TOKENS + TAIL_TOKENS)
    assert daemon.status()["namespaces"][0]["counters"]["evicted"] > 0

    where = ["--runtime-dir", str(fleet.runtime_dir)]
    subprocess.run([sys.executable, "-m", "kvd", "clear", "--yes", *where], check=True)
    for engine in fleet.engines:
        assert not engine.index().held[MEDIUM_CPU]
        assert engine.events.index.held[MEDIUM_GPU]
        engine.check(asked[:4])


def test_the_last_stores_are_published_before_an_engine_is_idle(
    fleet: Fleet, start_daemon: StartDaemon
) -> None:
    """Without another request; the other engine says the same with its next step."""
    fleet.serve(start_daemon)
    first, second = fleet.engines
    (prompt,) = prompts(1, seed=20)
    first.process.generate([prompt])

    def stored(index: EventIndex) -> bool:
        chain = index.chain(prompt, BLOCK)
        return len(chain) == len(prompt) // BLOCK and index.held[MEDIUM_CPU].issuperset(chain)

    first.events.wait(stored)
    assert stored(second.index())
    whole = len(prompt) // BLOCK * BLOCK
    assert second.check([prompt]) == (whole, whole)


def test_a_reset_is_told_by_all_engines(fleet: Fleet, start_daemon: StartDaemon) -> None:
    """One of the pool empties it for all; one of an engine's own cache alone leaves the pool."""
    daemon = fleet.serve(start_daemon)
    first, second = fleet.engines
    asked = family(seed=30)[:4]
    churn(daemon, [first], asked)
    first.process.reset(external=True)
    for engine in fleet.engines:  # the daemon is asked by nobody who waits for it
        eventually(engine.in_pool, operator.not_)
        engine.check(asked)

    churn(daemon, [second], asked)
    before = first.index().cleared, set(first.events.index.held[MEDIUM_CPU])
    first.process.reset()
    assert first.index().cleared == before[0] + 1
    assert first.events.index.held[MEDIUM_CPU] == before[1] != set()
    assert first.check(asked)[1] > 0
    second.check(asked)


def test_an_engine_that_attaches_late_tells_what_is_there(
    fleet: Fleet, start_daemon: StartDaemon
) -> None:
    """Of every chunk in the pool, none of which it has computed; then all three agree."""
    daemon = fleet.serve(start_daemon)
    asked = family(seed=40)
    churn(daemon, fleet.engines, asked)
    late = fleet.start()
    late.process.wait_ready()
    wait_served(daemon, late.process)
    there = late.index().held[MEDIUM_CPU]
    assert len(there) == wait_stored(daemon)
    for engine in fleet.engines:
        assert engine.index().held[MEDIUM_CPU] == there
    assert late.check(asked)[1] > 0
