"""Namespaces in a tier's process, and the broker's batches.

A batch is split into parts for threads; one answer collects their outcomes.
"""

import hashlib
import math
import mmap
import os
import struct
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from xxhash import xxh3_64, xxh3_64_intdigest

from kvd.errors import TierError
from kvd.tier.contract import Outcome, Space
from kvd.wire.tiering import BatchResult, Get, Lookup, OpenNamespace, Put
from kvd_proto.descriptions import DescriptionsView
from kvd_proto.directory import KEY_BYTES, DirectoryView, SlotState
from kvd_proto.jobs import IntArray

MAX_DESCRIPTIONS_BYTES = 2**20
"""Limit for the descriptions in one answer, so that the broker reads it quickly."""
TEXT_LIMIT = 1000


def space_id(namespace: bytes, salt: bytes) -> bytes:
    """Return the id under which a tier keeps a namespace's chunks until its next reset."""
    return hashlib.blake2b(namespace + salt, digest_size=16).digest()


class NamespaceMapping:
    """A namespace in the pool: the bytes of its slots, and the directory's entries for them.

    The mappings are released with the last reference: threads may still read after a close.

    Args:
        order: the broker's `OpenNamespace`.
        fds: of the directory and, if any, the descriptions; owned by this object.
        pool: all of the pool.

    Attributes:
        order: the broker's `OpenNamespace`.
        asked: the salt that the broker named last; empty if it knows of none.
        reset: the broker does not know yet that the tier has noted that salt.
        salt: the salt in effect, since the backend began `space`.
        space: None until the backend has begun it, and again after a close or reset.
        early: batches that came before the backend began the space.
        error: why the namespace cannot begin; empty if nothing failed.
        retry_at: when to try again, in monotonic seconds.
    """

    def __init__(self, order: OpenNamespace, fds: Sequence[int], pool: memoryview) -> None:
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
class BatchPart:
    """Chunks begin..end - 1 of a batch, for one thread."""

    batch: "Batch"
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes to transfer; 0 for a Lookup."""
        if isinstance(self.batch.order, Lookup):
            return 0
        return (self.end - self.begin) * self.batch.place.chunk_bytes


@dataclass(eq=False, slots=True)
class Batch:
    """An order of the broker's, and its outcomes.

    Columns have one item for each key; for an Lookup, `slots` and `generations` are empty.

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

    order: Put | Get | Lookup
    place: NamespaceMapping
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
        if not isinstance(order, Lookup):
            self.slots, self.generations = order.slots.tolist(), order.generations.tolist()
        self.coverages = [(0, 0, 0)] * count
        if isinstance(order, Put):
            columns = order.first.tolist(), order.count.tolist(), order.groups.tolist()
            self.coverages = list(zip(*columns, strict=True))
        self.outcomes = [Outcome.FAILED] * count
        self.descriptions = [b""] * count
        self.deadline = time.monotonic() + order.deadline_ms / 1000

    def parts(self, batch_bytes: int) -> list[BatchPart]:
        """Split it into parts of at most `batch_bytes`, or one chunk; one part if it is empty."""
        count = len(self.order.keys)
        step = max(1, count)
        if not isinstance(self.order, Lookup):
            step = max(1, batch_bytes // self.place.chunk_bytes)
        parts = [BatchPart(self, at, min(count, at + step)) for at in range(0, max(1, count), step)]
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

    def done(self) -> BatchResult:
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
        return BatchResult(
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


MAGIC = b"kvdC"
VERSION = 2
_HEAD = struct.Struct(f"<4sHBx16sQQHHH2xI4x{KEY_BYTES}s")
_CHECK = struct.Struct("<Q")
HEAD_BYTES: Final = _HEAD.size + _CHECK.size
"""Of a head without a description."""


class Damaged(TierError):
    """What was read is not what was put; the text says which part of it."""


class OtherChunk(Damaged):
    """A whole head, of another chunk: as where a power loss brings an old index back."""


@dataclass(frozen=True, slots=True)
class SealedHead:
    """What a head says.

    Attributes:
        coverage: first block, count of blocks, group.
        checksum: xxh3-64 of the shares.
        description: as the scheduler encoded it; empty: there is none.
    """

    coverage: tuple[int, int, int]
    checksum: int
    description: bytes


def checksum_of(shares: Sequence[memoryview]) -> int:
    """The xxh3-64 of the bytes of all shares, one after the other.

    The interpreter lock is let go while a large share is read.
    """
    if len(shares) == 1:
        return xxh3_64_intdigest(shares[0])
    state = xxh3_64()
    for share in shares:
        state.update(share)
    return state.intdigest()


def seal(
    space: Space, key: bytes, coverage: tuple[int, int, int], checksum: int, description: bytes
) -> bytes:
    """The head of a chunk.

    Args:
        space: its own.
        key: 1 to 48 bytes.
        coverage: first block, count of blocks, group; 16 bits each.
        checksum: `checksum_of` its shares.
        description: empty where there is none.
    """
    head = _HEAD.pack(
        MAGIC,
        VERSION,
        len(key),
        space.id,
        space.chunk_bytes,
        checksum,
        *coverage,
        len(description),
        key,
    )
    head += description
    return head + _CHECK.pack(xxh3_64_intdigest(head))


def unseal(head: bytes, space: Space, key: bytes) -> SealedHead:
    """What a head says, which must be that of this chunk.

    Raises:
        Damaged: it is not, or not whole. The shares are to be compared with `SealedHead.checksum`.
    """
    size = len(head) - _CHECK.size
    if size < _HEAD.size:
        raise Damaged(f"a head of {len(head)} bytes, {HEAD_BYTES} are the least")
    body = memoryview(head)[:size]
    if _CHECK.unpack_from(head, size)[0] != xxh3_64_intdigest(body):
        raise Damaged("the head's check word does not fit it")
    magic, version, key_len, space_id, nbytes, checksum, *coverage, length, padded = (
        _HEAD.unpack_from(head)
    )
    if (magic, version) != (MAGIC, VERSION):
        raise Damaged(f"a head of version {magic!r} {version}, this is {VERSION}")
    if (padded[:key_len], space_id) != (key, space.id):
        raise OtherChunk("the record of another chunk")
    if nbytes != space.chunk_bytes or size - _HEAD.size != length:
        raise Damaged(f"a record of {nbytes} bytes, a chunk has {space.chunk_bytes}")
    first, count, group = coverage
    return SealedHead((first, count, group), checksum, bytes(body[_HEAD.size :]))
