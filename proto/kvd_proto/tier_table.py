"""The tier table: which chunks lie in tiers below the pool. A part of the directory's file.

A hash table with linear probing and entries of 72 bytes; docs/protocol.md has the format. Homes
are the places below the capacity; probing from the last homes continues behind them instead of
wrapping around. Deletion shifts entries back, so entries only move to lower places: a scan from the
last place to the first misses no entry that stays.

Only the broker writes; readers take no lock. The first word of an entry has state, tiers, key
length and hash. The writer clears it before it writes the other words, and writes it last. A reader
compares the whole key and then checks that the word has not changed, so it never mistakes one key
for another; it may miss a key while the writer moves its entry. A result is a hint: only the tier
knows what it holds.

An entry is valid while its epoch is the table's. A reset raises the table's epoch, so all entries
are misses at once; they are removed piece by piece afterwards.
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
"""For so long a shared tier is not asked again for a chunk that it did not have."""

EPOCH_AT = 256  # in the header page: the table's epoch
STATUS_AT = 320  # in the header page: the health of tier 0
STATUS_STRIDE = 64
WORDS = ENTRY_BYTES // 8

EMPTY, HELD, ABSENT, BUSY = range(4)
"""States of an entry: none; tiers hold the chunk; no tier holds it; being written."""

SAME = 0xFFFF_FFFF_FFFF_0000
"""The bits of the first word that are hash and key length."""

BODY = struct.Struct(f"<IIHHH2x{KEY_BYTES}s")
"""An entry after its first word: epoch, time, first block, count, group, key."""

# By key length: reads the same fields in one call.
BODY_READERS = tuple(struct.Struct(f"<IIHHH2x{n}s").unpack_from for n in range(KEY_BYTES + 1))


class TierEntry(msgspec.Struct, frozen=True, gc=False):
    """Which tiers hold a chunk, and which of its blocks: bit i of `tiers` stands for tier i.

    `tiers` 0: the shared tiers were asked a moment ago, and none holds it.
    """

    tiers: int
    first: int
    count: int
    group: int


class TierHealth(NamedTuple):
    """Whether a tier works, and how fast it promotes.

    Attributes:
        usable: it accepts orders and completes them in time.
        latency_us: median time of a promotion without the transfer of its bytes, in microseconds.
        bytes_per_second: of promotions; 0: not known yet.
        queued_bytes: of promotions before a new one: those ordered, and requests that wait.
    """

    usable: bool
    latency_us: int
    bytes_per_second: int
    queued_bytes: int


def tier_table_capacity(chunks: int | None) -> int:
    """Return the capacity of a table for `chunks` chunks; None: the number is not known.

    A power of two within bounds, for a load of 0.75 or less.
    """
    if chunks is None:
        return UNKNOWN_ENTRIES
    capacity = 1 << (-(-chunks * 4 // 3) - 1).bit_length()
    return min(max(capacity, MIN_TIER_ENTRIES), MAX_TIER_ENTRIES)


class TierTableView:
    """Looks chunks up in a tier table. Never writes; no I/O.

    Args:
        memory: the directory.
        offset: bytes from its start to place 0.
        capacity: homes, a power of two.
        limit: a key's entry is at one of `limit` places from its home on.
        num_tiers: of the daemon, 1 to 4.

    Raises:
        DirectoryError: these figures contradict each other.
    """

    def __init__(
        self, memory: memoryview, offset: int, capacity: int, limit: int, num_tiers: int
    ) -> None:
        if capacity.bit_count() != 1 or not 1 <= num_tiers <= MAX_TIERS:
            raise DirectoryError(f"a tier table of {capacity} homes for {num_tiers} tiers")
        self.capacity = capacity
        self.num_tiers = num_tiers
        self.places = table_places(capacity, limit)
        self._limit = limit
        self._mask = capacity - 1
        self._bytes = memory[offset : offset + self.places * ENTRY_BYTES]
        self._words = self._bytes.cast("Q")
        self._epoch = memory[EPOCH_AT : EPOCH_AT + 8].cast("Q")
        end = STATUS_AT + num_tiers * STATUS_STRIDE
        self._status = memory[STATUS_AT:end].cast("Q")

    def find(self, key: bytes) -> TierEntry | None:
        """Return which tiers hold a chunk; None: none, as far as is known."""
        size = len(key)
        if not 0 < size <= KEY_BYTES:
            return None
        hash32 = crc32(key)
        same = hash32 << 32 | size << 16
        words, index = self._words, (hash32 & self._mask) * WORDS
        end = index + self._limit * WORDS
        while index < end and (word := words[index]):
            if word & SAME == same:
                body = BODY_READERS[size](self._bytes, index * 8 + 8)
                epoch, time, first, count, group, stored = body
                if stored == key and epoch == self._epoch[0] and words[index] == word:
                    if word & 0xFF == HELD:
                        return TierEntry(word >> 8 & 0xFF, first, count, group)
                    age = (monotonic_ns() // 1_000_000 - time) & 0xFFFF_FFFF
                    return TierEntry(0, 0, 0, 0) if age < ABSENT_MS else None
            index += WORDS
        return None

    def health(self, tier: int) -> TierHealth:
        """Return the health of a tier.

        Raises:
            IndexError: `tier` is out of range.
        """
        if not 0 <= tier < self.num_tiers:
            raise IndexError(f"tier {tier} of {self.num_tiers}")
        first_word = tier * STATUS_STRIDE // 8
        usable, latency, rate, queued = self._status[first_word : first_word + 4]
        return TierHealth(bool(usable), latency, rate, queued)

    def held_chunks(self, begin: int, end: int) -> list[tuple[bytes, TierEntry]]:
        """Return keys and entries of the chunks that tiers hold, at places `begin` to `end - 1`.

        To scan a whole table while it is written, go from the last places to the first: then no
        entry that stays is missed, and one may be seen twice.
        """
        epoch, words, chunks = self._epoch[0], self._words, []
        read, states = BODY.unpack_from, np.frombuffer(self._bytes, np.uint8)[::ENTRY_BYTES]
        # No place between an entry and its home is ever empty, so no entry moves to a place that
        # is empty now.
        for place in np.flatnonzero(states[begin:end])[::-1].tolist():
            index = (begin + place) * WORDS
            word = words[index]
            entry_epoch, _, first, count, group, key = read(self._bytes, index * 8 + 8)
            if word & 0xFF == HELD and entry_epoch == epoch and words[index] == word:
                entry = TierEntry(word >> 8 & 0xFF, first, count, group)
                chunks.append((key[: word >> 16 & 0xFF], entry))
        return chunks

    def close(self) -> None:
        """Release the buffer. Nothing works afterwards."""
        self._words.release()
        self._bytes.release()
        self._epoch.release()
        self._status.release()


def table_places(capacity: int, limit: int) -> int:
    """Return the number of places of a table: its homes, and `limit` behind the last one."""
    return capacity + limit if capacity else 0
