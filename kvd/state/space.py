"""The part of the pool that one namespace may use: its columns and their free slots.

Where freed slots are scrubbed, one that a chunk has left is soiled: it is not free, and
its column does not go back, until it is clean. A column that is to go is shut
meanwhile: none of its slots is given out any more.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvd.errors import IntegrityError
from kvd.filling import FillOrder
from kvd.state.geometry import Geometry
from kvd.state.scrubbing import Run, Scrubber


class Tenant(Protocol):
    """Whoever keeps chunks in a space, as the pool sees it."""

    def busy_slots(self) -> Iterable[int]:
        """Slots that must stay: pinned, being written, draining."""

    def yield_slots(self, slots: list[int]) -> None:
        """Evict these READY, unpinned chunks and give their slots back to the space."""


class Space:
    """Free and used slots of one namespace. Columns come and go by `kvd.state.pool.Pool`.

    `active`: engines are attached, so that the namespace has a share of its own.
    `model`: whose quota counts; empty where none does.
    `needs`: by column, how much of the pool must be filled for all its bytes to be there.
    `leaving`: its namespace is closed; it ends when its last column is clean.

    Without a `scrubber` slots are free as soon as they are given back.
    """

    def __init__(  # noqa: PLR0917  # all of what a space is
        self,
        geometry: Geometry,
        tenant: Tenant,
        number: int,
        fill: FillOrder,
        model: str = "",
        scrubber: Scrubber | None = None,
    ) -> None:
        self.geometry = geometry
        self.tenant = tenant
        self.number = number
        self.model = model
        self.active = False
        self.leaving = False
        self.held = 0  # extents owned; kept by the pool
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
        self._open: dict[int, None] = {}  # claimed columns with a free slot
        self._used_at = [0] * geometry.columns
        self._scrubber = scrubber
        self._soiled: set[int] = set()
        self._soiled_in: Counter[int] = Counter()  # column -> how many of its slots
        self.shut: set[int] = set()  # claimed columns that go when they are clean

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

    def take(self, n: int) -> list[int]:
        """`n` free slots, in runs of neighbours as far as there are any.

        Raises:
            IntegrityError: fewer are free.
        """
        if n > self.free_slots:
            raise IntegrityError(f"{n} slots of {self!r}")
        taken: list[int] = []
        while len(taken) < n:
            column = next(iter(self._open))
            free = self._free[column]
            some = free[len(taken) - n :]
            del free[len(taken) - n :]
            some.reverse()
            taken += some
            self.empty.discard(column)
            if not free:
                del self._open[column]
        self.free_slots -= n
        return taken

    def take_within(self, n: int, usable: int) -> list[int]:
        """Up to `n` free slots whose bytes lie inside `usable` bytes of the pool, as filled."""
        taken: list[int] = []
        for column in [c for c in self._open if self.needs[c] <= usable]:
            free = self._free[column]
            some = free[max(0, len(free) - (n - len(taken))) :]
            if not some:
                break
            del free[len(free) - len(some) :]
            taken += reversed(some)
            self.empty.discard(column)
            if not free:
                del self._open[column]
        self.free_slots -= len(taken)
        return taken

    def free_within(self, usable: int) -> int:
        """How many free slots `take_within` has."""
        return sum(len(self._free[c]) for c in self._open if self.needs[c] <= usable)

    def is_within(self, slot: int, usable: int) -> bool:
        """Whether the slot's column lies inside `usable` bytes of the pool, as filled."""
        return self.needs[slot // self._width] <= usable

    def give(self, slots: Iterable[int]) -> None:
        """Chunks have left these slots: they are free again, at once or when they are clean."""
        if self._scrubber is None:
            self._set_free(slots)
            return
        listed = list(slots)
        if listed:
            self._soiled.update(listed)
            self._soiled_in.update(slot // self._width for slot in listed)
            self._scrubber.soil(self, listed)

    def cleaned(self, slots: Iterable[int]) -> None:
        """Soiled slots are clean and free."""
        listed = list(slots)
        self._soiled.difference_update(listed)
        self._soiled_in.subtract(slot // self._width for slot in listed)
        self._soiled_in = +self._soiled_in
        self._set_free(listed)

    def _set_free(self, slots: Iterable[int]) -> None:
        width, num_slots = self._width, self.geometry.num_slots
        for slot in slots:
            column = slot // width
            free = self._free[column]
            free.append(slot)
            if column not in self.shut:
                self._open[column] = None
                self.free_slots += 1
            if len(free) == min(width, num_slots - column * width):
                free.sort(reverse=True)
                self.empty.add(column)

    @property
    def soiled_slots(self) -> frozenset[int]:
        """Slots that no chunk is in and that are not clean yet."""
        return frozenset(self._soiled)

    @property
    def soiled_columns(self) -> frozenset[int]:
        """The columns in which there are such slots."""
        return frozenset(self._soiled_in)

    def is_left(self, column: int) -> bool:
        """Nothing is in a claimed column any more but soil."""
        used = len(self.geometry.column_range(column)) - len(self._free[column])
        return 0 < used == self._soiled_in[column]

    def used_runs(self, begin: int, end: int) -> Iterator[Run]:
        """Where slots in use lie among the pool bytes begin..end - 1, in no order."""
        geometry, width = self.geometry, self._width
        for arena, size in enumerate(geometry.slot_bytes):
            base = geometry.arena_base(arena)
            first = max(0, (begin - base) // size)
            after = min(geometry.num_slots, -(-(end - base) // size))
            for column in range(first // width, -(-after // width)):
                if column not in self:
                    continue
                for slot in self.used_slots(column):
                    if first <= slot < after:
                        at = base + slot * size
                        yield max(begin, at), min(end, at + size)

    def mark(self, slots: Iterable[int], tick: int) -> None:
        """These slots were useful at `tick`, a number that grows with every use in the pool."""
        width, used_at = self._width, self._used_at
        for column in {slot // width for slot in slots}:
            used_at[column] = tick

    def used_at(self, column: int) -> int:
        """When a chunk in the column was last useful."""
        return self._used_at[column]

    def used_slots(self, column: int) -> list[int]:
        """The slots of a claimed column that are not free, ascending."""
        free = set(self._free[column])
        return [slot for slot in self.geometry.column_range(column) if slot not in free]

    def free_among(self, first: int, end: int) -> set[int]:
        """The slots from `first` to before `end` without a chunk: free, soiled, or not claimed."""
        free = self._soiled.intersection(range(first, end))
        for column in range(first // self._width, -(-end // self._width)):
            slots = self._free.get(column)
            free.update(self.geometry.column_range(column) if slots is None else slots)
        return free

    def open_column(self, column: int) -> None:
        """A column was claimed: its slots are free."""
        slots = self.geometry.column_range(column)
        self._free[column] = list(reversed(slots))
        self._open[column] = None
        self.empty.add(column)
        self.free_slots += len(slots)

    def occupy(self, slots: npt.NDArray[np.int64], stamps: npt.NDArray[np.uint64]) -> None:
        """Free slots of claimed columns are in use, each last at its stamp.

        Raises:
            IntegrityError: one is not free.
        """
        order = np.argsort(slots, kind="stable")
        slots, stamps = slots[order], stamps[order]
        columns, starts = np.unique(slots // self._width, return_index=True)
        for column, used, at in zip(
            columns.tolist(),
            np.split(slots, starts[1:]),
            np.split(stamps, starts[1:]),
            strict=True,
        ):
            free = self._free[column]
            left = np.setdiff1d(np.array(free), used, assume_unique=True)[::-1].tolist()
            if len(left) + len(used) != len(free):
                raise IntegrityError(f"slots of column {column} of {self!r} are in use twice")
            self._free[column] = sorted(left, reverse=True)
            self.free_slots -= len(used)
            self.empty.discard(column)
            if not left:
                self._open.pop(column, None)
            self._used_at[column] = int(at.max())

    def shut_column(self, column: int) -> None:
        """Nothing of a column is given out any more: it goes when it is clean.

        Raises:
            IntegrityError: it is shut already, or there is more in it than soil.
        """
        if column in self.shut or not self.is_left(column):
            raise IntegrityError(f"column {column} of {self!r} cannot be shut")
        self.shut.add(column)
        if self._free[column]:
            del self._open[column]
            self.free_slots -= len(self._free[column])

    def close_column(self, column: int) -> None:
        """A column goes back.

        Raises:
            IntegrityError: some of its slots are in use.
        """
        if column not in self.empty:
            raise IntegrityError(f"column {column} of {self!r} is in use")
        self.empty.remove(column)
        slots = self._free.pop(column)
        if column in self.shut:
            self.shut.remove(column)
        else:
            del self._open[column]
            self.free_slots -= len(slots)

    def check_integrity(self) -> None:
        """Free slots are counted, in their own columns, and no slot is free twice, or soiled too.

        Raises:
            IntegrityError: they are not.
        """
        total = 0
        for column, free in self._free.items():
            slots = self.geometry.column_range(column)
            if len(set(free)) != len(free) or not set(free) <= set(slots):
                raise IntegrityError(f"column {column} has the free slots {free}")
            if (column in self.empty) != (len(free) == len(slots)):
                raise IntegrityError(f"column {column} is wrongly called empty or not")
            if (column in self._open) != (bool(free) and column not in self.shut):
                raise IntegrityError(f"column {column} is wrongly called open or not")
            total += 0 if column in self.shut else len(free)
            if not self._soiled.isdisjoint(free):
                raise IntegrityError(f"free slots of column {column} are not clean: {self!r}")
            if column in self.shut and not self.is_left(column):
                raise IntegrityError(f"column {column} is shut and in use, or clean: {self!r}")
        if total != self.free_slots or not (self.empty | self._open.keys()) <= self._free.keys():
            raise IntegrityError(f"{total} free slots in {self!r}")
        if Counter(slot // self._width for slot in self._soiled) != self._soiled_in:
            raise IntegrityError(f"soiled slots are miscounted: {self!r}")
        if not self.shut | self._soiled_in.keys() <= self._free.keys():
            raise IntegrityError(f"columns that are not claimed are soiled or shut: {self!r}")

    def __repr__(self) -> str:
        return (
            f"<Space {self.number}: {len(self._free)} of {len(self.column_extents)} columns,"
            f" {self.free_slots} slots free, {len(self._soiled)} soiled, {self.held} extents>"
        )
