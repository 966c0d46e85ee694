"""Where the chunks of one namespace lie in the pool, and in which order the pool is filled.

The pool is one run of bytes. A namespace lays a grid over all of it: one arena for
each rank (one in all where every rank holds the same bytes), slot `i` of arena
`r` being rank r's share of chunk i::

    num_slots     = cpu_bytes // sum(slot_bytes)
    arena_base(r) = sum(slot_bytes[:r]) * num_slots
    share of chunk i = arena_base(r) + i * slot_bytes[r], slot_bytes[r] bytes long

Grids of several namespaces overlay each other, so bytes are owned in extents,
equal pieces of the pool. A namespace claims extents by the column: a run of
neighbouring slots about two extents wide in every arena, which costs the extents
that those slots touch.

Memory of many gigabytes takes its time to be allocated and pinned, and a chunk needs
a share in every rank's arena, spread over the whole pool. So the pool is filled piece
by piece, not from its start onwards: with the first two pieces a chunk of two ranks
has its bytes, with the first eight one of eight. Whoever fills (the broker allocates,
lanes touch and pin) goes in this one order, so a single number, the bytes filled so
far, says of every byte whether it may be used.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvd.errors import IntegrityError, PoolError

# Pieces are so many bytes long, or pages of more: whole huge pages of tmpfs, which does not always
# say that it uses them, and whole short pieces of a lane's copies.
UNIT_BYTES = 8 * 2**20
# To pin a piece keeps the driver of the whole machine from others, about 0.04 s a GiB; and Linux
# 6.11 to 6.13 pins no more than 2 GB at a time.
MAX_PIECE_BYTES = 256 * 2**20
MIN_PIECE_BYTES = 64 * 2**20
_PIECES = 256
_SECTIONS = 64


def piece_bytes_for(nbytes: int, page_bytes: int = UNIT_BYTES) -> int:
    """Bytes of one piece of a pool of `nbytes`, whole units and whole pages (powers of two).

    About 256 pieces in all; a large pool has more, of MAX_PIECE_BYTES or of one page.
    """
    unit = max(page_bytes, UNIT_BYTES)
    wanted = min(max(-(-nbytes // _PIECES), MIN_PIECE_BYTES), MAX_PIECE_BYTES)
    return -(-wanted // unit) * unit


@dataclass(frozen=True)
class FillOrder:
    """The order of the pieces of a pool of `nbytes`; the last piece may be short.

    Raises:
        PoolError: sizes that make no pieces.
    """

    nbytes: int
    piece_bytes: int

    def __post_init__(self) -> None:
        if self.nbytes < 1 or self.piece_bytes < 1:
            raise PoolError(f"{self.nbytes} bytes in pieces of {self.piece_bytes}")

    @classmethod
    def of(cls, nbytes: int, page_bytes: int = UNIT_BYTES) -> "FillOrder":
        """The order that the whole daemon uses for a pool in pages of `page_bytes`."""
        return cls(nbytes, piece_bytes_for(nbytes, page_bytes))

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The pieces' numbers, first to be filled first.

        The pool is cut into sections; one piece of each in turn, and the sections in the order
        that halves the largest gap: those of 2, 4, 8 … equal arenas grow from the first pieces on.
        """
        count = -(-self.nbytes // self.piece_bytes)
        bits = min(count, _SECTIONS).bit_length() - 1
        sections = 1 << bits
        starts = [section * count // sections for section in range(sections + 1)]
        turns = sorted(range(sections), key=lambda section: _reversed_bits(section, bits))
        longest = -(-count // sections)
        return tuple(
            starts[section] + step
            for step in range(longest)
            for section in turns
            if starts[section] + step < starts[section + 1]
        )

    @cached_property
    def filled_with(self) -> tuple[int, ...]:
        """By piece: how many bytes are filled once this piece is."""
        filled, done = [0] * len(self.order), 0
        for piece in self.order:
            begin, end = self.span(piece)
            done += end - begin
            filled[piece] = done
        return tuple(filled)

    def span(self, piece: int) -> tuple[int, int]:
        """First byte and end of a piece in the pool."""
        begin = piece * self.piece_bytes
        return begin, min(begin + self.piece_bytes, self.nbytes)

    def needed(self, begin: int, end: int) -> int:
        """How many bytes must be filled for pool bytes begin..end - 1 to be there."""
        pieces = range(begin // self.piece_bytes, (end - 1) // self.piece_bytes + 1)
        return max(self.filled_with[piece] for piece in pieces)


def _reversed_bits(number: int, bits: int) -> int:
    return int(f"{number:0{bits}b}"[::-1], 2) if bits else 0


PAGE = 4096
MAX_EXTENTS = 1024
COLUMN_EXTENTS = 2


@dataclass(frozen=True)
class Extents:
    """A pool of `cpu_bytes` cut into at most 1024 equal pieces of whole pages."""

    cpu_bytes: int

    @cached_property
    def size(self) -> int:
        """Bytes of one extent; the last one may be cut short by the end of the pool."""
        pages = -(-self.cpu_bytes // (PAGE * MAX_EXTENTS))
        return max(1, pages) * PAGE

    @property
    def count(self) -> int:
        """How many there are."""
        return -(-self.cpu_bytes // self.size)


@dataclass(frozen=True)
class Geometry:
    """The grid of one namespace.

    slot_bytes: bytes of one slot in each arena, one arena for each rank.
    world_size: how many ranks hold shares of one chunk.
    replicated: all of them hold the same bytes, stored once: there is one arena.
    column_width: extents that a column is wide in every arena, or a slot, if that is wider.
    blocks_per_chunk: blocks of a whole chunk; some chunks hold fewer.
    """

    slot_bytes: tuple[int, ...]
    extents: Extents
    world_size: int
    replicated: bool = False
    column_width: int = COLUMN_EXTENTS
    blocks_per_chunk: int = 1

    @property
    def bytes_per_chunk(self) -> int:
        """Bytes of one chunk, all arenas together."""
        return sum(self.slot_bytes)

    @cached_property
    def num_slots(self) -> int:
        """How many chunks fill the pool."""
        return self.extents.cpu_bytes // self.bytes_per_chunk

    def arena_base(self, arena: int) -> int:
        """Offset of slot 0 of an arena in the pool, in bytes."""
        return sum(self.slot_bytes[:arena]) * self.num_slots

    def writers(self, slot: int) -> int:
        """The ranks whose shares make the slot's chunk complete, as a bit mask."""
        # Where all hold the same bytes, they take turns to write.
        return 1 << slot % self.world_size if self.replicated else (1 << self.world_size) - 1

    def shares(self, slot: int) -> list[tuple[int, int]]:
        """First byte and end of every share of a slot's chunk in the pool."""
        starts = (self.arena_base(r) + slot * size for r, size in enumerate(self.slot_bytes))
        return [(start, start + size) for start, size in zip(starts, self.slot_bytes, strict=True)]

    @cached_property
    def column_slots(self) -> int:
        """Slots of one column; the last column may have fewer."""
        width = self.column_width * self.extents.size * len(self.slot_bytes)
        return max(1, width // self.bytes_per_chunk)

    @property
    def columns(self) -> int:
        """How many columns there are."""
        return -(-self.num_slots // self.column_slots)

    def column_range(self, column: int) -> range:
        """The slots of a column."""
        first = column * self.column_slots
        return range(first, min(first + self.column_slots, self.num_slots))

    def column_runs(self, column: int) -> list[tuple[int, int]]:
        """First byte and end of a column's slots in every arena."""
        slots = self.column_range(column)
        return [
            (base + slots.start * size, base + slots.stop * size)
            for base, size in ((self.arena_base(r), b) for r, b in enumerate(self.slot_bytes))
        ]

    def column_extents(self, column: int) -> tuple[int, ...]:
        """The extents that a column's slots touch, ascending."""
        size = self.extents.size
        touched: set[int] = set()
        for begin, end in self.column_runs(column):
            touched.update(range(begin // size, (end - 1) // size + 1))
        return tuple(sorted(touched))


class Tenant(Protocol):
    """Whoever keeps chunks in a space, as the pool sees it."""

    stamps: npt.NDArray[np.uint64]
    """For each slot, when its chunk was last of use."""

    def busy_slots(self) -> Iterable[int]:
        """Slots that must stay: pinned, being written, draining."""

    def yield_slots(self, slots: list[int]) -> None:
        """Evict these unpinned chunks, end loans of these slots, and give them to the space."""


class PoolSpace:
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
            f"<PoolSpace {self.number}: {len(self._free)} of {len(self.column_extents)} columns,"
            f" {self.free_slots} slots free, {self.held} extents>"
        )
