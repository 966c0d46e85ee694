"""Where the chunks of one namespace lie in the pool.

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
"""

from dataclasses import dataclass
from functools import cached_property

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
