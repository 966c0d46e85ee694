"""Namespaces in a tier's process, and the broker's batches.

A batch is split into parts for threads; one answer collects their outcomes.
"""

import hashlib
import math
import mmap
import os
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvd.tier.contract import Outcome, Space
from kvd.tier.seal import HEAD_BYTES
from kvd.wire.tiering import Ask, Done, Get, OpenSpace, Put
from kvd_proto.descriptions import DescriptionsView
from kvd_proto.directory import DirectoryView, SlotState
from kvd_proto.jobs import IntArray

MAX_DESCRIPTIONS_BYTES = 2**20
"""Limit for the descriptions in one answer, so that the broker reads it quickly."""
TEXT_LIMIT = 1000


def space_id(namespace: bytes, salt: bytes) -> bytes:
    """Return the id under which a tier keeps a namespace's chunks until its next reset."""
    return hashlib.blake2b(namespace + salt, digest_size=16).digest()


class Place:
    """A namespace in the pool: the bytes of its slots, and the directory's entries for them.

    The mappings are released with the last reference: threads may still read after a close.

    Args:
        order: the broker's `OpenSpace`.
        fds: of the directory and, if any, the descriptions; owned by this object.
        pool: all of the pool.

    Attributes:
        order: the broker's `OpenSpace`.
        asked: the salt that the broker named last; empty if it knows of none.
        reset: the broker does not know yet that the tier has noted that salt.
        salt: the salt in effect, since the backend began `space`.
        space: None until the backend has begun it, and again after a close or reset.
        early: batches that came before the backend began the space.
        error: why the namespace cannot begin; empty if nothing failed.
        retry_at: when to try again, in monotonic seconds.
    """

    def __init__(self, order: OpenSpace, fds: Sequence[int], pool: memoryview) -> None:
        for fd in fds:
            weakref.finalize(self, os.close, fd)
        directory = mmap.mmap(fds[0], os.fstat(fds[0]).st_size, prot=mmap.PROT_READ)
        self._directory = DirectoryView(directory)
        self._descriptions = DescriptionsView(fds[1]) if len(fds) > 1 else None
        self._pool = pool
        self.order = order
        self.chunk_bytes = sum(order.slot_bytes)
        self.asked, self.reset = order.salt, order.reset
        self.salt = b""
        self.space: Space | None = None
        self.early: list[Batch] = []
        self.error = ""
        self.retry_at = math.inf

    def space_of(self, salt: bytes) -> Space:
        """Return the namespace under a salt, as backends know it."""
        name = space_id(self.order.namespace, salt)
        return Space(name, self.order.slot_bytes, HEAD_BYTES + self.order.description_bytes)

    def shares(self, slot: int) -> tuple[memoryview, ...]:
        """Return the memory of a slot, one share for each arena."""
        return tuple(
            self._pool[base + slot * size : base + (slot + 1) * size]
            for base, size in zip(self.order.arena_bases, self.order.slot_bytes, strict=True)
        )

    def holds(self, slot: int, generation: int, state: SlotState, key: bytes) -> bool:
        """Return whether a slot holds this chunk in this state."""
        return self._directory.holds(slot, generation, state, key)

    def description(self, slot: int, generation: int) -> bytes:
        """Return the description of the chunk in a slot; empty if it has none that fits."""
        if self._descriptions is None:
            return b""
        encoded = self._descriptions.read_encoded(slot, generation)
        return encoded if len(encoded) <= self.order.description_bytes else b""


