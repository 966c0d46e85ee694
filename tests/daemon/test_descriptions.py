"""Descriptions of chunks in a whole daemon: told by one engine, read by others and after a kill."""

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvd.machine.memory import pool_directory_name
from kvd_proto.descriptions import encode
from kvd_proto.directory import LookupResult
from tests.conftest import Daemon, StartDaemon
from tests.daemon.engines import Engine, described, keys_of, read_descriptions, wait_hit
from tests.full import fill_up
from tests.waiting import eventually

KEEP = ("--keep-pool", "yes")
SHM = Path("/dev/shm")
Place = tuple[int, int]
"""Slot and generation."""


def store(engine: Engine, keys: Sequence[bytes]) -> None:
    """Store chunks with their descriptions, and wait until all are READY."""
    for at in range(0, len(keys), 10):
        engine.store(keys[at : at + 10], describe=lambda key: encode(described(key)))
    wait_hit(engine, list(keys))


def counters(daemon: Daemon) -> tuple[int, int, int]:
    """Descriptions that the only namespace has kept, found too long, and had no room for."""
    (namespace,) = daemon.status()["namespaces"]
    of = namespace["counters"]
    return of["descriptions"], of["descriptions_too_long"], of["descriptions_no_room"]


def file_of(daemon: Daemon, pool_dir: Path = SHM) -> Path:
    """The descriptions of the daemon's only namespace."""
    (file,) = (pool_dir / pool_directory_name(daemon.runtime_dir)).glob("*.descriptions")
    return file


def test_what_one_engine_says_another_reads_after_a_kill_too(start_daemon: StartDaemon) -> None:
    """Every description is the same: in the engine, in another one, and with two more daemons."""
    keys, plain = keys_of("said", 30), keys_of("plain", 3)
    expected = [*map(described, keys), None, None, None]
    daemon = start_daemon(*KEEP)
    with (
        Engine(daemon.runtime_dir, events=True).wait_attached() as engine,
        Engine(daemon.runtime_dir, "other").wait_attached() as other,
    ):
        assert engine.scheduler.describes
        assert not other.scheduler.describes
        store(engine, keys)
        store(other, plain)
        for one in (engine, other):
            assert read_descriptions(one.scheduler, keys + plain) == expected
        assert counters(daemon) == (30, 0, 0)
        for _ in range(2):
            daemon.stop(signal.SIGKILL)
            daemon = start_daemon(*KEEP)
            for one in (engine, other):
                one.wait_attached(daemon)
                wait_hit(one, keys + plain)
                assert read_descriptions(one.scheduler, keys + plain) == expected
    with Engine(daemon.runtime_dir, "late").wait_attached() as late:
        assert read_descriptions(late.scheduler, keys + plain) == expected
        assert late.load(keys[:10]) == (10, 0)


def places(engine: Engine, keys: Sequence[bytes], *, describe: bool = True) -> dict[bytes, Place]:
    """Store chunks; slot and generation of those that are there when all is quiet.

    For the next slots on loan the daemon may evict some of them.
    """
    engine.store(keys, describe=(lambda key: encode(described(key))) if describe else None)
    scheduler, there = engine.scheduler, engine.scheduler._attachments.current
    assert there is not None
    assert scheduler.status()  # answered after the last step
    eventually(lambda: LookupResult.HIT_PENDING not in scheduler.lookup_many(keys))
    entries = {key: there.directory.entry(key) for key in keys}
    return {key: entry[:2] for key, entry in entries.items() if entry is not None}


@pytest.mark.parametrize("harm", [lambda at: os.truncate(at, 5000), Path.unlink])
def test_a_file_that_is_harmed_under_a_daemon_costs_descriptions_only(
    start_daemon: StartDaemon, harm: Callable[[Path], object]
) -> None:
    """Engines load and store on, and what is stored afterwards is described."""
    daemon = start_daemon(*KEEP)
    keys, later = keys_of("before", 10), keys_of("later", 10)
    with Engine(daemon.runtime_dir, events=True).wait_attached() as engine:
        store(engine, keys)
        harm(file_of(daemon))
        assert set(read_descriptions(engine.scheduler, keys)) <= {None, *map(described, keys)}
        assert engine.load(keys) == (10, 0)
        store(engine, later)
        assert read_descriptions(engine.scheduler, later) == list(map(described, later))
        daemon.stop(signal.SIGKILL)
        daemon = start_daemon(*KEEP)
        engine.wait_attached(daemon)
        wait_hit(engine, keys + later)
        found = read_descriptions(engine.scheduler, keys + later)
        assert set(found) <= {None, *map(described, keys + later)}
        more = keys_of("more", 3)
        store(engine, more)
        assert read_descriptions(engine.scheduler, more) == list(map(described, more))


def test_a_full_filesystem_costs_descriptions_and_no_store(
    start_daemon: StartDaemon, tmp_path: Path, small_tmpfs: Callable[[Path, int], None]
) -> None:
    """Chunks are READY without them, and the report says how many descriptions were lost."""
    small_tmpfs(tmp_path, 72 * 2**20)
    daemon = start_daemon(*KEEP, "--pool-dir", str(tmp_path))
    keys = keys_of("full", 100)
    with Engine(daemon.runtime_dir, events=True).wait_attached() as engine:
        hog = fill_up(tmp_path)
        store(engine, keys)
        kept, too_long, no_room = counters(daemon)
        assert (kept + no_room, too_long) == (100, 0)
        assert no_room
        assert read_descriptions(engine.scheduler, keys).count(None) == no_room
        assert engine.load(keys[:10]) == (10, 0)
        hog.unlink()
        more = keys_of("more", 10)
        store(engine, more)
        assert read_descriptions(engine.scheduler, more) == list(map(described, more))
