"""Words in shared memory: what a process has counted outlives its SIGKILL."""

import mmap
import os
from enum import IntEnum
from pathlib import Path

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
