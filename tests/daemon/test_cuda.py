"""Engines in CUDA memory, from process to process, on a test driver that is no GPU."""

import select
import signal
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kvd_client import LookupResult
from tests.asked import Asked
from tests.conftest import Daemon, StartDaemon, started_daemons
from tests.daemon.cuda_engine import (
    CudaEngine,
    Rank,
    blocks_of,
    foreign_rank,
    lane_of,
    wait_lane,
)
from tests.daemon.cuda_lanes import Lanes, cuda_lanes, holders, in_copy, wait_next_lane
from tests.daemon.engines import FACTOR, PAGE, TENSORS, Engine, keys_of, wait_hit
from tests.daemon.users import OTHER_UID, needs_root
from tests.fakecuda.harness import calls
from tests.processes import kill_and_wait
from tests.waiting import eventually

pytestmark = pytest.mark.fakecuda

COMPUTED = 0x5A
RANK_CHUNK_BYTES = FACTOR * TENSORS * PAGE
# Pinned in two pieces; the arena of rank 0 is in the first, rank 1's in the second.
POOL = 128 * 2**20


@pytest.fixture
def lanes(
    fakecuda_folder: Path,
    start_daemon: StartDaemon,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Lanes:
    """What is started by the test finds the test driver, with unkind timing."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fakecuda_folder))
    monkeypatch.setenv("FAKECUDA_SEED", "7")
    monkeypatch.delenv("FAKECUDA_LOG", raising=False)
    found = Lanes(start_daemon, tmp_path / "lanes.switches", tmp_path / "lanes.calls")
    found.log.touch()
    return found


@pytest.fixture
def daemon(lanes: Lanes, request: pytest.FixtureRequest) -> Daemon:
    """One of them."""
    return lanes.start(*getattr(request, "param", ()))


HANGS = pytest.mark.parametrize(
    "daemon", [("--lane-timeout-seconds", "5")], indirect=True, ids=[""]
)
"""Of tests with a lane that hangs: it is replaced soon."""


@pytest.fixture(scope="module")
def shared(fakecuda_folder: Path) -> Iterator[CudaEngine]:
    """A registered engine of two ranks that no test kills a part of, with a daemon of its own."""
    with (
        tempfile.TemporaryDirectory(prefix="kvd-", dir="/tmp") as path,
        pytest.MonkeyPatch.context() as patch,
        started_daemons(Path(path) / "run") as start,
    ):
        patch.setenv("LD_LIBRARY_PATH", str(fakecuda_folder))
        patch.setenv("FAKECUDA_SEED", "11")
        patch.delenv("FAKECUDA_LOG", raising=False)
        with CudaEngine(start().runtime_dir) as running:
            running.register()
            yield running


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[CudaEngine]:
    """A registered engine of two ranks, in plain CUDA memory."""
    with CudaEngine(daemon.runtime_dir) as running:
        running.register()
        yield running


def test_exported_memory_is_served_too(daemon: Daemon) -> None:
    """Virtual memory travels as descriptors, of which one storage has two; its source stays."""
    with CudaEngine(daemon.runtime_dir, kind="vmm") as engine:
        device = engine.register()
        keys = keys_of("exported", 6)
        engine.store(keys)
        assert engine.load(keys) == 0
        for rank in engine.ranks.values():
            assert not rank.ask("wrong_bytes", keys, blocks_of(keys, 1))
        lane = wait_lane(daemon, workers=2)
        assert (lane["device"], lane["up"], lane["counters"]["restarts"]) == (device, True, 0)


def test_an_engine_that_sleeps_has_its_memory_back_and_other_memory_when_it_wakes_up(
    daemon: Daemon,
) -> None:
    """Nobody has what it was; the chunks stay, and stores and loads go to the new memory."""
    with CudaEngine(daemon.runtime_dir, kind="vmm") as engine:
        engine.register()
        keys, later = keys_of("asleep", 4), keys_of("awake", 4)
        engine.store(keys)
        files = set().union(*(rank.ask("memory_files") for rank in engine.ranks.values()))
        assert len(holders(files)) >= 3, "broker, lane, ranks"
        for rank in engine.ranks.values():
            rank.ask("sleep")
        assert not holders(files)
        eventually(lambda: not engine.scheduler.attached)
        for rank in engine.ranks.values():
            rank.ask("wake_up")
        engine.wait_attached()
        assert engine.load(keys, first_block=1) == 0
        engine.store(later, first_block=1)
        assert engine.load(later) == 0
        assert wait_lane(daemon, workers=2)["counters"]["restarts"] == 0


def test_a_lane_that_can_pin_nothing_says_so_and_the_engine_misses(lanes: Lanes) -> None:
    """The error of the very first piece is in the status, and the engine is detached."""
    daemon = lanes.start()
    lanes.switch("fail=cuMemHostRegister:2+:2")  # the first is the trial's
    with CudaEngine(daemon.runtime_dir, world_size=1) as engine:
        for rank in engine.ranks.values():
            rank.ask("register")
        lane = eventually(lambda: lane_of(daemon), lambda found: found["pin_error"])
        assert "CUDA_ERROR_OUT_OF_MEMORY" in lane["pin_error"]
        eventually(lambda: not engine.scheduler.attached)


@needs_root
@pytest.mark.parametrize("kind", ["ipc", "vmm"])
def test_memory_of_another_user_has_descriptors(
    daemon: Daemon, runtime_dir: Path, kind: str
) -> None:
    """By IPC handle it is refused in words that name both users; by descriptors it is served."""
    runtime_dir.parent.chmod(0o711)
    rank = Asked(partial(foreign_rank, kind=kind), daemon.runtime_dir, "engine", 0, 1)
    try:
        if kind == "vmm":
            rank.ask("register")
            wait_lane(daemon, workers=1)
            return
        words = rf"the worker's user is {OTHER_UID}, the lane's is 0 \(root\), .* descriptors"
        with pytest.raises(RuntimeError, match=words):
            rank.ask("register")
    finally:
        rank.close()


def test_host_and_cuda_engines_share_chunks(shared: CudaEngine) -> None:
    """What a GPU's engine stored, an engine in host memory loads: the layout counts, not where."""
    keys = keys_of("both", 4)
    shared.store(keys)
    with Engine(shared.runtime_dir, name="host-engine").wait_attached() as host:
        wait_hit(host, keys)
        assert host.load(keys) == (4, 0)


def test_a_worker_killed_in_a_copy_costs_nobody_else(
    engine: CudaEngine, daemon: Daemon, lanes: Lanes
) -> None:
    """Its copies drain before its memory is let go; the lane lives, the next rank takes over."""
    keys = keys_of("kept", 4)
    engine.store(keys)
    lane = wait_lane(daemon, workers=2)
    ticket = engine.begin(keys_of("lost", 2))
    lanes.switch("hold=copies")
    engine.submit("store", ticket, blocks_of(ticket.keys, 20))
    in_copy(daemon, 2 * RANK_CHUNK_BYTES * len(ticket.keys))  # of both ranks
    engine.ranks[1].kill()
    select.select([], [], [], 0.3)
    assert lane_of(daemon)["workers"] == 2  # it is still copied from
    lanes.switch("hold=")
    after = wait_lane(daemon, workers=1)
    assert (after["pid"], after["counters"]["restarts"]) == (lane["pid"], 0)
    engine.replace(1)
    assert engine.load(keys) == 0
    engine.store(keys_of("again", 2))


@HANGS
@pytest.mark.parametrize(
    "trouble",
    ["fail=cuEventQuery:1:700", "hang=cuEventRecord:1", "hold=copies"],
    ids=["lost", "hangs", "killed in a copy"],
)
def test_a_lane_that_loses_its_device_or_hangs_or_is_killed_is_replaced(
    engine: CudaEngine, daemon: Daemon, lanes: Lanes, trouble: str
) -> None:
    """Jobs fail; the next lane maps the same memory, and the chunks are all there."""
    keys = keys_of("kept", 4)
    engine.store(keys)
    pid = lane_of(daemon)["pid"]
    ticket = engine.scheduler.prepare_load(keys)
    lanes.switch(trouble)
    job = engine.submit("load", ticket, blocks_of(keys, 33))
    if killed := trouble == "hold=copies":
        in_copy(daemon)
        kill_and_wait(pid)
    results = [rank.ask("result", job).success for rank in engine.ranks.values()]
    assert not (any(results) if killed else all(results))
    lanes.switch(trouble.partition("=")[0] + "=")
    daemon.wait_ready()
    wait_next_lane(daemon, pid, workers=2)
    engine.wait_attached()
    assert engine.load(keys) == 0
    engine.store(keys_of("more", 2), first_block=20)


@HANGS
@pytest.mark.slow
def test_a_close_that_hangs_costs_that_lane_alone(
    engine: CudaEngine, daemon: Daemon, lanes: Lanes
) -> None:
    """The memory of a worker that left cannot be closed; host and other ranks are served on."""
    with Engine(daemon.runtime_dir, name="host-engine", world_size=2).wait_attached() as host:
        keys = keys_of("kept", 4)
        engine.store(keys)
        (before,) = (lane for lane in daemon.status()["lanes"] if lane["device"] == "host")
        pid = lane_of(daemon)["pid"]
        lanes.switch("hang=cuIpcCloseMemHandle:1")
        engine.ranks[1].kill()
        lanes.wait_hanging()
        others = keys_of("host", 3)
        host.store(others)
        wait_hit(host, others)
        assert host.load(others) == (3, 0)
        lanes.switch("hang=")
        wait_next_lane(daemon, pid, workers=1)
        engine.replace(1)
        assert eventually(lambda: engine.try_load(keys), lambda wrong: wrong is not None) == 0
        (now,) = (lane for lane in daemon.status()["lanes"] if lane["device"] == "host")
        assert (now["pid"], now["counters"]["restarts"]) == (before["pid"], 0)


def test_a_handle_that_the_driver_refuses_costs_its_own_engine_alone(
    engine: CudaEngine, daemon: Daemon
) -> None:
    """Its worker gets the driver's reason; the same lane goes on serving the good engine."""
    keys = keys_of("kept", 4)
    engine.store(keys)
    lane = wait_lane(daemon, workers=2)
    for code in ("999", "719~", "99999"):
        bad = Asked(Rank, daemon.runtime_dir, "bad", 0, 1)
        bad.ask("switch", f"handles={code}")
        with pytest.raises(RuntimeError, match=rf"opening a worker's memory: .*{code.rstrip('~')}"):
            bad.ask("register")
        assert engine.load(keys) == 0
        engine.store(keys_of(f"more {code}", 2), first_block=20)
        bad.close()
    after = wait_lane(daemon, workers=2)
    assert (after["pid"], after["counters"]["restarts"]) == (lane["pid"], 0)


def test_memory_that_ends_two_lanes_is_refused(engine: CudaEngine, daemon: Daemon) -> None:
    """An import that costs the context is blamed on that session: the third lane does not try."""
    keys = keys_of("kept", 4)
    engine.store(keys)
    bad = Asked(Rank, daemon.runtime_dir, "bad", 0, 1)
    bad.ask("switch", "handles=719")
    with pytest.raises(RuntimeError, match="ended 2 times while it mapped the memory of pid"):
        bad.ask("register")
    bad.close()
    lane = wait_lane(daemon, workers=2)
    assert lane["counters"]["restarts"] == 2
    engine.wait_attached()
    assert engine.load(keys) == 0


def test_one_lane_pins_at_a_time(lanes: Lanes, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one lane's registration hangs, that of another device waits for it."""
    monkeypatch.setenv("FAKECUDA_DEVICES", "2")
    daemon = lanes.start()
    lanes.switch("hang=cuMemHostRegister:2")  # after the trial of batches
    with (
        CudaEngine(daemon.runtime_dir, "first", world_size=1) as first,
        CudaEngine(daemon.runtime_dir, "second", world_size=1, device=1) as second,
    ):
        first.register()
        lanes.wait_hanging()
        second.register()
        select.select([], [], [], 0.3)
        assert calls(lanes.log).count("@hang") == 1
        lanes.switch("unhang=")
        eventually(lambda: [lane["pinned_bytes"] > 0 for lane in cuda_lanes(daemon)] == [True] * 2)


def test_a_device_that_the_daemon_does_not_see_is_refused(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lane's own sentence reaches the worker; no lane is left, and the daemon is ready."""
    monkeypatch.setenv("FAKECUDA_DEVICES", "2")
    rank = Asked(partial(Rank, device=1), daemon.runtime_dir, "engine", 0, 1)
    try:
        with pytest.raises(RuntimeError, match="RegistrationError: no CUDA device has the UUID"):
            rank.ask("register")
    finally:
        rank.close()
    report = daemon.status()
    assert report["ready"]
    assert [lane["device"] for lane in report["lanes"]] == ["host"]


def test_a_daemon_without_a_driver_says_so_and_serves_the_host(
    fakecuda_folder: Path, start_daemon: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers in CUDA memory are told what is missing; those in host memory notice nothing."""
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    daemon = start_daemon()
    with Engine(daemon.runtime_dir, name="host-engine").wait_attached() as host:
        monkeypatch.setenv("LD_LIBRARY_PATH", str(fakecuda_folder))
        rank = Asked(Rank, daemon.runtime_dir, "engine", 0, 1)
        try:
            with pytest.raises(RuntimeError, match=r"RegistrationError: .*libcuda\.so\.1"):
                rank.ask("register")
        finally:
            rank.close()
        keys = keys_of("host", 3)
        host.store(keys)
        wait_hit(host, keys)
        assert host.load(keys) == (3, 0)


def test_lookups_are_answered_while_the_pool_is_pinned_anew(lanes: Lanes) -> None:
    """Half pinned: a hit by the directory, a miss where it would be loaded; whole: right bytes."""
    first = lanes.start("--keep-pool", "yes", cpu_bytes=str(POOL))
    keys = keys_of("kept", 6)
    with CudaEngine(first.runtime_dir) as engine:
        engine.register()
        engine.store(keys)
        first.stop(signal.SIGKILL)
        lanes.switch("hang=cuMemHostRegister:3")  # one for the lane itself, two for the pool
        second = lanes.start("--keep-pool", "yes", cpu_bytes=str(POOL), ready=False)
        engine.wait_attached(second)
        wait_lane(second, workers=2, usable_bytes=POOL // 2)
        assert not second.status()["ready"]
        assert engine.scheduler.lookup_many(keys) == [LookupResult.HIT] * 6
        found = engine.scheduler.prepare_load(keys)
        assert not engine.succeeded(engine.submit("load", found, blocks_of(keys, 33)))
        engine.scheduler.complete_load(found)
        lanes.switch("unhang=")
        wait_lane(second, usable_bytes=POOL)
        assert engine.load(keys) == 0
        assert second.wait_ready()["namespaces"][0]["counters"]["restored"] == 6
