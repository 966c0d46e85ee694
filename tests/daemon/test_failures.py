"""What fails while engines work, and what a daemon leaves to the next one."""

import fcntl
import os
import signal
from pathlib import Path

import pytest

from kvd.machine.memory import pool_directory_name
from kvd.wire.tool import ToolConnection
from kvd_client import JobBlocks, LookupResult, Store
from kvd_proto.messages import Check, Checked, Ping
from tests.conftest import Daemon, StartDaemon
from tests.daemon.engines import Engine, keys_of, lend, make_layout, wait_hit
from tests.daemon.serving import run_kvd
from tests.daemon.slots import wait_slots
from tests.processes import children_running, frozen, has_ended
from tests.raw_client import RawClient
from tests.soak.restart_loop import run
from tests.waiting import DEADLINE, PATIENCE, eventually


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
    wait_slots(daemon, ready=ready, at_hand=[engine])
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
    assert "messages dropped" not in {condition["name"] for condition in report["conditions"]}


@pytest.mark.parametrize("steps", [True, False])
def test_no_call_of_a_step_waits_for_a_frozen_broker(
    start_daemon: StartDaemon, steps: bool
) -> None:
    """Loads succeed meanwhile; stores into slots on loan go on when it reads their step."""
    daemon = start_daemon()
    with Engine(daemon.runtime_dir, deadline=LONG, steps=steps).wait_attached() as engine:
        scheduler = engine.scheduler
        kept, new, more = engine.stored("kept", 6), keys_of("new", 4), keys_of("more", STEPS)
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
                with scheduler.prepare_load(kept) as load:
                    assert len(load) == 6
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
        kept, lost = engine.stored("kept", 6), keys_of("lost", 4)
        with frozen(daemon.process.pid):
            scheduler.deadline = 0.5
            ticket = scheduler.prepare_store(lost)
            blocks = engine.fill(ticket.keys, 1)
            jobs = engine.submit("store", [0], blocks, ticket.slots, ticket.generations)
            scheduler.end_step()
            eventually(lambda: not scheduler.attached)
            for _ in range(STEPS):  # still no call waits, and nothing is found
                assert not scheduler.prepare_load(kept).keys
                assert not scheduler.prepare_store(keys_of("none", 1)).keys
                scheduler.request_finished(kept)
                scheduler.end_step()
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


KEEP = ("--keep-pool", "yes")
SHM = Path("/dev/shm")


def area(daemon: Daemon) -> Path:
    """Where the daemon keeps its pool."""
    return SHM / pool_directory_name(daemon.runtime_dir)


@pytest.fixture
def warm(start_daemon: StartDaemon) -> Daemon:
    """A ready daemon that keeps its pool."""
    return start_daemon(*KEEP)


def hits(engine: Engine, keys: list[bytes]) -> int:
    """How many of the keys are loaded; none may have wrong bytes."""
    loads = [engine.load(keys[at : at + 10]) for at in range(0, len(keys), 10)]
    assert not any(wrong for _, wrong in loads)
    return sum(loaded for loaded, _ in loads)


def stored(engine: Engine, keys: list[bytes], group: int = 0) -> None:
    """Store the keys and wait until all are READY."""
    for at in range(0, len(keys), 10):
        engine.store(keys[at : at + 10], group=group)
    wait_hit(engine, keys)


def test_chunks_outlive_the_daemon(warm: Daemon, start_daemon: StartDaemon) -> None:
    """A new engine finds every chunk of the daemon that was stopped, and its partial ones."""
    keys, window = keys_of("kept", 40), keys_of("window", 6)
    with Engine(warm.runtime_dir).wait_attached() as engine:
        stored(engine, keys)
        stored(engine, window, group=1)
        warm.stop()
    second = start_daemon(*KEEP)
    assert second.status()["namespaces"][0]["chunks"]["ready"] == 46
    with Engine(second.runtime_dir, name="other").wait_attached() as engine:
        assert hits(engine, keys) == 40
        assert engine.load(window, group=1) == (6, 0)
        assert not engine.scheduler.prepare_store(keys).keys
        stored(engine, keys_of("new", 10))
        assert hits(engine, keys + keys_of("new", 10)) == 50


def test_auto_finds_the_kept_pool(start_daemon: StartDaemon) -> None:
    """cpu_bytes auto: the same engine gets its pool with its chunks, a larger one a new pool."""
    keys, sizes = keys_of("auto", 10), []
    for blocks, chunks in ((64, 0), (64, 10), (256, 0)):
        daemon = start_daemon(*KEEP, "--reserve", "0", cpu_bytes="auto", ready=False)
        layout = make_layout(blocks=blocks)
        with Engine(daemon.runtime_dir, world_size=1, layout=layout).wait_attached() as engine:
            sizes.append(daemon.status()["pool"]["cpu_bytes"])
            assert hits(engine, keys) == chunks
            stored(engine, keys)
            daemon.stop(signal.SIGKILL)
    assert sizes == [sizes[0], sizes[0], 4 * sizes[0]]


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
