"""Two engines on one daemon, one of which stores without end."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.conftest import Daemon, StartDaemon
from tests.daemon.engines import Engine, keys_of, make_layout, wait_hit
from tests.daemon.flood_process import PAGE
from tests.waiting import eventually

ROUNDS = 40
MIB = 2**20


@contextmanager
def flood(runtime_dir: Path, name: str) -> Iterator["subprocess.Popen[str]"]:
    """A flooding engine, from the moment when chunks are evicted for it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.daemon.flood_process", str(runtime_dir), name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "flooding\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def named(daemon: Daemon, model: str) -> dict[str, Any]:
    """A namespace in the report."""
    (found,) = [n for n in daemon.status()["namespaces"] if n["model"] == model]
    return dict(found)


def test_a_flood_of_stores_takes_no_floor_and_fails_no_load(start_daemon: StartDaemon) -> None:
    """The quiet engine's chunks stay and all its loads succeed, while the other fills the pool."""
    daemon = start_daemon("--quota", '{quiet = {floor = "4MiB"}}', cpu_bytes="16MiB")
    keys = keys_of("mine", 12)  # 256 KiB each
    with Engine(daemon.runtime_dir, "quiet", 1, "quiet", make_layout(page=PAGE)) as quiet:
        quiet.wait_attached()
        quiet.store(keys)
        wait_hit(quiet, keys)
        with flood(daemon.runtime_dir, "greedy") as greedy:
            before = int(named(daemon, "greedy")["counters"]["stored"])
            for _ in range(ROUNDS):
                assert quiet.load(keys) == (12, 0)

            def stored_meanwhile() -> int:
                assert quiet.load(keys) == (12, 0)
                return int(named(daemon, "greedy")["counters"]["stored"])

            eventually(stored_meanwhile, before.__lt__)
            mine, theirs = named(daemon, "quiet"), named(daemon, "greedy")
            assert greedy.poll() is None
            assert theirs["counters"]["evicted"] > 0
            assert mine["counters"]["yielded"] == 0
            assert mine["counters"]["misses"] == 0
            assert mine["chunks"]["ready"] == 12
            (quota,) = daemon.status()["pool"]["quotas"]
            assert quota["held_bytes"] >= 3 * MIB
            assert quiet.scheduler.prepare_store(keys_of("more", 1)).slots.size == 1


def test_a_cap_keeps_a_flood_out_of_the_rest_of_the_pool(start_daemon: StartDaemon) -> None:
    """A capped engine evicts its own chunks and leaves free what it may not have."""
    daemon = start_daemon("--quota", '{greedy = {cap = "25%"}}', cpu_bytes="16MiB")
    with flood(daemon.runtime_dir, "greedy"):
        report = daemon.status()
        (quota,) = report["pool"]["quotas"]
        assert 3 * MIB <= quota["held_bytes"] <= quota["cap_bytes"] == 4 * MIB
        assert report["pool"]["free_bytes"] >= 12 * MIB
