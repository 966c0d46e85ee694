"""What a benchmark needs beside this Python's packages, checked before it starts to work.

What is missing is named with its remedy; an empty text if nothing is.
"""

import ctypes
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

MOONCAKE_LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}
"""What Mooncake's client loads, which LMCache imports; with Debian's packages."""


def check_needs(*problems: str) -> None:
    """End the program with everything that is missing and the remedies, if anything is."""
    if missing := [problem for problem in problems if problem]:
        sys.exit("\n".join(missing))


def missing_engine(package: str, release: str = "") -> str:
    """Return why this Python has no such engine, of this release if given, such as `vllm` 0.33."""
    environment = f".venv-{package}-{release}" if release else f".venv-{package}"
    remedy = f"run make {environment}, then {environment}/bin/python {' '.join(sys.argv)}"
    if find_spec(package) is None:
        return f"{package} is not installed for {sys.executable}: {remedy}"
    if release and not _version(package).startswith(f"{release}."):
        installed = _version(package) or "another release"
        return f"{package} {release} is needed, {sys.executable} has {installed}: {remedy}"
    return ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # vLLM for the CPU has another name
        return ""


def missing_libraries(packages: dict[str, str]) -> str:
    """Return which shared libraries cannot be loaded; `packages` names Debian's for each."""
    missing = []
    for name in packages:
        try:
            ctypes.CDLL(name)
        except OSError:
            missing.append(name)
    if not missing:
        return ""
    debian = " ".join(packages[name] for name in missing)
    return f"{', '.join(missing)} cannot be loaded: apt-get install {debian}"


def missing_program(name: str, package: str) -> str:
    """Return that a program is not on PATH, and Debian's package that has it."""
    return "" if shutil.which(name) else f"{name} is not on PATH: apt-get install {package}"
