"""Where the chunks of a namespace lie in the pool, and in which order the pool is filled.

**Grid.** A namespace divides the whole pool into arenas, one for each rank (a single one if all
ranks hold the same bytes). Slot i of arena r is rank r's share of chunk i::

    num_slots     = cpu_bytes // sum(slot_bytes)
    arena_base(r) = sum(slot_bytes[:r]) * num_slots
    share of chunk i = arena_base(r) + i * slot_bytes[r], slot_bytes[r] bytes long

**Extents and columns.** Grids of several namespaces overlap, so bytes are owned in extents, equal
parts of the pool. A namespace claims extents by the column: a run of neighbouring slots, about two
extents wide in every arena. A column needs all extents that its slots touch.

**Fill order.** Allocating and pinning many gigabytes takes time, and a chunk needs a share in every
arena, spread over the whole pool. So the pool is filled in pieces, in an order that spreads over
all arenas: the first two pieces hold a chunk of two ranks, the first eight one of eight. The broker
(which allocates) and lanes (which touch and pin) use the same order, so one number, the bytes
filled so far, says of every byte whether it may be used.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvd.errors import IntegrityError, PoolError

# Pieces are multiples of this, or of a larger page: so they consist of whole huge pages of tmpfs,
# which does not always report them, and of whole short transfers of a lane.
UNIT_BYTES = 8 * 2**20
# Pinning a piece blocks the whole machine's driver, about 0.04 s a GiB; and Linux 6.11 to 6.13 pins
# no more than 2 GB at a time.
MAX_PIECE_BYTES = 256 * 2**20
MIN_PIECE_BYTES = 64 * 2**20
_PIECES = 256
_SECTIONS = 64


def piece_bytes_for(nbytes: int, page_bytes: int = UNIT_BYTES) -> int:
    """Return the size of a piece of a pool of `nbytes`: whole units and whole pages.

    There are about 256 pieces; a large pool has more, of MAX_PIECE_BYTES or of one page.
    """
    unit = max(page_bytes, UNIT_BYTES)
    piece_bytes = min(max(-(-nbytes // _PIECES), MIN_PIECE_BYTES), MAX_PIECE_BYTES)
    return -(-piece_bytes // unit) * unit


@dataclass(frozen=True)
class FillOrder:
    """The order in which the pieces of a pool of `nbytes` are filled; the last may be short.

    Raises:
        PoolError: a size is below 1.
    """

    nbytes: int
    piece_bytes: int

    def __post_init__(self) -> None:
        if self.nbytes < 1 or self.piece_bytes < 1:
            raise PoolError(f"{self.nbytes} bytes in pieces of {self.piece_bytes}")

    @classmethod
    def of(cls, nbytes: int, page_bytes: int = UNIT_BYTES) -> "FillOrder":
        """Return the daemon's order for a pool in pages of `page_bytes`."""
        return cls(nbytes, piece_bytes_for(nbytes, page_bytes))

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The numbers of the pieces, in the order in which they are filled.

        Up to 64 sections of about equal length take turns, a piece each. They come in bit-reversed
        order: each begins in the middle of a largest gap between the starts of those before it, so
        2, 4, 8 … equal arenas fill at the same pace.
        """
        count = -(-self.nbytes // self.piece_bytes)
        bits = min(count, _SECTIONS).bit_length() - 1
        sections = 1 << bits
        starts = [section * count // sections for section in range(sections + 1)]
        section_order = sorted(range(sections), key=lambda section: _reversed_bits(section, bits))
        longest = -(-count // sections)
        return tuple(
            starts[section] + step
            for step in range(longest)
            for section in section_order
            if starts[section] + step < starts[section + 1]
        )

    @cached_property
    def filled_with(self) -> tuple[int, ...]:
        """For each piece: how many bytes of the pool are filled once it is."""
        filled_with, filled_bytes = [0] * len(self.order), 0
        for piece in self.order:
            begin, end = self.span(piece)
            filled_bytes += end - begin
            filled_with[piece] = filled_bytes
        return tuple(filled_with)

    def span(self, piece: int) -> tuple[int, int]:
        """Return the first byte and the end of a piece in the pool."""
        begin = piece * self.piece_bytes
        return begin, min(begin + self.piece_bytes, self.nbytes)

    def required_fill(self, begin: int, end: int) -> int:
        """Return how many bytes must be filled before pool bytes begin..end - 1 may be used."""
        pieces = range(begin // self.piece_bytes, (end - 1) // self.piece_bytes + 1)
        return max(self.filled_with[piece] for piece in pieces)


def _reversed_bits(number: int, bits: int) -> int:
    return int(f"{number:0{bits}b}"[::-1], 2) if bits else 0


PAGE = 4096
MAX_EXTENTS = 1024
COLUMN_EXTENTS = 2


@dataclass(frozen=True)
class Extents:
    """A pool of `cpu_bytes` cut into at most 1024 equal parts of whole pages."""

    cpu_bytes: int

    @cached_property
    def size(self) -> int:
        """Bytes of one extent; the last one may be cut short by the end of the pool."""
        pages = -(-self.cpu_bytes // (PAGE * MAX_EXTENTS))
        return max(1, pages) * PAGE

    @property
    def count(self) -> int:
        """The number of extents."""
        return -(-self.cpu_bytes // self.size)


@dataclass(frozen=True)
class Geometry:
    """The grid of one namespace.

    slot_bytes: bytes of a slot in each arena; one arena for each rank.
    world_size: the number of ranks that hold shares of a chunk.
    replicated: all ranks hold the same bytes, which are stored once: there is one arena.
    column_width: width of a column in every arena, in extents; at least one slot.
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
        """The number of chunks that fill the pool."""
        return self.extents.cpu_bytes // self.bytes_per_chunk

    def arena_base(self, arena: int) -> int:
        """Return the offset of an arena's slot 0 in the pool, in bytes."""
        return sum(self.slot_bytes[:arena]) * self.num_slots

    def writers(self, slot: int) -> int:
        """Return a bit mask of the ranks that write the slot's chunk."""
        # Ranks that hold the same bytes take turns.
        return 1 << slot % self.world_size if self.replicated else (1 << self.world_size) - 1

    def shares(self, slot: int) -> list[tuple[int, int]]:
        """Return the first byte and the end of each share of a slot's chunk in the pool."""
        starts = (self.arena_base(r) + slot * size for r, size in enumerate(self.slot_bytes))
        return [(start, start + size) for start, size in zip(starts, self.slot_bytes, strict=True)]

    @cached_property
    def column_slots(self) -> int:
        """Slots of one column; the last column may have fewer."""
        width = self.column_width * self.extents.size * len(self.slot_bytes)
        return max(1, width // self.bytes_per_chunk)

    @property
    def columns(self) -> int:
        """The number of columns."""
        return -(-self.num_slots // self.column_slots)

    def column_range(self, column: int) -> range:
        """Return the slots of a column."""
        first = column * self.column_slots
        return range(first, min(first + self.column_slots, self.num_slots))

    def column_runs(self, column: int) -> list[tuple[int, int]]:
        """Return the first byte and the end of a column's slots in each arena."""
        slots = self.column_range(column)
        return [
            (base + slots.start * size, base + slots.stop * size)
            for base, size in ((self.arena_base(r), b) for r, b in enumerate(self.slot_bytes))
        ]

    def column_extents(self, column: int) -> tuple[int, ...]:
        """Return the extents that a column's slots touch, ascending."""
        size = self.extents.size
        touched: set[int] = set()
        for begin, end in self.column_runs(column):
            touched.update(range(begin // size, (end - 1) // size + 1))
        return tuple(sorted(touched))


class Tenant(Protocol):
    """The namespace that keeps chunks in a space, as the pool sees it."""

    stamps: npt.NDArray[np.uint64]
    """For each slot, when its chunk was last used."""

    def busy_slots(self) -> Iterable[int]:
        """Return the slots that cannot be freed: pinned, being written, draining."""

    def surrender_slots(self, slots: list[int]) -> None:
        """Give up these slots, none of them in `busy_slots`, to another namespace.

        Loans end, current chunks are evicted, and chunks that a reset removed from the policy, but
        a sweep has not freed yet, are dropped. All slots return to the space.
        """


class PoolSpace:
    """The slots of one namespace: which columns it has claimed, which of their slots are free.

    `kvd.pool.pool.Pool` opens and closes columns.

    Attributes:
        number: of the space, in the order in which spaces joined the pool.
        model: whose quota applies; empty: none.
        active: engines are attached, so the namespace has a fair share of the pool.
        num_extents: that the space owns; updated by the pool.
        exhausted_at, capped_at: the pool's change number when it last had no unowned column for the
            space, or none below the quota's cap; -1: never.
        column_extents: for each column the extents that it touches.
        columns_at: for each extent the columns that touch it.
        required_fill: for each column, how many bytes of the pool must be filled to use it.
        empty: claimed columns without a used slot.
    """

    def __init__(
        self, geometry: Geometry, number: int, fill: FillOrder, tenant: Tenant, model: str = ""
    ) -> None:
        self.tenant = tenant
        self.geometry = geometry
        self.number = number
        self.model = model
        self.active = False
        self.num_extents = 0
        self.exhausted_at = self.capped_at = -1
        self.free_slots = 0
        self.column_extents = [geometry.column_extents(c) for c in range(geometry.columns)]
        self.columns_at: dict[int, list[int]] = {}
        for column, extents in enumerate(self.column_extents):
            for extent in extents:
                self.columns_at.setdefault(extent, []).append(column)
        self.required_fill = [
            max(fill.required_fill(*run) for run in geometry.column_runs(c))
            for c in range(geometry.columns)
        ]
        self.empty: set[int] = set()
        self._width = geometry.column_slots
        self._free: dict[int, list[int]] = {}  # claimed column -> its free slots

    def __contains__(self, column: int) -> bool:
        return column in self._free

    @property
    def claimed(self) -> list[int]:
        """The columns whose slots may be used."""
        return list(self._free)

    @property
    def has_all_columns(self) -> bool:
        """Whether every column is claimed."""
        return len(self._free) == len(self.column_extents)

    def take(self, n: int, filled_bytes: int | None = None) -> list[int]:
        """Allocate up to `n` free slots, neighbours where possible.

        `filled_bytes`: only slots within so many bytes of the pool, in `FillOrder`; None: all.
        """
        slots: list[int] = []
        if n <= 0 or not self.free_slots:
            return slots
        for column in self._columns_with_free(filled_bytes):
            if len(slots) >= n:
                break
            free = self._free[column]
            from_column = free[len(slots) - n :]
            del free[len(slots) - n :]
            from_column.reverse()
            slots += from_column
            self.empty.discard(column)
        self.free_slots -= len(slots)
        return slots

    def num_free(self, filled_bytes: int | None) -> int:
        """Return how many slots `take` can allocate."""
        if filled_bytes is None:
            return self.free_slots
        return sum(len(self._free[column]) for column in self._columns_with_free(filled_bytes))

    def _columns_with_free(self, filled_bytes: int | None) -> Iterator[int]:
        for column, free in self._free.items():
            if free and (filled_bytes is None or self.required_fill[column] <= filled_bytes):
                yield column

    def give(self, slots: Iterable[int]) -> None:
        """Free slots that no chunk uses any more."""
        width, num_slots = self._width, self.geometry.num_slots
        for slot in slots:
            column = slot // width
            free = self._free[column]
            free.append(slot)
            self.free_slots += 1
            if len(free) == min(width, num_slots - column * width):
                free.sort(reverse=True)
                self.empty.add(column)

    def last_uses(self) -> list[int]:
        """Return for each column when a chunk in it was last used."""
        firsts = np.arange(0, self.geometry.num_slots, self._width)
        latest: list[int] = np.maximum.reduceat(self.tenant.stamps, firsts).tolist()
        return latest

    def busy_columns(self) -> set[int]:
        """Return the columns in which a slot is pinned, being written or draining."""
        return {slot // self._width for slot in self.tenant.busy_slots()}

    def used_slots(self, column: int) -> list[int]:
        """Return the slots of a claimed column that are not free, ascending."""
        free = set(self._free[column])
        return [slot for slot in self.geometry.column_range(column) if slot not in free]

    def free_among(self, first: int, end: int) -> set[int]:
        """Return the slots of `first` to `end - 1` that are free or not in a claimed column."""
        free: set[int] = set()
        for column in range(first // self._width, -(-end // self._width)):
            slots = self._free.get(column)
            free.update(self.geometry.column_range(column) if slots is None else slots)
        return free

    def open_column(self, column: int) -> None:
        """Add a column that was claimed; its slots are free."""
        slots = self.geometry.column_range(column)
        self._free[column] = list(reversed(slots))
        self.empty.add(column)
        self.free_slots += len(slots)

    def occupy(self, slots: npt.NDArray[np.int64]) -> None:
        """Allocate these free slots of claimed columns."""
        slots = np.sort(slots)
        columns, starts = np.unique(slots // self._width, return_index=True)
        for column, used in zip(columns.tolist(), np.split(slots, starts[1:]), strict=True):
            still_free = set(self._free[column]).difference(used.tolist())
            self._free[column] = sorted(still_free, reverse=True)
            self.free_slots -= len(used)
            self.empty.discard(column)

    def close_column(self, column: int) -> None:
        """Remove a column that was released."""
        free = self._free.pop(column)
        self.free_slots -= len(free)
        self.empty.discard(column)

    def check_integrity(self) -> None:
        """Raise IntegrityError if free slots are miscounted, listed twice or in a wrong column."""
        total = 0
        for column, free in self._free.items():
            slots = self.geometry.column_range(column)
            if len(set(free)) != len(free) or not set(free) <= set(slots):
                raise IntegrityError(f"column {column} has the free slots {free}")
            if (column in self.empty) != (len(free) == len(slots)):
                raise IntegrityError(f"column {column} has {len(free)} free slots: {self.empty=}")
            total += len(free)
        if total != self.free_slots or not self.empty <= self._free.keys():
            raise IntegrityError(
                f"space {self.number} has {total} free slots, counted {self.free_slots}; empty"
                f" columns {self.empty} of {self.claimed}"
            )
