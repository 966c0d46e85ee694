"""The ring of changes, which lies in the directory's file behind the index.

A change is that a chunk that lookups find as READY begins to be there, or ceases to be; and that
all chunks were dropped at once. Where there are tiers, changes also say which chunks lie in one or
more of them: those are other changes, as a chunk may be in memory, below it, or both. The n-th
change of a directory has number n, from 1 on, and lies at index (n - 1) % capacity of the ring. The
word `head`, in the directory's header page, is the number of the last change that is written whole.

The broker writes the directory's record and index, or the tier table's entry, first, then the
change, then head. So who reads
head, then the directory, and then the ring from that head on, misses nothing; what it sees twice
it may apply twice. Nobody waits for a reader: one that falls behind by the whole ring is told so
by `read`, and has to look through the directory again.
"""

import struct
from enum import IntEnum
from itertools import takewhile
from operator import eq, itemgetter
from typing import TypeAlias

CHANGE = struct.Struct("<QQQIHHHB49p4x")
"""A record of the ring. The key is preceded by its length, in a byte, and padded with zeros."""
CHANGE_BYTES = CHANGE.size
_NUMBER = itemgetter(0)
HEAD_AT = 192  # in the header page, apart from the words that every lookup reads
MIN_CHANGES, MAX_CHANGES = 1024, 2**24

Change: TypeAlias = tuple[int, int, int, int, int, int, int, int, bytes]
"""Number, time in ns of CLOCK_MONOTONIC, generation, slot, first block, count of blocks, group,
`ChangeKind` and key; a plain tuple, because thousands are read in a moment. What a kind
says nothing of is 0."""


class ChangeKind(IntEnum):
    """What has happened."""

    READY = 1  # lookups find the chunk from now on
    REMOVED = 2  # they do not any more
    CLEARED = 3  # no chunk is there any more whose generation is not above this one
    KEPT = 4  # tiers hold these blocks of the chunk from now on: none did, or other blocks
    RELEASED = 5  # no tier holds the chunk any more
    TIERS = 6  # what tiers hold is to be looked up anew in the tier table


def change_capacity(records: int) -> int:
    """The capacity of a ring for so many records: the next power of two, within the bounds."""
    return 1 << (min(max(records, MIN_CHANGES), MAX_CHANGES) - 1).bit_length()


class ChangesView:
    """A ring to read changes from; sans-I/O, never writes.

    Args:
        whole: the directory.
        offset: bytes from its start to record 0 of the ring.
        capacity: records of the ring, a power of two.
    """

    def __init__(self, whole: memoryview, offset: int, capacity: int) -> None:
        self.capacity = capacity
        self._head = whole[HEAD_AT : HEAD_AT + 8].cast("Q")
        self._ring = whole[offset : offset + capacity * CHANGE_BYTES]

    @property
    def head(self) -> int:
        """The number of the last change; 0: there was none."""
        return self._head[0]

    def read(self, after: int, limit: int) -> list[Change] | None:
        """Up to `limit` changes, those with the numbers after + 1, after + 2 and so on.

        Returns:
            None where the ring holds number after + 1 no more (overrun), or never did.
        """
        head = self._head[0]
        count = min(limit, head - after)
        if count <= 0:
            return [] if after <= head else None
        begin = after % self.capacity * CHANGE_BYTES
        end = begin + count * CHANGE_BYTES
        ring = self._ring
        found = bytes(ring[begin:end])
        if end > len(ring):
            found += bytes(ring[: end - len(ring)])
        # The writer may be about to overwrite the oldest record, before it moves head.
        if after + 1 <= self._head[0] + 1 - self.capacity:
            return None
        changes = list(CHANGE.iter_unpack(found))
        # Where memory is seen out of order a record may come later than head.
        there = map(eq, map(_NUMBER, changes), range(after + 1, after + 1 + count))
        return changes if all(there) else _in_order(changes, after)

    def release(self) -> None:
        """Let go of the buffer. Nothing works afterwards."""
        self._head.release()
        self._ring.release()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.capacity} changes, the last is {self.head}>"


def _in_order(changes: list[Change], after: int) -> list[Change]:
    """The first of them, as many as have the numbers that they should have."""
    numbered = enumerate(changes, after + 1)
    return [change for _, change in takewhile(lambda each: each[0] == each[1][0], numbered)]
