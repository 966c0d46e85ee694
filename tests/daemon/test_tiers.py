"""Whole daemons with tiers below a pool that is too small: what goes down comes back as it was."""

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import StartDaemon
from tests.daemon.engines import keys_of, wait_hit
from tests.daemon.tiers import (
    AGAIN_SECONDS,
    MISS,
    POOL,
    comes_back,
    engine_of,
    go_down,
    kept,
    push_out,
    tier_of,
    wait_aside,
    wait_below,
    wait_down,
    wait_usable,
)
from tests.processes import frozen, has_ended, kill_and_wait
from tests.waiting import eventually

MEMORY = "memory:,size=64MiB,keep=all,late=5"


@pytest.fixture
def disk(tmp_path: Path) -> str:
    """A tier whose chunks outlive its process, which may be replaced on a busy machine."""
    return f"disk:{tmp_path / 'slabs'},size=256MiB,late=5"


@pytest.fixture
def hang(tmp_path: Path) -> Path:
    """While this file exists the tier hangs."""
    return tmp_path / "hang"


def test_only_what_was_asked_for_goes_down_where_nothing_else_is_said(
    start_daemon: StartDaemon, disk: str
) -> None:
    """A chunk that is loaded goes, one that is only stored does not."""
    daemon = start_daemon("--tier", disk, cpu_bytes=POOL)
    with engine_of(daemon) as engine:
        asked, stored = keys_of("asked", 2), keys_of("stored", 2)
        wait_usable(engine)
        engine.store([*asked, *stored])
        wait_hit(engine, [*asked, *stored])

        loaded = float("-inf")

        def down() -> bool:
            nonlocal loaded
            if time.monotonic() > loaded + AGAIN_SECONDS:  # a put that is late comes to nothing
                assert engine.load(asked) == (2, 0)
                loaded = time.monotonic()
            return min(map(engine.scheduler.find_tier, asked)) >= 0

        eventually(down)
        push_out(engine, [*asked, *stored])
        comes_back(engine, asked)
        assert [engine.scheduler.find_tier(key) for key in stored] == [-1, -1]


def test_a_tier_that_hangs_costs_misses_and_is_used_again_by_itself(
    start_daemon: StartDaemon, hang: Path
) -> None:
    """Lookups miss, stores and loads from memory go on; afterwards all that it has is there."""
    daemon = start_daemon(
        "--tier", f"memory:,size=64MiB,keep=all,late=0.5,hang={hang}", cpu_bytes=POOL
    )
    with kept(daemon) as (engine, keys):
        hang.touch()
        wait_aside(daemon, engine, keys)
        eventually(lambda: engine.scheduler.lookup_many(keys), {MISS}.issuperset)
        wait_below(engine, keys, -1)
        others = keys_of("others", 4)
        engine.store(others)
        wait_hit(engine, others)
        assert engine.load(others) == (4, 0)
        hang.unlink()
        wait_usable(engine)
        if tier_of(daemon)["counters"]["restarts"]:  # it stood still for so long: it is empty now
            go_down(engine, keys)
            push_out(engine, keys)
        comes_back(engine, keys)
    assert sum(tier_of(daemon)["counters"]["opened"].values()) >= 1


def test_a_tier_that_is_killed_is_started_again(start_daemon: StartDaemon) -> None:
    """This one forgets all; what is stored afterwards comes back from the next process."""
    daemon = start_daemon("--tier", MEMORY, cpu_bytes=POOL)
    with kept(daemon) as (engine, keys):
        os.kill(tier_of(daemon)["pid"], signal.SIGKILL)
        eventually(lambda: tier_of(daemon)["counters"]["restarts"], lambda n: n >= 1)
        wait_usable(engine)
        assert [engine.scheduler.find_tier(key) for key in keys] == [-1] * 8
    with kept(daemon, "again") as (engine, keys):
        comes_back(engine, keys)


