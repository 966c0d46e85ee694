"""Which chunk's description is kept when, and which one is counted as not kept."""

from collections.abc import Sequence

from kvd.cache.chunks import ChunkTable
from kvd_proto.directory import SlotState
from tests.cache.tables import PAGE, add, make_namespaces, names, store

ROOM = 8


class Writer:
    """Notes what is written, and the state that each slot had in the directory then."""

    max_bytes = ROOM

    def __init__(self) -> None:
        self.full = False
        self.table: ChunkTable | None = None
        self.written: list[tuple[int, int, bytes, SlotState]] = []

    def write(self, slot: int, generation: int, description: bytes) -> bool:
        """Keep it, unless there is no room."""
        if self.table is not None and not self.full:
            state = SlotState(self.table.directory.state(slot))
            self.written.append((slot, generation, description, state))
        return not self.full


def make() -> tuple[ChunkTable, Writer]:
    """A table of four chunks, and what keeps its descriptions."""
    writer = Writer()
    table = add(
        make_namespaces(4 * PAGE, make_descriptions=lambda _name, _size: writer),
        *(0, PAGE),
        record_bytes=64,
    ).table
    assert table.descriptions.writer is writer
    writer.table = table
    return table, writer


def begin(
    table: ChunkTable, keys: list[bytes], descriptions: Sequence[bytes]
) -> tuple[list[int], list[int]]:
    """Begin stores; slots and generations."""
    slots, generations = table.lending.lend(1, len(keys), 1, 0.0)
    table.stores.begin(keys, slots, generations, 1, 0.0, descriptions=descriptions)
    return list(slots), list(generations)


def test_a_description_is_kept_before_its_chunk_is_ready() -> None:
    """The slot is being written; one without a description has none."""
    table, writer = make()
    slots, generations = begin(table, names(3), [b"first", b"", b"third"])
    assert writer.written == [
        (slots[0], generations[0], b"first", SlotState.WRITING),
        (slots[2], generations[2], b"third", SlotState.WRITING),
    ]
    assert table.counts.descriptions == 2


def test_a_store_that_is_lost_or_comes_second_writes_nothing() -> None:
    """Its slot may be another chunk's."""
    table, writer = make()
    (key,) = names(1)
    store(table, [key])
    slots, generations = table.lending.lend(1, 1, 1, 0.0)
    table.stores.begin([key], slots, generations, 1, 0.0, descriptions=[b"second"])
    table.stores.begin([b"lost"], [0], [10**6], 1, 0.0, descriptions=[b"lost"])
    assert (table.counts.stores_raced, table.counts.stores_lost) == (1, 1)
    assert not writer.written


def test_what_is_too_long_or_finds_no_room_is_counted_and_the_store_goes_on() -> None:
    """The chunks are READY all the same."""
    table, writer = make()
    longest, longer = bytes(ROOM), bytes(ROOM + 1)
    refs = begin(table, names(2), [longest, longer])
    writer.full = True
    more = begin(table, names(1, first=2), [longest])
    counts = table.counts
    assert (counts.descriptions, counts.descriptions_too_long) == (1, 1)
    assert counts.descriptions_no_room == 1
    for slots, generations in (refs, more):
        n = len(slots)
        ready, _ = table.stores.share_done(
            1, 0, slots, generations, [0] * n, [1] * n, [0] * n, ok=True
        )
        assert len(ready) == n
