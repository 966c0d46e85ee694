"""Whole daemons with tiers below a pool that is too small: what goes down comes back as it was."""

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvd_client import LookupResult
from kvd_proto.directory import DirectoryView
from tests.conftest import StartDaemon
from tests.daemon.engines import Engine, keys_of, wait_hit
from tests.daemon.serving import Daemon
from tests.daemon.slots import directory_fd
from tests.processes import frozen, has_ended, kill_and_wait
from tests.waiting import eventually

POOL = "1MiB"  # 64 chunks
HIT, MISS = LookupResult.HIT, LookupResult.MISS
MEMORY = "memory:,size=64MiB,keep=all,late=5"
AGAIN_SECONDS = 15.0  # until what has not gone down is stored once more


def tiers_of(daemon: Daemon) -> list[dict[str, Any]]:
    """What the daemon says of its tiers."""
    tiers: list[dict[str, Any]] = daemon.status()["tiers"]
    return tiers


def tier_of(daemon: Daemon, index: int = 0) -> dict[str, Any]:
    """What it says of one."""
    return tiers_of(daemon)[index]


def wait_tier(daemon: Daemon, index: int = 0, **wanted: Any) -> dict[str, Any]:
    """One tier, once these fields are so."""
    return eventually(
        lambda: tier_of(daemon, index),
        lambda tier: all(tier[key] == value for key, value in wanted.items()),
    )


def wait_below(engine: Engine, keys: Sequence[bytes], tier: int) -> None:
    """Until the directory says that this one has all of these, or -1: that none has."""
    eventually(lambda: set(map(engine.scheduler.below, keys)), {tier}.__eq__)


def wait_down(engine: Engine, keys: Sequence[bytes]) -> None:
    """Until the directory says that a tier has all of these."""
    below = engine.scheduler.below
    eventually(lambda: [below(key) for key in keys], lambda found: min(found) >= 0)


def wait_aside(daemon: Daemon, engine: Engine, keys: Sequence[bytes]) -> None:
    """Seek these until the first tier is set aside, or was until its process was replaced."""

    def aside() -> bool:
        engine.scheduler.seek(keys)
        opened = tier_of(daemon)["counters"]["opened"]
        return bool(opened["late"] + opened["failed"])

    eventually(aside)


def tiers_with(daemon: Daemon, key: bytes) -> int:
    """A bit for each tier that has the chunk."""
    fd = directory_fd(daemon.runtime_dir, "engine")
    assert fd is not None
    table = DirectoryView(os.pread(fd, os.fstat(fd).st_size, 0)).tiers
    os.close(fd)
    place = table.find(key) if table is not None else None
    return place.tiers if place is not None else 0


def engine_of(daemon: Daemon, **more: Any) -> Engine:
    """An engine of one rank that is attached."""
    return Engine(daemon.runtime_dir, world_size=1, **more).wait_attached()


def wait_usable(engine: Engine) -> None:
    """Until the directory says that all tiers may be used."""
    scheduler = engine.scheduler
    eventually(
        lambda: list(map(scheduler.tier_status, range(len(scheduler.tiers)))),
        lambda found: found and all(each is not None and each.usable for each in found),
    )


_floods = itertools.count()


def push_out(engine: Engine, keys: Sequence[bytes]) -> None:
    """Store others until memory has none of these."""
    while any(answer is not MISS for answer in engine.scheduler.lookup_many(keys)):
        engine.store(keys_of(f"flood-{next(_floods)}", 8), must=False)


def go_down(
    engine: Engine, keys: Sequence[bytes], is_down: Callable[[bytes], bool] | None = None
) -> None:
    """Store these until a tier has them all, or all are down: a put that is late is lost."""
    stored, below = float("-inf"), engine.scheduler.below
    is_down = is_down or (lambda key: below(key) >= 0)

    def down() -> bool:
        nonlocal stored
        lacking = [key for key in keys if not is_down(key)]
        if lacking and time.monotonic() > stored + AGAIN_SECONDS:
            push_out(engine, lacking)
            engine.store(lacking)
            stored = time.monotonic()
        return not lacking

    eventually(down)


def bring_up(engine: Engine, keys: Sequence[bytes]) -> None:
    """Seek these until they are in memory."""

    def sought() -> list[LookupResult]:
        engine.scheduler.seek(keys)
        return engine.scheduler.lookup_many(keys)

    eventually(sought, {HIT}.issuperset)


def comes_back(engine: Engine, keys: list[bytes]) -> None:
    """These are brought up and loaded, byte for byte."""
    bring_up(engine, keys)
    assert engine.load(keys) == (len(keys), 0)


@pytest.fixture
def disk(tmp_path: Path) -> str:
    """A tier whose chunks outlive its process, which may be replaced on a busy machine."""
    return f"disk:{tmp_path / 'slabs'},size=256MiB,late=5"


@pytest.fixture
def hang(tmp_path: Path) -> Path:
    """While this file exists the tier hangs."""
    return tmp_path / "hang"


@contextlib.contextmanager
def kept(
    daemon: Daemon, name: str = "kept", chunks: int = 8
) -> Iterator[tuple[Engine, list[bytes]]]:
    """An engine, and keys of chunks that are in the first tier and not in memory."""
    with engine_of(daemon) as engine:
        keys = keys_of(name, chunks)
        wait_usable(engine)
        go_down(engine, keys)
        push_out(engine, keys)
        yield engine, keys