def test_a_process_that_stands_still_is_set_aside_and_goes_on(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """SIGSTOP: it answers nothing, and nobody waits for it.

    On a busy machine it is replaced before it goes on, so what it keeps is on a disk.
    """
    disk = f"disk:{tmp_path / 'slabs'},size=256MiB,keep=all,late=2"
    daemon = start_daemon("--tier", disk, cpu_bytes=POOL)
    with kept(daemon) as (engine, keys):
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
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """Killed, with its pool gone: chunks come back from the disk, and after a reset none does."""
    disk = ("--tier", f"disk:{tmp_path / 'slabs'},size=256MiB,keep=all,late=5")
    daemon = start_daemon(*disk, cpu_bytes=POOL)
    with kept(daemon) as (_, keys):
        pass
    daemon.process.kill()
    daemon.process.wait()
    daemon = start_daemon(*disk, cpu_bytes=POOL)
    with engine_of(daemon) as engine:
        wait_down(engine, keys)
        comes_back(engine, keys)
        engine.scheduler.reset()
    daemon.stop()
    daemon = start_daemon(*disk, cpu_bytes=POOL)
    with engine_of(daemon) as engine:
        wait_usable(engine)
        go_down(engine, keys_of("fresh", 8))
        assert [engine.scheduler.find_tier(key) for key in keys] == [-1] * 8


@pytest.mark.parametrize(
    ("pool", "then"),
    [
        (("--keep-pool", "yes"), ("--keep-pool", "yes", "--cold")),
        (("--keep-pool", "no"), ("--keep-pool", "no")),
    ],
    ids=["cold", "not kept"],
)
def test_a_reset_is_remembered_where_the_daemon_ends_before_its_tier_knows(
    start_daemon: StartDaemon, tmp_path: Path, pool: tuple[str, ...], then: tuple[str, ...]
) -> None:
    """The tier stands still, a reset is answered, both are killed: nothing of before is found."""
    disk = ("--tier", f"disk:{tmp_path / 'slabs'},size=256MiB,keep=all,late=5")
    daemon = start_daemon(*disk, *pool, cpu_bytes=POOL)
    with kept(daemon) as (engine, keys):
        tier = tier_of(daemon)["pid"]
        os.kill(tier, signal.SIGSTOP)
        try:
            assert engine.scheduler.reset() is not None
            kill_and_wait(daemon.process.pid)
        finally:
            with contextlib.suppress(ProcessLookupError):  # the daemon was faster
                kill_and_wait(tier)
    daemon = start_daemon(*disk, *then, cpu_bytes=POOL)
    with engine_of(daemon) as engine:
        wait_usable(engine)
        assert [engine.scheduler.find_tier(key) for key in keys] == [-1] * 8
        fresh = keys_of("fresh", 8)
        go_down(engine, fresh)
        assert [engine.scheduler.find_tier(key) for key in keys] == [-1] * 8
        engine.scheduler.request_promotion(keys)
        push_out(engine, fresh)
        comes_back(engine, fresh)
        assert {MISS}.issuperset(engine.scheduler.lookup_many(keys))


def test_a_wrong_option_ends_the_start_with_the_remedy(start_daemon: StartDaemon) -> None:
    """One clear error, before anything is begun."""
    daemon = start_daemon("--tier", "memory:,sice=1GiB", cpu_bytes=POOL, ready=False)
    assert daemon.process.wait() != 0
    assert "sice is none of" in daemon.log.read_text()


def test_a_daemon_that_stops_ends_its_tiers(start_daemon: StartDaemon, hang: Path) -> None:
    """Also one whose tier hangs does not wait for it."""
    daemon = start_daemon(
        "--tier", f"memory:,size=64MiB,keep=all,late=0.5,hang={hang}", cpu_bytes=POOL
    )
    with kept(daemon) as (engine, keys):
        process = psutil.Process(tier_of(daemon)["pid"])
        hang.touch()
        wait_aside(daemon, engine, keys)
        assert daemon.stop() == 0
    assert has_ended(process)
