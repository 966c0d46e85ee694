"""The start of a daemon, beside what its interpreter needs to import three packages.

    python bench/starting.py

Both in turns: a machine's mood is in both. Stages are taken from the daemon's log.
"""

import compileall
import json
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

from harness import MIB, Daemon, Figures, median

import kvd
import kvd_client
import kvd_proto

STARTS = 9
BARE = "import zmq, msgspec, numpy"
STAGES = {"serving": "serving ", "allocated": " are allocated", "lane": " is up "}
"""Names of stages, and what their lines of the log have."""


def measure() -> Figures:
    """Medians of several starts, in ms; MiB resident beyond its pool when idle."""
    for package in (kvd, kvd_client, kvd_proto):  # as an installation has it
        compileall.compile_dir(Path(str(package.__file__)).parent, quiet=2)
    found: dict[str, list[float]] = {}
    for turn in range(STARTS + 1):  # the first one warms the page cache
        for name, value in _once().items():
            if turn:
                found.setdefault(name, []).append(value)
    return {name: median(values) for name, values in found.items()}


def _once() -> Figures:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", BARE], check=True)
    bare = (time.perf_counter() - began) * 1e3
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as place:
        log, exec_at = Path(place) / "log", time.time()
        with Daemon(64 * MIB, "--log-format", "json", log=log) as daemon:
            broker, lane = daemon.memory()
        lines = [json.loads(line) for line in log.read_text().splitlines()]
    stages = {}
    for name, text in STAGES.items():
        told = next(line["time"] for line in lines if text in line["event"])
        stages[f"start_{name}_ms"] = (datetime.fromisoformat(told).timestamp() - exec_at) * 1e3
    return {
        "start_ready_ms": daemon.start_ms,
        "bare_import_ms": bare,
        "start_ready_ratio": daemon.start_ms / bare,
        **stages,
        "broker_rss_mb": broker,
        "lane_rss_mb": lane,
    }


if __name__ == "__main__":
    print(json.dumps({name: round(value, 2) for name, value in measure().items()}, indent=2))
