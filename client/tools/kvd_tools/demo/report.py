"""The demo's figures, made from what the engine counted."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from rich.table import Table

MEMCPY_BYTES = 64 * 2**20
MEMCPY_RUNS = 5
MEANING = {
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
    "tier_stored_chunks": "chunks that tiers took, with --tier",
    "tier_loaded_chunks": "chunks that came up from tiers",
    "tier_in_GBps": "pool to tiers, while any was on its way",
    "tier_out_GBps": "tiers to pool, while any was on its way",
    "memcpy_GBps": "one contiguous copy, for comparison",
    "jobs": "stores and loads, each rank's counted",
    "job_p50_us": "submitted to seen finished, median",
    "job_p99_us": "the same, 99th percentile",
    "lookup_us_per_key": "from the scheduler's process",
    "wall_seconds": "serving all requests",
    "world_size": "rank processes",
    "device": "where the KV tensors are",
}
"""The figures, in their order. Chunks count once, bytes and jobs once a rank."""

Summary = dict[str, int | float | str | None]


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


def summarize(
    counts: Counter[str], job_ns: Sequence[int], others: Mapping[str, int | float | str | None]
) -> Summary:
    """Return the flat object of the JSON file; rates in 1e9 bytes a second."""
    p50, p99 = np.percentile(job_ns or [0], [50, 99]) / 1e3
    made: Summary = {
        **{
            f"{kind}_GBps": round(counts[f"{kind}_bytes"] / max(1, counts[f"{kind}_ns"]), 3)
            for kind in ("store", "load")
        },
        "jobs": len(job_ns),
        "job_p50_us": round(float(p50), 1),
        "job_p99_us": round(float(p99), 1),
        "lookup_us_per_key": round(counts["lookup_ns"] / 1e3 / max(1, counts["lookups"]), 3),
        **others,
    }
    return {name: made.get(name, counts[name]) for name in MEANING}


def table(summary: Summary) -> Table:
    """Return the summary for people, without figures that this run has none of."""
    made = Table("figure", "value", "what it is", title="kvd demo")
    made.columns[1].justify = "right"
    for name, value in summary.items():
        if value is not None:
            text = f"{value:,}" if isinstance(value, int) else str(value)
            made.add_row(name, text, MEANING[name])
    return made
