"""Things that die: the worst that follows is a miss, and nothing stays behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd_client import JobBlocks, LookupResult, Store
from tests.conftest import Daemon, StartDaemon
from tests.daemon.engines import Engine, keys_of, wait_hit
from tests.daemon.serving import wait_state
from tests.processes import kill_and_wait
from tests.waiting import PATIENCE, eventually

ROOT = Path(__file__).parents[2]


@pytest.fixture
def rank_process(daemon: Daemon) -> Iterator[subprocess.Popen[str]]:
    """Rank 1 of `engine`, registered, in a process of its own."""
    command = [sys.executable, str(ROOT / "tests/daemon/rank_process.py")]
    process = subprocess.Popen(
        [*command, str(daemon.runtime_dir), "engine", "1", "2"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "registered\n"
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_a_killed_worker_frees_what_was_in_writing(
    daemon: Daemon, rank_process: subprocess.Popen[str]
) -> None:
    """SIGKILL of a rank: its engine's half-written chunks are freed, READY ones stay."""
    with Engine(daemon.runtime_dir, ranks=[0]).wait_attached() as engine:
        assert rank_process.stdin is not None
        assert rank_process.stdout is not None
        whole, half = keys_of("whole", 3), keys_of("half", 5)
        ticket = engine.begin(whole)
        blocks = engine.fill(whole, 1)
        engine.results(engine.submit("store", [0], blocks, ticket.slots, ticket.generations))
        pairs = zip(ticket.slots.tolist(), ticket.generations.tolist(), strict=True)
        rank_process.stdin.write("store " + " ".join(f"{s}@{g}" for s, g in pairs) + "\n")
        rank_process.stdin.flush()
        assert rank_process.stdout.readline() == "done ok\n"
        wait_hit(engine, whole)
        ticket = engine.begin(half)
        engine.results(
            engine.submit("store", [0], engine.fill(half, 11), ticket.slots, ticket.generations)
        )
        wait_state(daemon, writing=5)
        rank_process.kill()
        wait_state(daemon, ready=3, writing=0, draining=0)
        eventually(lambda: not engine.scheduler.prepare_store(half).served)
        daemon.wait_log(f"rank 1 (pid {rank_process.pid}) is gone; 5 chunks in writing freed")


LATE_LANE = """
import os, sys, time
while "kvd.lane" in sys.orig_argv and os.path.exists(os.environ["NO_LANE"]):
    time.sleep(0.01)
"""


def test_a_killed_lane_costs_its_jobs_and_nothing_else(
    start_daemon: StartDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs in a killed lane fail at once; afterwards old chunks hit and new ones store."""
    no_lane = tmp_path / "no-lane"  # while it is there, none begins
    (tmp_path / "sitecustomize.py").write_text(LATE_LANE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("NO_LANE", str(no_lane))
    daemon = start_daemon()
    with Engine(daemon.runtime_dir).wait_attached() as engine:
        keys = keys_of("kept", 6)
        engine.store(keys)
        wait_hit(engine, keys)
        ticket = engine.begin(keys_of("lost", 2))
        blocks = engine.fill(ticket.keys, 20)
        never = engine.workers[0].timeline.reserve()
        engine.workers[0].submit(
            Store,
            999,
            JobBlocks.of(blocks, [4, 0], [0, 0], ticket.slots, ticket.generations),
            after=never,
        )
        lane = daemon.status()["lanes"][0]["pid"]
        no_lane.touch()
        kill_and_wait(lane)
        assert not engine.workers[0].wait([999], PATIENCE)
        (result,) = engine.workers[0].get_finished()
        assert not result.success
        # Nothing is found that could not be loaded, until the next lane serves both ranks.
        eventually(lambda: engine.scheduler.lookup(keys[0]), LookupResult.MISS.__eq__)
        assert not engine.scheduler.prepare_load(keys).keys
        no_lane.unlink()
        engine.wait_attached()
        assert engine.scheduler.lookup_many(keys) == [LookupResult.HIT] * 6
        (replaced,) = daemon.wait_ready()["lanes"]
        assert replaced["counters"]["restarts"] == 1
        assert "signal 9" in replaced["last_error"]
        wait_state(daemon, writing=0, draining=0, ready=6)
        assert engine.load(keys) == (6, 0)
        assert engine.store(keys_of("lost", 2))


@pytest.mark.parametrize(("drain_seconds", "signals"), [("0.5", 1), ("3600", 2)])
def test_a_stop_waits_for_jobs_as_long_as_it_may(
    start_daemon: StartDaemon, drain_seconds: str, signals: int
) -> None:
    """A lane with jobs is killed after `drain_seconds`, by name; a second signal ends at once."""
    daemon = start_daemon("--drain-seconds", drain_seconds)
    with Engine(daemon.runtime_dir).wait_attached() as engine:
        ticket = engine.begin(keys_of("lost", 2))
        blocks = JobBlocks.of(
            engine.fill(ticket.keys, 20), [4, 0], [0, 0], ticket.slots, ticket.generations
        )
        worker = engine.workers[0]
        worker.submit(Store, 999, blocks, after=worker.timeline.reserve())  # never signalled
        eventually(lambda: daemon.status()["lanes"][0]["queued_jobs"])
        if signals == 2:
            daemon.process.send_signal(signal.SIGTERM)
            daemon.wait_log("stopping: a signal came")
        assert daemon.stop() == 0
    killed = f"lane host is killed: not drained after {drain_seconds} s, 1 jobs queued"
    assert (killed in daemon.log.read_text()) == (signals == 1)
