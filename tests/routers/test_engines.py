"""What Dynamo's indexer promises of a prompt is what the engine then finds, whatever happened."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd_tools.vllm_engine import VllmServer
from tests.conftest import Daemon, StartDaemon
from tests.engine_answers import TEST_SECONDS
from tests.routers.fleet import (
    MODEL,
    NOT_STORED,
    ROUNDS,
    Fleet,
    Pairs,
    RoutedEngine,
    churn,
    family,
    store_all,
)
from tests.routers.indexer import NOTHING, DynamoIndexer
from tests.vllm.conftest import StartEngine
from tests.vllm.support import (
    BLOCK,
    chunks_of,
    prompts,
    wait_served,
    wait_stored,
)
from tests.waiting import eventually

POOL = "4MiB"  # 64 chunks; a family of prompts has 108, and each engine has 64 blocks of its own
LARGE_POOL = "64MiB"
REPEAT_SECONDS = 3.0
PROMPT_TOKENS = "vllm:prompt_tokens"

pytestmark = pytest.mark.timeout(TEST_SECONDS)


@pytest.fixture(scope="module")
def indexer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DynamoIndexer]:
    """The router that follows all engines from their start on."""
    with DynamoIndexer(tmp_path_factory.mktemp("indexer") / "log") as indexer:
        yield indexer


@pytest.fixture(scope="module")
def fleet(
    models: Path, module_dir: Path, start_engine: StartEngine, indexer: DynamoIndexer
) -> Fleet:
    """Two engines; when they start there is no daemon."""
    fleet = Fleet(module_dir, models, start_engine, indexer)
    for engine in [fleet.start(), fleet.start()]:
        engine.follow()
    return fleet


@pytest.fixture
def pairs() -> Iterator[Pairs]:
    """What the test compares; every promise must be kept."""
    pairs = Pairs()
    yield pairs
    assert not pairs.differences
    assert pairs.compared


def serve(fleet: Fleet, start_daemon: StartDaemon, size: str = POOL) -> Daemon:
    """Start a new daemon for the fleet, in which all engines can store."""
    daemon = start_daemon(cpu_bytes=size, where=fleet.runtime_dir)
    wait_served(daemon, *(engine.process for engine in fleet.engines))
    for engine in fleet.engines:
        engine.store_something(daemon)
    return daemon


def only_pool(engine: RoutedEngine, prompt: list[int]) -> int:
    """Return the tokens of a prompt that the router expects below the engine's device."""
    promised = engine.promise(prompt)
    return promised.longest - promised.gpu


def test_what_one_engine_stores_is_promised_of_the_other(
    fleet: Fleet, start_daemon: StartDaemon, pairs: Pairs
) -> None:
    """A prefix that A has computed is promised of B from the pool, and B finds it there."""
    daemon = serve(fleet, start_daemon, LARGE_POOL)
    first, second = fleet.engines
    asked = family(seed=10)
    store_all(daemon, [first], asked)
    second.publish_all()
    assert all(only_pool(second, prompt) for prompt in asked)
    second.check(asked, pairs)
    first.check(asked, pairs)


def test_evictions_by_both_engines(fleet: Fleet, start_daemon: StartDaemon, pairs: Pairs) -> None:
    """Two engines evict each other's chunks from a pool that is too small for their prompts."""
    daemon = serve(fleet, start_daemon)
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
    daemon = serve(fleet, start_daemon)
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
    daemon = serve(fleet, start_daemon)
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
    assert only_pool(idle, prompt) == len(prompt) // BLOCK * BLOCK
    prompt_tokens = idle.process.metric(PROMPT_TOKENS)
    asked = [prompt, *family(seed=81)]

    def evicted() -> bool:
        churn(daemon, [busy], asked[1:])
        eventually(lambda: idle.blocks_in_memory() == busy.blocks_in_memory())
        return not only_pool(idle, prompt)

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
    daemon = serve(fleet, start_daemon, LARGE_POOL)
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
        known = {tuple(prompt): late.promise(prompt) for prompt in asked}
        for prompt in asked:  # of the device's blocks it has heard nothing: vLLM does not repeat
            pooled = len(prompt) // BLOCK * BLOCK
            assert known[tuple(prompt)].longest == pooled
            eventually(
                lambda: router.query(prompt, MODEL).get(late.instance, NOTHING).cpu,  # noqa: B023  # called here
                lambda tokens: tokens == pooled,  # noqa: B023  # called here
            )

    fleet.leave(late, VllmServer.kill)
    for engine in fleet.engines:
        engine.check(asked, pairs)
    assert late.promise(asked[0]) == NOTHING
