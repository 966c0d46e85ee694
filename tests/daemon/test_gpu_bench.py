"""`make gpu` on the test driver, and where it refuses."""

import json
import os
from pathlib import Path

import pytest

from tests.fakecuda.harness import FakeCuda
from tests.gpu.stand_ins import bare_python
from tests.processes import python

WHOLE = 280.0  # seconds of all parts, each with daemons of its own
FRAGMENT, ENDLESS = 65536, 2**40  # no pool has room for fragments of the second length
TESTS = "every_byte_back and driver_rank-ipc or cannot_be_exported"
PARTS = {"beside": 22, "pins 2": 6, "pins 6": 6, "exporter": 4, "lanes": 17}  # figures of each
USERS = {(0, 0): True, (65534, 0): False, (0, 65534): False, (65533, 65534): False}


@pytest.mark.nightly
@pytest.mark.fakecuda
@pytest.mark.timeout(400)
def test_make_gpu_writes_every_figure_but_those_of_a_part_that_fails(
    fakecuda: FakeCuda, tmp_path: Path
) -> None:
    """Tests and benchmark run on a bare Python; a part that fails costs its own figures."""
    bare_python(tmp_path)
    environment = fakecuda.environment() | {
        "PYTHONPATH": str(tmp_path),
        "PYTEST_ADDOPTS": f"-k '{TESTS}'",
    }
    environment.pop("LD_PRELOAD", None)  # naps: its parts have limits
    out = tmp_path / "out"
    done = python(
        *("tests/gpu/run.py", "--mib", 2, "--rounds", 1, "--out", out),
        *("--fragments", f"{FRAGMENT},{ENDLESS}"),
        environment=environment,
        seconds=WHOLE,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert len(done.stdout) < 12_000
    result = json.loads((out / "gpu.json").read_text())
    failed = f"fragments {ENDLESS}"
    assert result["missing"].pop(failed)  # the last line of what its daemon said
    log = out / "gpu" / f"{failed.replace(' ', '-')}.log"
    assert "does not fit" in log.read_text("utf-8")
    assert result["missing"] == {}
    assert result["device"].startswith("kvd test double")
    (row,) = result["fragments"]
    assert (row["bytes"], row["moved"]) == (FRAGMENT, 2**21)
    for direction in ("store", "load", "both"):
        assert set(row[direction]) == {"kvd", "batch", "ratio", "cpu_ms_per_GB"}
        assert all(figure["median"] > 0 for figure in row[direction].values())
    assert {part: len(result[part]) for part in PARTS} == PARTS
    assert result["exporter"]["bytes"] == "as they were"
    if os.getuid():
        assert "only root" in result["skipped"]["users"]
    else:
        opened = {name: text == "works" for name, text in result["users"].items()}
        assert opened == {f"exporter_{a}_opener_{b}": works for (a, b), works in USERS.items()}
    lines = done.stdout.splitlines()
    assert any(line.startswith(f"not measured: {failed}: ") for line in lines)
    assert any(line.startswith("load, 64 KiB") and "at least 0.97" in line for line in lines)
    assert "tests: 2 of 2 passed" in lines
    assert "lane cuda:" in (out / "gpu" / f"fragments-{FRAGMENT}.log").read_text()
    assert "lane cuda:" in (out / "gpu-tests" / "daemons.log").read_text()


def test_make_gpu_refuses_in_a_sentence_without_a_gpu() -> None:
    """No driver, no device: one line that says so, before anything else is looked at."""
    if not python("tests/gpu/probe.py").returncode:
        pytest.skip("there is a GPU")
    done = python("tests/gpu/run.py")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("make gpu: ")
    assert "it needs a machine with an NVIDIA GPU" in line
