"""Messages between the broker and a tier's process.

The encoding is that of the lanes' link, see `kvd.wire.link`. Each batch has a number and gets one
`BatchResult`. Columns have one item for each chunk of the batch.
"""

from typing import Annotated, TypeAlias

from msgspec import Meta

from kvd_proto.codec import Codec
from kvd_proto.jobs import IntArray
from kvd_proto.messages import Count, Encoded, Keys, Message, Name, NamespaceId, Text

MAX_BATCH = 1024  # chunks
Encodeds = Annotated[tuple[Encoded, ...], Meta(max_length=MAX_BATCH)]
Salt: TypeAlias = Annotated[bytes, Meta(max_length=8)]
"""Drawn by each reset of a namespace. A tier finds only chunks stored under the current salt."""


class BeginTier(Message, frozen=True):
    """Broker → tier, first message: the tier's settings. Carries the pool's file.

    index: of the tier in the configured order, from 0.
    setting: the tier's setting, as the operator wrote it.
    """

    index: Count
    setting: Text
    pool_bytes: Count
    log_level: Name
    log_style: Name


class TierReady(Message, frozen=True):
    """Tier → broker, first message: the tier serves.

    damaged_records: damaged records of the tier's index, which it dropped at its start.
    """

    pid: Count
    described: Text
    total_bytes: Count
    used_bytes: Count
    chunks: Count
    damaged_records: Count = 0


class TierFailed(Message, frozen=True):
    """Tier → broker, instead of TierReady: why the tier cannot be used now."""

    error: Text


class OpenNamespace(Message, frozen=True):
    """Broker → tier: open a namespace. Carries its directory and, if any, its descriptions.

    Share r of slot i is pool bytes [arena_bases[r] + i * slot_bytes[r], + slot_bytes[r]).
    salt: of the namespace's last reset; empty if the broker knows none. Then the tier uses the salt
        it has stored, or draws one.
    reset: the tier has not confirmed that reset yet.
    """

    namespace: NamespaceId
    salt: Salt
    reset: bool
    slot_bytes: tuple[Count, ...]
    arena_bases: tuple[Count, ...]
    num_slots: Count
    description_bytes: Count


class NamespaceOpened(Message, frozen=True):
    """Tier → broker: the salt in effect. `ScanResult` messages follow, the last one with `last`."""

    namespace: NamespaceId
    salt: Salt


class CloseNamespace(Message, frozen=True):
    """Broker → tier: the broker has closed the namespace; the tier retains its chunks."""

    namespace: NamespaceId


class NewSalt(Message, frozen=True):
    """Broker → tier: the namespace was reset; only chunks of this salt are valid from now on."""

    namespace: NamespaceId
    salt: Salt


class ScanResult(Message, frozen=True):
    """Tier → broker: chunks that the tier has, from a scan at its start."""

    namespace: NamespaceId
    salt: Salt
    keys: Keys
    first: IntArray
    count: IntArray
    groups: IntArray
    last: bool


class RemovedChunks(Message, frozen=True):
    """Tier → broker: the tier no longer has these chunks."""

    namespace: NamespaceId
    keys: Keys


class Put(Message, frozen=True):
    """Broker → tier: store these READY chunks."""

    number: Count
    namespace: NamespaceId
    keys: Keys
    slots: IntArray
    generations: IntArray
    first: IntArray
    count: IntArray
    groups: IntArray
    deadline_ms: Count


class Get(Message, frozen=True):
    """Broker → tier: fill these slots, which are WRITING with these generations."""

    number: Count
    namespace: NamespaceId
    keys: Keys
    slots: IntArray
    generations: IntArray
    deadline_ms: Count


class Lookup(Message, frozen=True):
    """Broker → tier: which of these chunks does the tier have?"""

    number: Count
    namespace: NamespaceId
    keys: Keys
    deadline_ms: Count


class Drop(Message, frozen=True):
    """Broker → tier: remove these chunks."""

    namespace: NamespaceId
    keys: Keys


class BatchResult(Message, frozen=True):
    """Tier → broker: the batch has ended; nothing of it is in flight.

    outcomes: u1, `Outcome`.
    first, count, groups, descriptions: of the OK chunks of a Get.
    nanoseconds: time in the backend; waited: time in the queue before that.
    error: the medium's, if a chunk FAILED.
    """

    number: Count
    outcomes: IntArray
    first: IntArray
    count: IntArray
    groups: IntArray
    descriptions: Encodeds
    nanoseconds: Count
    waited: Count
    error: Text


class TierPing(Message, frozen=True):
    """Broker → tier: liveness probe; the tier's event loop answers."""


class TierPong(Message, frozen=True):
    """Tier → broker: the answer to `TierPing`. The tier makes progress if `progress` grows.

    progress: chunks that have their outcome.
    busy: parts of batches that a backend's thread works on.
    queued_bytes: bytes of parts that wait for a thread.
    error: why a namespace cannot be opened; empty if none fails.
    """

    progress: Count
    busy: Count
    queued_bytes: Count
    total_bytes: Count
    used_bytes: Count
    chunks: Count
    error: str = ""


class StopTier(Message, frozen=True):
    """Broker → tier: start nothing more, finish what threads work on, exit 0."""


TIERING = Codec(
    {
        0x301: BeginTier,
        0x302: TierReady,
        0x303: TierFailed,
        0x304: OpenNamespace,
        0x305: NamespaceOpened,
        0x306: CloseNamespace,
        0x307: NewSalt,
        0x308: ScanResult,
        0x309: RemovedChunks,
        0x30A: Put,
        0x30B: Get,
        0x30C: Lookup,
        0x30D: Drop,
        0x30E: BatchResult,
        0x30F: TierPing,
        0x310: TierPong,
        0x311: StopTier,
    }
)
"""The codec of a tier's link."""
