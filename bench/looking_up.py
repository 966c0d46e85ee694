"""Lookups in a directory of 100,000 chunks, beside a dict; asking for 1,000 slots."""

import random
import time

from harness import MIB, SPARE, Daemon, Engine, Figures, layout, median

from kvd.cache.directory import directory_bytes
from kvd_client.scheduler import Scheduler
from kvd_proto.directory import LookupResult

CHUNKS, BATCH, PAGE = 100_000, 1000, 4096
BIG_DIRECTORY = 1_000_000
ROUNDS = 7


def measure() -> Figures:
    """Microseconds a key, milliseconds a request, bytes a chunk."""
    with (
        Daemon((CHUNKS + SPARE * BATCH) * PAGE) as daemon,
        Engine(daemon.runtime_dir, layout(1, PAGE, BATCH + 1)) as engine,
    ):
        empty, _ = daemon.memory()
        keys, prepare_ms = engine.fill(CHUNKS, BATCH)
        full, _ = daemon.memory()
        figures = look_up(engine.scheduler, keys)
    figures["prepare_store_1000_ms"] = median(prepare_ms)
    figures["directory_bytes_per_chunk"] = directory_bytes(BIG_DIRECTORY) / BIG_DIRECTORY
    figures["broker_bytes_per_chunk"] = (full - empty) * MIB / CHUNKS
    return figures


def look_up(scheduler: Scheduler, keys: list[bytes]) -> Figures:
    """All keys in random order, one call each, the daemon's directory and a dict in turn."""
    random.Random(0).shuffle(keys)
    table = dict.fromkeys(keys, LookupResult.HIT)
    ours, theirs = [], []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        answers = [scheduler.lookup(key) for key in keys]
        ours.append((time.perf_counter() - started) / len(keys) * 1e6)
        started = time.perf_counter()
        expected = [table.get(key) for key in keys]
        theirs.append((time.perf_counter() - started) / len(keys) * 1e6)
        if answers != expected:
            raise RuntimeError("a stored chunk is not found")
    return {"lookup_us_per_key": median(ours), "dict_us_per_key": median(theirs)}
