"""Requests that wait for tiers: vLLM's own search, on a session whose tiers a test makes up."""

from collections.abc import Callable
from pathlib import Path

import pytest
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvd_client import NO_TIER, TierHealth, TierInfo
from kvd_client.vllm import metrics
from kvd_client.vllm.promotions import PROBE_CHUNKS, PROBE_SECONDS
from tests.vllm.configs import BLOCK, window
from tests.vllm.stepping import CHUNK_BYTES, WAITS, Lender, Stepping, hits

DISK = TierInfo(name="disk", medium="disk", shared=False)
SHARED = TierInfo(name="mooncake", medium="remote", shared=True)
PENDING_TIMEOUT, SEEK_TIMEOUT = 1.0, 0.05  # the connector's defaults
COMPUTING = 0.001  # seconds a token

MakeEngine = Callable[..., Stepping]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeEngine:
    """Makes an engine that computes a token in a millisecond, on a daemon with these tiers."""

    def made(*tiers: TierInfo, windows: tuple[KVCacheGroupSpec, ...] = ()) -> Stepping:
        engine = Stepping(tmp_path, monkeypatch, Lender(None, *tiers), *windows)
        speed = engine.manager.tier_waits.speed
        monkeypatch.setattr(speed, "seconds", lambda tokens: tokens * COMPUTING)
        return engine

    return made


@pytest.fixture
def engine(make: MakeEngine) -> Stepping:
    """An engine of a daemon with a disk, and a request "r", all six chunks of which are there."""
    engine = make(DISK)
    engine.come("r", 6)
    engine.lender.in_tiers = dict.fromkeys(engine.keys("r"), 0)
    return engine


def source(engine: Stepping, name: str) -> CacheHitSource:
    """Where the request's first chunk came from."""
    return engine.manager.get_load_source(engine.keys(name)[0], ReqContext(name))


def counts(engine: Stepping) -> dict[str, float]:
    """Waits that were counted since the last time."""
    return {name: value for name, value in engine.statistics().items() if "_tier_" in name}


def test_all_chunks_of_a_prompt_are_requested_in_one_step(engine: Stepping) -> None:
    """A prompt's head first; the request waits until they are there, and loads them."""
    session, keys = engine.lender, engine.keys("r")
    assert engine.ask("r") == WAITS
    assert session.requested == [keys]
    session.pending = set(keys)
    assert engine.ask("r") == WAITS
    session.pending, session.present = set(keys[3:]), set(keys[:3])
    assert engine.ask("r") == WAITS
    session.pending, session.present = set(), set(keys)
    assert engine.ask("r") == hits(6)
    assert session.requested == [keys]
    assert source(engine, "r") is CacheHitSource.DISK
    engine.admit("r", 0, range(1, 7))
    assert counts(engine) == {metrics.TIER_WAITS: 1}


@pytest.mark.parametrize(("latency", "waits"), [(0.030, True), (0.032, False), (0.050, False)])
def test_only_what_would_be_computed_otherwise_counts(
    engine: Stepping, latency: float, waits: bool
) -> None:
    """Two of six chunks are not in memory: they cost 32 ms to compute."""
    engine.lender.present = set(engine.keys("r")[:4])
    engine.lender.health = [TierHealth(True, round(latency * 1e6), 10**9, 0)]
    for _ in range(2):
        assert engine.ask("r") == (WAITS if waits else hits(4))


def test_a_tier_that_is_too_slow_is_tried_now_and_then(make: MakeEngine) -> None:
    """Some chunks come up for which no request waits, so that its figures are renewed."""
    engine = make(DISK)
    engine.lender.health = [TierHealth(True, 10**9, 10**9, 0)]
    for name, later in (("first", 0.0), ("second", PROBE_SECONDS - 0.1), ("third", 0.1)):
        engine.come(name, 40)
        engine.lender.in_tiers |= dict.fromkeys(engine.keys(name), 0)
        engine.now += later
        assert engine.ask(name) == hits(0)
    probed = [engine.keys(name)[:PROBE_CHUNKS] for name in ("first", "third")]
    assert engine.lender.requested == probed


def test_what_waits_at_the_tier_counts_also_that_of_the_same_step(make: MakeEngine) -> None:
    """Two requests that ask in one step: the second one sees what the first one has requested."""
    engine = make(DISK)
    for name in ("first", "second", "third"):
        engine.come(name, 6)
        engine.lender.in_tiers |= dict.fromkeys(engine.keys(name), 0)
    engine.lender.health = [TierHealth(True, 0, 100 * CHUNK_BYTES, 2 * CHUNK_BYTES)]
    assert engine.ask("first") == WAITS  # 20 + 60 ms, computing takes 96
    assert engine.ask("second") == hits(0)  # 60 ms more
    engine.step()  # from now on the tier says itself what waits
    assert engine.ask("third") == WAITS


