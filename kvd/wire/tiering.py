"""Messages between the broker and a tier's process.

They travel as those between broker and lanes do; see `kvd.wire.link`. A batch has a number, and
one answer. Columns have one item for each chunk of the batch.
"""

from typing import Annotated, TypeAlias

from msgspec import Meta

from kvd_proto.arrays import IntArray
from kvd_proto.codec import Codec
from kvd_proto.messages import Count, Encoded, Keys, Message, Name, NamespaceId, Text

MAX_BATCH = 1024  # chunks
Encodeds = Annotated[tuple[Encoded, ...], Meta(max_length=MAX_BATCH)]
Salt: TypeAlias = Annotated[bytes, Meta(max_length=8)]
"""Drawn by each reset of a namespace. A tier finds nothing that it keeps under another salt."""


class BeginTier(Message, frozen=True):
    """Broker → tier, first: what it is. Carries the pool's file.

    index: its place in the order of tiers, from 0.
    setting: as the operator wrote it.
    """

    index: Count
    setting: Text
    pool_bytes: Count
    log_level: Name
    log_style: Name


class TierReady(Message, frozen=True):
    """Tier → broker, first: it serves.

    damaged_records: of its index, found at the start and dropped.
    """

    pid: Count
    described: Text
    total_bytes: Count
    used_bytes: Count
    chunks: Count
    damaged_records: Count = 0


class TierFailed(Message, frozen=True):
    """Tier → broker, instead of TierReady: it cannot be used now, and why."""

    error: Text


class OpenSpace(Message, frozen=True):
    """Broker → tier: a namespace. Carries its directory and, where they are, its descriptions.

    Share r of slot i is pool bytes [arena_bases[r] + i * slot_bytes[r], + slot_bytes[r]).
    salt: of its last reset; empty where the broker knows of none: the one that the tier has noted
        holds, or one that it draws.
    reset: the tier has not confirmed that reset yet.
    """

    namespace: NamespaceId
    salt: Salt
    reset: bool
    slot_bytes: tuple[Count, ...]
    arena_bases: tuple[Count, ...]
    num_slots: Count
    description_bytes: Count


class SpaceOpened(Message, frozen=True):
    """Tier → broker: the salt that holds here; `Held` follows, until one has `last` set."""

    namespace: NamespaceId
    salt: Salt


class CloseSpace(Message, frozen=True):
    """Broker → tier: the namespace is closed here; what the tier keeps of it stays."""

    namespace: NamespaceId


class NewSalt(Message, frozen=True):
    """Broker → tier: the namespace was reset; chunks of any other salt are none."""

    namespace: NamespaceId
    salt: Salt


class Held(Message, frozen=True):
    """Tier → broker: it keeps these: what `scan` found."""

    namespace: NamespaceId
    salt: Salt
    keys: Keys
    first: IntArray
    count: IntArray
    groups: IntArray
    last: bool


class Gone(Message, frozen=True):
    """Tier → broker: it keeps these no more."""

    namespace: NamespaceId
    keys: Keys


class Put(Message, frozen=True):
    """Broker → tier: keep these READY chunks."""

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


class Ask(Message, frozen=True):
    """Broker → tier: which of these are there?"""

    number: Count
    namespace: NamespaceId
    keys: Keys
    deadline_ms: Count


class Drop(Message, frozen=True):
    """Broker → tier: remove these."""

    namespace: NamespaceId
    keys: Keys


class Done(Message, frozen=True):
    """Tier → broker: nothing of this batch moves any more.

    outcomes: u1, `Outcome`; of an Ask OK or ABSENT.
    first, count, groups, descriptions: of a Get, of what is OK.
    nanoseconds: that the backend took; waited: before that.
    error: of the medium, where something FAILED.
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
    """Broker → tier: answer from the loop that takes orders."""


class TierPong(Message, frozen=True):
    """Tier → broker: alive. It moves on where `progress` grows.

    progress: chunks whose transfer has ended.
    busy: batches that a backend's thread is in.
    queued_bytes: that wait.
    error: why a namespace cannot begin; empty where none is held up.
    """

    progress: Count
    busy: Count
    queued_bytes: Count
    total_bytes: Count
    used_bytes: Count
    chunks: Count
    error: str = ""


class StopTier(Message, frozen=True):
    """Broker → tier: begin nothing more, finish what a thread is in, exit 0."""


TIERING = Codec(
    {
        0x301: BeginTier,
        0x302: TierReady,
        0x303: TierFailed,
        0x304: OpenSpace,
        0x305: SpaceOpened,
        0x306: CloseSpace,
        0x307: NewSalt,
        0x308: Held,
        0x309: Gone,
        0x30A: Put,
        0x30B: Get,
        0x30C: Ask,
        0x30D: Drop,
        0x30E: Done,
        0x30F: TierPing,
        0x310: TierPong,
        0x311: StopTier,
    }
)
"""The codec of a tier's link."""
