"""How much of what is stored a tier with `keep=all` keeps, by the rate of stores.

One engine stores new chunks at a fixed rate through a pool that is far too small for them. A chunk
that leaves memory before the tier has taken it is not kept. Each rate runs in a daemon of its own.

`python bench/tier_keeps.py TIER [MB_PER_SECOND…]` prints, for each rate: MB/s really stored, chunks
stored, the share of them that the tier keeps, how many it does not, and MB/s put. TIER is as
`kvd serve --tier` takes it, with room for `SECONDS` of stores, such as `disk:/mnt/x,size=16GiB` on
an empty directory; `memory:,size=4GiB,delay=0.2` is a slow one. keep=all is added.
"""

import json
import sys
import time

import numpy as np
from harness import Daemon, Engine, Figures, find_doubles, fresh_keys, layout
from tiers import wait_up

TENSORS, CHUNK_BYTES, NUM_BLOCKS = 4, 256 * 1024, 128
POOL_BYTES = 128 * 2**20
JOB_CHUNKS = 16
SECONDS = 12.0
SETTLE_SECONDS = 2.0
RATES = (36.0, 72.0, 144.0, 288.0)  # MB/s


def measure(tier: str, rate: float) -> Figures:
    """Store for `SECONDS` at `rate` MB/s, then count what the tier has."""
    stored = 0
    shape = layout(TENSORS, CHUNK_BYTES // TENSORS, NUM_BLOCKS)
    with (
        Daemon(POOL_BYTES, "--tier", f"{tier},keep=all") as daemon,
        Engine(daemon.runtime_dir, shape, model=f"rate {rate}") as engine,
    ):
        wait_up(daemon)
        blocks = np.arange(1, 1 + JOB_CHUNKS)
        started = time.monotonic()
        while (passed := time.monotonic() - started) < SECONDS:
            ahead = stored * CHUNK_BYTES / (rate * 1e6) - passed
            if ahead > 0:
                time.sleep(ahead)
            engine.scheduler.reserve(JOB_CHUNKS, 1.0)
            ticket = engine.scheduler.prepare_store(fresh_keys(JOB_CHUNKS))
            if ticket.keys:
                engine.finish(engine.submit(ticket, blocks[: len(ticket)]))
                engine.scheduler.complete_store(ticket.keys)
                stored += len(ticket)
        offered = stored * CHUNK_BYTES / 1e6 / (time.monotonic() - started)
        time.sleep(SETTLE_SECONDS)
        status = daemon.status()
    counters = status["tiers"][0]["counters"]
    return {
        "stored_MB_per_s": offered,
        "stored": stored,
        "kept_share": counters["puts"]["ok"] / stored,
        "unkept": counters["unkept"],
        "put_MB_per_s": counters["put_bytes"] / 1e6 / SECONDS,
    }


def main() -> None:
    """Measure each rate."""
    find_doubles()
    rates = [float(rate) for rate in sys.argv[2:]] or RATES
    figures = {}
    for rate in rates:
        measured = measure(sys.argv[1], rate)
        figures[f"{rate:g}"] = {name: round(value, 3) for name, value in measured.items()}
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
