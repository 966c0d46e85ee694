"""Real engines on a pool that is a quarter of what they ask for: the rest comes from a tier.

Whatever the tier does, the engine answers, and its answers are those of an engine without kvd. How
much comes from the tier in time depends on the machine's load: that something does is asserted.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvd_client.vllm.metrics import TIER_WAITS
from kvd_tools.vllm_engine import VllmServer
from tests.conftest import Daemon, StartDaemon
from tests.engine_answers import TEST_SECONDS, ask_all, check
from tests.vllm.conftest import StartEngine
from tests.vllm.support import (
    CACHED_TOKENS,
    References,
    Setting,
    compute_references,
    wait_served,
    wait_stored,
    with_kvd,
)
from tests.waiting import eventually

CHUNK_BYTES, CHUNK_TOKENS = 128 * 1024, 64  # of two blocks, in four layers of two heads of 32
PROMPTS = 20
CHUNKS = PROMPTS * CACHED_TOKENS // CHUNK_TOKENS
POOL_CHUNKS, MOST_CHUNKS = CHUNKS // 4, CHUNKS * 3 // 4
ASK_SECONDS = 240.0  # for what a quick machine shows when all prompts are asked once or twice
SOURCES = "vllm:prompt_tokens_cached_by_source"

pytestmark = pytest.mark.timeout(TEST_SECONDS)


@pytest.fixture(scope="module")
def engines(
    models: Path, module_dir: Path, start_engine: StartEngine
) -> tuple[VllmServer, VllmServer]:
    """Two engines of one model; when they start there is no daemon."""
    options = with_kvd(Setting("dense").options(models), module_dir, blocks_per_chunk=2)
    engines = start_engine(options), start_engine(options)
    for engine in engines:
        engine.wait_ready()
    return engines


@pytest.fixture(scope="module")
def known(engines: tuple[VllmServer, VllmServer]) -> References:
    """What the answers should be: asked before the first daemon starts."""
    return compute_references(engines[0], PROMPTS)


class Tiered:
    """Engines, and a daemon with a tier and a pool that is too small."""

    def __init__(
        self, engines: tuple[VllmServer, VllmServer], daemon: Daemon, known: References
    ) -> None:
        self.engine, self.other = engines
        self.daemon = daemon
        self._known = known

    def tier(self) -> dict[str, Any]:
        """What the daemon says about its tier."""
        (tier,) = self.daemon.status()["tiers"]
        assert isinstance(tier, dict)
        return tier

    def wait_usable(self, without: int = 0) -> None:
        """Until the tier is used, by another process than this one."""
        eventually(self.tier, lambda tier: tier["usable"] and tier["pid"] not in {0, without})

    def ask(self, engine: VllmServer) -> None:
        """All prompts, one by one, on an empty cache of the engine's own; the answers are right."""
        engine.reset()
        check(ask_all(engine, self._known.prompts), self._known.cold)

    def ask_until(self, is_so: Callable[[], object], engine: VllmServer | None = None) -> None:
        """Ask all prompts again and again until this is so.

        On a busy machine that may be minutes: an engine waits for a tier only where it takes that
        for faster than computing.
        """
        end = time.monotonic() + ASK_SECONDS
        while not is_so():
            assert time.monotonic() < end, self.tier()
            self.ask(engine or self.engine)

    def fill(self) -> None:
        """Store all prompts. The tier has what was not evicted before its turn: most of it."""
        self.ask_until(lambda: wait_stored(self.daemon, 0) and self.tier()["chunks"] >= MOST_CHUNKS)

    def wait_disk_loads(self, engine: VllmServer) -> None:
        """Ask until a request has waited for a tier, and tokens have come from the disk."""
        waits, tokens = engine.metric(TIER_WAITS), engine.metric(SOURCES, source="disk")
        self.ask_until(
            lambda: (
                engine.metric(TIER_WAITS) > waits and engine.metric(SOURCES, source="disk") > tokens
            ),
            engine,
        )


Start = Callable[[str], Tiered]


@pytest.fixture
def start(
    engines: tuple[VllmServer, VllmServer],
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
        tiered.wait_usable()
        return tiered

    return started


def test_prompts_that_left_memory_come_back_from_disk(start: Start, tmp_path: Path) -> None:
    """For the engine that stored them and for another one; a new daemon finds them, too."""
    setting = f"disk:{tmp_path / 'tier'},size=256MiB,keep=all"
    tiered = start(setting)
    tiered.fill()
    tiered.wait_disk_loads(tiered.engine)
    tiered.wait_disk_loads(tiered.other)
    assert tiered.tier()["counters"]["gets"]["ok"]
    tiered.daemon.stop()
    again = start(setting)
    eventually(again.tier, lambda tier: tier["chunks"] >= MOST_CHUNKS)
    again.wait_disk_loads(again.engine)


@pytest.mark.nightly
def test_a_tier_that_hangs_costs_misses_and_comes_back(start: Start, tmp_path: Path) -> None:
    """It is set aside, and used again when it goes on; all the while answers come."""
    hang = tmp_path / "hang"
    tiered = start(f"memory:,size=256MiB,keep=all,hang={hang}")
    tiered.fill()
    hang.touch()

    def set_aside() -> int:
        """Return how often it has been; its process may be another one by now."""
        opened = tiered.tier()["counters"]["opened"]
        return int(opened["late"] + opened["failed"])

    tiered.ask_until(set_aside)
    tiered.ask(tiered.engine)
    hang.unlink()
    tiered.wait_usable()
    waits = tiered.engine.metric(TIER_WAITS)
    tiered.ask_until(lambda: tiered.engine.metric(TIER_WAITS) > waits)


@pytest.mark.nightly
def test_a_disk_tier_that_is_killed_is_there_again(start: Start, tmp_path: Path) -> None:
    """While requests wait for it: they are computed, and what it has kept comes back."""
    tiered = start(f"disk:{tmp_path / 'tier'},size=256MiB,keep=all")
    tiered.fill()
    pid = eventually(tiered.tier, lambda tier: tier["pid"])["pid"]
    os.kill(pid, signal.SIGKILL)
    tiered.ask(tiered.engine)
    tiered.wait_usable(without=pid)
    tiered.wait_disk_loads(tiered.engine)


def test_wrong_bytes_of_a_tier_are_misses(start: Start) -> None:
    """Each is noticed and counted, and no answer is made of it."""
    tiered = start("memory:,size=256MiB,keep=all,corrupt=1.0")
    tiered.ask_until(lambda: tiered.tier()["counters"]["gets"]["corrupt"])
    assert not tiered.tier()["counters"]["gets"]["ok"]
