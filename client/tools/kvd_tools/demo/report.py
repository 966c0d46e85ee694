"""What the demo measured: counters, and the figures made from them."""

import time
from dataclasses import dataclass, field

import numpy as np
from rich.table import Table

from kvd_tools.demo.rank import Finished

MEMCPY_BYTES = 64 * 2**20
MEMCPY_RUNS = 5

Summary = dict[str, int | float | str]


def memcpy_rate() -> float:
    """Return GB/s (1e9 bytes) of one contiguous copy in this process, the best of a few."""
    source = np.ones(MEMCPY_BYTES, np.uint8)
    target = np.zeros(MEMCPY_BYTES, np.uint8)
    best = float("inf")
    for _ in range(MEMCPY_RUNS):
        started = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - started)
    return MEMCPY_BYTES / best / 1e9


@dataclass(slots=True)
class Figures:
    """Everything that is counted. Chunks count once, bytes and jobs once a rank."""

    requests: int = 0
    lookups: int = 0
    lookup_ns: int = 0
    hit_chunks: int = 0
    stored_chunks: int = 0
    loaded_chunks: int = 0
    evicted_chunks: int = 0
    refused_chunks: int = 0
    failed_loads: int = 0
    failed_stores: int = 0
    verified_bytes: int = 0
    mismatched_bytes: int = 0
    strayed_bytes: int = 0
    wall_seconds: float = 0.0
    copied_bytes: dict[str, float] = field(default_factory=lambda: {"store": 0, "load": 0})
    copy_seconds: dict[str, float] = field(default_factory=lambda: {"store": 0, "load": 0})
    job_ns: list[int] = field(default_factory=list)

    def count_job(self, report: Finished, kind: str) -> None:
        """Add one rank's report of a store's or load's end."""
        self.verified_bytes += report.verified
        self.mismatched_bytes += report.mismatched
        self.job_ns.append(report.took_ns)
        if report.result.success:
            self.copied_bytes[kind] += report.result.bytes
            self.copy_seconds[kind] += report.result.seconds

    @property
    def good(self) -> bool:
        """No wrong byte, neither in what was loaded nor where nothing may be written."""
        return not self.mismatched_bytes and not self.strayed_bytes

    def summary(self, *, world_size: int, device: str, memcpy_gbps: float) -> Summary:
        """Return the flat object of the JSON file; rates in 1e9 bytes a second."""
        p50, p99 = np.percentile(self.job_ns or [0], [50, 99]) / 1e3
        measured: Summary = {
            **{
                f"{kind}_GBps": round(
                    self.copied_bytes[kind] / max(1e-9, self.copy_seconds[kind]) / 1e9, 3
                )
                for kind in ("store", "load")
            },
            "memcpy_GBps": round(memcpy_gbps, 3),
            "jobs": len(self.job_ns),
            "job_p50_us": round(float(p50), 1),
            "job_p99_us": round(float(p99), 1),
            "lookup_us_per_key": round(self.lookup_ns / 1e3 / max(1, self.lookups), 3),
            "wall_seconds": round(self.wall_seconds, 3),
            "world_size": world_size,
            "device": device,
        }
        return {
            name: measured[name] if name in measured else getattr(self, name) for name in _MEANING
        }


_MEANING = {
    "requests": "prompts served",
    "lookups": "keys looked up in shared memory",
    "hit_chunks": "chunks found and used, both groups",
    "stored_chunks": "chunks written to the pool",
    "loaded_chunks": "chunks read back from the pool",
    "evicted_chunks": "chunks that made room for others",
    "refused_chunks": "offered chunks that got no slot",
    "failed_loads": "loads that became misses",
    "failed_stores": "stores that came to nothing",
    "verified_bytes": "bytes compared after loading",
    "mismatched_bytes": "of these, wrong ones",
    "strayed_bytes": "bytes changed where nothing may be written",
    "store_GBps": "ranks to pool, the lane's copy time",
    "load_GBps": "pool to ranks, the lane's copy time",
    "memcpy_GBps": "one contiguous copy, for comparison",
    "jobs": "stores and loads, each rank's counted",
    "job_p50_us": "submitted to seen finished, median",
    "job_p99_us": "the same, 99th percentile",
    "lookup_us_per_key": "from the scheduler's process",
    "wall_seconds": "serving all requests",
    "world_size": "rank processes",
    "device": "where the KV tensors are",
}
"""The figures of a summary, in its order."""


def table(summary: Summary) -> Table:
    """Return the summary for people."""
    made = Table("figure", "value", "what it is", title="kvd demo")
    made.columns[1].justify = "right"
    for name, value in summary.items():
        text = f"{value:,}" if isinstance(value, int) else str(value)
        made.add_row(name, text, _MEANING[name])
    return made
