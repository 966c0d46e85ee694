"""What a tier's process works on: namespaces, batches of chunks, and the seal of a chunk.

A batch is split into parts for threads; one reply collects their outcomes. A seal is the head kept
beside a chunk's bytes, by which a get verifies that it read what a put wrote.
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
"""Limit for the descriptions in one reply, so that the broker reads it quickly."""
TEXT_LIMIT = 1000


def space_id(namespace: bytes, salt: bytes) -> bytes:
    """Return the id under which a tier keeps a namespace's chunks until its next reset."""
    return hashlib.blake2b(namespace + salt, digest_size=16).digest()


class NamespaceMapping:
    """A namespace in the pool: the bytes of its slots, and the directory's entries for them.

    The mappings are released with the last reference: threads may still read after a close.

    Args:
        fds: of the directory and, if any, the descriptions; owned by this object.
        pool: all of the pool.

    Attributes:
        requested_salt: the last salt from the broker; empty if it knows none.
        reset_unconfirmed: the broker does not know yet that the tier has noted that salt.
        salt: the salt in effect, once the backend has opened `space`.
        space: None until the backend has opened it, and again after a close or reset.
        pending_batches: those that came before the backend had opened the space.
        error: why the space cannot be opened; empty if nothing failed.
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
        self.requested_salt, self.reset_unconfirmed = order.salt, order.reset
        self.salt = b""
        self.space: Space | None = None
        self.pending_batches: list[Batch] = []
        self.error = ""
        self.retry_at = math.inf

    def space_of(self, salt: bytes) -> Space:
        """Return the space of this namespace and a salt."""
        id_ = space_id(self.order.namespace, salt)
        return Space(id_, self.order.slot_bytes, HEAD_BYTES + self.order.description_bytes)

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
        return (self.end - self.begin) * self.batch.namespace.chunk_bytes


@dataclass(eq=False, slots=True)
class Batch:
    """An order of the broker, and its outcomes.

    Columns have one item for each key; for a Lookup, `slots` and `generations` are empty.

    Attributes:
        space: in which it runs; None before the namespace's space is open.
        deadline: monotonic seconds.
        outcomes: of each chunk; FAILED until it has been executed.
        coverages, descriptions: of each chunk; a Get fills them in.
        error: the medium's last error.
        num_pending_parts: parts that have not ended.
        received_ns, started_ns, ended_ns: monotonic: when the order came, its first part was
            started, its last part ended.
    """

    order: Put | Get | Lookup
    namespace: NamespaceMapping
    space: Space | None = None
    slots: Sequence[int] = ()
    generations: Sequence[int] = ()
    coverages: list[tuple[int, int, int]] = field(init=False)
    outcomes: list[Outcome] = field(init=False)
    descriptions: list[bytes] = field(init=False)
    deadline: float = field(init=False)
    received_ns: int = field(default_factory=time.monotonic_ns)
    error: str = ""
    num_pending_parts: int = 0
    started_ns: int = 0
    ended_ns: int = 0
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

    def split(self, part_bytes: int) -> list[BatchPart]:
        """Split it into parts of at most `part_bytes`, or one chunk; one part if it is empty."""
        count = len(self.order.keys)
        step = max(1, count)
        if not isinstance(self.order, Lookup):
            step = max(1, part_bytes // self.namespace.chunk_bytes)
        parts = [
            BatchPart(self, begin, min(count, begin + step))
            for begin in range(0, max(1, count), step)
        ]
        self.num_pending_parts = len(parts)
        return parts

    @property
    def kind(self) -> str:
        """The order's name in the log."""
        return type(self.order).__name__.upper()

    @property
    def is_stale(self) -> bool:
        """Whether its namespace was reset or closed since it was submitted."""
        return self.namespace.space is not self.space

    def start_part(self) -> None:
        """Record that a thread starts a part."""
        with self.lock:
            self.started_ns = self.started_ns or time.monotonic_ns()

    def end_part(self) -> bool:
        """Record that a part has ended; return whether it was the last."""
        with self.lock:
            self.num_pending_parts -= 1
            self.ended_ns = time.monotonic_ns()
            return self.num_pending_parts == 0

    def set_outcome(
        self, outcome: Outcome, error: str = "", begin: int = 0, end: int = 1 << 30
    ) -> None:
        """Set the outcome of chunks begin..end - 1."""
        end = min(end, len(self.outcomes))
        self.outcomes[begin:end] = [outcome] * (end - begin)
        self.error = error[:TEXT_LIMIT] or self.error

    def reply(self) -> BatchResult:
        """Return the reply. Descriptions beyond `MAX_DESCRIPTIONS_BYTES` are left out."""
        room = MAX_DESCRIPTIONS_BYTES  # bytes
        coverages, descriptions = [(0, 0, 0)] * len(self.outcomes), []
        if isinstance(self.order, Get):
            for i, outcome in enumerate(self.outcomes):
                description = self.descriptions[i] if outcome is Outcome.OK else b""
                room -= len(description)
                descriptions.append(description if room >= 0 else b"")
                if outcome is Outcome.OK:
                    coverages[i] = self.coverages[i]
        ended_ns = self.ended_ns or time.monotonic_ns()
        started_ns = self.started_ns or ended_ns
        first, count, groups = (
            IntArray.of([coverage[i] for coverage in coverages], "u2") for i in range(3)
        )
        return BatchResult(
            number=self.order.number,
            outcomes=IntArray.of(map(int, self.outcomes), "u1"),
            first=first,
            count=count,
            groups=groups,
            descriptions=tuple(descriptions),
            nanoseconds=max(0, ended_ns - started_ns),
            waited=max(0, started_ns - self.received_ns),
            error=self.error,
        )


