"""What a tier costs loads from memory: none, one that works, and one that hangs, in one run.

Three daemons with an engine each take turns with the same load, so that all see the same machine:
a job of chunks that memory has is looked up, pinned and loaded, again and again, and after every
few of them a new chunk is stored, which goes down to the tier, where there is one. The tier that
hangs takes orders and ends none: it is set aside, tried again, and its process replaced. The
medium is the double in memory: what is measured is what a tier does to others.

The 99th of 100 loads is taken over all rounds of a side, 54 loads being slower; of one round's it
would rest on three. What chance adds is said by drawing rounds again (the bootstrap): nine in ten
ratios lie between the `low` and the `high` one.

`python bench/tiers.py [KIB]` prints the figures as JSON, for chunks of so many KiB, by default 64.
"""

import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
from harness import (
    POLL_SECONDS,
    SECONDS,
    Daemon,
    Engine,
    Figures,
    find_doubles,
    fresh_keys,
    layout,
)

TENSORS, CHUNK_KIB, NUM_BLOCKS = 4, 64, 64
POOL_CHUNKS, TIER_CHUNKS = 512, 2048
LOAD_CHUNKS, LOADS, LOADS_A_STORE, ROUNDS = 8, 300, 4, 18
LEAD_IN = 100  # loads that do not count, in which chunks are gathered as they are in a long run
HOT_JOBS = 16
SETTLE_SECONDS = 0.1  # after a round, in which what was gathered goes down
BLOCKS = np.arange(1, 1 + LOAD_CHUNKS)
SIDES = ("no_tier", "tier", "hanging_tier")
DRAWS = 300

Loads = npt.NDArray[np.float64]


def measure(chunk_kib: int = CHUNK_KIB) -> Figures:
    """Percentiles by side over all loads, and their ratios to no tier."""
    took: dict[str, list[list[float]]] = {side: [] for side in SIDES}
    nbytes = chunk_kib * 1024
    find_doubles()
    tier = f"memory:,size={TIER_CHUNKS * nbytes},keep=all"
    with (
        tempfile.TemporaryDirectory(prefix="kvd-bench-") as place,
        contextlib.ExitStack() as ending,
    ):
        hang = Path(place) / "hang"
        options = {"no_tier": (), "tier": ("--tier", tier)}
        options["hanging_tier"] = ("--tier", f"{tier},hang={hang}")
        loads = {}
        for side in SIDES:
            daemon = ending.enter_context(Daemon(POOL_CHUNKS * nbytes, *options[side]))
            shape = layout(TENSORS, nbytes // TENSORS, NUM_BLOCKS, 1)
            loads[side] = Load(ending.enter_context(Engine(daemon.runtime_dir, shape)))
            wait_up(daemon)
            loads[side].run(LOADS)  # warm, and the tier takes chunks
        hang.touch()
        ending.callback(hang.unlink)
        for turn in range(ROUNDS):
            for at in range(len(SIDES)):  # each comes first as often as the others
                side = SIDES[(turn + at) % len(SIDES)]
                took[side].append(loads[side].run(LEAD_IN + LOADS)[LEAD_IN:])
                time.sleep(SETTLE_SECONDS)
    return compared({side: np.array(rounds) for side, rounds in took.items()})


def wait_up(daemon: Daemon) -> None:
    """Wait until the processes of a daemon's tiers serve.

    Raises:
        RuntimeError: they do not within a minute.
    """
    end = time.monotonic() + SECONDS
    while not all(tier["pid"] for tier in daemon.status()["tiers"]):
        if time.monotonic() > end:
            raise RuntimeError("the tier does not start")
        time.sleep(POLL_SECONDS)


def compared(took: dict[str, Loads]) -> Figures:
    """The figures of microseconds by side, [rounds, loads]."""
    figures: Figures = {}
    none, draw = took[SIDES[0]], np.random.default_rng(0)
    drawn = draw.integers(0, len(none), (DRAWS, len(none)))
    for side, loads in took.items():
        for name, percent in (("p50", 50.0), ("p99", 99.0)):
            value = float(np.percentile(loads, percent))
            figures[f"{side}_hit_{name}_us"] = value
            if loads is none:
                continue
            figures[f"{side}_hit_{name}_ratio"] = value / figures[f"{SIDES[0]}_hit_{name}_us"]
            ratios = [
                np.percentile(loads[i], percent) / np.percentile(none[i], percent) for i in drawn
            ]
            low, high = np.percentile(ratios, (5.0, 95.0))
            figures[f"{side}_hit_{name}_low"], figures[f"{side}_hit_{name}_high"] = low, high
    return figures


class Load:
    """One engine's jobs, of chunks that stay in memory because they are loaded again and again."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._jobs = [fresh_keys(LOAD_CHUNKS) for _ in range(HOT_JOBS)]
        for keys in self._jobs:
            engine.finish(engine.submit(engine.offer(keys), BLOCKS))
            engine.stored(keys)

    def run(self, loads: int) -> list[float]:
        """Microseconds of each load, from the lookup to the bytes."""
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
        return took


if __name__ == "__main__":
    found = measure(*map(int, sys.argv[1:2]))
    print(json.dumps({name: round(value, 3) for name, value in found.items()}, indent=2))
