"""File descriptors, memory for tables and room for ledgers run out: nobody is disturbed."""

import contextlib
import os
import resource
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvd.gate import Gate, reserve_of
from tests.conftest import Daemon, StartDaemon
from tests.daemon.engines import Engine, keys_of
from tests.daemon.test_engines import wait_hit

PATIENCE = 20.0


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


def fill_up(path: Path) -> None:
    """Write to a file until its filesystem has no page left."""
    with path.open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while filler.write(bytes(4096)):
            pass


def wait_path(path: Path, *, there: bool) -> None:
    """Until a file is there, or gone."""
    end = time.monotonic() + PATIENCE
    while path.exists() != there:
        assert time.monotonic() < end, path
        select.select([], [], [], 0.01)


def test_newcomers_are_turned_away_before_descriptors_run_out(daemon: Daemon) -> None:
    """With few left, whoever comes reads why; who is here works on; later all are let in."""
    door, request_socket = (daemon.runtime_dir / name for name in ("door.sock", "broker.sock"))
    with Engine(daemon.runtime_dir).wait_attached() as engine:
        keys = keys_of("kept", 4)
        with descriptors_limited(daemon.process.pid, 5):
            wait_path(request_socket, there=False)
            for _ in range(30):
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as visitor:
                    visitor.settimeout(PATIENCE)
                    visitor.connect(str(door))
                    assert b"LimitNOFILE" in visitor.recv(65536)
            with socket.socket(socket.AF_UNIX) as late, pytest.raises(FileNotFoundError):
                late.connect(str(request_socket))
            assert engine.store(keys) == keys
            wait_hit(engine, keys)
            assert engine.load(keys) == (4, 0)
            assert engine.scheduler.status()["broker"]["limits"]["descriptors"] >= 30
        wait_path(request_socket, there=True)
        with Engine(daemon.runtime_dir, name="late").wait_attached() as another:
            assert another.load(keys) == (4, 0)
    assert daemon.process.poll() is None


FLOOD = """
import resource, socket, sys
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
held = []
try:
    while len(held) < int(sys.argv[2]):
        one = socket.socket(socket.AF_UNIX)
        one.connect(sys.argv[1])
        held.append(one)
except OSError as error:
    print(len(held), type(error).__name__, flush=True)
else:
    print(len(held), "all", flush=True)
sys.stdin.read()
"""


def test_a_flood_of_connections_ends_before_the_descriptors(daemon: Daemon) -> None:
    """As many connections as one likes: the socket is gone before the last descriptor is."""
    limit = 6000
    with ExitStack() as stack:
        engine = stack.enter_context(Engine(daemon.runtime_dir).wait_attached())
        stack.enter_context(descriptors_limited(daemon.process.pid, limit))
        path = daemon.runtime_dir / "broker.sock"
        flood = subprocess.Popen(
            [sys.executable, "-c", FLOOD, str(path), str(2 * limit)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.callback(flood.wait, PATIENCE)
        stack.callback(flood.kill)
        assert flood.stdout is not None
        assert flood.stdin is not None
        stack.callback(flood.stdout.close)
        stack.callback(flood.stdin.close)
        held, reason = flood.stdout.readline().split()
        assert reason == "FileNotFoundError", reason
        assert limit // 2 < int(held) < limit
        keys = keys_of("flooded", 3)
        assert engine.store(keys) == keys
        flood.kill()
        wait_path(path, there=True)
    assert daemon.process.poll() is None


def test_a_ledger_that_finds_no_room_refuses_its_engine(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """No room for its ledger: the engine waits without a cache, others work; then it has one."""
    pool_dir = tmp_path / "pool"
    pool_dir.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=12M", "tmpfs", str(pool_dir)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        daemon = start_daemon("--pool-dir", str(pool_dir), "--keep-pool", "yes", cpu_bytes="8MiB")
        with Engine(daemon.runtime_dir).wait_attached() as engine:
            fill_up(pool_dir / "filler")
            keys = keys_of("kept", 4)
            assert engine.store(keys) == keys
            with Engine(daemon.runtime_dir, name="other", model="other") as other:
                assert not other.scheduler.wait_attached(0.5)
                wait_hit(engine, keys)
                assert engine.load(keys) == (4, 0)
                (pool_dir / "filler").unlink()
                other.wait_attached()
                assert other.store(keys_of("late", 2))
            assert daemon.process.poll() is None
        daemon.stop()
    finally:
        subprocess.run(["umount", "--lazy", str(pool_dir)], check=False)


def test_a_daemon_without_room_for_its_manifest_says_so(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """The pool fits, the manifest does not: one sentence with the remedy, and status 1."""
    pool_dir = tmp_path / "pool"
    pool_dir.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4M", "tmpfs", str(pool_dir)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        extra = ("--pool-dir", str(pool_dir), "--keep-pool", "yes")
        daemon = start_daemon(*extra, cpu_bytes="2MiB")
        daemon.stop()
        (area,) = pool_dir.iterdir()
        (area / "manifest.json").unlink()
        fill_up(pool_dir / "filler")
        daemon = start_daemon(*extra, cpu_bytes="2MiB", ready=False)
        assert daemon.process.wait(PATIENCE) == 1
        said = daemon.log.read_text()
        assert "cannot be written: No space left on device; make room there" in said
        assert "Traceback" not in said
    finally:
        subprocess.run(["umount", "--lazy", str(pool_dir)], check=False)


def test_a_gate_hides_its_socket_and_brings_it_back(tmp_path: Path) -> None:
    """Its file has another name and no rights while descriptors are scarce, in this process."""
    path = tmp_path / "some.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        gate = Gate(path)
        assert not gate.turn()
        gate.check_integrity()
        with descriptors_limited(os.getpid(), reserve_of(0) - 1):
            assert gate.turn()
            assert not gate.turn()
            gate.check_integrity()
            assert not path.exists()
            assert gate.hidden.stat().st_mode & 0o777 == 0
        assert gate.turn()
        gate.check_integrity()
        assert path.stat().st_mode & 0o777 == 0o660
        gate.remove()
        assert not list(tmp_path.iterdir())