# The seal of a chunk. Little-endian: magic and version, the space's id, key, first block, count of
# blocks and group, bytes of all shares and their xxh3-64; then the chunk's description, if it has
# one; then the xxh3-64 of all of that.
MAGIC = b"kvdC"
VERSION = 2
_HEAD = struct.Struct(f"<4sHBx16sQQHHH2xI4x{KEY_BYTES}s")
_CHECK = struct.Struct("<Q")
HEAD_BYTES: Final = _HEAD.size + _CHECK.size
"""Bytes of a head without a description."""


class Damaged(TierError):
    """The bytes read are not those of the put; the text says which part."""


class OtherChunk(Damaged):
    """The head is whole, but of another chunk: a power loss may bring an old index back."""


@dataclass(frozen=True, slots=True)
class SealedHead:
    """The contents of a head.

    Attributes:
        coverage: first block, count of blocks, group.
        checksum: xxh3-64 of the shares.
        description: as the scheduler encoded it; empty if there is none.
    """

    coverage: tuple[int, int, int]
    checksum: int
    description: bytes


def checksum_of(shares: Sequence[memoryview]) -> int:
    """Return the xxh3-64 of all shares' bytes, one share after the other.

    The interpreter lock is released while a large share is read.
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
    """Return the head of a chunk; its fields are those of `SealedHead`."""
    nbytes = space.chunk_bytes
    identity = MAGIC, VERSION, len(key), space.id, nbytes, checksum, *coverage
    head = _HEAD.pack(*identity, len(description), key) + description
    return head + _CHECK.pack(xxh3_64_intdigest(head))


def unseal(head: bytes, space: Space, key: bytes) -> SealedHead:
    """Return the contents of a chunk's head. The caller must compare `checksum` with the shares.

    Raises:
        OtherChunk: the head is of another chunk.
        Damaged: the head is not whole, or of another version or size.
    """
    size = len(head) - _CHECK.size
    if size < _HEAD.size:
        raise Damaged(f"the head has {len(head)} bytes; the least is {HEAD_BYTES}")
    body = memoryview(head)[:size]
    if _CHECK.unpack_from(head, size)[0] != xxh3_64_intdigest(body):
        raise Damaged("the head does not match its checksum")
    magic, version, key_len, space_id, nbytes, checksum, *coverage, length, padded = (
        _HEAD.unpack_from(head)
    )
    if (magic, version) != (MAGIC, VERSION):
        raise Damaged(f"the head has version {magic!r} {version}; this kvd reads {VERSION}")
    if (padded[:key_len], space_id) != (key, space.id):
        raise OtherChunk("the record is of another chunk")
    if nbytes != space.chunk_bytes or size - _HEAD.size != length:
        raise Damaged(f"the record has {nbytes} bytes; a chunk has {space.chunk_bytes}")
    first, count, group = coverage
    return SealedHead((first, count, group), checksum, bytes(body[_HEAD.size :]))
