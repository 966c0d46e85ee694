"""The part of the pool that one namespace may use: its columns and their free slots."""

from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvd.errors import IntegrityError
from kvd.pool.filling import FillOrder
from kvd.pool.geometry import Geometry


class Tenant(Protocol):
    """Whoever keeps chunks in a space, as the pool sees it."""

    stamps: npt.NDArray[np.uint64]
    """For each slot, when its chunk was last of use."""

    def busy_slots(self) -> Iterable[int]:
        """Slots that must stay: pinned, being written, draining."""

    def yield_slots(self, slots: list[int]) -> None:
        """Evict these unpinned chunks, end loans of these slots, and give them to the space."""


class Space:
    """Free and used slots of one namespace. Columns come and go by `kvd.pool.pool.Pool`.

    `active`: engines are attached, so that the namespace has a share of its own.
    `model`: whose quota counts; empty where none does.
    `needs`: by column, how much of the pool must be filled for all its bytes to be there.
    `exhausted`, `capped`: changes of the pool when it found no column, or none below its cap.
    """

    def __init__(
        self, geometry: Geometry, number: int, fill: FillOrder, tenant: Tenant, model: str = ""
    ) -> None:
        self.tenant = tenant
        self.geometry = geometry
        self.number = number
        self.model = model
        self.active = False
        self.held = 0  # extents owned; kept by the pool
        self.exhausted = self.capped = -1
        self.free_slots = 0
        self.column_extents = [geometry.column_extents(c) for c in range(geometry.columns)]
        self.columns_at: dict[int, list[int]] = {}
        for column, extents in enumerate(self.column_extents):
            for extent in extents:
                self.columns_at.setdefault(extent, []).append(column)
        self.needs = [
            max(fill.needed(*run) for run in geometry.column_runs(c))
            for c in range(geometry.columns)
        ]
        self.empty: set[int] = set()  # claimed columns without a used slot
        self._width = geometry.column_slots
        self._free: dict[int, list[int]] = {}  # claimed column -> its free slots

    def __contains__(self, column: int) -> bool:
        return column in self._free

    @property
    def claimed(self) -> list[int]:
        """The columns that may be used."""
        return list(self._free)

    @property
    def is_whole(self) -> bool:
        """Every column is claimed."""
        return len(self._free) == len(self.column_extents)

    def take(self, n: int, usable: int | None = None) -> list[int]:
        """Up to `n` free slots, in runs of neighbours as far as there are any.

        With `usable`, those whose bytes lie inside so many bytes of the pool, as filled.
        """
        taken: list[int] = []
        if n <= 0 or not self.free_slots:
            return taken
        for column in self._open_within(usable):
            if len(taken) >= n:
                break
            free = self._free[column]
            some = free[len(taken) - n :]
            del free[len(taken) - n :]
            some.reverse()
            taken += some
            self.empty.discard(column)
        self.free_slots -= len(taken)
        return taken

    def free_within(self, usable: int | None) -> int:
        """How many free slots `take` has."""
        if usable is None:
            return self.free_slots
        return sum(len(self._free[column]) for column in self._open_within(usable))

    def _open_within(self, usable: int | None) -> Iterator[int]:
        """Claimed columns with a free slot."""
        for column, free in self._free.items():
            if free and (usable is None or self.needs[column] <= usable):
                yield column

    def give(self, slots: Iterable[int]) -> None:
        """Chunks have left these slots: they are free again."""
        width, num_slots = self._width, self.geometry.num_slots
        for slot in slots:
            column = slot // width
            free = self._free[column]
            free.append(slot)
            self.free_slots += 1
            if len(free) == min(width, num_slots - column * width):
                free.sort(reverse=True)
                self.empty.add(column)

    def used_at(self) -> list[int]:
        """By column, when a chunk in it was last of use."""
        firsts = np.arange(0, self.geometry.num_slots, self._width)
        latest: list[int] = np.maximum.reduceat(self.tenant.stamps, firsts).tolist()
        return latest

    def busy_columns(self) -> set[int]:
        """Columns in which something is pinned, being written or draining."""
        return {slot // self._width for slot in self.tenant.busy_slots()}

    def used_slots(self, column: int) -> list[int]:
        """The slots of a claimed column that are not free, ascending."""
        free = set(self._free[column])
        return [slot for slot in self.geometry.column_range(column) if slot not in free]

    def free_among(self, first: int, end: int) -> set[int]:
        """The slots from `first` to before `end` without a chunk: free, or not claimed."""
        free: set[int] = set()
        for column in range(first // self._width, -(-end // self._width)):
            slots = self._free.get(column)
            free.update(self.geometry.column_range(column) if slots is None else slots)
        return free

    def open_column(self, column: int) -> None:
        """A column was claimed: its slots are free."""
        slots = self.geometry.column_range(column)
        self._free[column] = list(reversed(slots))
        self.empty.add(column)
        self.free_slots += len(slots)

    def occupy(self, slots: npt.NDArray[np.int64]) -> None:
        """Free slots of claimed columns are in use."""
        slots = np.sort(slots)
        columns, starts = np.unique(slots // self._width, return_index=True)
        for column, used in zip(columns.tolist(), np.split(slots, starts[1:]), strict=True):
            left = set(self._free[column]).difference(used.tolist())
            self._free[column] = sorted(left, reverse=True)
            self.free_slots -= len(used)
            self.empty.discard(column)

    def close_column(self, column: int) -> None:
        """A column goes back."""
        free = self._free.pop(column)
        self.free_slots -= len(free)
        self.empty.discard(column)

    def check_integrity(self) -> None:
        """Raise IntegrityError where free slots are miscounted, twice or in another column."""
        total = 0
        for column, free in self._free.items():
            slots = self.geometry.column_range(column)
            if len(set(free)) != len(free) or not set(free) <= set(slots):
                raise IntegrityError(f"column {column} has the free slots {free}")
            if (column in self.empty) != (len(free) == len(slots)):
                raise IntegrityError(f"column {column} is wrongly called empty or not")
            total += len(free)
        if total != self.free_slots or not self.empty <= self._free.keys():
            raise IntegrityError(f"{total} free slots in {self!r}")

    def __repr__(self) -> str:
        return (
            f"<Space {self.number}: {len(self._free)} of {len(self.column_extents)} columns,"
            f" {self.free_slots} slots free, {self.held} extents>"
        )
