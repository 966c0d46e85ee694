"""What `make gpu` runs, where there is no GPU: its refusals, and its benchmark's shape."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakecuda.harness import FakeCuda

ROOT = Path(__file__).parents[2]
GPU = ROOT / "tests" / "gpu"
FRAGMENTS = (4096, 65536)
PATIENCE = 150


@pytest.mark.fakecuda
def test_the_gpu_benchmark_runs_and_writes_every_figure(fakecuda: FakeCuda, tmp_path: Path) -> None:
    """Tiny sizes through a real daemon, each figure beside its references."""
    out, log = tmp_path / "gpu.json", tmp_path / "log"
    command = [sys.executable, str(ROOT / "bench" / "gpu_transfer.py"), "--out", str(out)]
    command += ["--mib", "2", "--rounds", "1", "--jobs", "4"]
    command += ["--fragments", ",".join(map(str, FRAGMENTS))]
    # An interrupt lets it end its daemons too.
    with (
        log.open("w") as sink,
        subprocess.Popen(
            command, env=fakecuda.environment(), cwd=ROOT, stdout=sink, stderr=sink
        ) as process,
    ):
        try:
            status = process.wait(PATIENCE)
        finally:
            process.send_signal(signal.SIGINT)
    assert status == 0, log.read_text()
    result = json.loads(out.read_text())
    assert result["device"].startswith("kvd test double")
    assert result["lane"]["engine"] == "BatchEngine"
    assert [row["bytes"] for row in result["fragments"]] == list(FRAGMENTS)
    for row in result["fragments"]:
        for direction in ("store", "load", "both"):
            assert set(row[direction]) == {"kvd", "raw", "batch"}
            assert all(rate > 0 for rate in row[direction].values())
    assert set(result["registration"]) == {
        "register_s_per_gib",
        "allocate_and_register_s_per_gib",
    }
    assert {"store_p50_us", "store_p99_us", "load_p50_us", "load_p99_us", "context_mib"} == set(
        result["latency"]
    )
    assert result["interference"] is None
    assert result["skipped"] == ["interference: torch sees no GPU"]
    assert {"driver", "cuda", "date", "bytes", "rounds"} <= set(result)


def test_make_gpu_refuses_in_a_sentence_without_a_gpu() -> None:
    """No driver, no device: one line that says so, before anything else is looked at."""
    if not subprocess.run([sys.executable, str(GPU / "probe.py")], check=False).returncode:
        pytest.skip("there is a GPU")
    done = refused()
    assert "it needs a machine with an NVIDIA GPU" in done


@pytest.mark.fakecuda
def test_make_gpu_refuses_a_torch_that_cannot_use_the_gpu(fakecuda: FakeCuda) -> None:
    """A device, and a torch that does not know what to do with it."""
    assert "has no CUDA; choose another: make gpu PYTHON=" in refused(fakecuda.environment())


def refused(environment: dict[str, str] | None = None) -> str:
    """The one line that `make gpu` prints."""
    command = [sys.executable, str(GPU / "run.py")]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("make gpu: ")
    return line
