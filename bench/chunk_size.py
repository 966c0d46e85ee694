"""What smaller chunks cost: one prompt stored, looked up and loaded, by tokens of a chunk.

2,048 tokens in blocks of 16, 8 layers of 64 KiB a block, in blocks that lie anywhere. Processor
time of the scheduler's thread, of the broker and of the lane, and bytes over time of the job; all
sizes in turn, in every round. `python bench/chunk_size.py` prints the table.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from harness import (
    MIB,
    POLL_SECONDS,
    SECONDS,
    Daemon,
    Engine,
    Ints,
    fresh_keys,
    layout,
    median,
)
from rich.console import Console
from rich.table import Table

from kvd.cache.directory import directory_bytes
from kvd_client.tickets import LoadTicket, StoreTicket
from kvd_proto.directory import LookupResult

PROMPT_TOKENS, BLOCK_TOKENS, LAYERS, PAGE = 2048, 16, 8, 65536
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
PROMPT_BYTES = PROMPT_BLOCKS * LAYERS * PAGE
SIZES = (1, 2, 4, 8)  # blocks of a chunk
ROUNDS = 15
SETTLE_SECONDS = 0.05
POOL = 2048 * MIB
CHUNKS_COUNTED = 1_000_000
LOOK_UPS, BROKER = "look up, µs", "broker, µs"
STORE_CALLS, LOAD_CALLS = "prepare and complete a store, µs", "prepare and complete a load, µs"
UNITS = {
    LOOK_UPS: 1e6,
    STORE_CALLS: 1e6,
    LOAD_CALLS: 1e6,
    BROKER: 1e6,
    "lane, store, ms": 1e3,
    "lane, load, ms": 1e3,
    "store, GB/s": 1.0,
    "load, GB/s": 1.0,
    "directory, bytes": 1.0,
}


def main() -> None:
    """Measure and print."""
    figures: dict[int, dict[str, list[float]]] = {size: defaultdict(list) for size in SIZES}
    rng = np.random.default_rng(0)
    with Daemon(POOL) as daemon, ExitStack() as stack:
        daemon.wait_usable(SECONDS)
        engines = {
            size: stack.enter_context(
                Engine(
                    daemon.runtime_dir,
                    layout(LAYERS, PAGE, PROMPT_BLOCKS + 1, size),
                    model=f"chunks of {size} blocks",
                )
            )
            for size in SIZES
        }
        for number in range(ROUNDS + 1):
            for size in np.roll(SIZES, number).tolist():
                prompt = Prompt(daemon, engines[size], size, rng.permutation(PROMPT_BLOCKS) + 1)
                for name, value in prompt.measure().items():
                    if number:  # the first one touches memory
                        figures[size][name].append(value)
    for size in SIZES:
        chunks = PROMPT_BLOCKS // size
        figures[size]["directory, bytes"] = [
            directory_bytes(CHUNKS_COUNTED) / CHUNKS_COUNTED * chunks
        ]
    tokens = [f"{size * BLOCK_TOKENS} tokens" for size in SIZES]
    table = Table(f"of a prompt of {PROMPT_TOKENS:,} tokens", *tokens)
    for name, unit in UNITS.items():
        table.add_row(name, *(f"{unit * median(figures[size][name]):,.1f}" for size in SIZES))
    Console(width=120).print(table)


class Prompt:
    """One prompt that is new, of one engine.

    Args:
        daemon: its processes are looked at.
        engine: its blocks are `size` a chunk.
        size: blocks of a chunk.
        blocks: where its KV lies.
    """

    def __init__(self, daemon: Daemon, engine: Engine, size: int, blocks: Ints) -> None:
        self._engine, self._blocks = engine, blocks
        status = daemon.status()
        self._broker, self._lane = status["pid"], status["lanes"][0]["pid"]
        self._keys = fresh_keys(PROMPT_BLOCKS // size)
        self._took: dict[str, float] = defaultdict(float)

    def measure(self) -> dict[str, float]:
        """Seconds by step, of processors but for the two speeds."""
        scheduler, keys = self._engine.scheduler, self._keys
        before = processor_seconds(self._broker)
        scheduler.reserve(len(keys), SECONDS)
        with self._clock(STORE_CALLS):
            stored = scheduler.prepare_store(keys)
        self._move("store", stored)
        with self._clock(STORE_CALLS):
            scheduler.complete_store(stored)
        while scheduler.lookup(keys[-1]) is not LookupResult.HIT:  # not by asking the broker
            time.sleep(POLL_SECONDS)
        with self._clock(LOOK_UPS):
            for key in keys:
                scheduler.lookup(key)
        with self._clock(LOAD_CALLS):
            found = scheduler.prepare_load(keys)
        self._move("load", found)
        with self._clock(LOAD_CALLS):
            scheduler.complete_load(found)
        time.sleep(SETTLE_SECONDS)  # the broker has served all of it
        self._took[BROKER] = processor_seconds(self._broker) - before
        return self._took

    def _move(self, way: str, ticket: StoreTicket | LoadTicket) -> None:
        if len(ticket) != len(self._keys):
            raise RuntimeError(f"{ticket!r}: all chunks are needed")
        lane, started = processor_seconds(self._lane), time.perf_counter()
        self._engine.finish(self._engine.submit(ticket, self._blocks))
        self._took[f"{way}, GB/s"] = PROMPT_BYTES / (time.perf_counter() - started) / 1e9
        self._took[f"lane, {way}, ms"] = processor_seconds(self._lane) - lane

    @contextmanager
    def _clock(self, what: str) -> Iterator[None]:
        started = time.thread_time()
        yield
        self._took[what] += time.thread_time() - started


def processor_seconds(pid: int) -> float:
    """Of a process's first thread, to the nanosecond."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


if __name__ == "__main__":
    main()
