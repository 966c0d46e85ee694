"""Requests that wait for tiers: vLLM's own search, on a session whose tiers a test makes up."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import Request

from kvd_client import NO_TIER, TIER_UNKNOWN, LookupResult, TierHealth, TierInfo
from kvd_client.vllm import metrics
from kvd_client.vllm.promotions import (
    PROBE_CHUNKS,
    PROBE_SECONDS,
    SAMPLES,
    PrefillSpeed,
)
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
    ) -> None:
        self.session = session
        self._stepping = Stepping(folder, monkeypatch, session, *windows)
        self.manager, self._half = self._stepping.manager, self._stepping.half
        self.computing: float | None = COMPUTING

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

    def made(session: Tiered, *windows: KVCacheGroupSpec) -> Engine:
        return Engine(tmp_path, monkeypatch, session, *windows)

    return made


@pytest.fixture
def engine(make: MakeEngine) -> Engine:
    """An engine of a daemon with a disk."""
    return make(Tiered(DISK))


@pytest.fixture
def keys(engine: Engine) -> list[bytes]:
    """Of a request "r" that has come, all six chunks of which are on the disk."""
    keys = engine.add("r", 6)
    engine.session.held = dict.fromkeys(keys, 0)
    return keys


def hits(blocks: int) -> tuple[int, bool]:
    """What vLLM is told where so many blocks can be loaded."""
    return blocks * BLOCK, blocks > 0


def test_all_chunks_of_a_prompt_are_sought_in_one_step(engine: Engine, keys: list[bytes]) -> None:
    """A prompt's head first; the request waits until they are there, and loads them."""
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


@pytest.mark.parametrize(("latency", "waits"), [(0.030, True), (0.032, False), (0.050, False)])
def test_only_what_would_be_computed_otherwise_counts(
    engine: Engine, keys: list[bytes], latency: float, waits: bool
) -> None:
    """Two of six chunks are not in memory: they cost 32 ms to compute."""
    engine.session.present = set(keys[:4])
    engine.session.status = [TierHealth(True, round(latency * 1e6), 10**9, 0)]
    for _ in range(2):
        assert engine.ask("r") == (WAITS if waits else hits(4))


def test_a_tier_that_is_too_slow_is_tried_now_and_then(engine: Engine) -> None:
    """Some chunks come up for which no request waits, so that its figures are renewed."""
    engine.session.status = [TierHealth(True, 10**9, 10**9, 0)]
    names = "first", "second", "third"
    keys = [engine.add(name, 40) for name in names]
    engine.session.held = {key: 0 for own in keys for key in own}
    for name, later in zip(names, (0.0, PROBE_SECONDS - 0.1, 0.1), strict=True):
        engine.now += later
        assert engine.ask(name) == hits(0)
    assert engine.session.sought == [keys[0][:PROBE_CHUNKS], keys[2][:PROBE_CHUNKS]]


def test_what_waits_at_the_tier_counts_also_that_of_the_same_step(engine: Engine) -> None:
    """Two requests that ask in one step: the second one sees what the first one has sought."""
    names = "first", "second", "third"
    engine.session.held = {key: 0 for name in names for key in engine.add(name, 6)}
    engine.session.status = [TierHealth(True, 0, 100 * CHUNK, 2 * CHUNK)]  # 10 ms a chunk
    assert engine.ask("first") == WAITS  # 20 + 60 ms, computing takes 96
    assert engine.ask("second") == hits(0)  # 60 ms more
    engine.manager.end_step()  # from now on the tier says itself what waits
    assert engine.ask("third") == WAITS


def test_the_wait_ends_when_computing_would_have_ended(engine: Engine, keys: list[bytes]) -> None:
    """Then what has come is loaded and the rest is computed; the request waits only once."""
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


@pytest.mark.usefixtures("keys")
@pytest.mark.parametrize("computing", [None, 1.0])
def test_no_wait_is_longer_than_pending_timeout(engine: Engine, computing: float | None) -> None:
    """Where nothing was measured yet, or computing takes longer."""
    engine.computing = computing
    assert engine.ask("r") == WAITS
    engine.now += PENDING_TIMEOUT - 0.001
    assert engine.ask("r") == WAITS
    engine.now += 0.002
    assert engine.ask("r") == hits(0)


@pytest.mark.usefixtures("keys")
def test_a_tier_that_is_set_aside_is_a_miss_at_once(engine: Engine) -> None:
    """The daemon gives its promotions up, and says that it is not usable."""
    assert engine.ask("r") == WAITS
    engine.session.status = [TierHealth(False, 0, 0, 0)]
    assert engine.ask("r") == hits(0)


