"""Messages between the broker and a tier's process.

They travel as those between broker and lanes do; see `kvd.wire.link`. A batch has a number, and
one answer. Columns have one item for each chunk of the batch.
"""

import secrets
import time
from enum import IntEnum
from typing import Annotated

from msgspec import Meta

from kvd_proto.arrays import IntArray
from kvd_proto.codec import Codec
from kvd_proto.messages import Count, Encoded, Keys, Message, Name, NamespaceId, Text

MAX_BATCH = 1024  # chunks
Encodeds = Annotated[tuple[Encoded, ...], Meta(max_length=MAX_BATCH)]


class Outcome(IntEnum):
    """How the put or get of one chunk ended."""

    OK = 0  # a put: a get finds it from now on; a tier that keeps, also once it was killed
    ABSENT = 1  # a get: it is not there, or not any more
    FULL = 2  # a put: no room, and none can be made
    CORRUPT = 3  # a get: what was read is not what was put; the backend has dropped it
    FAILED = 4  # an error of the medium
    LATE = 5  # the deadline passed first
    GONE = 6  # the slot holds another chunk by now


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
    medium: Name
    shared: bool
    described: Text
    total_bytes: Count
    used_bytes: Count
    chunks: Count
    damaged_records: Count = 0


class TierFailed(Message, frozen=True):
    """Tier → broker, instead of TierReady: it cannot be used now, and why."""

    error: Text


def new_epoch() -> int:
    """An epoch that no other is equal to, and that is greater than those drawn before.

    Milliseconds since 1970 in the upper bits, so of two that tiers remember the later is known.
    """
    return time.time_ns() // 1_000_000 << 21 | secrets.randbits(21)


class OpenSpace(Message, frozen=True):
    """Broker → tier: a namespace. Carries its directory and, where they are, its descriptions.

    Share r of slot i is pool bytes [arena_bases[r] + i * slot_bytes[r], + slot_bytes[r]).
    epoch: 0: the tier's own last one goes on.
    """

    namespace: NamespaceId
    epoch: Count
    slot_bytes: tuple[Count, ...]
    arena_bases: tuple[Count, ...]
    num_slots: Count
    description_bytes: Count


class SpaceOpened(Message, frozen=True):
    """Tier → broker: the epoch that holds; `Held` follows, until one has `last` set."""

    namespace: NamespaceId
    epoch: Count


class CloseSpace(Message, frozen=True):
    """Broker → tier: the namespace is closed here; what the tier keeps of it stays."""

    namespace: NamespaceId


class NewEpoch(Message, frozen=True):
    """Broker → tier: the namespace was reset; chunks of any other epoch are none."""

    namespace: NamespaceId
    epoch: Count


class Held(Message, frozen=True):
    """Tier → broker: it keeps these: what `scan` found."""

    namespace: NamespaceId
    epoch: Count
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
        0x307: NewEpoch,
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
