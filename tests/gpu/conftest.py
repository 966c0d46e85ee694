"""Tests on a real GPU. They share the engine of tests/daemon, not its conftest's needs."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.serving import StartDaemon, started_daemons

HERE = Path(__file__).parent
SECONDS = 75  # a test that takes longer hangs; it costs the others no time


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip where there is no GPU, and say why."""
    mine = [item for item in items if HERE in item.path.parents]
    if not mine:
        return
    probe = [sys.executable, str(HERE / "probe.py")]
    done = subprocess.run(probe, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        for item in mine:
            item.add_marker(pytest.mark.skip(reason=f"make gpu: {done.stderr.strip()}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail what hangs: the tests' own process only ever waits for others, in Python."""

    def late(_number: int, _frame: object) -> None:
        raise TimeoutError(f"{item.name} takes more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def gpu_daemons(request: pytest.FixtureRequest) -> Iterator[StartDaemon]:
    """Starts daemons and ends them with the test; their logs go to GPU_TESTS_LOG."""
    with tempfile.TemporaryDirectory(prefix="kvd-", dir="/tmp") as path:
        try:
            with started_daemons(Path(path) / "run") as start:
                yield start
        finally:
            _keep_logs(Path(path), request.node.name)


def _keep_logs(folder: Path, test: str) -> None:
    if "GPU_TESTS_LOG" not in os.environ:
        return
    with Path(os.environ["GPU_TESTS_LOG"]).open("ab") as sink:
        for log in sorted(folder.glob("*.log")):
            sink.writelines((f"== {test}, {log.name}\n".encode(), log.read_bytes()))
