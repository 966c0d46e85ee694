"""Descriptions of chunks in a whole daemon, whose file is harmed or finds no room."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from kvd.machine.memory import pool_directory_name
from kvd_proto.descriptions import encode
from tests.conftest import StartDaemon
from tests.daemon.engines import Engine, described, keys_of, read_descriptions, wait_hit
from tests.full import fill_up

KEEP = ("--keep-pool", "yes")


def store(engine: Engine, name: str, count: int) -> list[bytes]:
    """Store chunks with their descriptions and wait until they are READY; their keys."""
    keys = keys_of(name, count)
    for at in range(0, count, 10):
        engine.store(keys[at : at + 10], describe=lambda key: encode(described(key)))
    wait_hit(engine, keys)
    return keys


@pytest.mark.parametrize("harm", [lambda at: os.truncate(at, 5000), Path.unlink])
def test_a_file_that_is_harmed_under_a_daemon_costs_descriptions_only(
    start_daemon: StartDaemon, harm: Callable[[Path], object]
) -> None:
    """Engines load and store on, and what is stored afterwards is described, to others too."""
    daemon = start_daemon(*KEEP)
    with (
        Engine(daemon.runtime_dir, events=True).wait_attached() as engine,
        Engine(daemon.runtime_dir, "other").wait_attached() as other,
    ):
        assert engine.scheduler.describes
        assert not other.scheduler.describes
        keys = store(engine, "before", 10)
        area = Path("/dev/shm") / pool_directory_name(daemon.runtime_dir)
        (file,) = area.glob("*.descriptions")
        harm(file)
        assert set(read_descriptions(engine.scheduler, keys)) <= {None, *map(described, keys)}
        assert engine.load(keys) == (10, 0)
        later = store(engine, "later", 10)
        wait_hit(other, later)
        for one in (engine, other):
            assert read_descriptions(one.scheduler, later) == list(map(described, later))
        daemon.stop(signal.SIGKILL)
        daemon = start_daemon(*KEEP)
        engine.wait_attached(daemon)
        wait_hit(engine, keys + later)
        descriptions = read_descriptions(engine.scheduler, keys + later)
        assert set(descriptions) <= {None, *map(described, keys + later)}
        more = store(engine, "more", 3)
        assert read_descriptions(engine.scheduler, more) == list(map(described, more))


def test_a_full_filesystem_costs_descriptions_and_no_store(
    start_daemon: StartDaemon, tmp_path: Path, small_tmpfs: Callable[[Path, int], None]
) -> None:
    """Chunks are READY without them, and the report says how many descriptions were lost."""
    small_tmpfs(tmp_path, 72 * 2**20)
    daemon = start_daemon(*KEEP, "--pool-dir", str(tmp_path))
    with Engine(daemon.runtime_dir, events=True).wait_attached() as engine:
        hog = fill_up(tmp_path)
        keys = store(engine, "full", 100)
        counters = daemon.status()["namespaces"][0]["counters"]
        lost = counters["descriptions_no_room"]
        assert lost
        assert counters["descriptions"] + lost == 100
        assert counters["descriptions_too_long"] == 0
        assert read_descriptions(engine.scheduler, keys).count(None) == lost
        assert engine.load(keys[:10]) == (10, 0)
        hog.unlink()
        more = store(engine, "more", 10)
        assert read_descriptions(engine.scheduler, more) == list(map(described, more))
