"""Measures the host backend: prints a table, writes bench/out/host.json.

Every ratio is taken within one run; every figure is a median of repeated runs.
"""

import json
import os
import platform
from pathlib import Path

import copying
import latency
import looking_up
from harness import MIB, Daemon, Figures, median
from rich.console import Console
from rich.table import Table

OUT = Path(__file__).parent / "out" / "host.json"
STARTS = 5


def starting() -> Figures:
    """From starting a daemon to ready, in ms; MiB resident beyond its pool when idle."""
    ms, broker_mb, lane_mb = [], [], []
    for _ in range(STARTS):
        with Daemon(64 * MIB) as daemon:
            broker, lane = daemon.memory()
        ms.append(daemon.start_ms)
        broker_mb.append(broker)
        lane_mb.append(lane)
    return {
        "start_ready_ms": median(ms),
        "broker_rss_mb": median(broker_mb),
        "lane_rss_mb": median(lane_mb),
    }


SECTIONS = {
    "daemon": starting,
    "lookup": looking_up.measure,
    "one-chunk jobs": latency.measure,
    "copying": copying.measure,
}
GOALS = {
    "host_store_ratio": "at least 0.8 of the best copy in one process",
    "host_load_ratio": "at least 0.8 of the best copy in one process",
    "lookup_us_per_key": "at most 1.5, 100,000 chunks, another process",
    "prepare_store_1000_ms": "at most 5",
    "job_p50_us": "at most 400, two ranks",
    "job_ratio": "at most 2.5 round trips of one bare client, two ranks",
    "alone_job_ratio": "the same of one rank",
    "start_ready_ms": "well under 1000",
    "directory_bytes_per_chunk": "shared memory, 1,000,000 chunks",
    "broker_bytes_per_chunk": "of the broker's own memory, 100,000 chunks",
    "broker_rss_mb": "idle, beyond the pool",
    "lane_rss_mb": "idle, beyond the pool",
    "host_store_first_GBps": "into pool pages never touched before",
    "memcpy_GBps": "contiguous, one thread",
}


def main() -> None:
    """Run all sections."""
    console = Console()
    figures: Figures = {}
    for name, measure in SECTIONS.items():
        with console.status(f"measuring: {name}"):
            figures |= measure()
    figures = {name: round(value, 3) for name, value in figures.items()}
    title = f"host backend, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    table = Table("figure", "value", "goal or meaning", title=title)
    table.columns[1].justify = "right"
    for name, value in figures.items():
        table.add_row(name, f"{value:,}", GOALS.get(name, ""))
    console.print(table)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(figures, indent=2) + "\n")
    console.print(f"written to {OUT}")


if __name__ == "__main__":
    main()
