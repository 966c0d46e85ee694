"""What `make bench-lane` measures and writes, with as little of everything as there may be."""

import json
import os
from pathlib import Path

import pytest

from tests.processes import ROOT, python

FRAGMENT = 65536
SECONDS = 280.0  # six daemons start, one pair after another
LITTLE = ("--fragments", FRAGMENT, "--rounds", 1, "--mib", 1, "--jobs", 2, "--job-mib", 2)
FIGURES = {
    "date",
    "commit",
    "cpu",
    "job_us",
    "idle_percent",
    f"load_GBps_{FRAGMENT}",
    f"store_GBps_{FRAGMENT}",
    f"both_GBps_{FRAGMENT}",
    f"load_wall_GBps_{FRAGMENT}",
    f"both_calls_GBps_{FRAGMENT}",
    f"load_GBps_{FRAGMENT}_workers_2",
    f"cpu_ms_per_GB_{FRAGMENT}",
    f"stage_load_plan_us_{FRAGMENT}",
    f"stage_store_driver_call_ms_per_GB_{FRAGMENT}",
}
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


@pytest.mark.slow
@pytest.mark.fakecuda
@pytest.mark.usefixtures("fakecuda")
def test_the_lane_benchmark_measures_both_trees_and_writes_every_figure(tmp_path: Path) -> None:
    """Real daemons of this tree and of the pinned one; without that, what it says why."""
    out = tmp_path / "lane.json"
    more = ("--quick", "--workers", "1,2", "--idle-seconds", 0.1, "--out", out)
    done = python("bench/lane.py", *LITTLE, *more, environment=ENVIRONMENT, seconds=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert set(result) >= FIGURES
    numbers = [name for name in result if "_GBps_" in name or name.endswith("_us")]
    assert all(result[name] > 0 for name in numbers)
    assert result[f"stage_store_driver_call_ms_per_GB_{FRAGMENT}"] > 0  # its timer is installed
    before = {name for name in result if name.startswith("before_")}
    if "without figures of the commit before" in done.stdout:
        assert not before
    else:
        assert {f"before_{name}" for name in numbers if not name.startswith("before")} <= before
    assert "64 KiB load" in done.stdout
    assert "64 KiB store: driver call" in done.stdout
