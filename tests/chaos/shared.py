"""What the processes of a run share: engines and keys, orders, counters that outlive a SIGKILL."""

import mmap
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Literal

from kvd_client import RankLayout
from tests.daemon.engines import keys_of, make_layout

SLACK_SECONDS = 15.0  # a busy machine may keep a process from running for so long

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
    VOIDED = 6  # stores whose blocks were taken back in the midst
    STOPPED_NS = 7  # how long the process was frozen; written by the harness
    RESTS = 8  # not 0: it holds nothing that it will give back
    ATTACHED = 9  # not 0: its engine is complete, as far as it knows
    PIN = 10  # not 0: pin all that can be pinned, and hold it; written by the harness
    PINNED = 11  # chunks that it pinned when it was told to
    FULL = 12  # keys that were refused for want of room
    STEP_CALLS = 13  # calls that an engine makes in a step
    LONGEST_NS = 14  # the longest of them
    LOANS = 15  # slots that a scheduler at rest has at hand


class Phase(IntEnum):
    """What all client processes are to do; word 0 of the run's own file."""

    RUN = 0
    REST = 1
    END = 2


def counts(folder: Path, name: str) -> Words:
    """The counters of the process of this name."""
    return words(folder / f"{name}.counts", len(Count))


def phase_word(folder: Path) -> Words:
    """The run's phase."""
    return words(folder / "phase", 1)


class Calls:
    """Times calls of one process, and keeps what is wrong in a file of the run.

    Args:
        name: of the process.
        counters: the process's; the harness says there for how long it was frozen.
        complaints: a file that all processes append to.
    """

    def __init__(self, name: str, counters: Words, complaints: Path) -> None:
        self.name = name
        self.counters = counters
        self._complaints = complaints

    @contextmanager
    def within(self, seconds: float, what: str) -> Iterator[None]:
        """Complain where the block takes longer, save for time that the process was frozen."""
        self.add(Count.CALLS)
        frozen = self.counters[Count.STOPPED_NS]
        began = time.monotonic()
        try:
            yield
        finally:
            away = (self.counters[Count.STOPPED_NS] - frozen) / 1e9
            took = time.monotonic() - began - away
            if took > seconds + SLACK_SECONDS:
                self.complain(f"{what} took {took:.2f} s, {seconds:g} s are allowed")

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """The same for a call of a step, which waits for nobody."""
        frozen, began = self.counters[Count.STOPPED_NS], time.monotonic_ns()
        with self.within(0.0, what):
            yield
        if self.counters[Count.STOPPED_NS] == frozen:
            took = time.monotonic_ns() - began
            self.counters[Count.LONGEST_NS] = max(self.counters[Count.LONGEST_NS], took)
        self.add(Count.STEP_CALLS)

    def add(self, count: Count, more: int = 1) -> None:
        """Count."""
        self.counters[count] += more

    def complain(self, text: str) -> None:
        """Say that something is wrong; one line, whole or not at all."""
        line = f"{time.monotonic():.3f} {self.name}: {text}\n"
        with self._complaints.open("a", encoding="utf-8") as file:
            file.write(line)


# ---------------------------------------------------------------------- engines

KEYS = 160
BATCH = 10
BLOCKS = 96
GROUPS = 2


@dataclass(frozen=True, slots=True)
class Spec:
    """One engine.

    Attributes:
        name: the engine's.
        model: engines of one model share chunks.
        ranks: how many.
        page: bytes of a page.
        replicated: every rank holds the same bytes.
        steps: its scheduler says at a step's end what it has to say, and not with each call.
    """

    name: str
    model: str
    ranks: int
    page: int = 4096
    replicated: bool = False
    steps: bool = True

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
