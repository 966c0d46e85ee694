"""Chunks below the daemon's memory: where they lie, and how they are asked for."""

import time
from types import SimpleNamespace

import pytest

from kvd.cache.tier_table import TierTable
from kvd_client import (
    NO_TIER,
    TIER_UNKNOWN,
    LookupResult,
    Scheduler,
    TierInfo,
)
from kvd_client.decisions import REREQUEST_SECONDS
from kvd_proto.messages import Detached
from tests.client.fake_daemon import BLOCKS_PER_CHUNK, USABLE, FakeDaemon
from tests.client.test_steps import steps, wait_steps
from tests.waiting import eventually

DISK = TierInfo(name="disk", medium="disk", shared=False)
SHARED = TierInfo(name="mooncake", medium="remote", shared=True)
WHOLE = (0, BLOCKS_PER_CHUNK)


@pytest.fixture
def table(daemon: FakeDaemon, stepping: Scheduler) -> TierTable:
    """What the daemon's two tiers hold, the second one shared; the scheduler is attached."""
    daemon.tiers = (DISK, SHARED)
    daemon.attach(stepping)
    return table_of(daemon)


def table_of(daemon: FakeDaemon) -> TierTable:
    """What the daemon's tiers hold."""
    assert daemon.directory is not None
    assert daemon.directory.tiers is not None
    return daemon.directory.tiers


def set_usable(table: TierTable, tier: int, usable: bool) -> None:
    """Whether a tier is."""
    table.set_health(tier, USABLE._replace(usable=usable))


def attach_anew(daemon: FakeDaemon, scheduler: Scheduler) -> None:
    """The engine is detached and attached, which it knows."""
    daemon.notify(Detached(reason="as the test says"))
    eventually(lambda: not scheduler.attached)
    daemon.attach(scheduler)


def sought(daemon: FakeDaemon) -> list[tuple[bytes, ...]]:
    """What was sought, step by step."""
    return [step.sought for step in steps(daemon) if step.sought]


# ----------------------------------------------------------------------- below


def test_the_first_usable_tier_that_holds_a_chunk_is_named(
    table: TierTable, stepping: Scheduler
) -> None:
    """The next one where the first cannot be used, and none where no other has it."""
    table.hold(b"k", 0, *WHOLE, 0)
    table.hold(b"k", 1, *WHOLE, 0)
    table.hold(b"only disk", 0, *WHOLE, 0)
    assert stepping.lookup(b"k") is LookupResult.MISS
    assert (stepping.find_tier(b"k"), stepping.find_tier(b"only disk")) == (0, 0)
    set_usable(table, 0, usable=False)
    assert (stepping.find_tier(b"k"), stepping.find_tier(b"only disk")) == (1, NO_TIER)


def test_blocks_that_a_tier_does_not_hold_are_not_below(
    table: TierTable, stepping: Scheduler
) -> None:
    """A chunk at a window's edge has only some; without a count all of the rest are needed."""
    table.hold(b"edge", 0, 1, 1, 0)
    table.hold(b"head", 0, 0, 1, 0)
    assert stepping.find_tier(b"edge") == stepping.find_tier(b"head") == NO_TIER
    assert stepping.find_tier(b"edge", 0, 1) == NO_TIER
    assert stepping.find_tier(b"edge", 1) == stepping.find_tier(b"edge", 1, 1) == 0


def test_what_nobody_knows_is_unknown_where_a_shared_tier_can_be_asked(
    table: TierTable, stepping: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for a while after it has said that it has no such chunk, nor while it is unusable."""
    monkeypatch.setattr("kvd_proto.tier_table.ABSENT_MS", 3_600_000)
    assert stepping.find_tier(b"k") == TIER_UNKNOWN
    table.mark_absent(b"k", time.monotonic())
    assert stepping.find_tier(b"k") == NO_TIER
    assert stepping.find_tier(b"other") == TIER_UNKNOWN
    set_usable(table, 1, usable=False)
    assert stepping.find_tier(b"other") == NO_TIER


def test_a_chunk_that_is_ready_with_other_blocks_is_not_brought_up(
    table: TierTable, daemon: FakeDaemon, stepping: Scheduler
) -> None:
    """The daemon leaves READY chunks alone, so nobody is to wait for that."""
    table.hold(b"part", 0, *WHOLE, 0)
    daemon.make_ready(b"part", 1, 1)
    assert stepping.lookup(b"part") is LookupResult.MISS
    assert stepping.find_tier(b"part") == NO_TIER
    assert stepping.find_tier(b"part", 1, 1) == 0


def test_without_tiers_nothing_is_below_and_nothing_is_sought(
    daemon: FakeDaemon, stepping: Scheduler
) -> None:
    """Nor while the engine is not attached, or a reset has no answer yet."""

    def nothing() -> bool:
        return (
            stepping.tiers == ()
            and stepping.find_tier(b"k") == NO_TIER
            and stepping.tier_status(0) is None
            and stepping.request_promotion([b"k"]) == 0
        )

    assert nothing()
    daemon.attach(stepping)
    assert nothing()
    stepping.end_step()
    assert steps(daemon) == []
    daemon.tiers = (DISK, SHARED)
    attach_anew(daemon, stepping)
    assert stepping.find_tier(b"k") == TIER_UNKNOWN
    daemon.freeze()
    stepping.reset(0)
    assert nothing()
    daemon.thaw()


# ------------------------------------------------------------------------ seek


def test_a_key_is_told_again_after_a_while_or_when_it_was_loaded(
    table: TierTable, daemon: FakeDaemon, stepping: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it is looked for; once loaded it may have gone again."""
    del table
    clock = SimpleNamespace(now=100.0)
    fake_time = SimpleNamespace(monotonic=lambda: clock.now)
    monkeypatch.setattr("kvd_client.scheduler.time", fake_time)
    assert stepping.request_promotion([b"a", b"ready"]) == 2
    clock.now += REREQUEST_SECONDS - 0.1
    assert stepping.request_promotion([b"a", b"ready"]) == 0
    stepping.complete_load(stepping.prepare_load([b"ready"]))
    assert stepping.request_promotion([b"a", b"ready"]) == 1
    clock.now += 0.1
    assert stepping.request_promotion([b"a", b"ready"]) == 1
    stepping.end_step()
    wait_steps(daemon, 1)
    assert sought(daemon) == [(b"a", b"ready", b"ready", b"a")]
