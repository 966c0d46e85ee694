"""Whole daemons with tiers below a pool that is too small: what goes down comes back as it was."""

import contextlib
import itertools
import json
import os
import select
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvd.metrics.reading import size
from kvd_client import NO_TIER, LookupResult
from tests.conftest import StartDaemon
from tests.daemon.engines import Engine, engine_of, keys_of
from tests.daemon.serving import Daemon, run_kvd, wait_state
from tests.processes import frozen, has_ended, kill_and_wait
from tests.waiting import PATIENCE, eventually

HIT, MISS = LookupResult.HIT, LookupResult.MISS
POOL = "1MiB"  # 64 chunks
AGAIN_SECONDS = 15.0  # until what has not gone down is stored once more

_floods = itertools.count()


def tier_of(daemon: Daemon) -> dict[str, Any]:
    """The status of a daemon's only tier."""
    (tier,) = daemon.status()["tiers"]
    return dict(tier)


def is_below(engine: Engine, keys: Sequence[bytes]) -> bool:
    """Whether the directory says that a tier has all of these."""
    return all(engine.scheduler.find_tier(key) >= 0 for key in keys)


def wait_usable(engine: Engine) -> None:
    """Until the directory says that all tiers may be used."""
    scheduler = engine.scheduler
    eventually(
        lambda: list(map(scheduler.tier_status, range(len(scheduler.tiers)))),
        lambda statuses: statuses and all(status and status.usable for status in statuses),
    )


def wait_aside(daemon: Daemon, engine: Engine, keys: Sequence[bytes]) -> None:
    """Seek these until the tier is set aside, or was until its process was replaced."""

    def is_aside() -> bool:
        engine.scheduler.request_promotion(keys)
        opened = tier_of(daemon)["counters"]["opened"]
        return bool(opened["late"] + opened["failed"])

    eventually(is_aside)


def push_out(engine: Engine, keys: Sequence[bytes]) -> None:
    """Store others until memory has none of these."""
    while any(answer is not MISS for answer in engine.scheduler.lookup_many(keys)):
        engine.store(keys_of(f"flood-{next(_floods)}", 8), must=False)


def go_down(engine: Engine, keys: Sequence[bytes]) -> None:
    """Store these until the tier has them all: a put that is late is lost."""
    stored = float("-inf")

    def are_down() -> bool:
        nonlocal stored
        lacking = [key for key in keys if not is_below(engine, [key])]
        if lacking and time.monotonic() > stored + AGAIN_SECONDS:
            push_out(engine, lacking)
            engine.store(lacking)
            stored = time.monotonic()
        return not lacking

    eventually(are_down)


def comes_back(engine: Engine, keys: list[bytes]) -> None:
    """Seek these until they are in memory, and load them byte for byte."""

    def lookups() -> list[LookupResult]:
        engine.scheduler.request_promotion(keys)
        return engine.scheduler.lookup_many(keys)

    eventually(lookups, {HIT}.issuperset)
    assert engine.load(keys) == (len(keys), 0)


@contextlib.contextmanager
def kept_below(daemon: Daemon, chunks: int = 8) -> Iterator[tuple[Engine, list[bytes]]]:
    """An engine, and keys of chunks that are in the tier and not in memory."""
    with engine_of(daemon) as engine:
        keys = keys_of("kept", chunks)
        wait_usable(engine)
        go_down(engine, keys)
        push_out(engine, keys)
        yield engine, keys


@pytest.fixture
def disk(tmp_path: Path) -> str:
    """A tier whose chunks outlive its process, which may be replaced on a busy machine."""
    return f"disk:{tmp_path / 'slabs'},size=256MiB,late=5"


@pytest.fixture
def hang(tmp_path: Path) -> Path:
    """While this file exists the tier `hanging` hangs."""
    return tmp_path / "hang"


@pytest.fixture
def hanging(hang: Path) -> str:
    """A tier in the memory of its process."""
    return f"memory:,size=64MiB,keep=all,late=0.5,hang={hang}"


def test_the_scheduler_that_seeks_a_chunk_is_woken_when_it_is_there(
    start_daemon: StartDaemon, disk: str
) -> None:
    """Another engine of the same model finds it as well; every command shows the tier."""
    tier = f"{disk},keep=all"
    daemon = start_daemon("--tier", tier, cpu_bytes=POOL)
    with kept_below(daemon, 1) as (engine, keys), engine_of(daemon, "other") as other:
        scheduler = engine.scheduler
        assert [tier.medium for tier in scheduler.tiers] == ["disk"]
        wait_state(daemon, writing=0)
        poll = select.poll()
        poll.register(scheduler.fileno(), select.POLLIN)
        eventually(lambda: not (scheduler.take_ready() or poll.poll(0)))  # of what was stored

        def is_there() -> bool:
            scheduler.request_promotion(keys)  # once more where the tier was late
            return scheduler.lookup(keys[0]) is HIT

        eventually(is_there)
        assert poll.poll(PATIENCE * 1000), "the scheduler was not woken"
        assert engine.load(keys) == other.load(keys) == (1, 0)
        assert scheduler.find_tier(b"unheard of") == NO_TIER
    runtime_dir = ("--runtime-dir", str(daemon.runtime_dir))
    shown = run_kvd("status", *runtime_dir).stdout
    assert size(256 * 2**20) in shown
    assert f"disk is {tier}, pid {tier_of(daemon)['pid']}" in shown
    shown = run_kvd("top", "--once", "--interval", "0.1", *runtime_dir).stdout
    assert "Tiers, the last minute" in shown
    command = ("selftest", "--device", "host", "--json", *runtime_dir)
    tested = eventually(lambda: run_kvd(*command), lambda tested: tested.returncode == 0)
    (row,) = json.loads(tested.stdout)["tiers"]
    assert (row["name"], row["ok"]) == ("disk", True)


