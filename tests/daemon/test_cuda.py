"""Engines in CUDA memory, from process to process, on a test driver that is no GPU."""

import contextlib
import select
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvd_client import LookupResult
from tests.asked import Asked
from tests.conftest import Daemon, StartDaemon
from tests.daemon.cuda_engine import (
    CudaEngine,
    Rank,
    blocks_of,
    cuda_lanes,
    foreign_rank,
    lane_of,
    wait_lane,
)
from tests.daemon.engines import FACTOR, PAGE, TENSORS, Engine, keys_of
from tests.daemon.users import OTHER_UID, needs_root
from tests.fakecuda.harness import calls, write_control
from tests.processes import kill_and_wait
from tests.waiting import eventually

pytestmark = pytest.mark.fakecuda

COMPUTED = 0x5A
RANK_CHUNK_BYTES = FACTOR * TENSORS * PAGE
# Pinned in two pieces; the arena of rank 0 is in the first, rank 1's in the second.
POOL = 128 * 2**20


@dataclass(frozen=True)
class Lanes:
    """Daemons whose lanes obey switches of the test driver, and the calls that these made."""

    start_daemon: StartDaemon
    control: Path
    log: Path

    def start(self, *flags: str, **settings: Any) -> Daemon:
        """A daemon; its ranks see nothing of the switches."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FAKECUDA_CONTROL", str(self.control))
            patch.setenv("FAKECUDA_LOG", str(self.log))
            return self.start_daemon(*flags, **settings)

    def switch(self, text: str) -> None:
        """Set `key=value`; read before the lane's next call of the driver."""
        write_control(self.control, text)

    def wait_hanging(self) -> None:
        """Until a call of the driver hangs."""
        eventually(lambda: "@hang" in calls(self.log))


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
    log = tmp_path / "lanes.calls"
    log.touch()
    return Lanes(start_daemon, tmp_path / "lanes.switches", log)


@pytest.fixture
def daemon(lanes: Lanes, request: pytest.FixtureRequest) -> Daemon:
    """A daemon on the test driver."""
    return lanes.start(*getattr(request, "param", ()))


HANGS = pytest.mark.parametrize(
    "daemon", [("--lane-timeout-seconds", "5")], indirect=True, ids=[""]
)
"""Of tests with a lane that hangs: it is replaced soon."""


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[CudaEngine]:
    """A registered engine of two ranks, in plain CUDA memory."""
    with CudaEngine(daemon.runtime_dir) as running:
        running.register()
        yield running


def wait_next_lane(daemon: Daemon, pid: int, workers: int) -> None:
    """Until another CUDA lane than that of this pid has so many workers."""
    eventually(
        lambda: lane_of(daemon), lambda lane: lane["pid"] != pid and lane["workers"] == workers
    )


def wait_in_copy(daemon: Daemon, nbytes: int = 1) -> None:
    """Until the CUDA lane has so many bytes in flight."""
    eventually(lambda: lane_of(daemon)["bytes_in_flight"] >= nbytes)


def test_exported_memory_is_served_too(daemon: Daemon) -> None:
    """Virtual memory travels as descriptors, of which one storage has two; its source stays.

    An engine in host memory loads what a GPU's engine has stored: the layout counts, not where.
    """
    with CudaEngine(daemon.runtime_dir, kind="vmm") as engine:
        device = engine.register()
        keys = keys_of("exported", 6)
        engine.store(keys)
        assert engine.load(keys) == 0
        for rank in engine.ranks.values():
            assert not rank.ask("wrong_bytes", keys, blocks_of(keys, 1))
        lane = wait_lane(daemon, workers=2)
        assert (lane["device"], lane["up"], lane["counters"]["restarts"]) == (device, True, 0)
        with Engine(daemon.runtime_dir, name="host-engine").wait_attached() as host:
            assert host.load(keys) == (6, 0)


def holders(files: set[int]) -> set[str]:
    """Commands of the processes that have one of these files, by number, open or mapped."""
    commands = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            inodes = {int(line.split()[4]) for line in (process / "maps").read_text().splitlines()}
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):  # closed meanwhile
                    inodes.add(descriptor.stat().st_ino)
            if not files.isdisjoint(inodes):
                commands.add((process / "cmdline").read_text())
    return commands


def test_an_engine_that_sleeps_has_its_memory_back_and_other_memory_when_it_wakes_up(
    daemon: Daemon,
) -> None:
    """No process holds the old memory; the chunks stay, and later jobs use the new memory."""
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
        lane = eventually(lambda: lane_of(daemon), lambda lane: lane["pin_error"])
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
    wait_in_copy(daemon, 2 * RANK_CHUNK_BYTES * len(ticket.keys))  # of both ranks
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
        wait_in_copy(daemon)
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
        others = host.stored("host", 3)
        assert host.load(others) == (3, 0)
        lanes.switch("hang=")
        wait_next_lane(daemon, pid, workers=1)
        engine.replace(1)
        assert eventually(lambda: engine.try_load(keys), lambda nbytes: nbytes is not None) == 0
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


def test_a_device_or_driver_that_the_daemon_lacks_is_named_and_the_host_is_served(
    daemon: Daemon,
    fakecuda_folder: Path,
    start_daemon: StartDaemon,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lane's own sentence reaches the worker; no CUDA lane is left, and the daemon is ready."""
    monkeypatch.delenv("LD_LIBRARY_PATH")
    without_driver = start_daemon(where=daemon.runtime_dir.with_name("other"))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fakecuda_folder))
    monkeypatch.setenv("FAKECUDA_DEVICES", "2")
    for lacking, words in (
        (daemon, "no CUDA device has the UUID"),
        (without_driver, r".*libcuda\.so\.1"),
    ):
        rank = Asked(partial(Rank, device=1), lacking.runtime_dir, "engine", 0, 1)
        with pytest.raises(RuntimeError, match=f"RegistrationError: {words}"):
            rank.ask("register")
        rank.close()
        assert lacking.wait_ready()["lanes"][0]["device"] == "host"
        assert not cuda_lanes(lacking)
        with Engine(lacking.runtime_dir, name="host-engine").wait_attached() as host:
            keys = host.stored("host", 3)
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
        ticket = engine.scheduler.prepare_load(keys)
        assert not engine.succeeded(engine.submit("load", ticket, blocks_of(keys, 33)))
        engine.scheduler.complete_load(ticket)
        lanes.switch("unhang=")
        wait_lane(second, usable_bytes=POOL)
        assert engine.load(keys) == 0
        assert second.wait_ready()["namespaces"][0]["counters"]["restored"] == 6


def test_a_lane_ends_without_engines_and_comes_back_for_the_next(lanes: Lanes) -> None:
    """Its end unpins the pool and is no error; the next engine finds its chunks."""
    daemon = lanes.start("--lane-idle-seconds", "0.3")
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