@dataclass(frozen=True, slots=True)
class Part:
    """Chunks begin..end - 1 of a batch, for one thread."""

    batch: "Batch"
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes to transfer; 0 for an Ask."""
        if isinstance(self.batch.order, Ask):
            return 0
        return (self.end - self.begin) * self.batch.place.chunk_bytes


@dataclass(eq=False, slots=True)
class Batch:
    """An order of the broker's, and its outcomes.

    Columns have one item for each key; for an Ask, `slots` and `generations` are empty.

    Attributes:
        place: its namespace.
        space: the space that it runs in; None before the namespace has begun.
        deadline: monotonic seconds.
        outcomes: of each chunk; FAILED until it is done.
        coverages, descriptions: of each chunk; a Get fills them in.
        error: the medium's last error.
        left: parts that have not ended.
        received, began, ended: monotonic nanoseconds: the order came, its first part began, its
            last part ended.
    """

    order: Put | Get | Ask
    place: Place
    space: Space | None = None
    slots: Sequence[int] = ()
    generations: Sequence[int] = ()
    coverages: list[tuple[int, int, int]] = field(init=False)
    outcomes: list[Outcome] = field(init=False)
    descriptions: list[bytes] = field(init=False)
    deadline: float = field(init=False)
    received: int = field(default_factory=time.monotonic_ns)
    error: str = ""
    left: int = 0
    began: int = 0
    ended: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        order, count = self.order, len(self.order.keys)
        if not isinstance(order, Ask):
            self.slots, self.generations = order.slots.tolist(), order.generations.tolist()
        self.coverages = [(0, 0, 0)] * count
        if isinstance(order, Put):
            columns = order.first.tolist(), order.count.tolist(), order.groups.tolist()
            self.coverages = list(zip(*columns, strict=True))
        self.outcomes = [Outcome.FAILED] * count
        self.descriptions = [b""] * count
        self.deadline = time.monotonic() + order.deadline_ms / 1000

    def parts(self, batch_bytes: int) -> list[Part]:
        """Split it into parts of at most `batch_bytes`, or one chunk; one part if it is empty."""
        count = len(self.order.keys)
        step = max(1, count)
        if not isinstance(self.order, Ask):
            step = max(1, batch_bytes // self.place.chunk_bytes)
        parts = [Part(self, at, min(count, at + step)) for at in range(0, max(1, count), step)]
        self.left = len(parts)
        return parts

    @property
    def kind(self) -> str:
        """The order's name in the log."""
        return type(self.order).__name__.upper()

    @property
    def stale(self) -> bool:
        """Whether its namespace was reset or closed since it was submitted."""
        return self.place.space is not self.space

    def begins(self) -> None:
        """Record that a thread begins a part."""
        with self.lock:
            self.began = self.began or time.monotonic_ns()

    def ends(self) -> bool:
        """Record that a part has ended; return whether it was the last."""
        with self.lock:
            self.left -= 1
            self.ended = time.monotonic_ns()
            return self.left == 0

    def fail(self, outcome: Outcome, error: str = "", begin: int = 0, end: int = 1 << 30) -> None:
        """Set the outcome of chunks begin..end - 1."""
        end = min(end, len(self.outcomes))
        self.outcomes[begin:end] = [outcome] * (end - begin)
        self.error = error[:TEXT_LIMIT] or self.error

    def done(self) -> Done:
        """Return the answer. Descriptions beyond `MAX_DESCRIPTIONS_BYTES` are left out."""
        room = MAX_DESCRIPTIONS_BYTES
        rows, descriptions = [(0, 0, 0)] * len(self.outcomes), []
        if isinstance(self.order, Get):
            for i, outcome in enumerate(self.outcomes):
                description = self.descriptions[i] if outcome is Outcome.OK else b""
                room -= len(description)
                descriptions.append(description if room >= 0 else b"")
                if outcome is Outcome.OK:
                    rows[i] = self.coverages[i]
        ended = self.ended or time.monotonic_ns()
        began = self.began or ended
        first, count, groups = (IntArray.of([row[i] for row in rows], "u2") for i in range(3))
        return Done(
            number=self.order.number,
            outcomes=IntArray.of(map(int, self.outcomes), "u1"),
            first=first,
            count=count,
            groups=groups,
            descriptions=tuple(descriptions),
            nanoseconds=max(0, ended - began),
            waited=max(0, began - self.received),
            error=self.error,
        )
