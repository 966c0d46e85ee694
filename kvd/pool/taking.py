"""Taking room from others: which column, within fair shares, floors and caps.

Whoever has no free extents left takes, in this order: columns of others that hold
nothing; and, while it stays within its fair share (the budget divided by the
number of namespaces with engines attached), the column used least recently of
those that hold more than theirs. A namespace that holds nothing may take its first
column from anybody, and so may one whose model is below its floor. No column is
taken in which a chunk is pinned, being written or draining.
"""

from collections import Counter
from dataclasses import dataclass

from kvd.pool.holdings import Holdings, search_order
from kvd.pool.shares import Quotas
from kvd.pool.space import Space


@dataclass(frozen=True, slots=True)
class Take:
    """A column to take, and the columns of others that go for it."""

    column: int
    others: tuple[tuple[Space, int], ...]


class Taking:
    """What a space may have besides: by its model's cap, and from whom. Changes no holdings."""

    def __init__(self, holdings: Holdings, quotas: Quotas) -> None:
        self._holdings = holdings
        self._quotas = quotas
        self._capped: dict[int, int] = {}  # space -> changes when its cap let it take no column

    def forget(self, space: Space) -> None:
        """A space ends."""
        self._capped.pop(space.number, None)

    def quotas_changed(self) -> None:
        """Who had no room below its cap may have some now."""
        self._capped.clear()

    def fits_cap(self, space: Space, column: int, given_up: int = 0) -> bool:
        """Whether the model may hold this column too, once it has `given_up` so many extents."""
        group = self._quotas.of(space)
        return group is None or self._holdings.gain(space, column) - given_up <= group.room

    def is_capped(self, space: Space) -> bool:
        """Nothing but the model's cap keeps the space from having another column."""
        columns = range(len(space.column_extents))
        return self._quotas.of(space) is not None and not any(
            column not in space and self.fits_cap(space, column) for column in columns
        )

    def best(self, space: Space) -> Take | None:
        """The best column to take from others, or None."""
        if self._capped.get(space.number) == self._holdings.changes:
            return None
        spaces, quotas = self._holdings.spaces, self._quotas
        fair = quotas.fair(spaces)
        own, group = fair[space.number], quotas.of(space)
        poor = group is not None and group.below_floor
        others = [other for other in spaces if other is not space]
        if not poor and space.held >= own and space.held and not any(o.empty for o in others):
            return None
        rich = {other.number for other in others if other.held > fair[other.number]}
        busy = {other.number: busy_columns(other) for other in others}
        counted = group is not None or quotas.has_floors
        fits = False
        best: tuple[tuple[bool, bool, int, int], Take] | None = None
        for column in search_order(space):
            if column in space:
                continue
            theirs = self._holdings.overlapped(space, column)
            losses = self._holdings.losses(theirs) if counted else Counter[str]()
            if not self.fits_cap(space, column, losses[space.model] if group else 0):
                continue
            fits = True
            if any(theirs_column in busy[other.number] for other, theirs_column in theirs):
                continue
            if not all(each.may_lose(losses[each.model], space) for each in quotas):
                continue
            holding = [(other, c) for other, c in theirs if c not in other.empty]
            from_poor = any(o.number not in rich for o, _ in holding)
            if holding and space.held and not poor:
                new = self._holdings.gain(space, column)
                if space.held + new > own or from_poor:
                    continue
            used_at = max((other.used_at(c) for other, c in holding), default=0)
            rank = (bool(holding), from_poor and poor, used_at, len(theirs))
            if best is None or rank < best[0]:
                best = (rank, Take(column, tuple(theirs)))
        if not fits:
            self._capped[space.number] = self._holdings.changes
        return best and best[1]

    def __repr__(self) -> str:
        return f"<Taking from {self._holdings!r}, {self._quotas!r}>"


def busy_columns(space: Space) -> set[int]:
    """Columns in which something is pinned, being written or draining."""
    return {slot // space.geometry.column_slots for slot in space.tenant.busy_slots()}
