"""Real engines on a pool that is a quarter of what they ask for: the rest comes from a tier.

Whatever the tier does, the engine answers, and its answers are those of an engine without kvd. How
much comes from the tier in time depends on the machine's load: that something does is asserted.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvd_client.vllm.metrics import TIER_WAITS
from kvd_tools.demo_vllm.engine import EngineProcess
from kvd_tools.engine_server import Answer
from tests.conftest import Daemon, StartDaemon
from tests.vllm.conftest import StartEngine
from tests.vllm.support import (
    CACHED_TOKENS,
    TEST_SECONDS,
    References,
    Setting,
    compute_references,
    far_apart,
    wait_served,
    wait_stored,
    with_kvd,
)
from tests.waiting import eventually

CHUNK_BYTES, CHUNK_TOKENS = 128 * 1024, 64  # of two blocks, in four layers of two heads of 32
PROMPTS = 20
CHUNKS = PROMPTS * CACHED_TOKENS // CHUNK_TOKENS
POOL_CHUNKS, MOST_CHUNKS = CHUNKS // 4, CHUNKS * 3 // 4
ROUNDS = 10  # of asking all prompts, until one came from the tier
SOURCES = "vllm:prompt_tokens_cached_by_source"

pytestmark = pytest.mark.timeout(TEST_SECONDS)


@pytest.fixture(scope="module")
def engines(
    models: Path, module_dir: Path, start_engine: StartEngine
) -> tuple[EngineProcess, EngineProcess]:
    """Two engines of one model; when they start there is no daemon."""
    options = with_kvd(Setting("dense").options(models), module_dir, blocks_per_chunk=2)
    engines = start_engine(options), start_engine(options)
    for engine in engines:
        engine.wait_ready()
    return engines


@pytest.fixture(scope="module")
def known(engines: tuple[EngineProcess, EngineProcess]) -> References:
    """What the answers should be: asked before the first daemon starts."""
    return compute_references(engines[0], PROMPTS)


class Tiered:
    """Engines, and a daemon with a tier and a pool that is too small."""

    def __init__(
        self, engines: tuple[EngineProcess, EngineProcess], daemon: Daemon, known: References
    ) -> None:
        self.engine, self.other = engines
        self.daemon = daemon
        self._known = known

    def tier(self) -> dict[str, Any]:
        """What the daemon says about its tier."""
        (tier,) = self.daemon.status()["tiers"]
        found: dict[str, Any] = tier
        return found

    def ask(self, engine: EngineProcess | None = None, **fields: Any) -> list[Answer]:
        """All prompts, one by one, on an empty cache of the engine's own; the answers are right."""
        asked = engine or self.engine
        asked.reset()
        answers = []
        for prompt, expected in zip(self._known.prompts, self._known.cold, strict=True):
            answers += asked.generate([prompt], **fields)
            assert not far_apart(answers[-1], expected)
        return answers

    def fill(self) -> None:
        """Store all prompts. The tier has what was not evicted before its turn: most of it."""
        for _ in range(ROUNDS):
            self.ask()
            wait_stored(self.daemon)
            if self.tier()["chunks"] >= MOST_CHUNKS:
                return
        pytest.fail(f"most chunks are not kept: {self.tier()}")

    def wait_loads(self, source: str, engine: EngineProcess | None = None) -> None:
        """Ask until tokens have come from there."""
        asked = engine or self.engine
        before = asked.metric(SOURCES, source=source), asked.metric(TIER_WAITS)
        for _ in range(ROUNDS):
            answers = self.ask(asked)
            tokens = asked.metric(SOURCES, source=source) - before[0]
            print(f"{tokens:g} tokens from {source}, {sum(a.cached_tokens for a in answers)} found")
            if tokens and asked.metric(TIER_WAITS) > before[1]:
                return
        pytest.fail(f"nothing came from {source}: {self.tier()}")


Start = Callable[[str], Tiered]


