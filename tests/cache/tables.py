"""Namespaces in plain memory, chunks stored at once, and readers of a directory's changes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from kvd.cache.chunks import ChunkTable
from kvd.cache.directory import Blocks, ChunkRefs, covers
from kvd.cache.namespaces import LedgerSetup, Namespace, Namespaces
from kvd.cache.recovery import ResetTable
from kvd.cache.stores import MakeDescriptions
from kvd.config.settings import Settings
from kvd.config.values import Quota
from kvd.pool.geometry import FillOrder
from kvd_proto.changes import MIN_CHANGES, Change, ChangeKind
from kvd_proto.directory import FLOOR_AT, RECORD_DTYPE, DirectoryView, SlotState

PAGE = 4096
MIB = 2**20


def make_namespaces(
    cpu_bytes: int,
    *,
    ledger_setup: LedgerSetup | None = None,
    resets: ResetTable | None = None,
    fill: FillOrder | None = None,
    quotas: Mapping[str, Quota] | None = None,
    make_descriptions: MakeDescriptions = lambda _name, _record_bytes: None,
    **settings: Any,
) -> Namespaces:
    """Return namespaces whose directories are bytearrays, with small rings of changes."""
    namespaces = Namespaces(
        cpu_bytes,
        Settings(**({} if ledger_setup is not None else {"change_ring": MIN_CHANGES}) | settings),
        boot_id=bytes(16),
        make_buffer=lambda _, size: bytearray(size),
        make_descriptions=make_descriptions,
        ledger_setup=ledger_setup,
        resets=resets,
        fill=fill,
    )
    namespaces.pool.set_quotas(quotas or {})
    return namespaces


def add(
    namespaces: Namespaces,
    number: int = 0,
    *slot_bytes: int,
    world_size: int | None = None,
    replicated: bool = False,
    **options: Any,
) -> Namespace:
    """Open a namespace of "model <number>", or another model, with one engine."""
    options.setdefault("model", f"model {number}")
    namespace = namespaces.open(
        bytes([number]) * 16,
        slot_bytes,
        world_size=world_size or (2 if replicated else len(slot_bytes)),
        replicated=replicated,
        **options,
    )
    namespaces.attach_engine(namespace)
    return namespace


def make_table(chunks: int, ranks: int = 1, **options: Any) -> ChunkTable:
    """Return the table of the only namespace in a pool of `chunks` chunks of four blocks."""
    namespaces = make_namespaces(chunks * ranks * PAGE, **options)
    return add(namespaces, 0, *(PAGE,) * ranks, blocks_per_chunk=4).table


def names(count: int, first: int = 0) -> list[bytes]:
    """Return keys with numbers."""
    return [b"key %d" % number for number in range(first, first + count)]


@dataclass
class Begun:
    """Stores that have begun, and what was evicted for their slots."""

    keys: list[bytes] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    evicted: list[bytes] = field(default_factory=list)


def removed(table: ChunkTable, since: int) -> list[bytes]:
    """The chunks that have ceased to be there after this change, in their order."""
    changes = table.directory.changes.read(since, table.directory.changes.capacity)
    assert changes is not None
    return [change[8] for change in changes if change[7] == ChangeKind.REMOVED]


def loans_of(table: ChunkTable, owner: int = 1) -> ChunkRefs:
    """The loans of an owner, lent first first: slots, and the generations that they will have."""
    return [(slot, each) for lent_to, slot, each in table.slots.loans.entries() if lent_to == owner]


def begin(
    table: ChunkTable,
    keys: list[bytes],
    now: float = 0.0,
    *,
    owner: int = 1,
    usable: int | None = None,
    blocks: Blocks | None = None,
    seconds: float = 60.0,
    descriptions: Sequence[bytes] = (),
) -> Begun:
    """Begin the stores of what is not here, as the only scheduler does, while it is lent slots.

    `blocks` are those that will be stored of each; None: all. With `descriptions`, a slot for
    every key is needed at once.
    """
    begun = Begun()
    remaining = [key for key in dict.fromkeys(keys) if _is_new(table, key, blocks)]
    while remaining:
        table.lending.lend(owner, len(remaining), 1, now, usable)
        loans = loans_of(table, owner)[: len(remaining)]
        if not loans:
            break
        some, remaining = remaining[: len(loans)], remaining[len(loans) :]
        slots, generations = map(list, zip(*loans, strict=True))
        parts = [blocks] * len(some) if blocks is not None else []
        before = table.directory.changes.head
        table.stores.begin(
            *(some, slots, generations, owner, now, parts),
            seconds=seconds,
            descriptions=descriptions,
        )
        begun.evicted += removed(table, before)
        begun.keys += some
        begun.slots += slots
        begun.generations += generations
    return begun


def _is_new(table: ChunkTable, key: bytes, blocks: Blocks | None) -> bool:
    if (entry := table.directory.entry(key)) is None:
        return True
    _, _, state, first, count = entry
    offered, stored = blocks or (0, table.directory.blocks_per_chunk), (first, count)
    return state == SlotState.READY and stored != offered and covers(offered, stored)


def store(table: ChunkTable, keys: list[bytes], now: float = 0.0) -> Begun:
    """Store as many whole chunks as there is room for, the shares of all ranks at once."""
    begun = begin(table, keys, now)
    finish(table, begun)
    return begun


def finish(table: ChunkTable, begun: Begun, blocks: Blocks | None = None) -> None:
    """Report all shares of what has begun, with these blocks or all."""
    n, (first, count) = len(begun.slots), blocks or (0, table.directory.blocks_per_chunk)
    refs = begun.slots, begun.generations
    for rank in range(table.space.geometry.world_size):
        table.stores.share_done(1, rank, *refs, [first] * n, [count] * n, [0] * n, ok=True)


def pin(
    table: ChunkTable,
    keys: list[bytes],
    now: float = 0.0,
    seconds: float = 10.0,
    *,
    owner: int = 1,
    number: int = 1,
) -> list[tuple[int, int]]:
    """Pin those of the keys that are READY: their slots and generations."""
    entries = [entry for key in keys if (entry := table.directory.entry(key)) is not None]
    refs = [(slot, gen) for slot, gen, state, *_ in entries if state == SlotState.READY]
    slots, generations = [slot for slot, _ in refs], [generation for _, generation in refs]
    table.loads.pin(number, slots, generations, owner, now, seconds)
    return refs


class Watched:
    """Memory: after every write there is a look, and within one that is longer than a word.

    `cuts`: so many bytes of that are written before.
    """

    def __init__(
        self, memory: memoryview, look: Callable[[], None], cuts: Sequence[int] = ()
    ) -> None:
        self._memory, self._look, self._cuts = memory, look, cuts
        self.release = memory.release

    def __setitem__(self, where: int | slice, value: Any) -> None:
        if isinstance(where, slice):
            for cut in self._cuts:
                self._memory[where.start : where.start + cut] = value[:cut]
                self._look()
        self._memory[where] = value
        self._look()

    def __getitem__(self, where: Any) -> Any:
        return self._memory[where]


Place: TypeAlias = tuple[int, int, int, int, int]
"""Slot, generation, first block, count of blocks and group of a chunk."""


def records(view: DirectoryView) -> dict[bytes, Place]:
    """The chunks that count, by what the records of all slots say."""
    memory = view._memory  # what a reader has that has no other code
    floor = int.from_bytes(memory[FLOOR_AT : FLOOR_AT + 8], "little")
    table = np.frombuffer(memory, RECORD_DTYPE, view.num_slots, view.header.records_offset)
    counts = (table["state"] == SlotState.READY) & (table["generation"] > floor)
    chunks = {}
    for slot in np.flatnonzero(counts & (table["key_len"] > 0)).tolist():
        row = table[slot]
        generation, first, count, group = row[["generation", "first", "count", "group"]].tolist()
        key = row["key"].tobytes()[: row["key_len"]]
        chunks[key] = slot, generation, first, count, group
    return chunks


def apply(said: dict[bytes, Place], change: Change) -> None:
    """Take in a change, which may be there already."""
    _, _, generation, slot, first, count, group, kind, key = change
    if kind == ChangeKind.READY:
        said[key] = slot, generation, first, count, group
    elif kind == ChangeKind.CLEARED:
        for gone in [key for key, place in said.items() if place[1] <= generation]:
            del said[gone]
    elif key in said and said[key][:2] == (slot, generation):
        del said[key]


class Follower:
    """Follows the changes of a directory from now on.

    `said` are the chunks that count, as far as it knows.
    """

    def __init__(self, view: DirectoryView) -> None:
        self.view = view
        self.number = view.changes.head
        self.said = records(view)

    def catch_up(self) -> None:
        """Take in all that has changed.

        Raises:
            AssertionError: it was overrun, or a change says what was so already.
        """
        changes = self.view.changes.read(self.number, 2**20)
        assert changes is not None
        for change in changes:
            key = change[-1]
            if change[-2] > ChangeKind.CLEARED:
                continue  # of tiers
            if change[-2] != ChangeKind.CLEARED:
                assert (key in self.said) == (change[-2] == ChangeKind.REMOVED)
            before = self.said.copy()
            apply(self.said, change)
            assert change[-2] == ChangeKind.CLEARED or self.said != before
        self.number += len(changes)
