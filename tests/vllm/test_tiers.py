"""Whether a request waits for tiers, decided from figures; and how fast an engine computes."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

from kvd_client import TierHealth, TierInfo
from kvd_client.vllm.promotions import (
    MAX_OPEN_STEPS,
    SAMPLES,
    PrefillSpeed,
)

DISK = TierInfo(name="disk", medium="disk", shared=False)
REMOTE = TierInfo(name="mooncake", medium="remote", shared=True)
MEMORY = TierInfo(name="memory", medium="memory", shared=False)
OTHER = TierInfo(name="tape", medium="tape", shared=False)


def status(latency_us: int, speed: int, queued: int = 0) -> TierHealth:
    """Of a usable tier."""
    return TierHealth(True, latency_us, speed, queued)


# ----------------------------------------------------------------- prefill speed


class Engine:
    """Steps at times that the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        fake_time = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr("kvd_client.vllm.promotions.time", fake_time)
        self.speed = PrefillSpeed()

    def schedule(self, prompt: int, decoded: int = 0) -> None:
        """Schedule a step of so many tokens of a new prompt, and of requests that have answers."""
        names = [f"d{i}" for i in range(decoded)]
        self.speed.step_scheduled(
            output({"new": prompt} if prompt else {}, dict.fromkeys(names, 1))
        )

    def end(self, seconds: float) -> None:
        """The oldest step ends, so much later than what was before."""
        self.now += seconds
        self.speed.step_ended()


def output(new: dict[str, int], decoding: dict[str, int], **more: int) -> SchedulerOutput:
    """What is scheduled: new prompts, requests with answers, and more of prompts begun before."""
    scheduled = new | decoding | more
    cached = CachedRequestData.make_empty()
    cached.req_ids = [*decoding, *more]
    cached.num_output_tokens = [1] * len(decoding) + [0] * len(more)
    first: Any = [SimpleNamespace(req_id=name) for name in new]
    return SchedulerOutput(
        scheduled_new_reqs=first,
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        num_common_prefix_blocks=[],
        finished_req_ids=set(),
        free_encoder_mm_hashes=[],
    )


def test_idle_time_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither before a step nor after it."""
    engine = Engine(monkeypatch)
    for _ in range(3):
        engine.now += 60.0
        engine.schedule(1024)
        engine.end(0.5)
    assert engine.speed.seconds(2048) == 1.0


def test_a_step_that_is_scheduled_ahead_begins_when_the_one_before_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with vLLM's asynchronous scheduling."""
    engine = Engine(monkeypatch)
    engine.schedule(0, decoded=1)
    engine.schedule(1024)
    engine.end(0.25)
    engine.schedule(0, decoded=2)
    engine.end(0.5)
    assert engine.speed.seconds(1024) == 0.5


def test_one_slow_step_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median of the latest ones counts, so that it follows a lasting change."""
    engine = Engine(monkeypatch)
    for seconds in (0.5, 0.5, 9.0, 0.5):
        engine.schedule(1024)
        engine.end(seconds)
    assert engine.speed.seconds(1024) == 0.5
    for _ in range(SAMPLES // 2 + 1):
        engine.schedule(1024)
        engine.end(0.25)
    assert engine.speed.seconds(1024) == 0.25


def test_small_and_large_steps_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has a fixed cost; a prompt goes by the largest steps that are no larger than it."""
    engine = Engine(monkeypatch)
    for tokens, seconds in ((16, 0.016), (1024, 0.128)):
        engine.schedule(tokens)
        engine.end(seconds)
    assert engine.speed.seconds(17) == pytest.approx(0.017)
    assert engine.speed.seconds(600) == pytest.approx(0.6)
    assert engine.speed.seconds(4096) == pytest.approx(0.512)
    assert engine.speed.seconds(8) == pytest.approx(0.008)
    assert engine.speed.seconds_per_token == pytest.approx(125e-6)


def test_steps_whose_end_cannot_be_told_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a step without tokens, and where vLLM loses one."""
    engine = Engine(monkeypatch)
    engine.schedule(1024)
    engine.schedule(0)
    engine.end(0.001)
    engine.end(0.001)
    assert engine.speed.seconds(1024) is None
    for _ in range(MAX_OPEN_STEPS + 1):
        engine.schedule(1024)
    engine.end(1.0)
    engine.end(1.0)
    assert engine.speed.seconds(1024) == 1.0
