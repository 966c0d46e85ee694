"""Quotas: the least and the most of a pool that the namespaces of one model own together.

A quota limits a model in extents. No model claims columns beyond its cap, and none takes a column
that leaves another model below its floor. Nothing is reserved for a floor that is not in use.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from kvd.config.values import Quota
from kvd.pool.geometry import Extents, PoolSpace

_ROUNDS = 40


class QuotaGroup:
    """The namespaces of one model, under its quota; `spaces` are all spaces of the pool."""

    def __init__(
        self, model: str, quota: Quota, extents: Extents, spaces: Sequence[PoolSpace]
    ) -> None:
        self.model = model
        self.quota = quota
        cap = extents.count if quota.cap_bytes is None else quota.cap_bytes // extents.size
        self.cap = min(cap, extents.count)
        self.floor = min(-(-quota.floor_bytes // extents.size), self.cap)
        self._all_spaces = spaces

    @property
    def spaces(self) -> list[PoolSpace]:
        """The spaces of the model's namespaces."""
        return [space for space in self._all_spaces if space.model == self.model]

    @property
    def num_extents(self) -> int:
        """Extents that the model's namespaces own."""
        return sum(space.num_extents for space in self.spaces)

    @property
    def num_left(self) -> int:
        """Extents up to the cap; negative until the model has shrunk to a lowered cap."""
        return self.cap - self.num_extents

    def may_lose(self, extents: int, taker: PoolSpace) -> bool:
        """Whether the model stays at its floor without `extents`, or `taker` is its own."""
        return not extents or self.model == taker.model or self.num_extents - extents >= self.floor


class Quotas:
    """The quotas of a pool, by model; `spaces` is the pool's list of spaces, which it changes."""

    def __init__(self, extents: Extents, spaces: Sequence[PoolSpace]) -> None:
        self._extents = extents
        self._spaces = spaces
        self._groups: dict[str, QuotaGroup] = {}

    def set(self, quotas: Mapping[str, Quota]) -> None:
        """Replace all quotas."""
        self._groups = {
            model: QuotaGroup(model, quota, self._extents, self._spaces)
            for model, quota in quotas.items()
        }

    def of(self, space: PoolSpace) -> QuotaGroup | None:
        """Return the group of a namespace; None if its model has no quota."""
        return self._groups.get(space.model)

    def __iter__(self) -> Iterator[QuotaGroup]:
        return iter(self._groups.values())

    def fair_shares(self) -> dict[PoolSpace, float]:
        """Return the number of extents up to which each space may take columns from others.

        The pool is divided evenly among spaces with engines, as far as floors and caps allow. What
        a model without engines owns of its floor is not divided.
        """
        active = Counter(space.model for space in self._spaces if space.active)
        num_without_quota = sum(n for model, n in active.items() if model not in self._groups)
        groups = [(g, active[g.model]) for g in self if active[g.model]]
        reserved = sum(min(g.num_extents, g.floor) for g in self if not active[g.model])
        even = self._even_share(num_without_quota, groups, self._extents.count - reserved)
        shares = {}
        for space in self._spaces:
            group = self.of(space)
            if not space.active:
                shares[space] = 0.0
            elif group is None:
                shares[space] = even
            else:
                shares[space] = _clamped(group, active[space.model], even) / active[space.model]
        return shares

    def _even_share(
        self, num_without_quota: int, groups: Sequence[tuple[QuotaGroup, int]], available: int
    ) -> float:
        """Return the share per space that, with floors and caps applied, uses up `available`."""
        if not groups:
            return available / num_without_quota if num_without_quota else 0.0
        low, high = 0.0, float(self._extents.count)
        for _ in range(_ROUNDS):
            middle = (low + high) / 2
            by_groups = sum(_clamped(*group, middle) for group in groups)
            if num_without_quota * middle + by_groups > available:
                high = middle
            else:
                low = middle
        return low


def _clamped(group: QuotaGroup, num_active: int, share: float) -> float:
    return min(max(share * num_active, group.floor), group.cap)
