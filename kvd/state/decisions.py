"""What a chunk table answers. Arrays are little-endian, ready for the wire."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Refs: TypeAlias = list[tuple[int, int]]
"""Slots with the generation that is meant."""


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


@dataclass(slots=True)
class Counters:
    """Events of one namespace since it was opened.

    offered = accepted + present + pending + full + quota + not_yet + bad_key + draining, all of
    them keys of PREPARE_STORE; asked = hits + misses.
    """

    offered: int = 0  # keys of PREPARE_STORE
    accepted: int = 0  # of `offered`, by answer
    present: int = 0
    pending: int = 0
    full: int = 0
    quota: int = 0  # the model holds what its cap allows, and none of it may go
    not_yet: int = 0
    bad_key: int = 0
    draining: int = 0  # of `offered`: the daemon took no new chunks
    index_full: int = 0  # of `full`: the index had no room near the key's home
    restored: int = 0  # chunks of the daemon before
    stored: int = 0  # chunks that became READY
    dropped: int = 0  # stores given up, whatever the reason
    tickets_expired: int = 0  # of `dropped`: the deadline passed
    stale_reports: int = 0  # shares and revocations of slots that had moved on
    evicted: int = 0  # chunks evicted to make room for this namespace
    yielded: int = 0  # chunks evicted to make room for another one, or to come down to a cap
    reset: int = 0  # chunks dropped by a reset
    removed: int = 0  # chunks that an operator dropped
    asked: int = 0  # keys of PREPARE_LOAD
    hits: int = 0  # of `asked`
    misses: int = 0
    leases: int = 0
    leases_expired: int = 0
