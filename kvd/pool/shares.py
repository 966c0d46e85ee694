"""Floors and caps: what a model may hold of the pool at most, and what no other takes from it.

A quota is for a model: it counts what all namespaces of that name hold together,
in extents. Nothing is set aside for a floor that is not in use; a model below its
floor gets there by taking from others, and they never take what is below it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from kvd.config.values import Quota
from kvd.pool.geometry import Extents
from kvd.pool.space import Space

_ROUNDS = 40


class Group:
    """The namespaces of one model, under its quota; `spaces` are all of the pool's."""

    def __init__(self, model: str, quota: Quota, extents: Extents, spaces: Sequence[Space]) -> None:
        self.model = model
        self.quota = quota
        cap = extents.count if quota.cap_bytes is None else quota.cap_bytes // extents.size
        self.cap = min(cap, extents.count)
        self.floor = min(-(-quota.floor_bytes // extents.size), self.cap)
        self._all = spaces

    @property
    def spaces(self) -> list[Space]:
        """Its namespaces' parts of the pool."""
        return [space for space in self._all if space.model == self.model]

    @property
    def held(self) -> int:
        """Extents that its namespaces own."""
        return sum(space.held for space in self.spaces)

    @property
    def room(self) -> int:
        """Extents up to the cap; negative where a lowered cap has not been reached yet."""
        return self.cap - self.held

    def may_lose(self, extents: int, taker: Space) -> bool:
        """Whether it stays at its floor without so many extents, or gives to one of its own."""
        return not extents or self.model == taker.model or self.held - extents >= self.floor

    def __repr__(self) -> str:
        return f"<Group {self.model!r}: {self.held} extents of {self.floor} to {self.cap}>"


class Quotas:
    """The quotas of a pool, by model; `spaces` are its spaces, a list that the pool changes."""

    def __init__(self, extents: Extents, spaces: Sequence[Space]) -> None:
        self._extents = extents
        self._spaces = spaces
        self._groups: dict[str, Group] = {}

    def set(self, quotas: Mapping[str, Quota]) -> None:
        """These hold from now on, and no others."""
        self._groups = {
            model: Group(model, quota, self._extents, self._spaces)
            for model, quota in quotas.items()
        }

    def of(self, space: Space) -> Group | None:
        """The group of a namespace; None where it has no quota."""
        return self._groups.get(space.model)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    def fair(self) -> dict[Space, float]:
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

    def _level(self, alone: int, groups: Sequence[tuple[Group, int]], available: int) -> float:
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

    def __repr__(self) -> str:
        return f"<Quotas {list(self)}>"


def _clamped(group: Group, active: int, level: float) -> float:
    return min(max(level * active, group.floor), group.cap)
