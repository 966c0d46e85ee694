"""What a scheduler knows of tiers below the daemon's memory, and asks of them.

Where a chunk lies it reads in shared memory, as it does for lookups. What it wants in memory it
tells the daemon with its step; nothing is answered, the directory shows what comes of it.
"""

from collections.abc import Iterable, Sequence

from kvd_proto.directory import DirectoryView, SlotState
from kvd_proto.messages import TierInfo
from kvd_proto.tier_table import TierStatus, TierTableView

NOT_BELOW = -1
"""No tier has the blocks, or none that has them is usable."""
UNKNOWN = -2
"""A usable shared tier may have the chunk: nobody has asked it of late."""

AGAIN_SECONDS = 2.0  # until the daemon is told of a key once more
MOST_KEYS = 65_536  # that are remembered

_READY = int(SlotState.READY)


class Seeking:
    """The tiers of one attachment. `below` takes no lock; the rest is for one thread at a time.

    Args:
        directory: of the namespace.
        table: that of the tiers, in the directory.
        tiers: as the daemon has them.
    """

    def __init__(
        self, directory: DirectoryView, table: TierTableView, tiers: Sequence[TierInfo]
    ) -> None:
        self._directory = directory
        self._table = table
        self._shared = [number for number, tier in enumerate(tiers) if tier.shared]
        self._told: dict[bytes, float] = {}  # when, the longest ago first

    def below(self, key: bytes, first: int, count: int | None) -> int:
        """Return which tier is the first usable one that holds these blocks of the chunk.

        Also while it is on its way up. A chunk that is READY with other blocks is not brought up.

        Returns:
            The tier's number, `NOT_BELOW` or `UNKNOWN`.
        """
        directory, table = self._directory, self._table
        end = directory.blocks_per_chunk if count is None else first + count
        place = table.find(key)
        if place is None:
            return UNKNOWN if any(table.status(i).usable for i in self._shared) else NOT_BELOW
        tiers = place.tiers
        if not tiers or not _covers((place.first, place.count), first, end):
            return NOT_BELOW
        there = directory.entry(key)
        if there is not None and there[2] == _READY and not _covers(there[3:], first, end):
            return NOT_BELOW
        for number in range(table.num_tiers):
            if tiers >> number & 1 and table.status(number).usable:
                return number
        return NOT_BELOW

    def status(self, number: int) -> TierStatus | None:
        """Return what the daemon says about a tier; None where there is none of this number."""
        return self._table.status(number) if 0 <= number < self._table.num_tiers else None

    def due(self, keys: Iterable[bytes], now: float) -> list[bytes]:
        """Return those keys that the daemon was not told of lately; they count as told now."""
        told, before = self._told, now - AGAIN_SECONDS
        while told and told[oldest := next(iter(told))] <= before:
            del told[oldest]
        due = [key for key in dict.fromkeys(keys) if key not in told]
        told.update(dict.fromkeys(due, now))
        while len(told) > MOST_KEYS:
            del told[next(iter(told))]
        return due

    def loaded(self, keys: Iterable[bytes]) -> None:
        """These are in memory: when they have gone again they may be sought at once."""
        if self._told:
            for key in keys:
                self._told.pop(key, None)

    def __repr__(self) -> str:
        return f"<Seeking {len(self._told)} keys in {self._table!r}>"


def _covers(held: Sequence[int], first: int, end: int) -> bool:
    """Whether the blocks from `first` up to `end` are among those held: the first, how many."""
    return held[0] <= first and end <= held[0] + held[1]
