"""What benchmarks say on a machine that lacks what they need, before they start to work."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.processes import ROOT, python

SCRIPTS = {
    script.name: engine
    for script in sorted((ROOT / "bench").glob("*.py"))
    for engine in ("vllm", "sglang")
    if f".venv-{engine}" in script.read_text() and "__main__" in script.read_text()
}
"""Benchmarks that run in an engine's environment."""


@pytest.mark.skipif(bool(find_spec("vllm") or find_spec("sglang")), reason="engines are installed")
@pytest.mark.parametrize("script", SCRIPTS)
def test_an_absent_engine_is_named_with_the_target_that_installs_it(script: str) -> None:
    """One line and no trace: the engine, the Python, make's target and the command to give."""
    arguments = ["trace.jsonl"] if script == "vllm_hits.py" else []
    done = python(ROOT / "bench" / script, *arguments)
    (line,) = done.stderr.splitlines()
    engine = SCRIPTS[script]
    assert done.returncode == 1
    assert line.startswith(f"{engine} is not installed for {sys.executable}: run make .venv-")
    assert f"/bin/python {ROOT / 'bench' / script}" in line


def test_a_library_that_lmcache_needs_is_named_with_its_package(tmp_path: Path) -> None:
    """What cannot be loaded is said at once, and all of it."""
    for name in ("libibverbs.so.1", "libnuma.so.1"):
        (tmp_path / name).write_bytes(b"no library")
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    arguments = ("--with", "lmcache")
    done = python(ROOT / "bench" / "vllm_ttft.py", *arguments, environment=environment)
    assert done.returncode == 1
    assert "libibverbs.so.1, libnuma.so.1" in done.stderr
    assert "apt-get install libibverbs1 libnuma1" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_program_that_a_benchmark_runs_is_named_with_its_package(tmp_path: Path) -> None:
    """Before anything is written."""
    done = python(ROOT / "bench" / "disk.py", tmp_path, environment=os.environ | {"PATH": ""})
    assert done.stderr == "fio is not on PATH: apt-get install fio\n"
    assert list(tmp_path.iterdir()) == []
