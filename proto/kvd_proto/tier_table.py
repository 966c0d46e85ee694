"""The tier table: which chunks lie in tiers below the pool. It lies in the directory's file.

docs/protocol.md has its format. It is a hash table with linear probing and entries of 72 bytes.
Homes are the places below the capacity; a run of entries that begins near the last home goes on
behind it instead of going round. Deletion shifts entries back, so they move to lower places only,
and who looks at the places from the last to the first misses none that stays.

The broker writes alone, and a reader needs no lock. The first word of an entry has state, tiers,
key length and hash; it is cleared while the rest is written, and written last. A reader compares
the whole key and then looks whether the word is still the same. So it never takes one key for
another, and may miss a key that is there while the writer moves it. What it finds is a hint: only
the tier itself knows what it has.

An entry counts while its epoch is the table's. A reset raises that, so everything is a miss at
once; the entries go piece by piece afterwards.
"""

import struct
from time import monotonic_ns
from typing import NamedTuple
from zlib import crc32

import msgspec
import numpy as np

from kvd_proto.errors import DirectoryError

ENTRY_BYTES = 72
KEY_BYTES = 48
MAX_TIERS = 4
MIN_TIER_ENTRIES, MAX_TIER_ENTRIES = 2**16, 2**22
UNKNOWN_ENTRIES = 2**20
ABSENT_MS = 2000
"""For so long nobody asks a shared tier again for what it did not have."""

EPOCH_AT = 256  # in the header page: the table's epoch
STATUS_AT = 320  # and what is known of tier 0
STATUS_STRIDE = 64
WORDS = ENTRY_BYTES // 8

EMPTY, HELD, ABSENT, BUSY = range(4)
"""States of an entry: nothing; tiers hold the chunk; no tier has it; being written."""

SAME = 0xFFFF_FFFF_FFFF_0000
"""What of the first word is hash and key length."""

BODY = struct.Struct(f"<IIHHH2x{KEY_BYTES}s")
"""An entry after its first word: epoch, time, first block, count, group, key."""

# By key length: the same, read in one call.
BODY_READERS = tuple(struct.Struct(f"<IIHHH2x{n}s").unpack_from for n in range(KEY_BYTES + 1))


class TierEntry(msgspec.Struct, frozen=True, gc=False):
    """Where a chunk lies: bit i of `tiers` is set where tier i holds it.

    No bit: the tiers that could be asked do not have it. The blocks are those of the chunk that
    hold bytes.
    """

    tiers: int
    first: int
    count: int
    group: int


class TierHealth(NamedTuple):
    """What is known of a tier.

    Attributes:
        usable: it takes orders, and does what it is told in time.
        latency_us: a promotion's time without that of its bytes, in microseconds; a median.
        bytes_per_second: of promotions; 0 while nobody knows.
        queued_bytes: of promotions that are on their way.
    """

    usable: bool
    latency_us: int
    bytes_per_second: int
    queued_bytes: int


def tier_table_capacity(chunks: int | None) -> int:
    """The capacity of a table for so many chunks; None: nobody knows how many.

    A power of two, within the bounds, at a load of 0.75 or less.
    """
    if chunks is None:
        return UNKNOWN_ENTRIES
    wanted = 1 << (-(-chunks * 4 // 3) - 1).bit_length()
    return min(max(wanted, MIN_TIER_ENTRIES), MAX_TIER_ENTRIES)


class TierTableView:
    """A tier table to look things up in. Never writes; sans-I/O.

    Args:
        whole: the directory.
        offset: bytes from its start to place 0.
        capacity: homes, a power of two.
        limit: places after a key's home, with it, where its entry may be.
        num_tiers: that the daemon has, 1 to 4.

    Raises:
        DirectoryError: these figures contradict each other.
    """

    def __init__(
        self, whole: memoryview, offset: int, capacity: int, limit: int, num_tiers: int
    ) -> None:
        if capacity.bit_count() != 1 or not 1 <= num_tiers <= MAX_TIERS:
            raise DirectoryError(f"a tier table of {capacity} homes for {num_tiers} tiers")
        self.capacity = capacity
        self.num_tiers = num_tiers
        self.places = table_places(capacity, limit)
        self._limit = limit
        self._mask = capacity - 1
        self._bytes = whole[offset : offset + self.places * ENTRY_BYTES]
        self._words = self._bytes.cast("Q")
        self._epoch = whole[EPOCH_AT : EPOCH_AT + 8].cast("Q")
        end = STATUS_AT + num_tiers * STATUS_STRIDE
        self._status = whole[STATUS_AT:end].cast("Q")

    def find(self, key: bytes) -> TierEntry | None:
        """Where a chunk lies below the pool; None: in no tier, as far as is known.

        A place without tiers: a shared tier was asked a moment ago, and none has it.
        """
        size = len(key)
        if not 0 < size <= KEY_BYTES:
            return None
        hash32 = crc32(key)
        same = hash32 << 32 | size << 16
        words, at = self._words, (hash32 & self._mask) * WORDS
        end = at + self._limit * WORDS
        while at < end and (word := words[at]):
            if word & SAME == same:
                epoch, time, first, count, group, name = BODY_READERS[size](self._bytes, at * 8 + 8)
                if name == key and epoch == self._epoch[0] and words[at] == word:
                    if word & 0xFF == HELD:
                        return TierEntry(word >> 8 & 0xFF, first, count, group)
                    age = (monotonic_ns() // 1_000_000 - time) & 0xFFFF_FFFF
                    return TierEntry(0, 0, 0, 0) if age < ABSENT_MS else None
            at += WORDS
        return None

    def health(self, tier: int) -> TierHealth:
        """What is known of a tier.

        Raises:
            IndexError: there is none of this number.
        """
        if not 0 <= tier < self.num_tiers:
            raise IndexError(f"tier {tier} of {self.num_tiers}")
        at = tier * STATUS_STRIDE // 8
        usable, latency, rate, queued = self._status[at : at + 4]
        return TierHealth(bool(usable), latency, rate, queued)

    def held_chunks(self, begin: int, end: int) -> list[tuple[bytes, TierEntry]]:
        """The chunks that tiers hold with entries at the places from `begin` up to `end`.

        To see all of a table that is written meanwhile, go from its last places to its first: then
        none is missed that stays, and one may be seen twice.
        """
        epoch, words, found = self._epoch[0], self._words, []
        read, states = BODY.unpack_from, np.frombuffer(self._bytes, np.uint8)[::ENTRY_BYTES]
        # Between its home and an entry no place is ever empty, so none moves to what is empty now.
        for place in np.flatnonzero(states[begin:end])[::-1].tolist():
            at = (begin + place) * WORDS
            word = words[at]
            entry_epoch, _, first, count, group, key = read(self._bytes, at * 8 + 8)
            if word & 0xFF == HELD and entry_epoch == epoch and words[at] == word:
                place_ = TierEntry(word >> 8 & 0xFF, first, count, group)
                found.append((key[: word >> 16 & 0xFF], place_))
        return found

    def close(self) -> None:
        """Let go of the buffer. Nothing works afterwards."""
        self._words.release()
        self._bytes.release()
        self._epoch.release()
        self._status.release()


def table_places(capacity: int, limit: int) -> int:
    """Entries that a table has room for: behind the last home a run may go on."""
    return capacity + limit if capacity else 0
