"""Measures the host backend: prints a table, writes bench/out/host.json.

Every ratio is taken within one run; every figure is a median of repeated runs.
"""

import json
import os
import platform
from pathlib import Path

import copying
import events
import latency
import looking_up
import policy_costs
import starting
import tiers
from harness import Figures
from rich.console import Console
from rich.table import Table

OUT = Path(__file__).parent / "out" / "host.json"

SECTIONS = {
    "daemon": starting.measure,
    "lookup": looking_up.measure,
    "one-chunk jobs": latency.measure,
    "copying": copying.measure,
    "KV events": events.measure,
    "tiers": tiers.measure,
    "eviction policies": policy_costs.measure,
}
GOALS = {
    "host_store_ratio": "at least 0.8 of the best copy in one process",
    "host_load_ratio": "at least 0.8 of the best copy in one process",
    "lookup_us_per_key": "at most 1.5, 100,000 chunks, another process",
    "prepare_store_1000_ms": "at most 5",
    "job_p50_us": "at most 400, two ranks",
    "job_ratio": "at most 2.5 round trips of one bare client, two ranks",
    "alone_job_ratio": "the same of one rank",
    "start_ready_ratio": "at most 2 of the bare import",
    "bare_import_ms": "python -c 'import zmq, msgspec, numpy'",
    "start_serving_ms": "of start_ready_ms: until requests are answered",
    "start_allocated_ms": "until the pool's 64 MiB are there",
    "start_lane_ms": "until the lane serves",
    "directory_bytes_per_chunk": "shared memory, 1,000,000 chunks",
    "broker_bytes_per_chunk": "of the broker's own memory, 100,000 chunks",
    "broker_rss_mb": "idle, beyond the pool",
    "lane_rss_mb": "idle, beyond the pool",
    "host_store_first_GBps": "into pool pages never touched before",
    "event_broker_us": "at most 2, the broker's for each change",
    "event_read_us": "at most 1, a scheduler's for each change: 1 % of its step at 10,000 a second",
    "tier_hit_p99_ratio": "at most 1.05: loads from memory with a tier, beside none",
    "hanging_tier_hit_p99_ratio": "the same while the tier hangs",
    "adaptive_use_us": "at most 2, for each chunk of a request that has finished",
    "adaptive_refresh_us": "at most 2, for each chunk that is pinned for a load",
    "adaptive_insert_us": "for each chunk that is stored; half of them have a ghost",
    "adaptive_evict_us": "at most 5, for each chunk that is reserved and evicted",
    "adaptive_learn_ms_longest": "at most 2, one class",
    "adaptive_tables_bytes": "at most 65,536, of one namespace",
    "ghost_bytes_per_key": "at most 48, of the broker's own memory",
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
