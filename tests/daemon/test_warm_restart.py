"""A daemon that ends leaves its chunks to the next one, however it ended."""

import fcntl
import os
import signal
from pathlib import Path

import pytest

from kvd.machine.memory import pool_directory_name
from kvd_client import LookupResult
from tests.conftest import Daemon, StartDaemon
from tests.daemon.engines import Engine, keys_of, make_layout, wait_hit
from tests.daemon.serving import run_kvd
from tests.processes import children_running, has_ended
from tests.soak.restart_loop import run
from tests.waiting import eventually

KEEP = ("--keep-pool", "yes")
SHM = Path("/dev/shm")


def area(daemon: Daemon) -> Path:
    """Where the daemon keeps its pool."""
    return SHM / pool_directory_name(daemon.runtime_dir)


@pytest.fixture
def warm(start_daemon: StartDaemon) -> Daemon:
    """A ready daemon that keeps its pool."""
    return start_daemon(*KEEP)


def looked_up(engine: Engine, keys: list[bytes]) -> list[LookupResult]:
    """What the directory says of the keys."""
    return [engine.scheduler.lookup(key) for key in keys]


def hits(engine: Engine, keys: list[bytes]) -> int:
    """How many of the keys are loaded with the right bytes; none may have wrong ones."""
    found = 0
    for at in range(0, len(keys), 10):
        loaded, wrong = engine.load(keys[at : at + 10])
        assert wrong == 0
        found += loaded
    return found


def stored(engine: Engine, keys: list[bytes], group: int = 0) -> None:
    """Store the keys and wait until all are READY."""
    for at in range(0, len(keys), 10):
        engine.store(keys[at : at + 10], group=group)
    wait_hit(engine, keys)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_chunks_outlive_the_daemon(
    warm: Daemon, start_daemon: StartDaemon, number: signal.Signals
) -> None:
    """Killed or stopped: a new engine finds every chunk, with its bytes and its partial ones."""
    keys, window = keys_of("kept", 40), keys_of("window", 6)
    with Engine(warm.runtime_dir).wait_attached() as engine:
        stored(engine, keys)
        stored(engine, window, group=1)
        before = warm.status()["boot_id"]
        warm.stop(number)
    second = start_daemon(*KEEP)
    report = second.status()
    assert report["boot_id"] != before
    assert report["namespaces"][0]["chunks"]["ready"] == 46
    with Engine(second.runtime_dir, name="other").wait_attached() as engine:
        assert looked_up(engine, keys + window) == [LookupResult.HIT] * 46
        assert hits(engine, keys) == 40
        assert engine.load(window, group=1) == (6, 0)
        assert not engine.scheduler.prepare_store(keys).keys
        stored(engine, keys_of("new", 10))
        assert hits(engine, keys + keys_of("new", 10)) == 50


def test_auto_finds_the_kept_pool(start_daemon: StartDaemon) -> None:
    """cpu_bytes auto: the same engine gets its pool with its chunks, a larger one a new pool."""
    auto = {"cpu_bytes": "auto"}
    keys = keys_of("auto", 10)
    options = (*KEEP, "--reserve", "0")
    first = start_daemon(*options, **auto, ready=False)
    with Engine(first.runtime_dir, world_size=1).wait_attached() as engine:
        stored(engine, keys)
        size = first.status()["pool"]["cpu_bytes"]
        first.stop(signal.SIGKILL)
    second = start_daemon(*options, **auto, ready=False)
    with Engine(second.runtime_dir, world_size=1).wait_attached() as engine:
        assert hits(engine, keys) == 10
        assert second.status()["pool"]["cpu_bytes"] == size
        second.stop(signal.SIGKILL)
    third = start_daemon(*options, **auto, ready=False)
    larger = make_layout(blocks=256)
    with Engine(third.runtime_dir, world_size=1, layout=larger).wait_attached() as engine:
        assert third.status()["pool"]["cpu_bytes"] == 4 * size
        assert hits(engine, keys) == 0


@pytest.mark.slow
def test_killed_at_random_moments_under_load() -> None:
    """Ten ends in a row: every READY chunk is a hit with bytes and description, and no other is."""
    tally = run(kills=10, seed=20261121)
    assert not tally.violations
    assert tally.kept == tally.described > 0
    assert tally.verified_bytes


def test_purge_gives_the_memory_back(warm: Daemon) -> None:
    """Not while a daemon runs, and not another user's; afterwards nothing is left."""
    purge = ("purge", "--runtime-dir", str(warm.runtime_dir))
    refused = run_kvd(*purge)
    assert refused.returncode == 1
    assert f"pid {warm.process.pid}" in refused.stderr
    warm.stop()
    assert area(warm).is_dir()
    if os.geteuid() == 0:
        os.chown(area(warm), 65534, 65534)
        refused = run_kvd(*purge)
        assert refused.returncode == 1
        assert "belongs to uid 65534" in refused.stderr
        os.chown(area(warm), 0, 0)
    assert "64.13 MiB given back" in run_kvd(*purge).stdout  # with the trailer
    assert not area(warm).exists()
    assert "0 B given back" in run_kvd(*purge).stdout


def test_lanes_of_a_dead_daemon_are_waited_for(warm: Daemon, start_daemon: StartDaemon) -> None:
    """No lane starts, so no slot is written, while one of the daemon before may still write."""
    with (area(warm) / "pool").open("rb") as pool:
        fcntl.flock(pool, fcntl.LOCK_SH)  # as a lane has it
        (own,) = children_running(warm.process.pid, "kvd.lane")
        own.suspend()  # it cannot end by itself
        warm.stop(signal.SIGKILL)
        second = start_daemon(*KEEP, ready=False)
        report = second.status(wait=1)
        assert not report["ready"]
        assert not report["lanes"][0]["up"]
    second.wait_ready()
    eventually(lambda: has_ended(own))
