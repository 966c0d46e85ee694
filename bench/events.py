"""What KV events cost: the broker, who writes changes; the reader; and how late they come.

Alone it prints a table and writes bench/out/events.json; `make bench` takes the first two figures.
"""

import json
import mmap
import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import zmq
from harness import SECONDS, Daemon, Engine, Figures, fresh_keys, layout, median
from rich.console import Console
from rich.table import Table

from kvd.cache.directory import DirectoryWriter
from kvd_client.scheduler import Scheduler
from kvd_proto.announcer import Announcer
from kvd_proto.change_reader import ChangeReader, Place
from kvd_proto.changes import change_capacity
from kvd_proto.descriptions import Description, encode
from kvd_proto.directory import DirectoryHeader

OUT = Path(__file__).parent / "out" / "events.json"
CHUNKS, ROUNDS, FREED = 2**16, 7, 64
AT_A_TIME = 40  # changes in a step of 4 ms, at 10,000 a second
PAGE = 4096


class _Silent:
    """A log of changes that writes nothing."""

    def write(self, *_: object) -> None:
        """Nothing."""


def measure() -> Figures:
    """Microseconds a change."""
    return {"event_broker_us": writing_us(), "event_read_us": reading_us()}


@contextmanager
def directory() -> Iterator[DirectoryWriter]:
    """An empty one."""
    header = DirectoryHeader.plan(CHUNKS, bytes(16), bytes(16), 1, change_capacity(4 * CHUNKS))
    writer = DirectoryWriter(mmap.mmap(-1, header.total_bytes), header)
    yield writer
    writer.release()


def writing_us() -> float:
    """Of the broker, for each change: `make_ready` and `free` with the ring and without, in turn."""
    keys, slots, took = fresh_keys(CHUNKS), list(range(CHUNKS)), []
    with directory() as writer:
        log, silent = writer.changes, _Silent()
        for _ in range(ROUNDS):
            round_took = []
            for changes in (silent, log):
                writer.changes = changes  # type: ignore[assignment]  # what is left out
                round_took.append(_turn_over(writer, keys, slots))
            took.append((round_took[1] - round_took[0]) / (2 * CHUNKS) * 1e6)
    return median(took[1:])


def _turn_over(writer: DirectoryWriter, keys: list[bytes], slots: list[int]) -> float:
    """Seconds in which all chunks become READY and go."""
    writer.lend(slots, 1)
    for key, slot in zip(keys, slots, strict=True):
        writer.place(key, slot)
        writer.add_share(slot, 0, 0, 1, 0)
    started = time.perf_counter()
    for slot in slots:
        writer.make_ready(slot)
    for begin in range(0, CHUNKS, FREED):
        writer.free(slots[begin : begin + FREED])
    return time.perf_counter() - started
