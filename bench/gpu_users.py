"""Whether a daemon and an engine of different users can share GPU memory by IPC handle.

Daemon and engine are started by setpriv from a copy of the sources that everybody may read.
`python gpu_users.py RUNTIME_DIR` is the engine: it registers, stores, loads and compares.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {
    "kvd": "kvd",
    "client/kvd_client": "kvd_client",
    "proto/kvd_proto": "kvd_proto",
    "bench": "bench",
}
# A daemon starts lanes, so its user must be able to start what it runs on.
CHECK = (
    "import subprocess, sys;"
    " code = 'import numpy, msgspec, zmq, cuda.bindings.driver';"
    " subprocess.run([sys.executable, '-c', code], check=True)"
)
ONE, OTHER, GROUP = 65534, 65533, 65534
PAIRS = ((0, 0), (0, ONE), (ONE, 0), (ONE, OTHER))  # daemon, engine
SECONDS = 40.0
FRAGMENT, NBYTES, POOL = 65536, 4 * 2**20, "64MiB"


def why_not() -> str:
    """Why it cannot be tried here; empty where it can."""
    if os.getuid():
        return "only root can start processes of other users"
    if shutil.which("setpriv") is None:
        return "setpriv is not installed (util-linux)"
    return ""


def measure() -> dict[str, str]:
    """For each pair, such as `daemon 0, engine 65534`: `works`, or the last line of what failed."""
    with tempfile.TemporaryDirectory(prefix="kvd-users-", dir="/tmp") as name:
        place = Path(name)
        place.chmod(0o755)
        for source, target in SOURCES.items():
            ignored = shutil.ignore_patterns("__pycache__", "out")
            shutil.copytree(ROOT / source, place / target, ignore=ignored)
        shutil.copy(ROOT / "tests" / "gpu" / "serve.py", place)
        paths = (str(place), str(place / "bench"), os.environ.get("PYTHONPATH", ""))
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        return {
            f"daemon {daemon}, engine {engine}": _try(place, daemon, engine)
            for daemon, engine in PAIRS
        }


def _try(place: Path, daemon: int, engine: int) -> str:
    for uid in (daemon, engine):
        done = _run([*_as(uid), sys.executable, "-c", CHECK])
        if done.returncode:
            return f"not tried: uid {uid} cannot run {sys.executable} ({_last(done.stderr)})"
    with _daemon(place, daemon) as runtime_dir:
        program = str(place / "bench" / "gpu_users.py")
        done = _run([*_as(engine), sys.executable, program, str(runtime_dir)])
    print(done.stdout, done.stderr, flush=True)
    return _last(done.stdout if done.returncode == 0 else done.stderr)


@contextmanager
def _daemon(place: Path, uid: int) -> Iterator[Path]:
    """A daemon of this user; yields its runtime directory. What it says goes to our log."""
    own = place / f"of-{uid}"
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir()
    os.chown(own, uid, GROUP)
    own.chmod(0o750)
    command = [
        *_as(uid),
        sys.executable,
        str(place / "serve.py"),
        "--runtime-dir",
        str(own / "run"),
    ]
    command += ["--cpu-bytes", POOL]
    command += ["--http-listen", "off", "--keep-pool", "no"]
    process = subprocess.Popen(command)
    try:
        yield own / "run"
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _as(uid: int) -> list[str]:
    command = ["setpriv", f"--reuid={uid}", f"--regid={GROUP}", "--clear-groups"]
    # What root might do all the same.
    return command + (["--inh-caps=-all", "--bounding-set=-all"] if uid else [])


def _run(command: list[str]) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no end within {SECONDS:g} s")


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1]


def engine(runtime_dir: Path) -> None:
    """Store into the daemon's pool and load from it.

    Raises:
        RuntimeError, KvdError: it does not work.
    """
    from gpu_device import Gpu  # noqa: PLC0415  # only the engine has a driver
    from gpu_engine import GpuEngine  # noqa: PLC0415
    from harness import Served  # noqa: PLC0415

    with GpuEngine(Gpu(), Served(runtime_dir), FRAGMENT, NBYTES) as made:
        keys, _ = made.move(store=True)
        made.move(keys)
        made.check()
    print("works")


if __name__ == "__main__":
    engine(Path(sys.argv[1]))
