"""One byte budget, shared by namespaces whose chunks differ in size.

Every extent of the pool belongs to one namespace or to none, and a namespace uses
only columns of which it owns every extent (see `kvd.pool.geometry`). An extent belongs to
the first that claims a column over it, until the last such column is released. Alone, a
namespace owns them all and reaches ``cpu_bytes // bytes_per_chunk`` chunks.

Whoever needs room gets free extents first. Whoever has no free extents left takes, in
this order: columns of others that hold nothing; and, while it stays within its fair
share (the budget divided by the number of namespaces with engines attached), the
column used least recently of those that hold more than theirs. A namespace that holds
nothing may take its first column from any other, and so may one whose model is below its
floor. No column is taken in which a chunk is pinned, being written or draining; loans in it end.
Beyond that a namespace must evict its own chunks.

Quotas bound all of it: no model claims beyond its cap, none takes what leaves another below its
floor. A quota is for a model: it counts what all namespaces of that name hold together, in
extents. Nothing is set aside for a floor that is not in use.

While the pool's memory is still being filled only columns whose bytes are all there are given
away, and nothing is taken or evicted for them.

Bytes that change hands are not zeroed: no engine maps the pool, and a lane lets it read only
blocks that its own namespace has written.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvd.config.values import Quota
from kvd.errors import IntegrityError
from kvd.pool.geometry import Extents, FillOrder, Geometry, PoolSpace, Tenant

_ROUNDS = 40


class QuotaGroup:
    """The namespaces of one model, under its quota; `spaces` are all of the pool's."""

    def __init__(
        self, model: str, quota: Quota, extents: Extents, spaces: Sequence[PoolSpace]
    ) -> None:
        self.model = model
        self.quota = quota
        cap = extents.count if quota.cap_bytes is None else quota.cap_bytes // extents.size
        self.cap = min(cap, extents.count)
        self.floor = min(-(-quota.floor_bytes // extents.size), self.cap)
        self._all = spaces

    @property
    def spaces(self) -> list[PoolSpace]:
        """Its namespaces' parts of the pool."""
        return [space for space in self._all if space.model == self.model]

    @property
    def held(self) -> int:
        """Extents that its namespaces own."""
        return sum(space.held for space in self.spaces)

    @property
    def num_left(self) -> int:
        """Extents up to the cap; negative where a lowered cap has not been reached yet."""
        return self.cap - self.held

    def may_lose(self, extents: int, taker: PoolSpace) -> bool:
        """Whether it stays at its floor without so many extents, or gives to one of its own."""
        return not extents or self.model == taker.model or self.held - extents >= self.floor


class Quotas:
    """The quotas of a pool, by model; `spaces` are its spaces, a list that the pool changes."""

    def __init__(self, extents: Extents, spaces: Sequence[PoolSpace]) -> None:
        self._extents = extents
        self._spaces = spaces
        self._groups: dict[str, QuotaGroup] = {}

    def set(self, quotas: Mapping[str, Quota]) -> None:
        """These hold from now on, and no others."""
        self._groups = {
            model: QuotaGroup(model, quota, self._extents, self._spaces)
            for model, quota in quotas.items()
        }

    def of(self, space: PoolSpace) -> QuotaGroup | None:
        """The group of a namespace; None where it has no quota."""
        return self._groups.get(space.model)

    def __iter__(self) -> Iterator[QuotaGroup]:
        return iter(self._groups.values())

    def fair(self) -> dict[PoolSpace, float]:
        """Extents that each namespace may take from others for.

        The pool is divided evenly among those with engines, as far as floors and
        caps allow. What a model without engines holds of its floor is not divided.
        """
        active = Counter(space.model for space in self._spaces if space.active)
        alone = sum(count for model, count in active.items() if model not in self._groups)
        groups = [(g, active[g.model]) for g in self if active[g.model]]
        kept = sum(min(g.held, g.floor) for g in self if not active[g.model])
        level = self._level(alone, groups, self._extents.count - kept)
        fair = {}
        for space in self._spaces:
            group = self.of(space)
            if not space.active:
                fair[space] = 0.0
            elif group is None:
                fair[space] = level
            else:
                fair[space] = _clamped(group, active[space.model], level) / active[space.model]
        return fair

    def _level(self, alone: int, groups: Sequence[tuple[QuotaGroup, int]], available: int) -> float:
        """The even part that, with floors and caps, divides what is available."""
        if not groups:
            return available / alone if alone else 0.0
        low, high = 0.0, float(self._extents.count)
        for _ in range(_ROUNDS):
            middle = (low + high) / 2
            if alone * middle + sum(_clamped(*group, middle) for group in groups) > available:
                high = middle
            else:
                low = middle
        return low


def _clamped(group: QuotaGroup, active: int, level: float) -> float:
    return min(max(level * active, group.floor), group.cap)


Columns = list[tuple[PoolSpace, int]]


class Pool:
    """Who owns which extent of a pool of `cpu_bytes`, whose memory is filled in order `fill`."""

    def __init__(self, cpu_bytes: int, fill: FillOrder | None = None) -> None:
        self.cpu_bytes = cpu_bytes
        self.extents = Extents(cpu_bytes)
        self.fill = fill or FillOrder.of(cpu_bytes)
        self._spaces: list[PoolSpace] = []
        self.quotas = Quotas(self.extents, self._spaces)
        self._owner: list[PoolSpace | None] = [None] * self.extents.count
        self._claims = [0] * self.extents.count  # columns of the owner that touch the extent
        self._changes = 0  # of owners and quotas: until then who cannot grow need not look again
        self._joined = 0
        self._tick = 0

    @property
    def free_bytes(self) -> int:
        """Bytes of the extents that no namespace owns."""
        return self.cpu_bytes - sum(map(self.held_bytes, self._spaces))

    def held_bytes(self, space: PoolSpace) -> int:
        """Bytes of the extents that a space owns."""
        owned = space.held * self.extents.size
        if self._owner[-1] is space:  # the last extent may be cut short
            owned -= self.extents.count * self.extents.size - self.cpu_bytes
        return owned

    def set_quotas(self, quotas: Mapping[str, Quota]) -> None:
        """These hold, by model; who is above a cap shrinks now, as far as nothing is in use."""
        self.quotas.set(quotas)
        self._changes += 1
        self.trim()

    def trim(self) -> None:
        """Bring every model down to its cap: the columns used least recently go, if they may.

        To be called now and then: a column in which something is in use stays until later.
        """
        for group in self.quotas:
            if group.num_left >= 0:
                continue
            columns = [
                (column not in space.empty, used_at[column], space.number, column, space)
                for space in group.spaces
                for busy, used_at in [(space.busy_columns(), space.used_at())]
                for column in space.claimed
                if column not in busy
            ]
            columns.sort(key=lambda entry: entry[:4])
            for *_, column, space in columns:
                if group.num_left >= 0:
                    break
                self._empty_out(space, column)

    def is_capped(self, space: PoolSpace) -> bool:
        """Whether nothing but the model's cap keeps the space from having another column."""
        group = self.quotas.of(space)
        return group is not None and not any(
            column not in space and self._gain(space, column) <= group.num_left
            for column in range(len(space.column_extents))
        )

    def join(self, geometry: Geometry, tenant: Tenant, model: str = "") -> PoolSpace:
        """Add a space, which owns nothing yet; `model` says whose quota counts, if any."""
        space = PoolSpace(geometry, self._joined, self.fill, tenant, model)
        self._joined += 1
        self._spaces.append(space)
        return space

    def leave(self, space: PoolSpace) -> None:
        """Remove a space, whatever chunks it holds."""
        for column in space.claimed:
            self._release(space, column)
        self._spaces.remove(space)

    def tick(self, uses: int, now: int) -> int:
        """The last of `uses` numbers greater than all before, to mark uses with.

        They are the time, `now` in microseconds, as far as that grows fast enough.
        """
        self._tick = max(self._tick + uses, now)
        return self._tick

    def restore(self, space: PoolSpace, slots: npt.NDArray[np.int64], last: int) -> None:
        """Claim what holds these chunks of the previous daemon, whose last tick is `last`.

        IntegrityError says that another namespace claims the same bytes.
        """
        for column in np.unique(slots // space.geometry.column_slots).tolist():
            if not self._is_free_for(space, column):
                raise IntegrityError(f"column {column} of {space!r} has two owners")
            self._claim(space, column)
        space.occupy(slots)
        self._tick = max(self._tick, last)

    # ------------------------------------------------------------------ acquiring

    def acquire(
        self, space: PoolSpace, slots: int, usable: int | None = None, *, evict: bool = True
    ) -> None:
        """Claim columns until `slots` are free in `space`, or no more may be had.

        Chunks of other namespaces may be evicted for it, never those of `space`; none without
        `evict`. While the pool is filled, they are free inside `usable` bytes, and nothing is
        evicted.
        """
        self._claim_unowned(space, slots, usable)
        while usable is None and space.free_slots < slots and not space.is_whole:
            if not (evict or any(other.empty for other in self._spaces if other is not space)):
                return
            found = self._best_take(space)
            if found is None:
                return
            column, others = found
            if not evict and any(theirs not in other.empty for other, theirs in others):
                return
            for other, theirs in others:
                self._empty_out(other, theirs)
            self._claim(space, column)
            self._claim_unowned(space, slots, usable)

    def _claim_unowned(self, space: PoolSpace, slots: int, usable: int | None) -> None:
        """Claim columns over extents that no other namespace owns."""
        short = slots - space.free_within(usable)
        if space.exhausted == self._changes or space.is_whole:
            return
        group = self.quotas.of(space)
        for column in _search_order(space):
            if short <= 0:
                return
            if (
                (usable is None or space.needs[column] <= usable)
                and self._is_free_for(space, column)
                and (group is None or self._gain(space, column) <= group.num_left)
            ):
                self._claim(space, column)
                short -= len(space.geometry.column_range(column))
        if usable is None:
            space.exhausted = self._changes

    def _best_take(self, space: PoolSpace) -> tuple[int, Columns] | None:
        """The best column to take from others, with the columns that go for it."""
        if space.capped == self._changes:
            return None
        quotas, fair = self.quotas, self.quotas.fair()
        own, group = fair[space], quotas.of(space)
        room = group.num_left if group is not None else 0
        below_floor = group is not None and group.held < group.floor
        others = [other for other in self._spaces if other is not space]
        if (
            not below_floor
            and space.held >= own
            and space.held
            and not any(other.empty for other in others)
        ):
            return None
        rich = {other for other in others if other.held > fair[other]}
        busy = {other: other.busy_columns() for other in others}
        used_at = {other: other.used_at() for other in others}
        counted = group is not None or any(each.floor for each in quotas)
        fits = False
        best: tuple[tuple[bool, bool, int, int], int, Columns] | None = None
        for column in _search_order(space):
            if column in space:
                continue
            theirs = self._overlapped(space, column)
            losses = self._losses(theirs) if counted else Counter[str]()
            gain = self._gain(space, column)
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
            last = max((used_at[other][c] for other, c in holding), default=0)
            rank = (bool(holding), from_poor and below_floor, last, len(theirs))
            if best is None or rank < best[0]:
                best = (rank, column, theirs)
        if not fits:
            space.capped = self._changes
        return None if best is None else best[1:]

    def _empty_out(self, space: PoolSpace, column: int) -> None:
        """Evict what is in a column and release it."""
        used = space.used_slots(column)
        if used:
            space.tenant.yield_slots(used)
        self._release(space, column)

    def release_empty_columns(self, space: PoolSpace) -> None:
        """Release every column of a space that holds no chunk."""
        for column in list(space.empty):
            self._release(space, column)

    # -------------------------------------------------------------------- extents

    def _gain(self, space: PoolSpace, column: int) -> int:
        """How many extents the space would own besides, with this column."""
        return sum(self._owner[extent] is not space for extent in space.column_extents[column])

    def _losses(self, columns: Iterable[tuple[PoolSpace, int]]) -> Counter[str]:
        """How many extents each model would lose with these columns: those no other one keeps."""
        claims = Counter((s, e) for s, column in columns for e in s.column_extents[column])
        losses: Counter[str] = Counter()
        for (space, extent), count in claims.items():
            losses[space.model] += self._claims[extent] == count
        return losses

    def _is_free_for(self, space: PoolSpace, column: int) -> bool:
        """Whether the space has not claimed the column, and no other owns an extent of it."""
        return column not in space and all(
            self._owner[extent] in {None, space} for extent in space.column_extents[column]
        )

    def _overlapped(self, space: PoolSpace, column: int) -> Columns:
        """The claimed columns of others that share an extent with this one."""
        found: dict[tuple[PoolSpace, int], None] = {}
        for extent in space.column_extents[column]:
            other = self._owner[extent]
            if other is not None and other is not space:
                for theirs in other.columns_at[extent]:
                    if theirs in other:
                        found[other, theirs] = None
        return list(found)

    def _claim(self, space: PoolSpace, column: int) -> None:
        """The space has a column that is free for it."""
        self._changes += 1
        for extent in space.column_extents[column]:
            if self._owner[extent] is None:
                self._owner[extent] = space
                space.held += 1
            self._claims[extent] += 1
        space.open_column(column)

    def _release(self, space: PoolSpace, column: int) -> None:
        """A column goes back."""
        self._changes += 1
        space.close_column(column)
        for extent in space.column_extents[column]:
            self._claims[extent] -= 1
            if not self._claims[extent]:
                self._owner[extent] = None
                space.held -= 1

    def check_integrity(self) -> None:
        """Raise IntegrityError where extents are not owned as claimed, or chunks overlap."""
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
            if space.held != sum(each is space for each in owner):
                raise IntegrityError(f"held extents are miscounted: {space!r}")
        if owner != self._owner or claims != self._claims:
            raise IntegrityError("extents are not owned as the claimed columns say")
        end = 0
        for first, after, number, slot in sorted(shares):
            if first < end or after > self.cpu_bytes:
                raise IntegrityError(f"slot {slot} of space {number} overlaps or leaves the pool")
            end = after

    def __repr__(self) -> str:
        free = self._owner.count(None)
        return f"<Pool {self.cpu_bytes} bytes, {free} of {self.extents.count} extents free>"


def _search_order(space: PoolSpace) -> range:
    """The columns of a space, in the order in which it looks for room."""
    # Every other namespace starts at the far end, so that two that grow have one border
    # instead of many that cut columns.
    columns = range(len(space.column_extents))
    return columns if space.number % 2 == 0 else columns[::-1]
