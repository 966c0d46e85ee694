"""The GPU's benchmark on the test driver: its shape, never its speed."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakecuda.harness import FakeCuda

ROOT = Path(__file__).parents[2]
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
