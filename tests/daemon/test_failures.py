"""What fails while engines work: workers, lanes, a broker that stands still."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from kvd.wire.tool import ToolConnection
from kvd_client import JobBlocks, LookupResult, Store
from kvd_proto.directory import SlotState
from kvd_proto.messages import Check, Checked, Ping
from tests.conftest import Daemon, StartDaemon
from tests.daemon.cuda_engine import CudaEngine, lane_of, wait_lane
from tests.daemon.cuda_lanes import cuda_lanes
from tests.daemon.engines import Engine, keys_of, lend, wait_hit
from tests.daemon.serving import wait_state
from tests.daemon.slots import slots_of
from tests.processes import frozen, kill_and_wait
from tests.raw_client import RawClient
from tests.waiting import DEADLINE, PATIENCE, eventually

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


LONG = 600.0  # of a call that waited; a test may take half of that
STEPS = 100


def check(daemon: Daemon, engine: Engine, ready: int) -> None:
    """The broker's tables agree; every slot is FREE or READY, and on loan if it is at hand."""
    eventually(
        lambda: (slots_of(daemon.runtime_dir, engine.name), engine.scheduler.reserve(0, 0.0)),
        lambda found: (
            found[0]
            and found[0].states[SlotState.READY] == ready
            and len(found[0].loans) == found[1]
            and not found[0].states[SlotState.WRITING]
            and not found[0].states[SlotState.DRAINING]
        ),
    )
    with ToolConnection(daemon.runtime_dir, PATIENCE) as control:
        checked = control.ask(Check(), Checked)
    assert (checked.violation, checked.whole) == ("", True)


def test_a_reply_that_comes_too_late_is_no_message_that_cannot_be_read(daemon: Daemon) -> None:
    """Clients that gave a frozen broker up are counted apart, and no condition follows."""
    with RawClient(daemon.runtime_dir) as client:
        client.hello()
        with frozen(daemon.process.pid):
            client.request(Ping())
            client.close()
    report = eventually(daemon.status, lambda report: report["broker"]["dropped_replies"])
    assert report["broker"]["dropped_frames"] == 0
    assert "messages dropped" not in {found["name"] for found in report["conditions"]}


@pytest.mark.parametrize("steps", [True, False])
def test_no_call_of_a_step_waits_for_a_frozen_broker(
    start_daemon: StartDaemon, steps: bool
) -> None:
    """Loads succeed meanwhile; stores into slots on loan go on when it reads their step."""
    daemon = start_daemon()
    with Engine(daemon.runtime_dir, deadline=LONG, steps=steps).wait_attached() as engine:
        scheduler = engine.scheduler
        kept, new, more = keys_of("kept", 6), keys_of("new", 4), keys_of("more", STEPS)
        engine.store(kept)
        scheduler.end_step()
        wait_hit(engine, kept)
        lend(scheduler, len(new) + len(more))
        with frozen(daemon.process.pid):
            assert engine.load(kept) == (6, 0)
            ticket = scheduler.prepare_store(new)
            assert ticket.keys == tuple(new)
            blocks = engine.fill(new, 1)
            jobs = engine.submit("store", [0, 1], blocks, ticket.slots, ticket.generations)
            scheduler.end_step()
            assert set(scheduler.lookup_many(new)) == {LookupResult.HIT_PENDING}
            for key in more:
                scheduler.count_tokens(32, 0)
                with scheduler.prepare_load(kept) as found:
                    assert len(found) == 6
                given_up = scheduler.prepare_store([key])
                assert given_up.keys == (key,)
                scheduler.complete_store(given_up, success=False)
                scheduler.request_finished(kept)
                scheduler.take_ready()
                scheduler.take_changes()
                for worker in engine.workers.values():
                    worker.cancel([])
                    assert worker.get_finished() == []
                scheduler.end_step()
            assert scheduler.attached
        assert all(result.success for result in engine.results(jobs).values())
        scheduler.complete_store(ticket)
        wait_hit(engine, new)
        assert engine.load(new) == (4, 0)
        eventually(lambda: set(scheduler.lookup_many(more)), {LookupResult.MISS}.__eq__)
        scheduler.end_step()
        check(daemon, engine, ready=10)


def test_a_session_that_a_frozen_broker_costs_leaves_nothing_behind(
    start_daemon: StartDaemon,
) -> None:
    """Frozen for longer than the deadline: misses, then a new session; all slots are accounted."""
    daemon = start_daemon()
    with Engine(daemon.runtime_dir, steps=True).wait_attached() as engine:
        scheduler = engine.scheduler
        kept, lost = keys_of("kept", 6), keys_of("lost", 4)
        engine.store(kept)
        scheduler.end_step()
        eventually(lambda: set(scheduler.lookup_many(kept)), {LookupResult.HIT}.__eq__)
        with frozen(daemon.process.pid):
            scheduler.deadline = 0.5
            ticket = scheduler.prepare_store(lost)
            blocks = engine.fill(ticket.keys, 1)
            jobs = engine.submit("store", [0], blocks, ticket.slots, ticket.generations)
            scheduler.end_step()
            eventually(lambda: not scheduler.attached)
            for number in count():  # still no call waits, and nothing is found
                assert not scheduler.prepare_load(kept).keys
                assert not scheduler.prepare_store(keys_of("none", 1)).keys
                scheduler.request_finished(kept)
                scheduler.end_step()
                if number == STEPS:
                    break
            scheduler.deadline = DEADLINE
        engine.results(jobs)  # good where the broker read the step before it dropped the session
        engine.wait_attached()
        engine.load(kept)  # perhaps before it knows that it is attached
        eventually(lambda: engine.load(kept), (6, 0).__eq__)
        assert set(engine.scheduler.lookup_many(lost)) == {LookupResult.MISS}
        assert engine.store(lost) == lost
        scheduler.end_step()
        wait_hit(engine, lost)
        check(daemon, engine, ready=10)


pytestmark = pytest.mark.fakecuda


def test_a_lane_ends_without_engines_and_comes_back_for_the_next(
    fakecuda_folder: Path, start_daemon: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end unpins the pool and is no error; the next engine finds its chunks."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fakecuda_folder))
    daemon = start_daemon("--lane-idle-seconds", "0.3")
    keys = keys_of("kept", 4)
    with CudaEngine(daemon.runtime_dir) as engine:
        engine.register()
        engine.store(keys)
        eventually(lambda: lane_of(daemon)["pinned_bytes"])
        first = lane_of(daemon)["pid"]
    daemon.wait_log("has ended: no engine for 0.3 s")
    assert not cuda_lanes(daemon)
    with CudaEngine(daemon.runtime_dir, name="next") as engine:
        engine.register()
        daemon.wait_ready()  # its arenas are pinned again
        assert engine.load(keys) == 0
        lane = wait_lane(daemon, workers=2)
        assert (lane["pid"] != first, lane["counters"]["restarts"]) == (True, 0)
        eventually(lambda: lane_of(daemon)["pinned_bytes"])
        assert daemon.stop() == 0
    log = daemon.log.read_text()
    assert "[error" not in log
    assert "is killed" not in log
    assert "is lost" not in log
