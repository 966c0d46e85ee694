"""What KV events cost: the broker, which writes changes, and the engine, which reads them.

Alone it prints a table and writes bench/out/events.json; `make bench` takes the first two figures.
"""

import argparse
import itertools
import json
import mmap
import os
import platform
import time
from pathlib import Path
from typing import Any, Self

import numpy as np
from harness import SECONDS, Daemon, Figures, Served, engine_name, fresh_keys, layout, median
from rich.console import Console
from rich.table import Table

from kvd.cache.directory import DirectoryWriter
from kvd_client.announcer import Announcer
from kvd_client.memory import HostMemory
from kvd_client.scheduler import Scheduler
from kvd_client.worker import Worker
from kvd_proto.changes import change_capacity
from kvd_proto.descriptions import Description, encode
from kvd_proto.directory import DirectoryHeader
from kvd_proto.jobs import JobBlocks
from kvd_proto.messages import Fingerprint, Store

OUT = Path(__file__).parent / "out" / "events.json"
CHUNKS, ROUNDS, FREED = 2**12, 101, 64
RING = 2**17  # changes
PAGE, SLOTS, BLOCK_TOKENS = 4096, 4000, 16
READ_CHUNKS, BATCH, AT_A_TIME = 20_000, 500, 40  # at 10,000 changes a second a step of 4 ms has 40
CHANGES_A_SECOND = 10_000
MOST_SECONDS, MOST_BATCHES = 4.0, (100, 2000)


class _Silent:
    """A log of changes that writes nothing."""

    def write(self, *_: object) -> None:
        """Nothing."""


def measure() -> Figures:
    """Microseconds a change."""
    return {"event_broker_us": writing_us(), "event_read_us": reading_us()}


# ----------------------------------------------------------------- the broker


def writing_us() -> float:
    """Of the broker, a change: `make_ready` and `free` with the ring and without, in turn."""
    header = DirectoryHeader.plan(CHUNKS, bytes(16), bytes(16), 1, change_capacity(RING))
    writer = DirectoryWriter(mmap.mmap(-1, header.total_bytes), header)
    keys, log, silent, took = fresh_keys(CHUNKS), writer.changes, _Silent(), []
    for _ in range(ROUNDS):
        without, with_ring = (_turn_over(writer, each, keys) for each in (silent, log))
        took.append((with_ring - without) / (2 * CHUNKS) * 1e6)
    return median(took)


def _turn_over(writer: DirectoryWriter, changes: Any, keys: list[bytes]) -> float:
    """Processor time in which all chunks become READY and go; `changes` is told of it."""
    writer.changes = changes
    slots = range(len(keys))
    for key, slot in zip(keys, slots, strict=True):
        writer.place(key, slot, 1)
        writer.add_share(slot, 0, 0, 1, 0)
    started = time.thread_time()
    for slot in slots:
        writer.make_ready(slot)
    for begin in range(0, len(keys), FREED):
        writer.free(slots[begin : begin + FREED])
    return time.thread_time() - started


# ------------------------------------------------------------------- an engine


class Storing:
    """An engine of one rank that stores described chunks of one block; ended with the context.

    Its scheduler takes changes. The pool has room for `SLOTS` chunks: each further one costs one.
    """

    def __init__(self, daemon: Served, at_a_time: int) -> None:
        name = engine_name()
        plan = layout(1, PAGE, at_a_time + 1)
        self._memory = HostMemory.allocate(plan.storages[0])
        self._worker = Worker(daemon.runtime_dir, name, 0, 1)
        self.scheduler = Scheduler(daemon.runtime_dir, name, events=True)
        self._worker.register([self._memory], plan, Fingerprint(model="bench"), required=True)
        if not (self._worker.wait_attached(SECONDS) and self.scheduler.wait_attached(SECONDS)):
            raise RuntimeError("the engine does not become complete")
        self._numbers = itertools.count(1)

    def store(self, count: int) -> list[bytes]:
        """Store new chunks, which are a chain; those that had a slot."""
        keys = fresh_keys(count)
        described = [
            encode(
                Description(
                    parent=keys[at - 1][:-4] if at else b"",
                    hashes=(key[:-4],),
                    tokens=key[:4] * BLOCK_TOKENS,
                    block_size=BLOCK_TOKENS,
                    kind="full_attention",
                )
            )
            for at, key in enumerate(keys)
        ]
        self.scheduler.reserve(count, SECONDS)
        ticket = self.scheduler.prepare_store(keys, None, described)
        if not ticket.keys:
            return []
        blocks = np.arange(1, 1 + len(ticket))
        arrays = JobBlocks.of(blocks, [len(blocks)], [0], ticket.slots, ticket.generations)
        job = next(self._numbers)
        self._worker.submit(Store, job, arrays)
        if self._worker.wait([job], SECONDS):
            raise RuntimeError(f"job {job} does not end")
        self._worker.get_finished()
        self.scheduler.complete_store(ticket)
        return list(ticket.keys)

    def fill(self) -> None:
        """Until the pool is full, and a quarter more; nobody takes these changes."""
        stored = 0
        while stored < SLOTS * 5 // 4:
            stored += len(self.store(BATCH))
        self.take_all_changes()

    def take_all_changes(self) -> None:
        """Take all changes."""
        while self.scheduler.changes_waiting:
            self.scheduler.take_changes()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.scheduler.close()
        self._worker.close()
        self._memory.close()


def pool() -> Daemon:
    """A daemon with room for `SLOTS` chunks."""
    return Daemon(SLOTS * PAGE)


# ------------------------------------------------------------------ the reader


def reading_us() -> float:
    """Of a scheduler's thread, for each change: `take_changes` of as many as a step has."""
    return _reading(announce=False)


def _reading(*, announce: bool) -> float:
    """Processor time in µs a change; `announce`: with descriptions read, and announcements made."""
    spent = stored = 0.0
    with pool() as daemon, Storing(daemon, BATCH) as engine:
        scheduler = engine.scheduler
        announcer = Announcer(scheduler.description)
        engine.fill()
        while stored < READ_CHUNKS:
            stored += len(engine.store(BATCH))
            while scheduler.changes_waiting:
                started = time.thread_time()
                changes = scheduler.take_changes(AT_A_TIME)
                if announce:
                    announcer.announce(changes)
                spent += time.thread_time() - started
    return spent / (2 * stored) * 1e6  # each store has cost a chunk


# --------------------------------------------------------------------- the most


def most() -> Figures:
    """Changes a second that the broker writes at most, of chunks of one page."""
    figures = {}
    for batch in MOST_BATCHES:
        with Daemon(8 * batch * PAGE) as daemon, Storing(daemon, batch) as engine:
            for _ in range(16):
                engine.store(batch)
            engine.take_all_changes()
            stored, began = 0, time.perf_counter()
            while time.perf_counter() - began < MOST_SECONDS:
                stored += len(engine.store(batch))
            figures[f"most_changes_a_second_{batch}"] = 2 * stored / (time.perf_counter() - began)
    return figures


def main() -> None:
    """All of it."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    figures = measure()
    figures["event_read_share_percent"] = figures["event_read_us"] * CHANGES_A_SECOND / 1e4
    figures["event_announce_us"] = _reading(announce=True)
    figures |= most()
    table = Table("figure", "value", title=f"KV events, {os.cpu_count()} CPUs")
    for name, value in figures.items():
        table.add_row(name, f"{value:,.2f}")
    Console().print(table)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps({k: round(v, 3) for k, v in figures.items()}, indent=2) + "\n")
    print(f"written to {OUT}, Python {platform.python_version()}")


if __name__ == "__main__":
    main()
