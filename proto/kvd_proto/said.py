"""What a reader has said of chunks, and the differences to it."""

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvd_proto.errors import ReaderFault

NO_SLOT: Final = 0xFFFF_FFFF
"""The slot, with generation 0, of a chunk in tiers."""


class Place(NamedTuple):
    """Where a chunk lies, and which of its blocks it holds: first..first + count - 1.

    slot, generation: of a READY chunk; `NO_SLOT` and 0 of one in tiers.
    time_ns: when it became so, by CLOCK_MONOTONIC; 0 where it was found in the directory.
    """

    slot: int
    generation: int
    first: int
    count: int  # type: ignore[assignment]  # a chunk has no other count
    time_ns: int


@dataclass(slots=True)
class Differences:
    """What has changed of what is said, each key once in the first two, and once in the others.

    stored: chunks that are READY, and were not said to be, or at another place or with other
        blocks: such a key has not been removed in between.
    removed: keys of chunks that were said to be READY and are not.
    kept: chunks that lie in tiers, and were not said to, or with other blocks.
    released: keys of chunks that were said to lie in tiers and lie in none.
    """

    stored: dict[bytes, Place] = field(default_factory=dict)
    removed: list[bytes] = field(default_factory=list)
    kept: dict[bytes, Place] = field(default_factory=dict)
    released: list[bytes] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.stored or self.removed or self.kept or self.released)

    def __len__(self) -> int:
        return len(self.stored) + len(self.removed) + len(self.kept) + len(self.released)


class Said:
    """What is said of chunks in memory, or of those in tiers.

    No key is in two of the first three.

    Attributes:
        confirmed: what is said, and true as far as is known.
        unconfirmed: what was said before a directory is looked through, and not found in it yet.
        gone: what is known to be gone and still said: it is taken back piece by piece.
        next: where the snapshot goes on; None: all was seen.
        end: the change after which the snapshot is complete.
    """

    __slots__ = ("confirmed", "end", "gone", "next", "unconfirmed")

    def __init__(self) -> None:
        self.confirmed: dict[bytes, Place] = {}
        self.unconfirmed: dict[bytes, Place] = {}
        self.gone: dict[bytes, Place] = {}
        self.next: int | None = None
        self.end = 0

    @property
    def all(self) -> Mapping[bytes, Place]:
        """All that was said and was not taken back."""
        return ChainMap(self.confirmed, self.unconfirmed, self.gone)

    def place(self, key: bytes) -> Place | None:
        """Where a chunk is said to be; None: it is not."""
        return self.confirmed.get(key) or self.unconfirmed.get(key) or self.gone.get(key)

    def claim(self, key: bytes) -> Place | None:
        """Take a chunk out of those that may have to be taken back."""
        return self.unconfirmed.pop(key, None) or self.gone.pop(key, None)

    def begin(self, at: int) -> None:
        """All that is said is to be found again, from here on."""
        self.unconfirmed = _joined(self.unconfirmed, self.confirmed)
        self.confirmed = {}
        self.next = at

    def withdraw(self) -> None:
        """All that is said is gone, unless it is found in a snapshot that goes on."""
        self.gone = _joined(self.gone, _joined(self.unconfirmed, self.confirmed))
        self.unconfirmed, self.confirmed = {}, {}

    def settle(self, position: int) -> None:
        """What a snapshot that is complete has not found is gone."""
        if self.unconfirmed and self.next is None and position >= self.end:
            self.gone = _joined(self.gone, self.unconfirmed)
            self.unconfirmed = {}

    def net(
        self, before: dict[bytes, Place | None], limit: int
    ) -> tuple[dict[bytes, Place], list[bytes]]:
        """What is there now, and what is not any more.

        Args:
            before: what was said of each key that was touched.
            limit: chunks that are taken back at most, besides those that were touched.
        """
        stored: dict[bytes, Place] = {}
        removed: list[bytes] = []
        confirmed, unconfirmed, gone = self.confirmed.get, self.unconfirmed.get, self.gone
        for key, was in before.items():
            now = confirmed(key) or unconfirmed(key)
            if now is not None:
                if was is None or now[:4] != was[:4]:
                    stored[key] = now
            elif was is None:
                gone.pop(key, None)  # it came and went within this call
            elif key not in gone:
                removed.append(key)
        if gone:
            removed += [gone.popitem()[0] for _ in range(min(limit, len(gone)))]
        return stored, removed

    def __len__(self) -> int:
        return len(self.confirmed) + len(self.unconfirmed) + len(self.gone)

    def check_integrity(self) -> None:
        """Raise ReaderFault where what is held contradicts itself."""
        confirmed, unconfirmed, gone = (
            self.confirmed.keys(),
            self.unconfirmed.keys(),
            self.gone.keys(),
        )
        twice = (confirmed & unconfirmed) | (confirmed & gone) | (unconfirmed & gone)
        if twice:
            raise ReaderFault(f"{len(twice)} chunks are said twice: {self!r}")
        if b"" in self.all:
            raise ReaderFault(f"a chunk has no key: {self!r}")

    def __repr__(self) -> str:
        snapshot = "" if self.next is None else f", snapshot at {self.next}"
        counts = f"{len(self.confirmed)} confirmed, {len(self.unconfirmed)} unconfirmed"
        return f"<{counts}, {len(self.gone)} gone{snapshot}>"


def _joined(some: dict[bytes, Place], others: dict[bytes, Place]) -> dict[bytes, Place]:
    """Both in one; in constant time where one is empty, as it nearly always is."""
    if not some or not others:
        return some or others
    some.update(others)
    return some
