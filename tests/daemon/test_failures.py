"""What fails while engines work, and what a daemon leaves to the next one."""

import fcntl
import os
import select
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from kvd.machine.memory import pool_directory_name
from kvd.wire.tool import ToolConnection
from kvd_client import JobBlocks, LookupResult, Store
from kvd_proto.descriptions import encode
from kvd_proto.messages import Check, Checked, Ping
from tests.conftest import Daemon, StartDaemon
from tests.daemon.engines import (
    Engine,
    described,
    keys_of,
    lend,
    make_layout,
    read_descriptions,
    wait_hit,
)
from tests.daemon.serving import run_kvd
from tests.daemon.slots import wait_slots
from tests.full import fill_up
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
        stored, new, more = engine.stored("kept", 6), keys_of("new", 4), keys_of("more", STEPS)
        lend(scheduler, len(new) + len(more))
        with frozen(daemon.process.pid):
            assert engine.load(stored) == (6, 0)
            ticket = scheduler.prepare_store(new)
            assert ticket.keys == tuple(new)
            blocks = engine.fill(new, 1)
            jobs = engine.submit("store", [0, 1], blocks, ticket.slots, ticket.generations)
            scheduler.end_step()
            assert set(scheduler.lookup_many(new)) == {LookupResult.HIT_PENDING}
            for key in more:
                scheduler.count_tokens(32, 0)
                with scheduler.prepare_load(stored) as load:
                    assert len(load) == 6
                given_up = scheduler.prepare_store([key])
                assert given_up.keys == (key,)
                scheduler.complete_store(given_up, success=False)
                scheduler.request_finished(stored)
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
        stored, lost = engine.stored("kept", 6), keys_of("lost", 4)
        with frozen(daemon.process.pid):
            scheduler.deadline = 0.5
            ticket = scheduler.prepare_store(lost)
            blocks = engine.fill(ticket.keys, 1)
            jobs = engine.submit("store", [0], blocks, ticket.slots, ticket.generations)
            scheduler.end_step()
            eventually(lambda: not scheduler.attached)
            for _ in range(STEPS):  # still no call waits, and nothing is found
                assert not scheduler.prepare_load(stored).keys
                assert not scheduler.prepare_store(keys_of("none", 1)).keys
                scheduler.request_finished(stored)
                scheduler.end_step()
            scheduler.deadline = DEADLINE
        engine.results(jobs)  # good where the broker read the step before it dropped the session
        engine.wait_attached()
        engine.load(stored)  # perhaps before it knows that it is attached
        eventually(lambda: engine.load(stored), (6, 0).__eq__)
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


def test_chunks_outlive_the_daemon(warm: Daemon, start_daemon: StartDaemon) -> None:
    """A new engine finds every chunk of the daemon that was stopped, and its partial ones."""
    window = keys_of("window", 6)
    with Engine(warm.runtime_dir).wait_attached() as engine:
        keys = engine.stored("kept", 40)
        engine.store(window, group=1)
        wait_hit(engine, window)
        warm.stop()
    second = start_daemon(*KEEP)
    assert second.status()["namespaces"][0]["chunks"]["ready"] == 46
    with Engine(second.runtime_dir, name="other").wait_attached() as engine:
        assert engine.load(keys) == (40, 0)
        assert engine.load(window, group=1) == (6, 0)
        assert not engine.scheduler.prepare_store(keys).keys
        assert engine.load(keys + engine.stored("new", 10)) == (50, 0)


def test_auto_finds_the_kept_pool(start_daemon: StartDaemon) -> None:
    """cpu_bytes auto: the same engine gets its pool with its chunks, a larger one a new pool."""
    keys, sizes = keys_of("auto", 10), []
    for blocks, chunks in ((64, 0), (64, 10), (256, 0)):
        daemon = start_daemon(*KEEP, "--reserve", "0", cpu_bytes="auto", ready=False)
        layout = make_layout(blocks=blocks)
        with Engine(daemon.runtime_dir, world_size=1, layout=layout).wait_attached() as engine:
            sizes.append(daemon.status()["pool"]["cpu_bytes"])
            assert engine.load(keys) == (chunks, 0)
            engine.store(keys)
            wait_hit(engine, keys)
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
        select.select([], [], [], 1.0)
        report = second.status()
        assert not report["ready"]
        assert not report["lanes"][0]["up"]
    second.wait_ready()
    eventually(lambda: has_ended(own))


def store(engine: Engine, name: str, count: int) -> list[bytes]:
    """Store chunks with their descriptions and wait until they are READY; their keys."""
    keys = keys_of(name, count)
    engine.store(keys, describe=lambda key: encode(described(key)))
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
