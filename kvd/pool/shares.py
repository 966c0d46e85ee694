"""Floors and caps: what a model may hold of the pool at most, and what nobody takes from it.

A quota is for a model: it counts what all namespaces of that name hold together,
in extents. Nothing is set aside for a floor that is not in use; a model below its
floor gets there by taking from others, and they never take what is below it.
"""

from collections.abc import Iterable, Iterator, Mapping

from kvd.config.quota import Quota
from kvd.errors import IntegrityError
from kvd.pool.geometry import Extents
from kvd.pool.space import Space

_ROUNDS = 40


class Group:
    """The namespaces of one model, under its quota."""

    def __init__(self, model: str, quota: Quota, extents: Extents) -> None:
        self.model = model
        self.quota = quota
        cap = extents.count if quota.cap_bytes is None else quota.cap_bytes // extents.size
        self.cap = min(cap, extents.count)
        self.floor = min(-(-quota.floor_bytes // extents.size), self.cap)
        self.spaces: list[Space] = []

    @property
    def held(self) -> int:
        """Extents that its namespaces own."""
        return sum(space.held for space in self.spaces)

    @property
    def active(self) -> int:
        """Namespaces with engines."""
        return sum(space.active for space in self.spaces)

    @property
    def room(self) -> int:
        """Extents up to the cap; negative where a lowered cap has not been reached yet."""
        return self.cap - self.held

    @property
    def below_floor(self) -> bool:
        """It may take from anybody who is not below a floor."""
        return self.held < self.floor

    def may_lose(self, extents: int, taker: Space) -> bool:
        """It stays at its floor without so many extents, or gives to one of its own."""
        return not extents or self.model == taker.model or self.held - extents >= self.floor

    def __repr__(self) -> str:
        return f"<Group {self.model!r}: {self.held} extents of {self.floor} to {self.cap}>"


class Quotas:
    """The groups of a pool, by model."""

    def __init__(self, extents: Extents) -> None:
        self._extents = extents
        self._groups: dict[str, Group] = {}

    def set(self, quotas: Mapping[str, Quota], spaces: Iterable[Space]) -> None:
        """These hold from now on, and no others."""
        self._groups = {model: Group(model, q, self._extents) for model, q in quotas.items()}
        for space in spaces:
            self.add(space)

    def add(self, space: Space) -> None:
        """A namespace was opened."""
        group = self.of(space)
        if group is not None:
            group.spaces.append(space)

    def remove(self, space: Space) -> None:
        """A namespace ends."""
        group = self.of(space)
        if group is not None:
            group.spaces.remove(space)

    def of(self, space: Space) -> Group | None:
        """The group of a namespace; None where it has no quota."""
        return self._groups.get(space.model)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    @property
    def has_floors(self) -> bool:
        """Somebody has one."""
        return any(group.floor for group in self)

    def fair(self, spaces: Iterable[Space]) -> dict[int, float]:
        """Extents that each namespace may take from others for, by its number.

        The pool is divided evenly among those with engines, as far as floors and
        caps allow. What a model without engines holds of its floor is not divided.
        """
        spaces = list(spaces)
        alone = sum(space.active for space in spaces if self.of(space) is None)
        groups = [group for group in self if group.active]
        count = self._extents.count
        kept = sum(min(group.held, group.floor) for group in self if not group.active)
        level = _level(alone, groups, count - kept, count)
        fair = {}
        for space in spaces:
            group = self.of(space)
            if not space.active:
                fair[space.number] = 0.0
            elif group is None:
                fair[space.number] = level
            else:
                fair[space.number] = _clamped(group, level) / group.active
        return fair

    def check_integrity(self, spaces: Iterable[Space]) -> None:
        """Every namespace is counted in the group of its model, once.

        Raises:
            IntegrityError: otherwise.
        """
        spaces = list(spaces)
        for group in self:
            theirs = sorted(space.number for space in group.spaces)
            if theirs != [space.number for space in spaces if space.model == group.model]:
                raise IntegrityError(f"{group!r} counts the namespaces {theirs}")

    def __repr__(self) -> str:
        return f"<Quotas {list(self)}>"


def _clamped(group: Group, level: float) -> float:
    return min(max(level * group.active, group.floor), group.cap)


def _level(alone: int, groups: list[Group], available: int, count: int) -> float:
    """The even part that, with floors and caps, divides what is available."""
    if not groups:
        return available / alone if alone else 0.0
    low, high = 0.0, float(count)
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        if alone * middle + sum(_clamped(group, middle) for group in groups) > available:
            high = middle
        else:
            low = middle
    return low
