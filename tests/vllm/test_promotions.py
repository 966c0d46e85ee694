"""Requests that wait for tiers: vLLM's own search, on a session whose tiers a test makes up."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import Request

from kvd_client import NO_TIER, TIER_UNKNOWN, LookupResult, TierHealth, TierInfo
from kvd_client.vllm import metrics
from kvd_client.vllm.promotions import PROBE_CHUNKS, PROBE_SECONDS
from tests.vllm.configs import BLOCK, window
from tests.vllm.stepping import Lender, Stepping

DISK = TierInfo(name="disk", medium="disk", shared=False)
SHARED = TierInfo(name="mooncake", medium="remote", shared=True)
CHUNK = 1000  # bytes
PENDING_TIMEOUT, SEEK_TIMEOUT = 1.0, 0.05  # those of `Stepping`
COMPUTING = 0.001  # seconds a token
WAITS: tuple[None, bool] = (None, False)


class Tiered(Lender):
    """A session with a daemon that has tiers.

    Attributes:
        held: chunks in tiers, and in which.
        pending: chunks that are being written.
        status: of each tier.
        sought: what was sought, call by call, each key once.
    """

    bytes_per_chunk = CHUNK

    def __init__(self, *tiers: TierInfo) -> None:
        super().__init__(None)
        self.tiers = tiers
        self.held: dict[bytes, int] = {}
        self.pending: set[bytes] = set()
        self.status = [TierHealth(True, 0, 10**9, 0)] * len(tiers)
        self.sought: list[list[bytes]] = []

    def lookup(self, key: bytes, *blocks: int) -> LookupResult:
        """See Scheduler."""
        pending = key in self.pending
        return LookupResult.HIT_PENDING if pending else super().lookup(key, *blocks)

    def find_tier(self, key: bytes, *blocks: int) -> int:
        """See Scheduler."""
        del blocks
        askable = any(
            tier.shared and status.usable
            for tier, status in zip(self.tiers, self.status, strict=True)
        )
        number = self.held.get(key, TIER_UNKNOWN if askable else NO_TIER)
        return number if number < 0 or self.status[number].usable else NO_TIER

    def tier_status(self, number: int) -> TierHealth:
        """See Scheduler."""
        return self.status[number]

    def request_promotion(self, keys: Sequence[bytes]) -> int:
        """See Scheduler."""
        known = {key for step in self.sought for key in step}
        due = [key for key in keys if key not in known]
        if due:
            self.sought.append(due)
        return len(due)


class Engine:
    """vLLM's half of the connector, whose clock and speed a test sets."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        session: Tiered,
        *windows: KVCacheGroupSpec,
        computing: float | None = COMPUTING,
    ) -> None:
        self.session = session
        self._stepping = Stepping(folder, monkeypatch, session, *windows)
        self.manager, self._half = self._stepping.manager, self._stepping.half
        self.computing = computing

        def seconds(tokens: int) -> float | None:
            return None if self.computing is None else tokens * self.computing

        monkeypatch.setattr(self.manager.tier_waits.speed, "seconds", seconds)
        self.now = 100.0
        fake_time = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr("kvd_client.vllm.promotions.time", fake_time)
        self.requests: dict[str, Request] = {}

    def add(self, name: str, blocks: int, tiers: list[dict[str, str]] | None = None) -> list[bytes]:
        """A new request of so many blocks, each a chunk, and from which tiers it may load.

        Returns:
            The keys of its chunks, group by group.
        """
        start = len(self.requests) * 1000
        extra = None if tiers is None else {"kv_transfer_params": {"kv_load_tiers": tiers}}
        request = Request(
            name,
            list(range(start, start + blocks * BLOCK)),
            SamplingParams(max_tokens=9, extra_args=extra),
            None,
            block_hasher=self._stepping.hasher,
        )
        self.requests[name] = request
        self._half.on_new_request(request)
        state = self._half._req_status[name]
        state.update_offload_keys()
        return [key for group in state.group_states for key in group.offload_keys]

    def ask(self, name: str) -> tuple[int | None, bool]:
        """What vLLM is told that the request can load."""
        found: tuple[int | None, bool] = self._half.get_num_new_matched_tokens(
            self.requests[name], 0
        )
        return found

    def source(self, name: str, key: bytes) -> CacheHitSource:
        """Where the request's chunk came from."""
        context = self._half._req_status[name].req_context
        return self.manager.get_load_source(OffloadKey(key), context)

    def admit(self, name: str) -> None:
        """The request gets blocks, and loads nothing."""
        blocks: Any = None  # not looked at
        self._half.update_state_after_alloc(self.requests[name], blocks, 0)

    def counts(self) -> dict[str, float]:
        """Waits that were counted since the last time."""
        figures = self.manager.get_stats().reduce()
        return {name: value for name, value in figures.items() if "_tier_" in name}


