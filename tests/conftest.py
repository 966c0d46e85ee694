"""What all tests share: daemons that are always ended."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

pytest_plugins = ["tests.fakecuda.plugin"]

# The engine has an environment of its own: make test-vllm.
collect_ignore = [] if importlib.util.find_spec("vllm") else ["vllm"]

settings.register_profile("kvd", deadline=None, max_examples=60)
settings.load_profile("kvd")


@dataclass
class Daemon:
    """One `kvd serve` process."""

    runtime_dir: Path
    process: subprocess.Popen[str]
    log: Path
    extra: list[str] = field(default_factory=list)

    def status(self, wait: float = 0.0) -> dict[str, Any]:
        """What `kvd status --json` prints."""
        done = subprocess.run(
            [
                *(sys.executable, "-m", "kvd", "status", "--json"),
                *("--runtime-dir", str(self.runtime_dir), "--wait", str(wait)),
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.stdout, f"{done.stderr}\n{self.log.read_text()}"
        report: dict[str, Any] = json.loads(done.stdout)
        return report

    def wait_ready(self) -> dict[str, Any]:
        """The status once ready; fails with the daemon's log otherwise."""
        report = self.status(wait=30)
        assert report["ready"], self.log.read_text()
        return report

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout=30)


StartDaemon = Callable[..., Daemon]


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """A short path: Unix socket paths are limited to 108 bytes."""
    with tempfile.TemporaryDirectory(prefix="kvd-", dir="/tmp") as path:
        yield Path(path) / "run"


@pytest.fixture
def start_daemon(runtime_dir: Path) -> Iterator[StartDaemon]:
    """Starts daemons (by default in `runtime_dir`, 64 MiB) and ends them with the test."""
    with started_daemons(runtime_dir) as start:
        yield start


@contextmanager
def started_daemons(runtime_dir: Path) -> Iterator[StartDaemon]:
    """Starts daemons (by default in `runtime_dir`, 64 MiB) and ends them with the block."""
    daemons: list[Daemon] = []

    def start(
        *extra: str, cpu_bytes: str = "64MiB", where: Path | None = None, ready: bool = True
    ) -> Daemon:
        path = where or runtime_dir
        path.parent.mkdir(parents=True, exist_ok=True)
        log = path.parent / f"{path.name}-{len(daemons)}.log"
        command = [sys.executable, "-m", "kvd", "serve", "--runtime-dir", str(path)]
        command += ["--cpu-bytes", cpu_bytes, *extra]
        with log.open("w") as sink:
            process = subprocess.Popen(command, stderr=sink, text=True, env=os.environ | {})
        daemon = Daemon(path, process, log)
        daemons.append(daemon)
        if ready:
            daemon.wait_ready()
        return daemon

    try:
        yield start
    finally:
        for daemon in daemons:
            if daemon.process.poll() is None:
                daemon.process.kill()
            daemon.process.wait(timeout=30)
            for pool in Path("/dev/shm").glob("kvd-*.pool"):
                if str(pool) in daemon.log.read_text():
                    pool.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def fakecuda_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the test driver is, a double of CUDA's, for LD_LIBRARY_PATH."""
    if importlib.util.find_spec("cuda") is None:
        pytest.skip("cuda-bindings is not installed")
    from tests.fakecuda.build import NoCompiler, build  # noqa: PLC0415  # most tests need none

    folder = tmp_path_factory.mktemp("fakecuda")
    try:
        build(folder)
    except NoCompiler as error:
        pytest.skip(str(error))
    return folder


@pytest.fixture
def daemon(start_daemon: StartDaemon) -> Daemon:
    """A ready daemon with a pool of 64 MiB."""
    return start_daemon()
