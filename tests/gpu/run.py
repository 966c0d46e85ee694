"""`make gpu`: the tests that need a GPU, then the benchmark, in under 8 minutes.

It uses the Python that runs it, with that Python's torch; kvd is taken from the
source tree and not installed. Packages that are missing come from the folder of
wheels that WHEELS names, into a temporary folder. Nothing is downloaded.
"""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (ROOT, ROOT / "client", ROOT / "proto")
SECONDS = 470.0
SHARE_OF_TESTS = 0.5
LAST_WORDS_SECONDS = 10.0
SHARED_MEMORY, SHARED_BYTES = Path("/dev/shm"), 2 * 2**30
# Packages by the modules that are imported.
PACKAGES = {
    "click": "click>=8.1",
    "cuda.bindings": "cuda-bindings>=13",
    "msgpack": "msgpack>=1.0.8",
    "msgspec": "msgspec>=0.19",
    "numpy": "numpy>=1.26",
    "psutil": "psutil>=5.9",
    "pytest": "pytest>=8.3",
    "rich": "rich>=13.7",
    "zmq": "pyzmq>=26",
}


class Refused(Exception):
    """This cannot run here; the text is a sentence that says why and what to do."""


def main() -> int:
    """Run both; the exit status, 2 where it refuses."""
    end = time.monotonic() + SECONDS
    try:
        _check()
        with tempfile.TemporaryDirectory(prefix="kvd-gpu-") as folder:
            environment = _environment(Path(folder))
            tests = [sys.executable, "-m", "pytest", "-c", "tests/gpu/pytest.ini"]
            tests += ["--rootdir", "tests/gpu", "--confcutdir", "tests/gpu", "-m", "gpu"]
            tests += ["-p", "no:cacheprovider", "tests/gpu"]
            half = time.monotonic() + SHARE_OF_TESTS * SECONDS
            tested = _run("the tests", tests, environment, half)
            bench = [sys.executable, "bench/gpu_transfer.py"]
            return _run("the benchmark", bench, environment, end) or tested
    except Refused as refusal:
        print(f"make gpu: {refusal}", file=sys.stderr)
        return 2


def _check() -> None:
    """Refuse where there is no GPU, or no torch that can use it.

    Raises:
        Refused: with the reason.
    """
    # In a process of its own: the driver is never loaded into this one.
    probe = [sys.executable, str(Path(__file__).parent / "probe.py")]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Refused(f"{done.stderr.strip()}; it needs a machine with an NVIDIA GPU")
    code = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode == 3:
        raise Refused(
            f"the torch of {sys.executable} has no CUDA; choose another: make gpu PYTHON="
        )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it died"])[-1]
        raise Refused(
            f"{sys.executable} cannot import torch ({last}); choose another: make gpu PYTHON="
        )
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < SHARED_BYTES:
        raise Refused(
            f"{SHARED_MEMORY} has {free // 2**20} MiB free and {SHARED_BYTES // 2**20} are needed;"
            " give the container more, as with --shm-size=4g"
        )


def _environment(folder: Path) -> dict[str, str]:
    """With the sources, their metadata and what is missing on the path.

    Raises:
        Refused: a package is missing, and there is no folder of wheels that has it.
    """
    lacking = [package for module, package in PACKAGES.items() if not _is_there(module)]
    if lacking:
        _install(lacking, folder)
    # `kvd.version` reads what an installation would have written.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    name, version = project["name"].replace("-", "_"), project["version"]
    metadata = folder / f"{name}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {version}\n")
    paths = [*map(str, SOURCES), str(folder), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it is in
        return False


def _install(packages: list[str], folder: Path) -> None:
    wheels = os.environ.get("WHEELS", "")
    listed = ", ".join(packages)
    if not wheels:
        raise Refused(
            f"{sys.executable} lacks {listed}; put their wheels into a folder and name it:"
            " WHEELS=folder make gpu"
        )
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index"]
    command += ["--find-links", wheels, "--target", str(folder), *packages]
    if subprocess.run(command, check=False).returncode:
        raise Refused(f"{wheels} has not all wheels for {listed} and what they need")


def _run(what: str, command: list[str], environment: dict[str, str], end: float) -> int:
    """Run a program until it ends or the time is over; its exit status."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    try:
        return process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        print(f"make gpu: {what} take too long and are ended", file=sys.stderr)
        process.send_signal(signal.SIGINT)  # it ends the daemons that it has started
        try:
            process.wait(LAST_WORDS_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return 1


if __name__ == "__main__":
    sys.exit(main())
