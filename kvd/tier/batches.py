"""A batch of the broker's: divided into parts for threads, put together again in one answer."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from kvd.errors import TierError
from kvd.tier.contract import Space
from kvd.tier.place import Place
from kvd.wire.tiering import MAX_BATCH, Ask, Done, Get, Outcome, Put
from kvd_proto.arrays import IntArray

MAX_DESCRIPTIONS_BYTES = 2**20
"""Of an answer: a tier fills no message that the broker takes long to read."""
TEXT_LIMIT = 1000


class Kind(Enum):
    """What is to be done with a batch's chunks."""

    PUT = auto()
    GET = auto()
    ASK = auto()


@dataclass(frozen=True, slots=True)
class Part:
    """Chunks begin..end - 1 of a batch, for one thread."""

    batch: "Batch"
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes that it moves."""
        batch = self.batch
        if batch.kind is Kind.ASK:
            return 0
        return (self.end - self.begin) * batch.place.asked.chunk_bytes


@dataclass(eq=False, slots=True)
class Batch:
    """An order of the broker's, and what has become of it.

    Columns have one item for each key, those of slots are empty of an Ask.

    Attributes:
        place: of its namespace.
        space: the epoch with which it runs; None before the namespace has begun.
        deadline: monotonic seconds.
        outcomes: of each chunk; FAILED before it is done.
        coverages, descriptions: of a Get they are found.
        error: of the medium, the last one.
        left: parts that have not ended.
        received, began, ended: monotonic nanoseconds: of the order, the first part, the last.
    """

    kind: Kind
    number: int
    place: Place
    keys: Sequence[bytes]
    slots: Sequence[int]
    generations: Sequence[int]
    coverages: list[tuple[int, int, int]]
    deadline: float
    received: int = field(default_factory=time.monotonic_ns)
    space: Space | None = None
    outcomes: list[Outcome] = field(init=False)
    descriptions: list[bytes] = field(init=False)
    error: str = ""
    left: int = 0
    began: int = 0
    ended: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.outcomes = [Outcome.FAILED] * len(self.keys)
        self.descriptions = [b""] * len(self.keys)

    @classmethod
    def of(cls, order: Put | Get | Ask, place: Place) -> "Batch":
        """The batch that an order asks for.

        Raises:
            TierError: its columns are not equally long, or it has too many chunks: a bug in kvd.
        """
        count = len(order.keys)
        columns: list[list[int]] = []
        if isinstance(order, Put | Get):
            columns = [order.slots.tolist(), order.generations.tolist()]
        if isinstance(order, Put):
            columns += [order.first.tolist(), order.count.tolist(), order.groups.tolist()]
        if count > MAX_BATCH or any(len(column) != count for column in columns):
            sizes = [count, *map(len, columns)]
            raise TierError(f"{type(order).__name__} has columns of {sizes}; a bug in kvd")
        if any(max(column, default=0) > 0xFFFF for column in columns[2:]):
            raise TierError("blocks or groups above 16 bits; a bug in kvd")
        coverages = list(zip(*columns[2:], strict=True)) if columns[2:] else [(0, 0, 0)] * count
        return cls(
            kind={Put: Kind.PUT, Get: Kind.GET, Ask: Kind.ASK}[type(order)],
            number=order.number,
            place=place,
            keys=order.keys,
            slots=columns[0] if columns else [],
            generations=columns[1] if columns else [],
            coverages=coverages,
            deadline=time.monotonic() + order.deadline_ms / 1000,
        )

    def parts(self, batch_bytes: int) -> list[Part]:
        """Divide it into parts of at most so many bytes, or of one chunk; one where it is empty."""
        count = len(self.keys)
        step = max(1, count)
        if self.kind is not Kind.ASK:
            step = max(1, batch_bytes // self.place.asked.chunk_bytes)
        parts = [Part(self, at, min(count, at + step)) for at in range(0, max(1, count), step)]
        self.left = len(parts)
        return parts

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
        end = min(end, len(self.keys))
        self.outcomes[begin:end] = [outcome] * (end - begin)
        self.error = error[:TEXT_LIMIT] or self.error

    def done(self) -> Done:
        """The answer. Descriptions beyond `MAX_DESCRIPTIONS_BYTES` are left out."""
        ok = [outcome is Outcome.OK for outcome in self.outcomes]
        got = ok if self.kind is Kind.GET else [False] * len(ok)
        room = MAX_DESCRIPTIONS_BYTES
        descriptions = []
        for is_got, description in zip(got, self.descriptions, strict=True):
            room -= len(description)
            descriptions.append(description if is_got and room >= 0 else b"")
        rows = [c if g else (0, 0, 0) for c, g in zip(self.coverages, got, strict=True)]
        first, count, groups = (IntArray.of([row[i] for row in rows], "u2") for i in range(3))
        ended = self.ended or time.monotonic_ns()
        began = self.began or ended
        return Done(
            number=self.number,
            outcomes=IntArray.of(map(int, self.outcomes), "u1"),
            first=first,
            count=count,
            groups=groups,
            descriptions=tuple(descriptions) if self.kind is Kind.GET else (),
            nanoseconds=max(0, ended - began),
            waited=max(0, began - self.received),
            error=self.error,
        )

    def __repr__(self) -> str:
        return (
            f"<Batch {self.number}: {self.kind.name} of {len(self.keys)}, {self.left} parts left>"
        )


def refused(order: Put | Get | Ask, outcome: Outcome, error: str) -> Done:
    """The answer to an order of which nothing is carried out."""
    zeros = IntArray.of([0] * len(order.keys), "u2")
    return Done(
        number=order.number,
        outcomes=IntArray.of([int(outcome)] * len(order.keys), "u1"),
        first=zeros,
        count=zeros,
        groups=zeros,
        descriptions=(b"",) * min(len(order.keys), MAX_BATCH) if isinstance(order, Get) else (),
        nanoseconds=0,
        waited=0,
        error=error[:TEXT_LIMIT],
    )
