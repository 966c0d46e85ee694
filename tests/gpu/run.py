"""`make gpu`: the tests that need a GPU, then the benchmark, in under 8 minutes.

It uses the Python that runs it, with that Python's torch; kvd is taken from the
source tree and not installed. Packages that are missing come from the folder of
wheels that WHEELS names, into a temporary folder. Nothing is downloaded. What it
finds is in bench/out: gpu.json, and the daemons' logs in gpu.log and gpu-tests.log.
"""

import argparse
import contextlib
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
SOURCES = (ROOT, ROOT / "client", ROOT / "client" / "tools", ROOT / "proto")
TESTS = (
    *("-m", "pytest", "-v", "-c", "tests/gpu/pytest.ini", "--rootdir", "tests/gpu"),
    *("--confcutdir", "tests/gpu", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu"),
)
LOG = ROOT / "bench" / "out" / "gpu-tests.log"
SECONDS = 470.0
DRIVER_SECONDS, IMPORT_SECONDS = 60.0, 120.0
SHARE_OF_TESTS = 0.45
LAST_WORDS_SECONDS = 10.0
SHARED_MEMORY = Path("/dev/shm")
# The benchmark's pool is three times what it moves at a time; and what the tests need.
POOLS, SPARE_BYTES = 3, 2**30
# What the endpoint over HTTP needs, which is off here.
NOT_NEEDED = {"prometheus-client", "starlette", "uvicorn"}
# Where a package's module has another name.
MODULES = {"cuda-bindings": "cuda.bindings", "pyzmq": "zmq"}


class Refused(Exception):
    """This cannot run here; the text is a sentence that says why and what to do."""


def main() -> int:
    """Run both; the exit status, 2 where it refuses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=2048, help="the benchmark moves at a time")
    mib = parser.parse_args().mib
    end = time.monotonic() + SECONDS
    try:
        _check(POOLS * mib * 2**20 + SPARE_BYTES)
        with tempfile.TemporaryDirectory(prefix="kvd-gpu-") as folder:
            environment = _environment(Path(folder))
            LOG.parent.mkdir(parents=True, exist_ok=True)
            LOG.write_bytes(b"")
            half = time.monotonic() + SHARE_OF_TESTS * SECONDS
            tested = _run("the tests", [sys.executable, *TESTS], environment, half)
            left = end - time.monotonic() - LAST_WORDS_SECONDS
            bench = [sys.executable, "bench/gpu_transfer.py"]
            bench += ["--seconds", f"{left:.0f}", "--mib", f"{mib}"]
            return _run("the benchmark", bench, environment, end) or tested
    except Refused as refusal:
        print(f"make gpu: {refusal}", file=sys.stderr)
        return 2


def _check(shared_bytes: int) -> None:
    """Refuse where there is no GPU, too little shared memory, or no torch that can use the GPU.

    Raises:
        Refused: with the reason.
    """
    # In processes of their own: the driver is never loaded into this one.
    probe = [sys.executable, str(Path(__file__).parent / "probe.py")]
    done = _ask(probe, DRIVER_SECONDS, "the NVIDIA driver does not answer")
    if done.returncode:
        raise Refused(f"{done.stderr.strip()}; it needs a machine with an NVIDIA GPU")
    check_shared_memory(shared_bytes)
    code = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)"
    done = _ask([sys.executable, "-c", code], IMPORT_SECONDS, "torch and its CUDA do not start")
    if done.returncode == 3:
        raise Refused(
            f"the torch of {sys.executable} has no CUDA; choose another: make gpu PYTHON="
        )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it died"])[-1]
        raise Refused(
            f"{sys.executable} cannot import torch ({last}); choose another: make gpu PYTHON="
        )


def check_shared_memory(needed_bytes: int, folder: Path = SHARED_MEMORY) -> None:
    """Refuse where the pools do not fit.

    Raises:
        Refused: with the remedy.
    """
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise Refused(
            f"{folder} has {free // 2**20} MiB free and {needed_bytes // 2**20} are needed; enlarge"
            f" it: mount -o remount,size=24g {folder} (a container: --shm-size=24g)"
        )


def _ask(command: list[str], seconds: float, late: str) -> "subprocess.CompletedProcess[str]":
    """Run a program that answers by its exit status.

    Raises:
        Refused: it does not answer; `late` says of what.
    """
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise Refused(f"{late} within {seconds:g} s; look at nvidia-smi and dmesg") from None


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
    """With the sources and what is missing on the path.

    Raises:
        Refused: a package is missing, and there is no folder of wheels that has it.
    """
    packages = needed()
    lacking = [package for module, package in packages.items() if not _is_there(module)]
    if lacking:
        _install(lacking, folder)
    paths = [*map(str, SOURCES), str(folder), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    # Plugins that happen to be there are no part of these tests.
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    environment["GPU_TESTS_LOG"] = str(LOG)
    code = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    command = [sys.executable, "-c", code, *packages, "kvd.daemon.loop", "kvd_client"]
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
    if not wheels:
        raise Refused(
            f"{sys.executable} lacks {listed}; put their wheels into a folder and name it:"
            f" WHEELS=folder make gpu ({_download(packages)})"
        )
    if not Path(wheels).is_dir():
        raise Refused(f"WHEELS={wheels} is no folder; it is to have the wheels of {listed}")
    there = {_plain(wheel.name.split("-")[0]) for wheel in Path(wheels).glob("*.whl")}
    if missing := [package for package in packages if _plain(package) not in there]:
        raise Refused(
            f"{sys.executable} and WHEELS={wheels} lack {', '.join(missing)}; put their wheels"
            f" there too ({_download(missing)})"
        )
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


def _plain(package: str) -> str:
    """A name as wheels have it: `cuda_bindings` of `cuda-bindings>=13`."""
    return re.sub("[-_.]+", "_", re.split("[<>=~! ]", package)[0]).lower()


def _download(packages: list[str]) -> str:
    names = " ".join(f"'{package}'" for package in packages)
    python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    return (
        f"where there is a network: {python} -m pip download --only-binary=:all: -d folder {names}"
    )


def _run(what: str, command: list[str], environment: dict[str, str], end: float) -> int:
    """Run a program until it ends or the time is over; its exit status. Nothing of it stays."""
    # A shell ignores Ctrl-C in what it runs in the background, and so would all that this starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command, cwd=ROOT, env=environment, process_group=0)
    try:
        return process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        print(f"make gpu: {what} take too long and are ended", file=sys.stderr)
        return 1
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)  # it ends the daemons that it has started
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LAST_WORDS_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
