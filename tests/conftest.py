"""What all tests share: daemons that are always ended."""

import importlib.util
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.daemon.serving import Daemon, StartDaemon, daemon_left_clean, started_daemons
from tests.fakecuda.build import NoCompiler, build
from tests.fakecuda.harness import FakeCuda
from tests.processes import TEMPORARY

__all__ = ["Daemon", "StartDaemon", "started_daemons"]

# Engines have environments of their own: make test-vllm, make test-sglang.
collect_ignore = [name for name in ("vllm", "sglang") if not importlib.util.find_spec(name)]
if "vllm" in collect_ignore:
    collect_ignore.append("routers")  # fed by engines: make test-routers

# A shell ignores Ctrl-C in what it runs in the background, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Where a machine asks for colours, no test could read what a command prints.
for variable in ("FORCE_COLOR", "TTY_COMPATIBLE"):
    os.environ.pop(variable, None)

# Without compiled modules each process that a test starts would compile all of kvd again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Sockets lie in tests' folders, and their paths are limited to 108 bytes.
os.environ["TMPDIR"] = tempfile.tempdir = TEMPORARY

# What chance finds belongs to whoever looks for it (--hypothesis-profile=explore), not to whoever
# changed something else: make test draws the same examples every time.
settings.register_profile("kvd", deadline=None, max_examples=60, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile("kvd")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """An empty folder, removed with the test.

    Pytest's own has user, worker and test in its path, which leaves a socket's name little room.
    """
    with tempfile.TemporaryDirectory(prefix="kvd-", ignore_cleanup_errors=True) as path:
        yield Path(path)


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """A short path: Unix socket paths are limited to 108 bytes."""
    with tempfile.TemporaryDirectory(prefix="kvd-", dir="/tmp") as path:
        yield Path(path) / "run"


@pytest.fixture
def start_daemon(runtime_dir: Path, tmp_path: Path) -> Iterator[StartDaemon]:
    """Starts daemons (by default in `runtime_dir`, 64 MiB) and ends them with the test."""
    del tmp_path  # it may have a daemon's files, so it is removed after the daemon has ended
    with started_daemons(runtime_dir) as start:
        yield start


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[Daemon]:
    """A ready daemon with a pool of 64 MiB for all tests of a module that break nothing.

    What a test counts or stores there is of an engine and a model that are named by `label`.
    """
    with daemon_left_clean() as daemon:
        yield daemon


@pytest.fixture
def label(request: pytest.FixtureRequest) -> str:
    """A name that no other test uses."""
    return str(request.node.name)


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Callable[[Path, int], None]]:
    """Mounts a tmpfs of so many bytes over a directory, until the test has ended."""
    del tmp_path  # removed once nothing is mounted over it
    mounted: list[Path] = []

    def mount(place: Path, nbytes: int) -> None:
        command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "none", str(place)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        if done.returncode:
            pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
        mounted.append(place)

    yield mount
    for place in mounted:
        subprocess.run(["umount", "-l", str(place)], check=True, timeout=60)


@pytest.fixture(scope="session")
def fakecuda(tmp_path_factory: pytest.TempPathFactory) -> FakeCuda:
    """The test driver; tests are skipped where it cannot be built or used, and say why."""
    if not importlib.util.find_spec("cuda"):
        pytest.skip("cuda-bindings is not installed: pip install cuda-bindings")
    try:
        return FakeCuda(build(tmp_path_factory.mktemp("fakecuda")))
    except NoCompiler as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def fakecuda_folder(fakecuda: FakeCuda) -> Path:
    """Where the test driver is, a double of CUDA's, for LD_LIBRARY_PATH."""
    return fakecuda.library.parent


@pytest.fixture
def daemon(start_daemon: StartDaemon) -> Daemon:
    """A ready daemon with a pool of 64 MiB."""
    return start_daemon()