MakeEngine = Callable[..., Engine]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeEngine:
    """Makes an engine on a session."""

    def made(session: Tiered, *windows: KVCacheGroupSpec, **more: Any) -> Engine:
        return Engine(tmp_path, monkeypatch, session, *windows, **more)

    return made


def hits(blocks: int) -> tuple[int, bool]:
    """What vLLM is told where so many blocks can be loaded."""
    return blocks * BLOCK, blocks > 0


def test_all_chunks_of_a_prompt_are_sought_in_one_step(make: MakeEngine) -> None:
    """A prompt's head first; the request waits until they are there, and loads them."""
    engine = make(Tiered(DISK))
    keys = engine.add("r", 6)
    engine.session.held = dict.fromkeys(keys, 0)
    assert engine.ask("r") == WAITS
    assert engine.session.sought == [keys]
    engine.session.pending = set(keys)
    assert engine.ask("r") == WAITS
    engine.session.pending = set(keys[3:])
    engine.session.present = set(keys[:3])
    assert engine.ask("r") == WAITS
    engine.session.pending, engine.session.present = set(), set(keys)
    assert engine.ask("r") == hits(6)
    assert engine.session.sought == [keys]
    assert engine.source("r", keys[0]) is CacheHitSource.DISK
    engine.admit("r")
    assert engine.counts() == {metrics.TIER_WAITS: 1}


def test_chunks_behind_a_miss_are_not_sought(make: MakeEngine) -> None:
    """They are of no use without those before them."""
    engine = make(Tiered(DISK))
    keys = engine.add("r", 6)
    engine.session.held = dict.fromkeys([*keys[:2], *keys[3:]], 0)
    assert engine.ask("r") == WAITS
    assert engine.session.sought == [keys[:2]]


@pytest.mark.parametrize(("latency", "waits"), [(0.030, True), (0.032, False), (0.050, False)])
def test_only_what_would_be_computed_otherwise_counts(
    make: MakeEngine, latency: float, waits: bool
) -> None:
    """Two of six chunks are not in memory: they cost 32 ms to compute."""
    engine = make(Tiered(DISK))
    keys = engine.add("r", 6)
    engine.session.present = set(keys[:4])
    engine.session.held = dict.fromkeys(keys, 0)
    engine.session.status = [TierHealth(True, round(latency * 1e6), 10**9, 0)]
    for _ in range(2):
        assert engine.ask("r") == (WAITS if waits else hits(4))


def test_a_tier_that_is_too_slow_is_tried_now_and_then(make: MakeEngine) -> None:
    """Some chunks come up that nobody waits for, so that its figures are renewed."""
    engine = make(Tiered(DISK))
    engine.session.status = [TierHealth(True, 10**9, 10**9, 0)]
    names = "first", "second", "third"
    keys = [engine.add(name, 40) for name in names]
    engine.session.held = {key: 0 for own in keys for key in own}
    for name, later in zip(names, (0.0, PROBE_SECONDS - 0.1, 0.1), strict=True):
        engine.now += later
        assert engine.ask(name) == hits(0)
    assert engine.session.sought == [keys[0][:PROBE_CHUNKS], keys[2][:PROBE_CHUNKS]]


def test_what_waits_at_the_tier_counts_also_that_of_the_same_step(make: MakeEngine) -> None:
    """Two requests that ask in one step: the second one sees what the first one has sought."""
    engine = make(Tiered(DISK))
    first, second = engine.add("first", 6), engine.add("second", 6)
    engine.session.held = dict.fromkeys([*first, *second], 0)
    engine.session.status = [TierHealth(True, 0, 100 * CHUNK, 2 * CHUNK)]  # 10 ms a chunk
    assert engine.ask("first") == WAITS  # 20 + 60 ms, computing takes 96
    assert engine.ask("second") == hits(0)  # 60 ms more
    third = engine.add("third", 6)
    engine.session.held |= dict.fromkeys(third, 0)
    engine.manager.end_step()  # from now on the tier says itself what waits
    assert engine.ask("third") == WAITS


def test_the_wait_ends_when_computing_would_have_ended(make: MakeEngine) -> None:
    """Then what has come is loaded and the rest is computed; the request waits only once."""
    engine = make(Tiered(DISK))
    keys = engine.add("r", 6)
    engine.session.held = dict.fromkeys(keys, 0)
    assert engine.ask("r") == WAITS
    engine.session.pending = set(keys[2:])
    engine.session.present = set(keys[:2])
    engine.now += 0.095  # of 96 ms
    assert engine.ask("r") == WAITS
    engine.now += 0.002
    assert engine.ask("r") == hits(2)
    engine.session.present = set()
    assert engine.ask("r") == hits(0)
    engine.admit("r")
    assert engine.counts() == {metrics.TIER_WAITS: 1, metrics.TIER_WAITS_OVER: 1}


