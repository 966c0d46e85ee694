"""File descriptors, memory for tables and room for ledgers run out: sessions go on."""

import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvd_client.errors import RegistrationError
from tests.conftest import Daemon, StartDaemon
from tests.daemon.engines import Engine, keys_of, wait_hit
from tests.full import fill_up
from tests.waiting import PATIENCE


@contextmanager
def descriptors_limited(pid: int, more: int) -> Iterator[None]:
    """The process may open so many descriptors more than it has now."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    count = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (count + more, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("more", [0, 1, 2, 3, 9])
def test_sessions_work_on_without_descriptors(daemon: Daemon, more: int) -> None:
    """New connections to every socket are refused; no session ends, and later all are served."""
    with Engine(daemon.runtime_dir).wait_attached() as engine, ExitStack() as stack:
        engine.store(keys_of("known", 1))  # lanes know it
        keys = keys_of("kept", 4)
        lane = daemon.status()["lanes"][0]
        jobs = next(daemon.runtime_dir.glob("lane-host-*.sock"))
        with descriptors_limited(daemon.process.pid, more), descriptors_limited(lane["pid"], more):
            for path in (daemon.runtime_dir / "broker.sock", jobs):
                for _ in range(20):
                    connection = stack.enter_context(socket.socket(socket.AF_UNIX))
                    connection.settimeout(PATIENCE)
                    connection.connect(str(path))
            with Engine(daemon.runtime_dir, name="late") as late:
                assert not late.scheduler.wait_attached(0.5)
            assert engine.store(keys) == keys
            wait_hit(engine, keys)
            assert engine.load(keys) == (4, 0)
            assert engine.scheduler.status()
        stack.close()
        with Engine(daemon.runtime_dir, name="another").wait_attached() as another:
            assert another.load(keys) == (4, 0)
        report = daemon.status()
        assert report["lanes"][0]["pid"] == lane["pid"]
        assert report["broker"]["limits"]["open_files"] >= 1
    assert daemon.process.poll() is None
    assert "Traceback" not in daemon.log.read_text()


@pytest.mark.parametrize("more", [0, 1, 3, 4])
def test_a_lane_without_descriptors_refuses_registrations_and_lives(
    daemon: Daemon, more: int
) -> None:
    """The refusal names limit and remedy; the lane serves on, and takes the engine later."""
    with Engine(daemon.runtime_dir).wait_attached() as engine:
        lane = daemon.status()["lanes"][0]["pid"]
        with descriptors_limited(lane, more):
            with (
                Engine(daemon.runtime_dir, name="late", world_size=1, ranks=()) as late,
                pytest.raises(RegistrationError, match=r"raise LimitNOFILE \(ulimit -n\), now \d"),
            ):
                late.add(0)
            keys = keys_of("kept", 4)
            engine.store(keys)
            wait_hit(engine, keys)
        with Engine(daemon.runtime_dir, name="later", world_size=1).wait_attached():
            assert daemon.status()["lanes"][0]["pid"] == lane
    log = daemon.wait_log("memory not imported: ")
    assert "Traceback" not in log
    assert "is lost" not in log


def test_a_ledger_that_finds_no_room_refuses_its_engine(
    start_daemon: StartDaemon, tmp_path: Path, small_tmpfs: Callable[[Path, int], None]
) -> None:
    """No room for its ledger: the engine waits without a cache, others work; then it has one."""
    small_tmpfs(tmp_path, 12 * 2**20)
    daemon = start_daemon("--pool-dir", str(tmp_path), "--keep-pool", "yes", cpu_bytes="8MiB")
    with Engine(daemon.runtime_dir).wait_attached() as engine:
        filler = fill_up(tmp_path)
        keys = keys_of("kept", 4)
        assert engine.store(keys) == keys
        with Engine(daemon.runtime_dir, name="other", model="other") as other:
            assert not other.scheduler.wait_attached(0.5)
            wait_hit(engine, keys)
            assert engine.load(keys) == (4, 0)
            filler.unlink()
            other.wait_attached()
            assert other.store(keys_of("late", 2))
        assert daemon.process.poll() is None
