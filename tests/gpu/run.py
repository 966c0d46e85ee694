"""`make gpu`: the tests that need a GPU, then the benchmark, in under 8 minutes.

It uses the Python that runs it, with that Python's torch; kvd is taken from the
source tree and not installed. Packages that are missing come from the folder of
wheels that WHEELS names, into a temporary folder. Nothing is downloaded.
"""

import importlib.util
import os
import re
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
SHARE_OF_TESTS = 0.45
LAST_WORDS_SECONDS = 10.0
SHARED_MEMORY, SHARED_BYTES = Path("/dev/shm"), 2 * 2**30
# What the endpoint over HTTP needs, which is off here.
NOT_NEEDED = {"prometheus-client", "starlette", "uvicorn"}
# Where a package's module has another name.
MODULES = {"cuda-bindings": "cuda.bindings", "pyzmq": "zmq"}


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
            left = end - time.monotonic() - LAST_WORDS_SECONDS
            bench = [sys.executable, "bench/gpu_transfer.py", "--seconds", f"{left:.0f}"]
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
            " give a container more, as with --shm-size=4g, or enlarge it:"
            f" mount -o remount,size=4g {SHARED_MEMORY}"
        )


def needed(pyproject: Path = ROOT / "pyproject.toml") -> dict[str, str]:
    """What the daemon, its CUDA lanes, the client and the tests need, by module: `pyzmq>=26`."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    packages = [*project["dependencies"], *extras["daemon"], *extras["cuda"]]
    packages += [package for package in extras["dev"] if package.startswith("pytest>")]
    named = {re.split("[<>=~! ]", package)[0]: package for package in packages}
    return {
        MODULES.get(name, name.replace("-", "_")): package
        for name, package in named.items()
        if name not in NOT_NEEDED
    }


def _environment(folder: Path) -> dict[str, str]:
    """With the sources, their metadata and what is missing on the path.

    Raises:
        Refused: a package is missing, and there is no folder of wheels that has it.
    """
    packages = needed()
    lacking = [package for module, package in packages.items() if not _is_there(module)]
    if lacking:
        _install(lacking, folder)
    # `kvd.version` reads what an installation would have written.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    name, version = project["name"].replace("-", "_"), project["version"]
    metadata = folder / f"{name}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {version}\n")
    paths = [*map(str, SOURCES), str(folder), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    # Plugins that happen to be there are no part of these tests.
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    code = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    command = [sys.executable, "-c", code, *packages, "kvd.broker.service", "kvd_client"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it died"])[-1]
        raise Refused(f"{sys.executable} cannot import what is needed ({last})")
    return environment


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it is in
        return False


def _install(packages: list[str], folder: Path) -> None:
    wheels = os.environ.get("WHEELS", "")
    listed = ", ".join(packages)
    names = " ".join(f"'{package}'" for package in packages)
    if not wheels:
        raise Refused(
            f"{sys.executable} lacks {listed}; put their wheels into a folder and name it:"
            f" WHEELS=folder make gpu (where there is a network: python{sys.version_info[0]}."
            f"{sys.version_info[1]} -m pip download --only-binary=:all: -d folder {names})"
        )
    if not Path(wheels).is_dir():
        raise Refused(f"WHEELS={wheels} is no folder; it is to have the wheels of {listed}")
    if not _is_there("pip"):
        raise Refused(f"{sys.executable} lacks {listed}, and pip to install them from {wheels}")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index"]
    command += ["--disable-pip-version-check", "--find-links", wheels, "--target", str(folder)]
    said = ""
    # What they need in turn may be in the folder, or installed, which pip does not look at here.
    for alone in ([], ["--no-deps"]):
        done = subprocess.run(
            [*command, *alone, *packages], capture_output=True, text=True, check=False
        )
        if not done.returncode:
            return
        said = (done.stderr.strip().splitlines() or ["pip died"])[-1]
    raise Refused(f"{wheels} has not all wheels for {listed} ({said})")


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