@pytest.fixture
def start(
    engines: tuple[EngineProcess, EngineProcess],
    known: References,
    module_dir: Path,
    start_daemon: StartDaemon,
) -> Start:
    """Starts a daemon with this tier, where the engines look for it."""

    def started(tier: str) -> Tiered:
        size = str(POOL_CHUNKS * CHUNK_BYTES)
        daemon = start_daemon("--tier", tier, cpu_bytes=size, where=module_dir)
        wait_served(daemon, *engines)
        tiered = Tiered(engines, daemon, known)
        eventually(tiered.tier, lambda found: found["usable"])
        return tiered

    return started


def test_prompts_that_left_memory_come_back_from_disk(start: Start, tmp_path: Path) -> None:
    """For the engine that stored them and for another one; a new daemon finds them, too."""
    setting = f"disk:{tmp_path / 'tier'},size=256MiB,keep=all"
    tiered = start(setting)
    tiered.fill()
    tiered.wait_loads("disk")
    tiered.wait_loads("disk", tiered.other)
    assert tiered.tier()["counters"]["gets"]["ok"]
    tiered.daemon.process.send_signal(signal.SIGTERM)
    tiered.daemon.process.wait()
    again = start(setting)
    eventually(again.tier, lambda tier: tier["chunks"] >= MOST_CHUNKS)
    again.wait_loads("disk")


def test_a_request_loads_from_the_tiers_that_it_names(start: Start, tmp_path: Path) -> None:
    """`kv_load_tiers` without the disk: nothing is brought up for it."""
    tiered = start(f"disk:{tmp_path / 'tier'},size=256MiB,keep=all")
    tiered.fill()
    before = tiered.engine.metric(TIER_WAITS), tiered.engine.metric(SOURCES, source="disk")
    for _ in range(ROUNDS):  # what was sought before may still be on its way up
        gets = tiered.tier()["counters"]["gets"]
        tiered.ask(kv_transfer_params={"kv_load_tiers": [{"medium": "CPU"}]})
        if tiered.tier()["counters"]["gets"] == gets:
            break
    else:
        pytest.fail(f"chunks are brought up: {tiered.tier()}")
    assert (
        tiered.engine.metric(TIER_WAITS),
        tiered.engine.metric(SOURCES, source="disk"),
    ) == before
    tiered.wait_loads("disk")


def test_a_tier_that_hangs_costs_misses_and_comes_back(start: Start, tmp_path: Path) -> None:
    """It is set aside, and used again when it goes on; all the while answers come."""
    hang = tmp_path / "hang"
    tiered = start(f"memory:,size=256MiB,keep=all,hang={hang}")
    tiered.fill()
    before = eventually(tiered.tier, lambda tier: tier["usable"])["counters"]["opened"]["late"]
    hang.touch()

    def late() -> bool:
        """Whether it is set aside, or was until its process was replaced."""
        tiered.ask()
        tier = tiered.tier()
        return not tier["usable"] or tier["counters"]["opened"]["late"] > before

    eventually(late)
    tiered.ask()
    hang.unlink()
    eventually(tiered.tier, lambda tier: tier["usable"])
    waits = tiered.engine.metric(TIER_WAITS)
    for _ in range(ROUNDS):
        tiered.ask()
        if tiered.engine.metric(TIER_WAITS) > waits:
            return
    pytest.fail(f"the tier is not used again: {tiered.tier()}")


def test_a_disk_tier_that_is_killed_is_there_again(start: Start, tmp_path: Path) -> None:
    """While requests wait for it: they are computed, and what it has kept comes back."""
    tiered = start(f"disk:{tmp_path / 'tier'},size=256MiB,keep=all")
    tiered.fill()
    pid = eventually(tiered.tier, lambda tier: tier["pid"])["pid"]
    os.kill(pid, signal.SIGKILL)
    tiered.ask()
    eventually(tiered.tier, lambda tier: tier["usable"] and tier["pid"] not in {0, pid})
    tiered.wait_loads("disk")


def test_wrong_bytes_of_a_tier_are_misses(start: Start) -> None:
    """Each is noticed and counted, and no answer is made of it."""
    tiered = start("memory:,size=256MiB,keep=all,corrupt=1.0")
    for _ in range(ROUNDS):
        tiered.ask()
        if tiered.tier()["counters"]["gets"]["corrupt"]:
            break
    counters = tiered.tier()["counters"]["gets"]
    assert counters["corrupt"]
    assert not counters["ok"]
