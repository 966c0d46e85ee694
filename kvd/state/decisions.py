"""What a chunk table answers. Arrays are little-endian, ready for the wire."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Blocks: TypeAlias = tuple[int, int]
"""The first of some blocks of a chunk, and how many they are."""

Refs: TypeAlias = list[tuple[int, int]]
"""Slots with the generation that is meant."""


def covers(held: Blocks, needed: Blocks) -> bool:
    """Whether all blocks that are needed are held."""
    return held[0] <= needed[0] and needed[0] + needed[1] <= held[0] + held[1]


@dataclass(frozen=True, slots=True)
class StoreDecision:
    """`answers[i]` is the `StoreAnswer` for key i; slots and generations of the accepted."""

    answers: npt.NDArray[np.uint8]
    slots: npt.NDArray[np.uint32]
    generations: npt.NDArray[np.uint64]
    evicted: list[bytes]


@dataclass(frozen=True, slots=True)
class ShareOutcome:
    """What one rank's report did: slots now READY, and slots given up, to be revoked."""

    ready: Refs
    dropped: Refs


@dataclass(frozen=True, slots=True)
class StoreSummary:
    """How many keys are READY, still being written, and gone."""

    ready: int
    pending: int
    dropped: int


@dataclass(frozen=True, slots=True)
class LoadDecision:
    """`found[i]` is 1 where key i is pinned. The rest is about the found ones, in order.

    `lease_id` is 0 where nothing was found. Blocks first..first + count - 1 of a
    chunk hold bytes on every rank. `deadline` is on the clock of `now`.
    """

    lease_id: int
    found: npt.NDArray[np.uint8]
    slots: npt.NDArray[np.uint32]
    generations: npt.NDArray[np.uint64]
    first: npt.NDArray[np.uint16]
    count: npt.NDArray[np.uint16]
    deadline: float


@dataclass(frozen=True, slots=True)
class ResetOutcome:
    """Chunks dropped now, chunks that go when their leases end, slots to be revoked."""

    dropped: int
    deferred: int
    revoke: Refs
