"""What `make gpu` needs: a GPU, shared memory, a torch that can use them, and packages.

The Python that runs it is used, with its torch; kvd is taken from the source tree and not
installed. Packages that are missing come from the folder of wheels that WHEELS names, into a
temporary folder. Nothing is downloaded. Only the standard library is imported here.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (ROOT, ROOT / "client", ROOT / "client" / "tools", ROOT / "proto")
DRIVER_SECONDS, IMPORT_SECONDS = 60.0, 120.0
SHARED_MEMORY = Path("/dev/shm")
# The benchmark's pool is three times what it moves at a time; and what the tests need.
POOLS, SPARE_BYTES = 3, 2**30
LEAST_MIB = 256
# What the endpoint over HTTP needs, which is off here, and the command line, which
# tests/gpu/serve.py does without.
NOT_NEEDED = {"click", "prometheus-client", "psutil", "rich", "starlette", "uvicorn"}
# Where a package's module has another name.
MODULES = {"cuda-bindings": "cuda.bindings", "pyzmq": "zmq"}


class Refused(Exception):
    """This cannot run here; the text is a sentence that says why and what to do."""


def check() -> None:
    """Refuse where there is no GPU, or no torch that can use it.

    Raises:
        Refused: with the reason.
    """
    # In processes of their own: the driver is never loaded into this one.
    probe = [sys.executable, str(Path(__file__).parent / "probe.py")]
    done = _ask(probe, DRIVER_SECONDS, "the NVIDIA driver does not answer")
    if done.returncode:
        raise Refused(f"{done.stderr.strip()}; it needs a machine with an NVIDIA GPU")
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


def mib_that_fit(requested: int, folder: Path = SHARED_MEMORY) -> int:
    """MiB to move at a time: as requested, or less where shared memory is small.

    Raises:
        Refused: there is too little for figures that mean something; with the remedy.
    """
    free = shutil.disk_usage(folder).free
    fit = (free - SPARE_BYTES) // POOLS // 2**20
    if fit < min(requested, LEAST_MIB):
        needed_bytes = POOLS * requested * 2**20 + SPARE_BYTES
        raise Refused(
            f"{folder} has {free // 2**20} MiB free and {needed_bytes // 2**20} are needed; enlarge"
            f" it: mount -o remount,size=24g {folder} (a container: --shm-size=24g)"
        )
    return min(requested, fit)


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


def environment(folder: Path) -> dict[str, str]:
    """With the sources and what is missing on the path.

    Raises:
        Refused: a package is missing, and there is no folder of wheels that has it.
    """
    packages = needed()
    lacking = [package for module, package in packages.items() if not is_there(module)]
    if lacking:
        _install(lacking, folder)
    paths = [*map(str, SOURCES), str(folder), os.environ.get("PYTHONPATH", "")]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    # Plugins that happen to be there are no part of these tests.
    variables["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    code = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    command = [sys.executable, "-c", code, *packages, "kvd.server.loop", "kvd_client"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it died"])[-1]
        raise Refused(f"{sys.executable} cannot import what is needed ({last})")
    return variables


def is_there(module: str) -> bool:
    """Whether a module can be imported, by its dotted name."""
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
    wheel_names = {_plain(wheel.name.split("-")[0]) for wheel in Path(wheels).glob("*.whl")}
    if missing := [package for package in packages if _plain(package) not in wheel_names]:
        raise Refused(
            f"{sys.executable} and WHEELS={wheels} lack {', '.join(missing)}; put their wheels"
            f" there too ({_download(missing)})"
        )
    if not is_there("pip"):
        raise Refused(f"{sys.executable} lacks {listed}, and pip to install them from {wheels}")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index"]
    command += ["--disable-pip-version-check", "--find-links", wheels, "--target", str(folder)]
    last_line = ""
    # What they need in turn may be in the folder, or installed, which pip does not look at here.
    for alone in ([], ["--no-deps"]):
        done = subprocess.run(
            [*command, *alone, *packages], capture_output=True, text=True, check=False
        )
        if not done.returncode:
            return
        last_line = (done.stderr.strip().splitlines() or ["pip died"])[-1]
    raise Refused(f"{wheels} has not all wheels for {listed} ({last_line})")


def _plain(package: str) -> str:
    """A name as wheels have it: `cuda_bindings` of `cuda-bindings>=12.9,<14`."""
    return re.sub("[-_.]+", "_", re.split("[<>=~! ]", package)[0]).lower()


def _download(packages: list[str]) -> str:
    names = " ".join(f"'{package}'" for package in packages)
    python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    return (
        f"where there is a network: {python} -m pip download --only-binary=:all: -d folder {names}"
    )
