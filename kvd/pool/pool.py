"""One byte budget, shared by namespaces whose chunks differ in size.

Every extent of the pool belongs to one namespace or to none, and a namespace uses
only columns of which it owns every extent (see `kvd.pool.geometry`). Alone, it
owns them all and reaches ``cpu_bytes // bytes_per_chunk`` chunks.

Whoever needs room gets free extents first. Whoever has no free extents left takes, in
this order: columns of others that hold nothing; and, while it stays within its fair
share (the budget divided by the number of namespaces with engines attached), the
column used least recently of those that hold more than theirs. A namespace that holds
nothing may take its first column from any other, and so may one whose model is below its
floor. No column is taken in which a chunk is pinned, being written or draining. Beyond
that a namespace must evict its own chunks.

Quotas (`kvd.pool.shares`) bound all of it: no model claims beyond its cap, none
takes what leaves another below its floor.

While the pool's memory is still being filled (see `kvd.pool.filling`) only columns
whose bytes are all there are given away, and nothing is taken or evicted for them.

Bytes that change hands are not zeroed: no engine maps the pool, and a lane lets it read only
blocks that its own namespace has written.
"""

from collections import Counter
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvd.config.quota import Quota
from kvd.errors import IntegrityError
from kvd.pool.filling import FillOrder
from kvd.pool.geometry import Extents, Geometry
from kvd.pool.holdings import Holdings
from kvd.pool.shares import Quotas
from kvd.pool.space import Space, Tenant

Columns = list[tuple[Space, int]]