def test_a_shared_tier_that_does_not_answer_is_asked_for_a_short_time(make: MakeEngine) -> None:
    """It costs a request no more than `seek_timeout`."""
    engine = make(Tiered(SHARED))
    keys = engine.add("r", 6)
    assert engine.ask("r") == WAITS
    assert engine.session.sought == [keys]
    engine.now += SEEK_TIMEOUT - 0.001
    assert engine.ask("r") == WAITS
    engine.now += 0.002
    assert engine.ask("r") == hits(0)


@pytest.mark.parametrize("comes", [True, False])
def test_what_a_shared_tier_has_is_waited_for(make: MakeEngine, comes: bool) -> None:
    """As long as it is worth for what is there, not for what was asked for."""
    engine = make(Tiered(DISK, SHARED))
    keys = engine.add("r", 6)
    assert engine.ask("r") == WAITS
    engine.session.pending = set(keys[:4])  # it has these, and they are promoted
    engine.session.held = dict.fromkeys(keys[4:], NO_TIER)
    assert engine.ask("r") == WAITS
    engine.now += 0.063  # computing the four takes 64 ms
    assert engine.ask("r") == WAITS
    if comes:
        engine.session.pending, engine.session.present = set(), set(keys[:4])
        assert engine.ask("r") == hits(4)
        assert engine.source("r", keys[0]) is CacheHitSource.EXTERNAL_UNSPECIFIED
    else:
        engine.now += 0.002
        assert engine.ask("r") == hits(0)


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


# ------------------------------------------------------------ how fast an engine computes


class Steps:
    """Steps at times that the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        fake_time = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr("kvd_client.vllm.promotions.time", fake_time)
        self.speed = PrefillSpeed()

    def schedule(self, prompt: int, decoded: int = 0, more: int = 0) -> None:
        """Schedule tokens of a new prompt, of requests that have answers, of an earlier prompt."""
        scheduled = {f"d{i}": 1 for i in range(decoded)} | ({"more": more} if more else {})
        cached = CachedRequestData.make_empty()
        cached.req_ids = [*scheduled]
        cached.num_output_tokens = [1] * decoded + [0] * bool(more)
        new: Any = [SimpleNamespace(req_id="new")] if prompt else []
        scheduled |= {"new": prompt} if prompt else {}
        self.speed.step_scheduled(
            SchedulerOutput(
                scheduled_new_reqs=new,
                scheduled_cached_reqs=cached,
                num_scheduled_tokens=scheduled,
                total_num_scheduled_tokens=sum(scheduled.values()),
                scheduled_spec_decode_tokens={},
                scheduled_encoder_inputs={},
                num_common_prefix_blocks=[],
                finished_req_ids=set(),
                free_encoder_mm_hashes=[],
            )
        )

    def end(self, seconds: float) -> None:
        """The oldest step ends, so much later than what was before."""
        self.now += seconds
        self.speed.step_ended()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Of an engine that has not computed yet."""
    return Steps(monkeypatch)


def test_prompts_are_measured_without_answers_and_idle_time(steps: Steps) -> None:
    """Nothing is known before one was computed; one may be computed in several steps."""
    steps.schedule(0, decoded=3)
    steps.end(1.0)
    assert steps.speed.seconds(1000) is None
    for _ in range(3):
        steps.now += 60.0
        steps.schedule(1000, decoded=2, more=24)
        steps.end(0.5)
    assert steps.speed.seconds(2048) == 1.0


def test_one_slow_step_changes_nothing(steps: Steps) -> None:
    """The median of the latest ones counts, so that it follows a lasting change."""
    for seconds in (0.5, 0.5, 9.0, 0.5):
        steps.schedule(1024)
        steps.end(seconds)
    assert steps.speed.seconds(1024) == 0.5
    for _ in range(SAMPLES // 2 + 1):
        steps.schedule(1024)
        steps.end(0.25)
    assert steps.speed.seconds(1024) == 0.25


def test_small_and_large_steps_are_kept_apart(steps: Steps) -> None:
    """A step has a fixed cost; a prompt goes by the largest steps that are no larger than it."""
    for tokens, seconds in ((16, 0.016), (1024, 0.128)):
        steps.schedule(tokens)
        steps.end(seconds)
    for tokens, seconds in ((17, 0.017), (600, 0.6), (4096, 0.512), (8, 0.008)):
        assert steps.speed.seconds(tokens) == pytest.approx(seconds)
    assert steps.speed.seconds_per_token == pytest.approx(125e-6)
