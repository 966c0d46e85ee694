"""Who holds what of the pool: which space owns an extent, and by how many of its columns.

An extent belongs to the first space that claims a column over it, until the last such
column is released. So what a column costs, its gain, is the extents under it that its
space does not own yet; and what columns give when they go, their losses, is the extents
that no other column of their space keeps.
"""

from collections import Counter
from collections.abc import Iterable

from kvd.errors import IntegrityError
from kvd.pool.geometry import Extents
from kvd.pool.space import Space


class Holdings:
    """The spaces of a pool and the extents that they own.

    `changes` counts columns that came or went: who found nothing to have need not look
    again before it grows.
    """

    def __init__(self, extents: Extents) -> None:
        self.spaces: list[Space] = []
        self.changes = 0
        self._extents = extents
        self._owner: list[Space | None] = [None] * extents.count
        self._claims = [0] * extents.count  # columns of the owner that touch the extent

    def held_bytes(self, space: Space) -> int:
        """Bytes of the extents that a space owns."""
        owned = space.held * self._extents.size
        if self._owner[-1] is space:  # the last extent may be cut short
            owned -= self._extents.count * self._extents.size - self._extents.cpu_bytes
        return owned

    def gain(self, space: Space, column: int) -> int:
        """How many extents the space would own besides, with this column."""
        return sum(self._owner[extent] is not space for extent in space.column_extents[column])

    def losses(self, columns: Iterable[tuple[Space, int]]) -> Counter[str]:
        """How many extents each model would lose with these columns."""
        claims = Counter((s, e) for s, column in columns for e in s.column_extents[column])
        losses: Counter[str] = Counter()
        for (space, extent), count in claims.items():
            losses[space.model] += self._claims[extent] == count
        return losses

    def is_free_for(self, space: Space, column: int) -> bool:
        """Whether the space has not claimed the column, and no other owns an extent of it."""
        owner, extents = self._owner, space.column_extents[column]
        return column not in space and all(
            owner[extent] is None or owner[extent] is space for extent in extents
        )

    def overlapped(self, space: Space, column: int) -> list[tuple[Space, int]]:
        """The claimed columns of others that share an extent with this one."""
        found: dict[tuple[Space, int], None] = {}
        for extent in space.column_extents[column]:
            other = self._owner[extent]
            if other is not None and other is not space:
                for theirs in other.columns_at[extent]:
                    if theirs in other:
                        found[other, theirs] = None
        return list(found)

    def claim(self, space: Space, column: int) -> None:
        """The space has a column that is free for it."""
        self.changes += 1
        for extent in space.column_extents[column]:
            if self._owner[extent] is None:
                self._owner[extent] = space
                space.held += 1
            self._claims[extent] += 1
        space.open_column(column)

    def release(self, space: Space, column: int) -> None:
        """A column goes back."""
        space.close_column(column)
        for extent in space.column_extents[column]:
            self._claims[extent] -= 1
            if not self._claims[extent]:
                self._owner[extent] = None
                space.held -= 1
        self.changes += 1

    def check_integrity(self) -> None:
        """Raise IntegrityError where extents are not owned as claimed, or chunks overlap."""
        owner: list[Space | None] = [None] * self._extents.count
        claims = [0] * self._extents.count
        shares: list[tuple[int, int, int, int]] = []
        for space in self.spaces:
            space.check_integrity()
            for column in space.claimed:
                for extent in space.column_extents[column]:
                    if owner[extent] not in (None, space):
                        raise IntegrityError(f"extent {extent} is claimed twice")
                    owner[extent] = space
                    claims[extent] += 1
                for slot in space.used_slots(column):
                    shares += [
                        (*share, space.number, slot) for share in space.geometry.shares(slot)
                    ]
            if space.held != sum(each is space for each in owner):
                raise IntegrityError(f"held extents are miscounted: {space!r}")
        if owner != self._owner or claims != self._claims:
            raise IntegrityError("extents are not owned as the claimed columns say")
        end = 0
        for first, after, number, slot in sorted(shares):
            if first < end or after > self._extents.cpu_bytes:
                raise IntegrityError(f"slot {slot} of space {number} overlaps or leaves the pool")
            end = after

    def __repr__(self) -> str:
        free = sum(owner is None for owner in self._owner)
        return (
            f"<Holdings of {len(self.spaces)} namespaces,"
            f" {free} of {self._extents.count} extents free>"
        )