class Pool:
    """Who owns which extent of a pool of `cpu_bytes`, whose memory is filled in order `fill`."""

    def __init__(self, cpu_bytes: int, fill: FillOrder | None = None) -> None:
        self.cpu_bytes = cpu_bytes
        self.extents = Extents(cpu_bytes)
        self.fill = fill or FillOrder.of(cpu_bytes)
        self._holdings = Holdings(self.extents)
        self.quotas = Quotas(self.extents, self._holdings.spaces)
        self._joined = 0
        self._tick = 0
        # By space: changes of holdings when it found no column to claim, or none below its cap.
        self._exhausted: dict[Space, int] = {}
        self._capped: dict[Space, int] = {}

    @property
    def free_bytes(self) -> int:
        """Bytes of the extents that no namespace owns."""
        return self.cpu_bytes - sum(map(self.held_bytes, self._holdings.spaces))

    def held_bytes(self, space: Space) -> int:
        """Bytes of the extents that a space owns."""
        return self._holdings.held_bytes(space)

    def set_quotas(self, quotas: Mapping[str, Quota]) -> None:
        """These hold, by model; who is above a cap shrinks now, as far as nothing is in use."""
        self.quotas.set(quotas)
        self._exhausted.clear()
        self._capped.clear()
        self.trim()

    def trim(self) -> None:
        """Bring every model down to its cap: the columns used least recently go, if they may."""
        for group in self.quotas:
            if group.room >= 0:
                continue
            columns = [
                (column not in space.empty, space.used_at[column], space.number, column, space)
                for space in group.spaces
                for busy in [self._busy_columns(space)]
                for column in space.claimed
                if column not in busy
            ]
            for *_, column, space in sorted(columns, key=lambda entry: entry[:4]):
                if group.room >= 0:
                    break
                self._empty_out(space, column)

    def is_capped(self, space: Space) -> bool:
        """Whether nothing but the model's cap keeps the space from having another column."""
        group = self.quotas.of(space)
        return group is not None and not any(
            column not in space and self._holdings.gain(space, column) <= group.room
            for column in range(len(space.column_extents))
        )

    def join(self, geometry: Geometry, tenant: Tenant, model: str = "") -> Space:
        """Add a space, which owns nothing yet; `model` says whose quota counts, if any."""
        space = Space(geometry, self._joined, self.fill, tenant, model)
        self._joined += 1
        self._holdings.spaces.append(space)
        return space

    def leave(self, space: Space) -> None:
        """Remove a space, whatever chunks it holds."""
        for column in space.claimed:
            self._holdings.release(space, column)
        self._holdings.spaces.remove(space)
        self._exhausted.pop(space, None)
        self._capped.pop(space, None)

    def tick(self, uses: int, now: int) -> int:
        """The last of `uses` numbers greater than all before, to mark uses with.

        They are the time, `now` in microseconds, as far as that grows fast enough.
        """
        self._tick = max(self._tick + uses, now)
        return self._tick

    def restore(
        self, space: Space, slots: npt.NDArray[np.int64], stamps: npt.NDArray[np.uint64]
    ) -> None:
        """Claim what holds these chunks of the previous daemon, each last used at its stamp.

        Raises:
            IntegrityError: another namespace claims the same bytes.
        """
        for column in np.unique(slots // space.geometry.column_slots).tolist():
            if not self._holdings.is_free_for(space, column):
                raise IntegrityError(f"column {column} of {space!r} has two owners")
            self._holdings.claim(space, column)
        space.occupy(slots, stamps)
        self._tick = max(self._tick, int(stamps.max(initial=0)))

    # ------------------------------------------------------------------ acquiring

    def acquire(self, space: Space, slots: int, usable: int | None = None) -> None:
        """Claim columns until `slots` are free in `space`, or no more may be had.

        Chunks of other namespaces may be evicted for it, never those of `space`. While the
        pool is filled, they are free inside `usable` bytes, and nothing is evicted.
        """
        self._claim_unowned(space, slots, usable)
        while usable is None and space.free_slots < slots and not space.is_whole:
            found = self._best_take(space)
            if found is None:
                return
            column, others = found
            for other, theirs in others:
                self._empty_out(other, theirs)
            self._holdings.claim(space, column)
            self._claim_unowned(space, slots, usable)

    def _claim_unowned(self, space: Space, slots: int, usable: int | None) -> None:
        """Claim columns over extents that no other namespace owns."""
        short = slots - space.free_within(usable)
        if self._exhausted.get(space) == self._holdings.changes or space.is_whole:
            return
        group = self.quotas.of(space)
        for column in _search_order(space):
            if short <= 0:
                return
            if (
                (usable is None or space.needs[column] <= usable)
                and self._holdings.is_free_for(space, column)
                and (group is None or self._holdings.gain(space, column) <= group.room)
            ):
                self._holdings.claim(space, column)
                short -= len(space.geometry.column_range(column))
        if usable is None:
            self._exhausted[space] = self._holdings.changes

    def _best_take(self, space: Space) -> tuple[int, Columns] | None:
        """The best column to take from others, with the columns that go for it."""
        if self._capped.get(space) == self._holdings.changes:
            return None
        spaces, quotas, fair = self._holdings.spaces, self.quotas, self.quotas.fair()
        own, group = fair[space], quotas.of(space)
        room = group.room if group is not None else 0
        below_floor = group is not None and group.held < group.floor
        others = [other for other in spaces if other is not space]
        if (
            not below_floor
            and space.held >= own
            and space.held
            and not any(other.empty for other in others)
        ):
            return None
        rich = {other for other in others if other.held > fair[other]}
        busy = {other: self._busy_columns(other) for other in others}
        counted = group is not None or any(each.floor for each in quotas)
        fits = False
        best: tuple[tuple[bool, bool, int, int], int, Columns] | None = None
        for column in _search_order(space):
            if column in space:
                continue
            theirs = self._holdings.overlapped(space, column)
            losses = self._holdings.losses(theirs) if counted else Counter[str]()
            gain = self._holdings.gain(space, column)
            if group is not None and gain - losses[space.model] > room:
                continue
            fits = True
            if any(theirs_column in busy[other] for other, theirs_column in theirs):
                continue
            if not all(each.may_lose(losses[each.model], space) for each in quotas):
                continue
            holding = [(other, c) for other, c in theirs if c not in other.empty]
            from_poor = any(other not in rich for other, _ in holding)
            if (
                holding
                and space.held
                and not below_floor
                and (space.held + gain > own or from_poor)
            ):
                continue
            used_at = max((other.used_at[c] for other, c in holding), default=0)
            rank = (bool(holding), from_poor and below_floor, used_at, len(theirs))
            if best is None or rank < best[0]:
                best = (rank, column, theirs)
        if not fits:
            self._capped[space] = self._holdings.changes
        return best and best[1:]

    def _busy_columns(self, space: Space) -> set[int]:
        """Columns in which something is pinned, being written or draining."""
        width = space.geometry.column_slots
        return {slot // width for slot in space.tenant.busy_slots()}

    def _empty_out(self, space: Space, column: int) -> None:
        """Evict what is in a column and release it."""
        used = space.used_slots(column)
        if used:
            space.tenant.yield_slots(used)
        self._holdings.release(space, column)

    def give_back(self, space: Space) -> None:
        """Release every column of a space that holds no chunk."""
        for column in list(space.empty):
            self._holdings.release(space, column)

    def check_integrity(self) -> None:
        """Raise IntegrityError where extents are not owned as the spaces say."""
        self._holdings.check_integrity()

    def __repr__(self) -> str:
        return f"<Pool {self.cpu_bytes} bytes, {self._holdings!r}>"


def _search_order(space: Space) -> range:
    """The columns of a space, in the order in which it looks for room."""
    # Every other namespace starts at the far end, so that two that grow have one border
    # instead of many that cut columns.
    columns = range(len(space.column_extents))
    return columns if space.number % 2 == 0 else columns[::-1]