@pytest.mark.parametrize("computing", [None, 1.0])
def test_no_wait_is_longer_than_pending_timeout(make: MakeEngine, computing: float | None) -> None:
    """Where nothing was measured yet, or computing takes longer."""
    engine = make(Tiered(DISK), computing=computing)
    keys = engine.add("r", 6)
    engine.session.held = dict.fromkeys(keys, 0)
    assert engine.ask("r") == WAITS
    engine.now += PENDING_TIMEOUT - 0.001
    assert engine.ask("r") == WAITS
    engine.now += 0.002
    assert engine.ask("r") == hits(0)


def test_a_tier_that_is_set_aside_is_a_miss_at_once(make: MakeEngine) -> None:
    """The daemon gives its promotions up, and says that it is not usable."""
    engine = make(Tiered(DISK))
    keys = engine.add("r", 6)
    engine.session.held = dict.fromkeys(keys, 0)
    assert engine.ask("r") == WAITS
    engine.session.status = [TierHealth(False, 0, 0, 0)]
    assert engine.ask("r") == hits(0)


def test_what_nobody_knows_is_asked_for_a_short_time(make: MakeEngine) -> None:
    """A shared tier that does not answer costs a request no more than `seek_timeout`."""
    engine = make(Tiered(SHARED))
    keys = engine.add("r", 6)
    assert engine.ask("r") == WAITS
    assert engine.session.sought == [keys]
    engine.now += SEEK_TIMEOUT - 0.001
    assert engine.ask("r") == WAITS
    engine.now += 0.002
    assert engine.ask("r") == hits(0)


def test_what_a_shared_tier_has_is_waited_for(make: MakeEngine) -> None:
    """As long as it is worth for what is there, not for what was asked for."""
    engine = make(Tiered(DISK, SHARED))
    keys = engine.add("r", 6)
    assert engine.ask("r") == WAITS
    engine.session.pending = set(keys[:4])  # it has these, and they are promoted
    engine.session.held = dict.fromkeys(keys[4:], NO_TIER)
    assert engine.ask("r") == WAITS
    engine.now += 0.063  # computing the four takes 64 ms
    assert engine.ask("r") == WAITS
    engine.session.pending, engine.session.present = set(), set(keys[:4])
    assert engine.ask("r") == hits(4)
    assert engine.source("r", keys[0]) is CacheHitSource.EXTERNAL_UNSPECIFIED

    keys = engine.add("other", 6)
    assert engine.ask("other") == WAITS
    engine.session.pending = set(keys[:4])
    engine.session.held |= dict.fromkeys(keys[4:], NO_TIER)
    assert engine.ask("other") == WAITS
    engine.now += 0.065
    assert engine.ask("other") == hits(0)


@pytest.mark.parametrize(
    ("wanted", "waits"),
    [
        ([], []),
        ([{"medium": "CPU"}], []),
        ([{"medium": "STORAGE"}], ["disk", "shared"]),
        ([{"medium": "STORAGE", "locality": "LOCAL"}], ["disk"]),
        ([{"locality": "REMOTE"}], ["shared"]),
    ],
)
def test_a_request_loads_from_the_tiers_that_it_names(
    make: MakeEngine, wanted: list[dict[str, str]], waits: list[str]
) -> None:
    """Its `kv_load_tiers`; as with vLLM's own tiers, what is in memory is loaded in any case."""
    for name, tier in (("disk", DISK), ("shared", SHARED)):
        engine = make(Tiered(tier))
        keys = engine.add(name, 6, wanted)
        engine.session.present = set(keys[:2])
        if tier is DISK:
            engine.session.held = dict.fromkeys(keys[2:], 0)
        assert engine.ask(name) == (WAITS if name in waits else hits(2))


def test_of_a_window_only_the_chunks_are_sought_that_a_load_needs(make: MakeEngine) -> None:
    """The last 64 tokens of it, and all chunks of the group that sees everything."""
    engine = make(Tiered(DISK), window(["w"]))
    keys = engine.add("r", 12)
    everything, windows = keys[:12], keys[12:]
    engine.session.held = dict.fromkeys(keys, 0)
    assert engine.ask("r") == WAITS
    (sought,) = engine.session.sought
    assert set(everything) <= set(sought)
    assert 4 <= len(set(windows) & set(sought)) <= 6
    assert windows[0] not in sought
    engine.session.present = set(keys)
    assert engine.ask("r") == (12 * BLOCK - 1, True)
