"""Divides one byte budget among namespaces whose chunks differ in size.

Each extent of the pool (see `kvd.pool.geometry`) is owned by one namespace or unowned. A namespace
uses only columns whose extents it owns. It owns an extent from its first claim of a column that
touches it until it releases the last such column. A single namespace owns all extents and reaches
``cpu_bytes // bytes_per_chunk`` chunks.

A namespace that needs slots gets columns in this order:

1. columns over unowned extents;
2. columns of other namespaces that hold no chunk;
3. while it stays within its fair share (the budget divided by the number of namespaces with engines
   attached): the least recently used column of a namespace that holds more than its fair share.

A namespace without a column, or one whose model is below its floor, may take a column from any
other. A column in which a chunk is pinned, being written or draining is never taken; loans in a
taken column end. Otherwise a namespace evicts its own chunks.

Quotas of models (see `kvd.pool.quotas`) limit what is claimed and taken.

While the pool's memory is being filled, only columns whose bytes are all filled are handed out, and
none is taken from others.

Reused bytes are not zeroed: no engine maps the pool, and lanes let a namespace read only blocks
that it has written.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvd.config.values import Quota
from kvd.errors import IntegrityError
from kvd.pool.geometry import Extents, FillOrder, Geometry, PoolSpace, Tenant
from kvd.pool.quotas import QuotaGroup, Quotas

Columns = list[tuple[PoolSpace, int]]


class _Cost(NamedTuple):
    """The cost of taking a column from others; the lowest is taken first.

    1. Columns that evict no chunk.
    2. Columns of spaces above their fair share.
    3. The least recently used.
    4. Those that replace the fewest columns.
    """

    evicts: bool
    from_poor: bool
    last_use: int
    num_replaced: int


@dataclass(slots=True)
class _Search:
    """A search for columns that a space may take from others: what holds for all of them.

    Attributes:
        busy, last_uses: of each other space's columns.
        has_quotas: whether quotas limit what may be taken.
        any_empty: whether others have columns without a chunk.
        fits_cap: whether a column was rated that leaves the space's model at its cap or below.
    """

    space: PoolSpace
    group: QuotaGroup | None
    fair_shares: Mapping[PoolSpace, float]
    busy: Mapping[PoolSpace, Collection[int]]
    last_uses: Mapping[PoolSpace, Any]
    has_quotas: bool
    any_empty: bool
    fits_cap: bool = False


class Pool:
    """Which space owns each extent of a pool, and how many of its columns touch the extent.

    Args:
        cpu_bytes: the pool's size; its file may have more, up to whole pages.
        fill: the order in which its memory is filled; None: the default.
    """

    def __init__(self, cpu_bytes: int, fill: FillOrder | None = None) -> None:
        self.cpu_bytes = cpu_bytes
        self.extents = Extents(cpu_bytes)
        self.fill = fill or FillOrder.of(cpu_bytes)
        self._spaces: list[PoolSpace] = []
        self.quotas = Quotas(self.extents, self._spaces)
        self._owners: list[PoolSpace | None] = [None] * self.extents.count
        self._claims = [0] * self.extents.count  # columns of the owner that touch the extent
        # Changes of owners and quotas: after a search in vain a space waits for the next one.
        self._num_changes = 0
        self._num_joined = 0
        self._last_stamp = 0

    @property
    def free_bytes(self) -> int:
        """Bytes of the unowned extents."""
        return self.cpu_bytes - sum(map(self.held_bytes, self._spaces))

    def held_bytes(self, space: PoolSpace) -> int:
        """Return the bytes of the extents that a space owns."""
        nbytes = space.num_extents * self.extents.size
        if self._owners[-1] is space:  # the last extent may be cut short
            nbytes -= self.extents.count * self.extents.size - self.cpu_bytes
        return nbytes

    def set_quotas(self, quotas: Mapping[str, Quota]) -> None:
        """Replace all quotas, by model, and `trim`."""
        self.quotas.set(quotas)
        self._num_changes += 1
        self.trim()

    def trim(self) -> None:
        """Release least recently used columns of every model above its cap.

        Busy columns are skipped, so call this from time to time.
        """
        for group in self.quotas:
            if group.num_left >= 0:
                continue
            columns = [
                (column not in space.empty, last_uses[column], space.number, column, space)
                for space in group.spaces
                for busy, last_uses in [(space.busy_columns(), space.last_uses())]
                for column in space.claimed
                if column not in busy
            ]
            columns.sort(key=lambda candidate: candidate[:4])
            for *_, column, space in columns:
                if group.num_left >= 0:
                    break
                self._evict_column(space, column)

    def is_capped(self, space: PoolSpace) -> bool:
        """Whether every further column would take the space's model above its cap."""
        group = self.quotas.of(space)
        return group is not None and not any(
            column not in space and self._num_new_extents(space, column) <= group.num_left
            for column in range(len(space.column_extents))
        )

    def join(self, geometry: Geometry, tenant: Tenant, model: str = "") -> PoolSpace:
        """Add and return a space without columns; `model`: whose quota applies, empty: none."""
        space = PoolSpace(geometry, self._num_joined, self.fill, tenant, model)
        self._num_joined += 1
        self._spaces.append(space)
        return space

    def leave(self, space: PoolSpace) -> None:
        """Remove a space with all its columns; its chunks are lost."""
        for column in space.claimed:
            self._release(space, column)
        self._spaces.remove(space)

    def next_stamps(self, n: int, now: int) -> int:
        """Return the last of `n` consecutive stamps, all greater than every stamp before.

        The last stamp is `now`, in microseconds, unless stamps before it are ahead of the clock.
        """
        self._last_stamp = max(self._last_stamp + n, now)
        return self._last_stamp

    def restore(self, space: PoolSpace, slots: npt.NDArray[np.int64], last_stamp: int) -> None:
        """Claim the columns of the previous daemon's chunks, whose newest stamp is `last_stamp`.

        Raises:
            IntegrityError: another namespace owns some of these bytes.
        """
        for column in np.unique(slots // space.geometry.column_slots).tolist():
            if not self._is_free_for(space, column):
                raise IntegrityError(f"column {column} of space {space.number} has two owners")
            self._claim(space, column)
        space.occupy(slots)
        self._last_stamp = max(self._last_stamp, last_stamp)

    # ------------------------------------------------------------------ acquiring

    def acquire(
        self, space: PoolSpace, slots: int, filled_bytes: int | None = None, *, evict: bool = True
    ) -> None:
        """Claim columns until `slots` slots are free in `space`, or no more can be claimed.

        Args:
            space: whose columns grow.
            slots: number of free slots needed.
            filled_bytes: of the pool: claim only columns in them, none of other namespaces;
                None: the pool is filled.
            evict: chunks of other namespaces may be evicted; False: only their empty columns are
                taken.
        """
        self._claim_unowned(space, slots, filled_bytes)
        if filled_bytes is None:
            while space.free_slots < slots and not space.has_all_columns:
                if not self._take_columns(space, slots, evict=evict):
                    return

    def _take_columns(self, space: PoolSpace, slots: int, *, evict: bool) -> bool:
        """Take columns from others, the best first, until `slots` are free; return whether any.

        All columns are rated once, which takes milliseconds. A take changes the cost of columns
        beside it: those wait for the next call.
        """
        search = self._begin_search(space)
        if search is None or not (evict or search.any_empty):
            return False
        rated = [
            (rating[0], column)
            for column in _search_order(space)
            if (rating := self._rate(search, column)) is not None
        ]
        if not search.fits_cap:
            space.capped_at = self._num_changes
        any_taken = False
        for cost, column in sorted(rated, key=itemgetter(0)):
            if space.free_slots >= slots or (cost.evicts and not evict):
                break
            rating = self._rate(search, column)
            if rating is None or rating[0] != cost:
                continue
            freed: set[int] = set()
            for other, lost_column in rating[1]:
                self._evict_column(other, lost_column)
                freed.update(other.column_extents[lost_column])
            self._claim(space, column)
            beside = {other for extent in freed for other in space.columns_at.get(extent, ())}
            self._claim_unowned(space, slots, None, sorted(beside))
            any_taken = True
        return any_taken

    def _claim_unowned(
        self,
        space: PoolSpace,
        slots: int,
        filled_bytes: int | None,
        columns: Iterable[int] | None = None,
    ) -> None:
        """Claim columns over extents that no other space owns; arguments as `acquire`.

        Ends when `slots` slots are free or no column is left: of these `columns`, if given.
        """
        num_missing = slots - space.num_free(filled_bytes)
        # No change since no column was left: there is none now.
        if space.exhausted_at == self._num_changes or space.has_all_columns:
            return
        group = self.quotas.of(space)
        for column in _search_order(space) if columns is None else columns:
            if num_missing <= 0:
                return
            if (
                (filled_bytes is None or space.required_fill[column] <= filled_bytes)
                and self._is_free_for(space, column)
                and (group is None or self._num_new_extents(space, column) <= group.num_left)
            ):
                self._claim(space, column)
                num_missing -= len(space.geometry.column_range(column))
        if filled_bytes is None and columns is None:
            space.exhausted_at = self._num_changes

    def _begin_search(self, space: PoolSpace) -> "_Search | None":
        """Return what a search for columns of others needs; None if there are none for the space.

        Valid while the caller only takes columns.
        """
        if space.capped_at == self._num_changes:
            return None
        group, fair_shares = self.quotas.of(space), self.quotas.fair_shares()
        below_floor = group is not None and group.num_extents < group.floor
        others = [other for other in self._spaces if other is not space]
        any_empty = any(other.empty for other in others)
        if (
            not below_floor
            and space.num_extents >= fair_shares[space]
            and space.num_extents
            and not any_empty
        ):
            return None
        return _Search(
            space,
            group,
            fair_shares,
            busy={other: other.busy_columns() for other in others},
            last_uses={other: other.last_uses() for other in others},
            has_quotas=group is not None or any(quota.floor for quota in self.quotas),
            any_empty=any_empty,
        )

    def _rate(self, search: "_Search", column: int) -> tuple["_Cost", Columns] | None:
        """Return the cost of taking a column, and the columns of others that it replaces.

        None: the space may not take it.
        """
        space, group, quotas = search.space, search.group, self.quotas
        if column in space:
            return None
        below_floor = group is not None and group.num_extents < group.floor
        victims = self._overlapped(space, column)
        losses = self._losses(victims) if search.has_quotas else Counter[str]()
        gain = self._num_new_extents(space, column)
        if group is not None and gain - losses[space.model] > group.num_left:
            return None
        search.fits_cap = True
        if any(lost_column in search.busy[other] for other, lost_column in victims):
            return None
        if not all(quota.may_lose(losses[quota.model], space) for quota in quotas):
            return None
        with_chunks = [
            (other, lost_column) for other, lost_column in victims if lost_column not in other.empty
        ]
        shares = search.fair_shares
        from_poor = any(other.num_extents <= shares[other] for other, _ in with_chunks)
        if (
            with_chunks
            and space.num_extents
            and not below_floor
            and (space.num_extents + gain > shares[space] or from_poor)
        ):
            return None
        last_use = max(
            (search.last_uses[other][lost_column] for other, lost_column in with_chunks), default=0
        )
        cost = _Cost(bool(with_chunks), from_poor and below_floor, last_use, len(victims))
        return cost, victims

    def _evict_column(self, space: PoolSpace, column: int) -> None:
        """Evict the chunks of a column and release it."""
        used = space.used_slots(column)
        if used:
            space.tenant.surrender_slots(used)
        self._release(space, column)

    def release_empty_columns(self, space: PoolSpace) -> None:
        """Release every column of a space without a used slot."""
        for column in list(space.empty):
            self._release(space, column)

    # -------------------------------------------------------------------- extents

    def _num_new_extents(self, space: PoolSpace, column: int) -> int:
        """Return how many more extents the space would own with this column."""
        return sum(self._owners[extent] is not space for extent in space.column_extents[column])

    def _losses(self, columns: Iterable[tuple[PoolSpace, int]]) -> Counter[str]:
        """Return how many extents each model would lose with these columns."""
        # A space loses an extent when the last of its columns that touch it goes.
        claims = Counter((s, e) for s, column in columns for e in s.column_extents[column])
        losses: Counter[str] = Counter()
        for (space, extent), count in claims.items():
            losses[space.model] += self._claims[extent] == count
        return losses

    def _is_free_for(self, space: PoolSpace, column: int) -> bool:
        """Whether the column is not claimed yet and no other space owns an extent of it."""
        return column not in space and all(
            self._owners[extent] in {None, space} for extent in space.column_extents[column]
        )

    def _overlapped(self, space: PoolSpace, column: int) -> Columns:
        """Return the claimed columns of others that share an extent with this column."""
        columns: dict[tuple[PoolSpace, int], None] = {}
        for extent in space.column_extents[column]:
            other = self._owners[extent]
            if other is not None and other is not space:
                for lost_column in other.columns_at[extent]:
                    if lost_column in other:
                        columns[other, lost_column] = None
        return list(columns)

    def _claim(self, space: PoolSpace, column: int) -> None:
        """Give a space a column that is free for it."""
        self._num_changes += 1
        for extent in space.column_extents[column]:
            if self._owners[extent] is None:
                self._owners[extent] = space
                space.num_extents += 1
            self._claims[extent] += 1
        space.open_column(column)

    def _release(self, space: PoolSpace, column: int) -> None:
        """Take a column from a space; extents that none of its columns touches become unowned."""
        self._num_changes += 1
        space.close_column(column)
        for extent in space.column_extents[column]:
            self._claims[extent] -= 1
            if not self._claims[extent]:
                self._owners[extent] = None
                space.num_extents -= 1

    def check_integrity(self) -> None:
        """Raise IntegrityError if owners contradict the claimed columns, or chunks overlap."""
        owner: list[PoolSpace | None] = [None] * self.extents.count
        claims = [0] * self.extents.count
        shares: list[tuple[int, int, int, int]] = []
        for space in self._spaces:
            space.check_integrity()
            for column in space.claimed:
                for extent in space.column_extents[column]:
                    if owner[extent] not in {None, space}:
                        raise IntegrityError(f"extent {extent} is claimed twice")
                    owner[extent] = space
                    claims[extent] += 1
                for slot in space.used_slots(column):
                    shares += [
                        (*share, space.number, slot) for share in space.geometry.shares(slot)
                    ]
            num_extents = sum(extent_owner is space for extent_owner in owner)
            if space.num_extents != num_extents:
                raise IntegrityError(
                    f"space {space.number} owns {num_extents} extents, counted {space.num_extents}"
                )
        if owner != self._owners or claims != self._claims:
            raise IntegrityError("owners of extents contradict the claimed columns")
        end = 0
        for first, after, number, slot in sorted(shares):
            if first < end or after > self.cpu_bytes:
                raise IntegrityError(f"slot {slot} of space {number} overlaps or leaves the pool")
            end = after


def _search_order(space: PoolSpace) -> range:
    """Return the columns of a space in the order in which it claims them."""
    # Every other space starts at the far end, so that two growing spaces meet at one border instead
    # of many, each of which cuts columns.
    columns = range(len(space.column_extents))
    return columns if space.number % 2 == 0 else columns[::-1]