def test_the_wait_ends_when_computing_would_have_ended(engine: Stepping) -> None:
    """Then what has come is loaded and the rest is computed; the request waits only once."""
    session, keys = engine.lender, engine.keys("r")
    assert engine.ask("r") == WAITS
    session.pending, session.present = set(keys[2:]), set(keys[:2])
    engine.now += 0.095  # of 96 ms
    assert engine.ask("r") == WAITS
    engine.now += 0.002
    assert engine.ask("r") == hits(2)
    session.present = set()
    assert engine.admit("r") == 0
    assert counts(engine) == {metrics.TIER_WAITS: 1, metrics.TIER_WAITS_OVER: 1}


@pytest.mark.parametrize("computing", [None, 100.0])
def test_no_wait_is_longer_than_pending_timeout(
    engine: Stepping, monkeypatch: pytest.MonkeyPatch, computing: float | None
) -> None:
    """Where nothing was measured yet, or computing takes longer."""
    monkeypatch.setattr(engine.manager.tier_waits.speed, "seconds", lambda _: computing)
    assert engine.ask("r") == WAITS
    engine.now += PENDING_TIMEOUT - 0.001
    assert engine.ask("r") == WAITS
    engine.now += 0.002
    assert engine.ask("r") == hits(0)


def test_a_tier_that_is_set_aside_is_a_miss_at_once(engine: Stepping) -> None:
    """The daemon gives its promotions up, and says that it is not usable."""
    assert engine.ask("r") == WAITS
    engine.lender.health = [TierHealth(False, 0, 0, 0)]
    assert engine.ask("r") == hits(0)


def test_a_shared_tier_that_does_not_answer_is_asked_for_a_short_time(make: MakeEngine) -> None:
    """It costs a request no more than `seek_timeout`."""
    engine = make(SHARED)
    engine.come("r", 6)
    assert engine.ask("r") == WAITS
    assert engine.lender.requested == [engine.keys("r")]
    engine.now += SEEK_TIMEOUT - 0.001
    assert engine.ask("r") == WAITS
    engine.now += 0.002
    assert engine.ask("r") == hits(0)


@pytest.mark.parametrize("comes", [True, False])
def test_what_a_shared_tier_has_is_waited_for(make: MakeEngine, comes: bool) -> None:
    """As long as it is worth for what is there, not for what was asked for."""
    engine = make(DISK, SHARED)
    engine.come("r", 6)
    session, keys = engine.lender, engine.keys("r")
    assert engine.ask("r") == WAITS
    session.pending = set(keys[:4])  # it has these, and they are promoted
    session.in_tiers = dict.fromkeys(keys[4:], NO_TIER)
    assert engine.ask("r") == WAITS
    engine.now += 0.063  # computing the four takes 64 ms
    assert engine.ask("r") == WAITS
    if comes:
        session.pending, session.present = set(), set(keys[:4])
        assert engine.ask("r") == hits(4)
        assert source(engine, "r") is CacheHitSource.EXTERNAL_UNSPECIFIED
    else:
        engine.now += 0.002
        assert engine.ask("r") == hits(0)


@pytest.mark.parametrize(
    ("allowed", "waits"),
    [
        ([], []),
        ([{"medium": "CPU"}], []),
        ([{"medium": "STORAGE"}], [DISK, SHARED]),
        ([{"medium": "STORAGE", "locality": "LOCAL"}], [DISK]),
        ([{"locality": "REMOTE"}], [SHARED]),
    ],
)
def test_a_request_loads_from_the_tiers_that_it_names(
    make: MakeEngine, allowed: list[dict[str, str]], waits: list[TierInfo]
) -> None:
    """Its `kv_load_tiers`; as with vLLM's own tiers, what is in memory is loaded in any case."""
    for tier in (DISK, SHARED):
        engine = make(tier)
        engine.come("r", 6, {"kv_load_tiers": allowed})
        keys = engine.keys("r")
        engine.lender.present = set(keys[:2])
        if tier is DISK:
            engine.lender.in_tiers = dict.fromkeys(keys[2:], 0)
        assert engine.ask("r") == (WAITS if tier in waits else hits(2))


def test_of_a_window_only_the_chunks_are_requested_that_a_load_needs(make: MakeEngine) -> None:
    """The last 64 tokens of it, and all chunks of the group that sees everything."""
    engine = make(DISK, windows=(window(["w"]),))
    engine.come("r", 12)
    everything, windows = engine.keys("r"), engine.keys("r", 1)
    engine.lender.in_tiers = dict.fromkeys(everything + windows, 0)
    assert engine.ask("r") == WAITS
    (requested,) = engine.lender.requested
    assert set(everything) <= set(requested)
    assert 4 <= len(set(windows) & set(requested)) <= 6
    assert windows[0] not in requested
    engine.lender.present = set(everything + windows)
    assert engine.ask("r") == (12 * BLOCK - 1, True)