def test_a_tier_that_hangs_costs_misses_and_is_used_again_by_itself(
    start_daemon: StartDaemon, hang: Path, hanging: str
) -> None:
    """Lookups miss, stores and loads from memory go on; afterwards all that it has is there."""
    daemon = start_daemon("--tier", hanging, cpu_bytes=POOL)
    with kept_below(daemon) as (engine, keys):
        hang.touch()
        wait_aside(daemon, engine, keys)
        eventually(lambda: engine.scheduler.lookup_many(keys), {MISS}.issuperset)
        eventually(lambda: set(map(engine.scheduler.find_tier, keys)), {NO_TIER}.__eq__)
        assert engine.load(engine.stored("others", 4)) == (4, 0)
        hang.unlink()
        wait_usable(engine)
        if tier_of(daemon)["counters"]["restarts"]:  # it stood still for so long: it is empty now
            go_down(engine, keys)
            push_out(engine, keys)
        comes_back(engine, keys)
    assert sum(tier_of(daemon)["counters"]["opened"].values()) >= 1


def test_a_process_that_stands_still_is_set_aside_and_goes_on(
    start_daemon: StartDaemon, disk: str
) -> None:
    """SIGSTOP: it answers nothing, and no call waits for it.

    On a busy machine it is replaced before it goes on, so what it keeps is on a disk.
    """
    daemon = start_daemon("--tier", f"{disk},keep=all", cpu_bytes=POOL)
    with kept_below(daemon) as (engine, keys):
        with frozen(tier_of(daemon)["pid"]):
            wait_aside(daemon, engine, keys)
            eventually(
                lambda: (
                    {MISS}.issuperset(engine.scheduler.lookup_many(keys))
                    or tier_of(daemon)["counters"]["restarts"]
                )
            )
        wait_usable(engine)
        comes_back(engine, keys)


def test_a_new_daemon_with_an_empty_pool_finds_what_a_disk_has(
    start_daemon: StartDaemon, disk: str
) -> None:
    """Killed, with its pool gone: chunks come back from the disk, and after a reset none does."""
    tier = ("--tier", f"{disk},keep=all")
    daemon = start_daemon(*tier, cpu_bytes=POOL)
    with kept_below(daemon) as (_, keys):
        pass
    daemon.stop(signal.SIGKILL)
    daemon = start_daemon(*tier, cpu_bytes=POOL)
    with engine_of(daemon) as engine:
        eventually(lambda: is_below(engine, keys))
        comes_back(engine, keys)
        engine.scheduler.reset()
    daemon.stop()
    daemon = start_daemon(*tier, cpu_bytes=POOL)
    with engine_of(daemon) as engine:
        wait_usable(engine)
        go_down(engine, keys_of("fresh", 8))
        assert [engine.scheduler.find_tier(key) for key in keys] == [NO_TIER] * 8


@pytest.mark.parametrize(
    "pool", [("--keep-pool", "yes", "--cold"), ("--keep-pool", "no")], ids=["cold", "not kept"]
)
def test_a_reset_is_remembered_where_the_daemon_ends_before_its_tier_knows(
    start_daemon: StartDaemon, disk: str, pool: tuple[str, ...]
) -> None:
    """The tier stands still, a reset is answered, both are killed: nothing of before is found."""
    tier = ("--tier", f"{disk},keep=all")
    daemon = start_daemon(*tier, *pool, cpu_bytes=POOL)
    with kept_below(daemon) as (engine, keys):
        pid = tier_of(daemon)["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            assert engine.scheduler.reset() is not None
            kill_and_wait(daemon.process.pid)
        finally:
            with contextlib.suppress(ProcessLookupError):  # the daemon was faster
                kill_and_wait(pid)
    daemon = start_daemon(*tier, *pool, cpu_bytes=POOL)
    with engine_of(daemon) as engine:
        wait_usable(engine)
        assert [engine.scheduler.find_tier(key) for key in keys] == [NO_TIER] * 8
        fresh = keys_of("fresh", 8)
        go_down(engine, fresh)
        assert [engine.scheduler.find_tier(key) for key in keys] == [NO_TIER] * 8
        engine.scheduler.request_promotion(keys)
        push_out(engine, fresh)
        comes_back(engine, fresh)
        assert {MISS}.issuperset(engine.scheduler.lookup_many(keys))


def test_a_daemon_that_stops_ends_its_tiers(
    start_daemon: StartDaemon, hang: Path, hanging: str
) -> None:
    """A daemon whose tier hangs does not wait for it."""
    daemon = start_daemon("--tier", hanging, cpu_bytes=POOL)
    with kept_below(daemon) as (engine, keys):
        process = psutil.Process(tier_of(daemon)["pid"])
        hang.touch()
        wait_aside(daemon, engine, keys)
        assert daemon.stop() == 0
    assert has_ended(process)
