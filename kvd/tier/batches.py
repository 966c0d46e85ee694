"""A namespace's slots as a tier's process sees them, and the broker's batches of their chunks.

A batch is divided into parts for threads, and put together again in one answer.
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
from kvd_proto.arrays import IntArray
from kvd_proto.descriptions import DescriptionsView
from kvd_proto.directory import DirectoryView, SlotState

MAX_DESCRIPTIONS_BYTES = 2**20
"""Of an answer: a tier fills no message that the broker takes long to read."""
TEXT_LIMIT = 1000


def space_id(namespace: bytes, salt: bytes) -> bytes:
    """The name under which a tier keeps a namespace's chunks from one reset to the next."""
    return hashlib.blake2b(namespace + salt, digest_size=16).digest()


class Place:
    """A namespace in the pool: which bytes a slot has, and what the directory says of it.

    What is mapped goes with the last reference: threads may still look while it is closed.

    Args:
        order: the broker's.
        fds: its directory and, where they are, its descriptions; taken over.
        pool: all of it.

    Attributes:
        order: the broker's.
        asked: the salt that the broker named last; empty: it knows of none.
        reset: the broker has drawn that salt and not heard yet that it is noted.
        salt: the one that holds since the backend has begun `space`.
        space: None while the backend has not begun it, and once it is closed.
        early: batches that came before it has begun.
        error: why it cannot begin; empty where nothing hinders it.
        retry_at: monotonic seconds, when that is tried again.
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
        """The namespace under a salt, as backends know it."""
        name = space_id(self.order.namespace, salt)
        return Space(name, self.order.slot_bytes, HEAD_BYTES + self.order.description_bytes)

    def shares(self, slot: int) -> tuple[memoryview, ...]:
        """The memory of a slot, one share for each arena."""
        return tuple(
            self._pool[base + slot * size : base + (slot + 1) * size]
            for base, size in zip(self.order.arena_bases, self.order.slot_bytes, strict=True)
        )

    def holds(self, slot: int, generation: int, state: SlotState, key: bytes) -> bool:
        """Whether a slot holds this chunk in this state."""
        return self._directory.holds(slot, generation, state, key)

    def description(self, slot: int, generation: int) -> bytes:
        """The description of the chunk in a slot; empty where it has none that fits."""
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
        """Bytes that it moves."""
        if isinstance(self.batch.order, Ask):
            return 0
        return (self.end - self.begin) * self.batch.place.chunk_bytes


@dataclass(eq=False, slots=True)
class Batch:
    """An order of the broker's, and what has become of it.

    Columns have one item for each key, those of slots are empty of an Ask.

    Attributes:
        place: of its namespace.
        space: with which it runs; None before the namespace has begun.
        deadline: monotonic seconds.
        outcomes: of each chunk; FAILED before it is done.
        coverages, descriptions: of a Get they are found.
        error: of the medium, the last one.
        left: parts that have not ended.
        received, began, ended: monotonic nanoseconds: of the order, the first part, the last.
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
        """Divide it into parts of at most so many bytes, or of one chunk; one where it is empty."""
        count = len(self.order.keys)
        step = max(1, count)
        if not isinstance(self.order, Ask):
            step = max(1, batch_bytes // self.place.chunk_bytes)
        parts = [Part(self, at, min(count, at + step)) for at in range(0, max(1, count), step)]
        self.left = len(parts)
        return parts

    @property
    def kind(self) -> str:
        """What it is called in the log."""
        return type(self.order).__name__.upper()

    @property
    def stale(self) -> bool:
        """Whether its namespace was reset or closed since."""
        return self.place.space is not self.space

    def begins(self) -> None:
        """A thread has taken a part."""
        with self.lock:
            self.began = self.began or time.monotonic_ns()

    def ends(self) -> bool:
        """A part has ended; whether it was the last."""
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
        """The answer. Descriptions beyond `MAX_DESCRIPTIONS_BYTES` are left out."""
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