def test_chunks_that_memory_has_no_room_for_come_back(start_daemon: StartDaemon, disk: str) -> None:
    """Stored, pushed out of a small pool, sought, loaded: the bytes are the same."""
    daemon = start_daemon("--tier", f"{disk},keep=all", cpu_bytes=POOL)
    with kept(daemon) as (engine, keys):
        wait_below(engine, keys, 0)
        comes_back(engine, keys)
    tier = wait_tier(daemon, state="up", breaker="closed", medium="disk")
    assert tier["counters"]["gets"]["ok"] >= 8
    assert tier["counters"]["get_bytes"] >= 8 * 16384


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
            return min(map(engine.scheduler.below, asked)) >= 0

        eventually(down)
        push_out(engine, [*asked, *stored])
        comes_back(engine, asked)
        assert [engine.scheduler.below(key) for key in stored] == [-1, -1]


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


def test_chunks_that_come_back_wrong_are_misses(start_daemon: StartDaemon) -> None:
    """None is loaded, each is counted and dropped, and the tier is set aside."""
    daemon = start_daemon("--tier", f"{MEMORY},corrupt=1", cpu_bytes=POOL)
    with kept(daemon) as (engine, keys):

        def corrupt() -> bool:
            engine.scheduler.seek(keys)
            return bool(tier_of(daemon)["counters"]["opened"]["corrupt"])

        eventually(corrupt)
        assert tier_of(daemon)["counters"]["gets"]["corrupt"] >= 3
        eventually(lambda: engine.scheduler.lookup_many(keys), {MISS}.issuperset)
    assert "is not what was put there" in daemon.wait_log("is set aside: 3 chunks")


def test_chunks_that_a_tier_has_lost_are_misses(start_daemon: StartDaemon) -> None:
    """It said that it keeps them and does not: each is found out once."""
    daemon = start_daemon("--tier", f"{MEMORY},lose=1", cpu_bytes=POOL)
    with kept(daemon) as (engine, keys):

        def absent() -> int:
            engine.scheduler.seek(keys)
            return int(tier_of(daemon)["counters"]["gets"]["absent"])

        eventually(absent, lambda n: n >= 8)
        wait_below(engine, keys, -1)
        eventually(lambda: engine.scheduler.lookup_many(keys), {MISS}.issuperset)


def test_a_tier_that_is_killed_is_started_again(start_daemon: StartDaemon) -> None:
    """This one forgets all; what is stored afterwards comes back from the next process."""
    daemon = start_daemon("--tier", MEMORY, cpu_bytes=POOL)
    with kept(daemon) as (engine, keys):
        os.kill(tier_of(daemon)["pid"], signal.SIGKILL)
        eventually(lambda: tier_of(daemon)["counters"]["restarts"], lambda n: n >= 1)
        wait_usable(engine)
        assert [engine.scheduler.below(key) for key in keys] == [-1] * 8
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


def test_a_reset_forgets_what_tiers_have(start_daemon: StartDaemon, disk: str) -> None:
    """Nothing of before comes up, not even after the tier's process is another one."""
    daemon = start_daemon("--tier", f"{disk},keep=all", cpu_bytes=POOL)
    with kept(daemon) as (engine, keys):
        engine.scheduler.reset()
        assert [engine.scheduler.below(key) for key in keys] == [-1] * 8
        engine.scheduler.seek(keys)
        fresh = keys_of("fresh", 8)
        go_down(engine, fresh)
        push_out(engine, fresh)
        comes_back(engine, fresh)
        assert {MISS}.issuperset(engine.scheduler.lookup_many(keys))


def test_a_tier_that_is_full_drops_what_is_oldest_and_says_so(start_daemon: StartDaemon) -> None:
    """It holds the last of many chunks; those that it dropped are not sought there."""
    daemon = start_daemon("--tier", "memory:,size=512KiB,keep=all,late=5", cpu_bytes=POOL)
    with engine_of(daemon) as engine:
        wait_usable(engine)
        first = keys_of("first", 8)
        go_down(engine, first)

        def dropped() -> bool:
            engine.store(keys_of(f"many-{next(_floods)}", 8))
            return bool(tier_of(daemon)["counters"]["dropped"] >= 30)

        eventually(dropped)
        wait_below(engine, first, -1)
        go_down(engine, keys_of("last", 8))


def test_two_tiers_are_filled_and_the_second_helps_out(
    start_daemon: StartDaemon, hang: Path, tmp_path: Path
) -> None:
    """While the first hangs, what both have comes from the second."""
    daemon = start_daemon(
        *("--tier", f"memory:,size=32MiB,keep=all,late=0.5,hang={hang}"),
        *("--tier", f"disk:{tmp_path / 'slabs'},size=256MiB,keep=all,late=5"),
        cpu_bytes=POOL,
    )
    keys = keys_of("kept", 8)
    with engine_of(daemon) as engine:
        wait_usable(engine)
        go_down(engine, keys, lambda key: tiers_with(daemon, key) == 0b11)
        push_out(engine, keys)
        hang.touch()
        wait_aside(daemon, engine, keys)
        comes_back(engine, keys)
        assert tier_of(daemon, 1)["counters"]["gets"]["ok"] >= 8


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
        assert [engine.scheduler.below(key) for key in keys] == [-1] * 8


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
        assert [engine.scheduler.below(key) for key in keys] == [-1] * 8
        fresh = keys_of("fresh", 8)
        go_down(engine, fresh)
        assert [engine.scheduler.below(key) for key in keys] == [-1] * 8
        engine.scheduler.seek(keys)
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
