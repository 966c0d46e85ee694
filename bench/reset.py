"""How long an engine's scheduler stands still for a reset of 450,000 chunks, and what follows.

Another engine of the namespace loads nothing of before, either: it is asked right after.
"""

import random
import time

from harness import SPARE, Daemon, Engine, Figures, layout, median, wait_found

from kvd_client.scheduler import Scheduler
from kvd_proto.directory import LookupResult

CHUNKS, BATCH, PAGE = 450_000, 4_500, 4096
ROUNDS = 3


def measure() -> Figures:
    """Milliseconds: until the call returns, and until the slots are free; medians of the rounds."""
    waits, sweeps = [], []
    with (
        Daemon((CHUNKS + SPARE * BATCH) * PAGE) as daemon,
        Engine(daemon.runtime_dir, layout(1, PAGE, BATCH + 1)) as engine,
    ):
        for _ in range(ROUNDS):
            keys, _ = engine.fill(CHUNKS, BATCH)
            wait, sweep = _reset(engine.scheduler, keys)
            waits.append(wait)
            sweeps.append(sweep)
    return {"reset_ms": median(waits), "reset_ms_longest": max(waits), "swept_ms": median(sweeps)}


def _reset(scheduler: Scheduler, keys: list[bytes]) -> tuple[float, float]:
    """Milliseconds that the scheduler stands still, and until all room is free again."""
    some = random.Random(0).sample(keys, 1000)
    wait_found(scheduler, keys)
    started = time.perf_counter()
    while not scheduler.reset():  # as an engine does that is not told of the end of it
        pass
    wait = time.perf_counter() - started
    if set(scheduler.lookup_many(some)) != {LookupResult.MISS}:
        raise RuntimeError("a chunk is found after the reset")
    while scheduler.status()["pool"]["free_bytes"] < CHUNKS * PAGE:
        time.sleep(0.001)
    return wait * 1e3, (time.perf_counter() - started) * 1e3


if __name__ == "__main__":
    print({name: round(value, 2) for name, value in measure().items()})
