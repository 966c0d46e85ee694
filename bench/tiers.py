"""What a tier costs loads from memory: none, one that works, and one that hangs, in one run.

Three daemons with an engine each take turns with the same load, so that all see the same machine:
a job of chunks that memory has is looked up, pinned and loaded, again and again, and after every
few of them a new chunk is stored, which goes down to the tier, where there is one. The tier that
hangs takes orders and ends none: it is set aside, tried again, and its process replaced. The
medium is the double in memory: what is measured is what a tier does to others.

`python bench/tiers.py` prints the figures as JSON.
"""

import contextlib
import json
import tempfile
import time
from pathlib import Path

import numpy as np
from harness import MIB, Daemon, Engine, Figures, fresh_keys, layout, median

TENSORS, PAGE, NUM_BLOCKS = 4, 16384, 64  # a chunk of one block has 64 KiB
POOL = 64 * MIB
LOAD_CHUNKS, LOADS, LOADS_A_STORE, ROUNDS = 8, 400, 4, 11
HOT_JOBS = 16
TIER = "memory:,size=256MiB,keep=all"
BLOCKS = np.arange(1, 1 + LOAD_CHUNKS)
SIDES = ("no_tier", "tier", "hanging_tier")


def measure() -> Figures:
    """Percentiles by side, over the rounds their medians, and the rounds' ratios to no tier."""
    took: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
    with (
        tempfile.TemporaryDirectory(prefix="kvd-bench-") as place,
        contextlib.ExitStack() as ending,
    ):
        hang = Path(place) / "hang"
        options = {"no_tier": (), "tier": ("--tier", TIER)}
        options["hanging_tier"] = ("--tier", f"{TIER},hang={hang}")
        loads = {}
        for side in SIDES:
            daemon = ending.enter_context(Daemon(POOL, *options[side]))
            shape = layout(TENSORS, PAGE, NUM_BLOCKS, 1)
            loads[side] = Load(ending.enter_context(Engine(daemon.runtime_dir, shape)))
            loads[side].run(LOADS)  # warm, and the tier takes chunks
        hang.touch()
        ending.callback(hang.unlink)
        for turn in range(ROUNDS):
            for at in range(len(SIDES)):  # each comes first as often as the others
                side = SIDES[(turn + at) % len(SIDES)]
                took[side].append(loads[side].run(LOADS))
    figures: Figures = {}
    for side in SIDES:
        p50, p99 = zip(*took[side], strict=True)
        figures |= {f"{side}_hit_p50_us": median(p50), f"{side}_hit_p99_us": median(p99)}
        if side != SIDES[0]:
            for at, name in enumerate(("p50", "p99")):
                pairs = zip(took[side], took[SIDES[0]], strict=True)
                figures[f"{side}_hit_{name}_ratio"] = median(a[at] / b[at] for a, b in pairs)
    return figures


class Load:
    """One engine's jobs, of chunks that stay in memory because they are loaded again and again."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._jobs = [fresh_keys(LOAD_CHUNKS) for _ in range(HOT_JOBS)]
        for keys in self._jobs:
            engine.finish(engine.submit(engine.offer(keys), BLOCKS))
            engine.stored(keys)

    def run(self, loads: int) -> tuple[float, float]:
        """Microseconds of a load, from the lookup to the bytes: the median, and the 99th in 100."""
        engine, took = self._engine, []
        for number in range(loads):
            keys = self._jobs[number % HOT_JOBS]
            started = time.perf_counter()
            engine.scheduler.lookup_many(keys)
            with engine.find(keys) as ticket:
                engine.finish(engine.submit(ticket, BLOCKS))
                took.append((time.perf_counter() - started) * 1e6)
            if number % LOADS_A_STORE == 0:
                new = fresh_keys(1)
                engine.finish(engine.submit(engine.offer(new), BLOCKS[:1]))
                engine.stored(new)
        return float(np.percentile(took, 50)), float(np.percentile(took, 99))


if __name__ == "__main__":
    print(json.dumps({name: round(value, 3) for name, value in measure().items()}, indent=2))
