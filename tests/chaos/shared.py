"""What the processes of a run share: engines and keys, orders, counters that outlive a SIGKILL."""

import mmap
import os
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Literal

from kvd_client import RankLayout
from tests.daemon.engines import keys_of, make_layout

Words = memoryview
"""64-bit words; each has one writer at a time."""


def words(path: Path, count: int) -> Words:
    """Return the words of a file, which is made with zeros where it is not there."""
    with path.open("ab"):
        os.truncate(path, count * 8)
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), count * 8)).cast("Q")


class Count(IntEnum):
    """What each client process counts."""

    STORES = 0  # chunks' shares stored
    LOADS = 1  # chunks' shares loaded
    VERIFIED_BYTES = 2
    UNTOUCHED_BYTES = 3  # of blocks that were looked at because nothing may have written to them
    MISSES = 4  # loads and stores that failed, which they may
    CALLS = 5
    STOPPED_NS = 6  # how long the process was frozen; written by the harness
    RESTS = 7  # not 0: it holds nothing that it will give back
    ATTACHED = 8  # not 0: its engine is complete, as far as it knows
    PIN = 9  # not 0: pin all that can be pinned, and hold it (2: forget it); by the harness
    LOANS = 10  # slots that a scheduler at rest has at hand
    REPEATED = 11  # stores of a chunk that has had its store, which are refused


class Phase(IntEnum):
    """What all client processes are to do; the word of the run's own file."""

    RUN = 0
    REST = 1
    END = 2


def counts(folder: Path, name: str) -> Words:
    """The counters of the process of this name."""
    return words(folder / f"{name}.counts", len(Count))


def phase_word(folder: Path) -> Words:
    """The run's phase."""
    return words(folder / "phase", 1)


GIVEN = struct.Struct("<16s16sIQ")
"""A note in the file "given" of a slot that a scheduler gave to a key, as `Given` has it."""
Given = tuple[bytes, bytes, int, int]
"""Boot id of the daemon, namespace, slot, generation."""


# ---------------------------------------------------------------------- engines

KEYS = 160
BATCH = 10
BLOCKS = 96
GROUPS = 2


@dataclass(frozen=True, slots=True)
class Spec:
    """One engine."""

    name: str
    model: str  # engines of one model share chunks
    ranks: int
    page: int = 4096
    replicated: bool = False  # every rank holds the same bytes
    steps: bool = True  # its scheduler speaks at a step's end, and not with each call

    @property
    def layout(self) -> RankLayout:
        """Of each of its ranks."""
        return make_layout(blocks=BLOCKS, page=self.page, replicated=self.replicated)

    def keys(self, group: int) -> list[bytes]:
        """Those of one group, the same for all engines of the model."""
        return keys_of(f"{self.model}{group}", KEYS)


SPECS = {
    spec.name: spec
    for spec in (
        Spec("one", "split", 2),
        Spec("two", "split", 2, steps=False),
        Spec("alike", "alike", 2, page=8192, replicated=True),
    )
}
"""By name. The first two share their chunks; the third has chunks of another size."""

HOSTILE = "hostile"
"""Name and model of the engine that stores each chunk more than once (`tests.chaos.hostile`)."""


# ----------------------------------------------------------------------- orders

LARGEST = 2**16


@dataclass(frozen=True, slots=True)
class Order:
    """Store or load these chunks of a group, then take the blocks back after `patience` seconds."""

    number: int
    way: Literal["store", "load"]
    group: int
    keys: tuple[bytes, ...]
    slots: tuple[int, ...]
    generations: tuple[int, ...]
    patience: float
    cancel: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """A rank has done with an order; its blocks are its own again."""

    number: int
    name: str
    success: bool


def mailbox(folder: Path, name: str) -> socket.socket:
    """Where datagrams to a process of this name arrive; that of one before it is replaced."""
    path = folder / f"{name}.sock"
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sock.bind(str(path))
    return sock


def post(sock: socket.socket, folder: Path, name: str, frame: bytes) -> bool:
    """Send a datagram; whether that process lives and takes it."""
    try:
        sock.sendto(frame, socket.MSG_DONTWAIT, str(folder / f"{name}.sock"))
    except OSError:
        return False
    return True


def lives(folder: Path, name: str) -> bool:
    """Whether a process has the mailbox of this name open."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        return probe.connect_ex(str(folder / f"{name}.sock")) == 0
