"""The ring of changes: which chunks became available or went, in order.

It lies in the directory's file behind the index. Changes of memory and of tiers are separate, since
a chunk may be in either or both; see `ChangeKind`. The n-th change of a directory has number n,
from 1 on, and lies at index (n - 1) % capacity. The word `head` in the directory's header page is
the number of the last complete change.

The broker writes the directory's record and index, or the tier table's entry, first, then the
change, then head. So a reader that reads head, then the directory, then the ring from that head on
misses nothing; changes that it sees twice may be applied twice. The broker never waits for readers:
after an overrun `read` returns None, and the reader has to scan the directory again.
"""

import struct
from enum import IntEnum
from itertools import takewhile
from operator import eq, itemgetter
from typing import TypeAlias

CHANGE = struct.Struct("<QQQIHHHB49p4x")
"""A record of the ring. The last field is a byte with the key's length, and the zero-padded key."""
CHANGE_BYTES = CHANGE.size
_NUMBER = itemgetter(0)
HEAD_AT = 192  # in the header page, on a cache line that lookups do not read
MIN_CHANGES, MAX_CHANGES = 1024, 2**24

Change: TypeAlias = tuple[int, int, int, int, int, int, int, int, bytes]
"""Number, time in ns of CLOCK_MONOTONIC, generation, slot, first block, count of blocks, group,
`ChangeKind` and key; a plain tuple, because thousands are read at once. Fields that a kind does not
use are 0."""


class ChangeKind(IntEnum):
    """What changed."""

    READY = 1  # lookups find the chunk from now on
    REMOVED = 2  # lookups miss the chunk from now on
    CLEARED = 3  # all chunks with this generation or a lower one are removed
    KEPT = 4  # tiers hold these blocks of the chunk from now on; none did, or other blocks
    RELEASED = 5  # no tier holds the chunk any more
    TIERS = 6  # many tier entries changed: scan the tier table again


def change_capacity(records: int) -> int:
    """Return the capacity of a ring for `records` changes: the next power of two, within bounds."""
    return 1 << (min(max(records, MIN_CHANGES), MAX_CHANGES) - 1).bit_length()


class ChangesView:
    """Reads a ring of changes; never writes, no I/O.

    Args:
        memory: the directory.
        offset: bytes from its start to record 0 of the ring.
        capacity: records of the ring, a power of two.
    """

    def __init__(self, memory: memoryview, offset: int, capacity: int) -> None:
        self.capacity = capacity
        self._head = memory[HEAD_AT : HEAD_AT + 8].cast("Q")
        self._ring = memory[offset : offset + capacity * CHANGE_BYTES]

    @property
    def head(self) -> int:
        """The number of the last change; 0: none yet."""
        return self._head[0]

    def read(self, after: int, limit: int) -> list[Change] | None:
        """Return up to `limit` changes: numbers after + 1, after + 2 and so on.

        Fewer than there are, if a record is not visible yet. None: number after + 1 was overwritten
        (overrun), or `after` is larger than `head`.
        """
        head = self._head[0]
        count = min(limit, head - after)
        if count <= 0:
            return [] if after <= head else None
        begin = after % self.capacity * CHANGE_BYTES
        end = begin + count * CHANGE_BYTES
        ring = self._ring
        records = bytes(ring[begin:end])
        if end > len(ring):
            records += bytes(ring[: end - len(ring)])
        # The writer may be overwriting the oldest record now; it moves head afterwards.
        if after <= self._head[0] - self.capacity:
            return None
        changes = list(CHANGE.iter_unpack(records))
        # On CPUs that reorder reads, a record may become visible after head.
        in_order = map(eq, map(_NUMBER, changes), range(after + 1, after + 1 + count))
        return changes if all(in_order) else _leading_in_order(changes, after)

    def release(self) -> None:
        """Release the buffer. Nothing works afterwards."""
        self._head.release()
        self._ring.release()


def _leading_in_order(changes: list[Change], after: int) -> list[Change]:
    """Return the changes before the first one with a wrong number."""
    numbered = enumerate(changes, after + 1)
    return [change for _, change in takewhile(lambda pair: pair[0] == pair[1][0], numbered)]
