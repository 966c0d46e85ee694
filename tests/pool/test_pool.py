"""Namespaces that share one pool, and the geometry below them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.cache.namespaces import Namespace, Namespaces
from kvd.config.values import Quota
from kvd.errors import Refusal
from kvd.pool.geometry import (
    MAX_EXTENTS,
    MAX_PIECE_BYTES,
    UNIT_BYTES,
    Extents,
    FillOrder,
    Geometry,
    PoolSpace,
)
from kvd_proto.messages import ErrorCode
from tests.cache import tables
from tests.cache.tables import MIB, PAGE, add, begin, make_namespaces, names, pin


def store(namespace: Namespace, first: int, count: int) -> int:
    """Store keys by number, all ranks; how many were accepted."""
    return len(tables.store(namespace.table, names(count, first)).slots)


def held(namespaces: Namespaces, namespace: Namespace) -> int:
    """Bytes of the pool that a namespace holds."""
    return namespaces.pool.held_bytes(namespace.table.space)


sizes = st.lists(st.integers(1, 40).map(lambda pages: pages * PAGE), min_size=1, max_size=5)


@given(st.integers(1, 300 * MIB), sizes)
def test_slots_fill_the_published_formula(cpu_bytes: int, slot_bytes: list[int]) -> None:
    """Slots fill the published formula, lie in the pool, and columns cover what they touch."""
    extents = Extents(cpu_bytes)
    assert extents.size % PAGE == 0
    assert 1 <= extents.count <= MAX_EXTENTS
    assert (extents.count - 1) * extents.size < cpu_bytes <= extents.count * extents.size
    geometry = Geometry(tuple(slot_bytes), extents, len(slot_bytes))
    assert geometry.num_slots == cpu_bytes // sum(slot_bytes)
    slots = [slot for c in range(geometry.columns) for slot in geometry.column_range(c)]
    assert slots == list(range(geometry.num_slots))
    for column in {0, geometry.columns // 2, geometry.columns - 1} & set(range(geometry.columns)):
        touched: set[int] = set()
        for slot in geometry.column_range(column):
            for arena, (first, end) in enumerate(geometry.shares(slot)):
                assert first == geometry.arena_base(arena) + slot * slot_bytes[arena]
                assert first < end <= cpu_bytes
                touched |= {first // extents.size, (end - 1) // extents.size}
        assert touched <= set(geometry.column_extents(column))


def test_two_namespaces_settle_at_their_fair_shares() -> None:
    """A newcomer takes from a namespace that holds everything, up to its half and no further."""
    namespaces = make_namespaces(16 * MIB)
    old = add(namespaces, 1, 8192, 8192)
    assert store(old, 0, 1024) == 1024
    new = add(namespaces, 2, 12288)
    for turn in range(40):
        assert store(new, 1000 * turn, 50) == 50
        assert store(old, 5000 + 1000 * turn, 50) == 50
    namespaces.check_integrity()
    for namespace in (old, new):
        assert 0.4 < held(namespaces, namespace) / (16 * MIB) <= 0.61
    yielded = old.table.counts.yielded, new.table.counts.yielded
    store(new, 90_000, 400)
    store(old, 90_000, 400)
    after = old.table.counts.yielded, new.table.counts.yielded
    assert yielded == after  # settled: each evicts its own from now on


def test_many_columns_are_taken_in_few_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer gets hundreds of slots without a search of all columns for each of them."""
    namespaces = make_namespaces(12 * MIB)
    old = add(namespaces, 1, 32768)
    assert store(old, 0, 384) == 384
    new = add(namespaces, 2, 16384)
    searches: list[PoolSpace] = []

    def count(space: PoolSpace) -> list[int]:
        searches.append(space)
        return last_uses(space)

    last_uses = PoolSpace.last_uses
    monkeypatch.setattr(PoolSpace, "last_uses", count)
    slots, _ = new.table.lending.lend(1, 150, 1, 1.0)
    assert len(slots) == 150
    assert len(new.table.space.claimed) >= 75
    assert len(searches) <= 4
    namespaces.check_integrity()


@given(
    st.lists(st.tuples(sizes, st.integers(0, 60)), min_size=2, max_size=4),
    st.integers(16, 600),
)
def test_no_byte_has_two_owners(shapes: list[tuple[list[int], int]], pages: int) -> None:
    """Whatever the chunk sizes, chunks of different namespaces never overlap."""
    namespaces = make_namespaces(pages * PAGE)
    members = [
        (add(namespaces, number, *slot_bytes), count)
        for number, (slot_bytes, count) in enumerate(shapes)
        if sum(slot_bytes) <= pages * PAGE
    ]
    for turn in range(3):
        for namespace, count in members:
            store(namespace, 100 * turn, count)
            namespaces.check_integrity()


@pytest.mark.parametrize(
    ("number", "slot_bytes", "replicated"),
    [
        (2, (), False),
        (2, (0,), False),
        (2, (MIB + PAGE,), False),
        (2, (PAGE, -1), False),
        (2, (PAGE, PAGE), True),
        (1, (2 * PAGE,), False),
    ],
)
def test_impossible_slot_sizes_are_refused(
    number: int, slot_bytes: tuple[int, ...], replicated: bool
) -> None:
    """No bytes, more than the budget, several for replicated shares, others than before."""
    namespaces = make_namespaces(MIB)
    first = add(namespaces, 1, PAGE)
    assert add(namespaces, 1, PAGE) is first
    with pytest.raises(Refusal) as refused:
        add(namespaces, number, *slot_bytes, replicated=replicated)
    assert refused.value.code == ErrorCode.BAD_LAYOUT
    assert list(namespaces) == [first]


def test_a_temporary_namespace_takes_one_column_of_a_full_pool_and_no_more() -> None:
    """It costs the column over one extent, and the fair share of others stays what it was."""
    namespaces = make_namespaces(16 * MIB)
    size = namespaces.pool.extents.size
    old = add(namespaces, 1, PAGE)
    full = old.geometry.num_slots
    assert store(old, 0, full) == full
    passing = add(namespaces, 2, PAGE, temporary=True)
    assert namespaces.pool.quotas.fair_shares()[old.table.space] == namespaces.pool.extents.count
    column = old.geometry.column_slots
    assert store(passing, 0, 100) == column
    assert namespaces.pool.held_bytes(passing.table.space) == 2 * size
    assert full - old.table.slots.stats()["ready"] == column
    namespaces.check_integrity()
    alone = add(make_namespaces(16 * MIB), 1, PAGE, temporary=True)
    assert store(alone, 0, 100) == 100  # what is free may be had


def test_a_model_below_its_floor_gets_there_at_the_cost_of_others() -> None:
    """A floor above the even share is reached, though others were there first."""
    namespaces = make_namespaces(16 * MIB, quotas={"model 3": Quota(floor_bytes=10 * MIB)})
    early = [add(namespaces, number, 12288) for number in (1, 2)]
    for namespace in early:
        store(namespace, 0, 2000)
    late = add(namespaces, 3, 8192, 8192)
    for turn in range(20):
        store(late, 100 * turn, 100)
    assert held(namespaces, late) >= 10 * MIB
    for turn in range(20):
        for namespace in early:
            store(namespace, 10_000 + 100 * turn, 100)
    assert held(namespaces, late) >= 10 * MIB
    assert all(held(namespaces, namespace) > 2 * MIB for namespace in early)
    namespaces.check_integrity()


def test_a_lowered_cap_holds_at_once_for_what_is_not_in_use() -> None:
    """The chunks used longest ago go; pinned ones stay until their leases end."""
    namespaces = make_namespaces(16 * MIB)
    model = add(namespaces, 1, 8192)
    store(model, 0, 2048)
    recent = names(64)
    pin(model.table, recent)
    namespaces.pool.set_quotas({"model 1": Quota(cap_bytes=256 * 1024)})
    assert 256 * 1024 < held(namespaces, model) <= MIB
    assert all(model.directory.find(key) >= 0 for key in recent)
    model.table.loads.unpin(1, 1)
    namespaces.pool.trim()
    assert held(namespaces, model) <= 256 * 1024
    namespaces.check_integrity()


def test_a_namespace_on_its_floor_is_not_closed_for_a_new_one() -> None:
    """Where no more may be open, one without a floor goes; where there is none, the new one."""
    namespaces = make_namespaces(
        MIB, max_namespaces=2, quotas={"model 1": Quota(floor_bytes=MIB // 2)}
    )
    floored, other = add(namespaces, 1, PAGE), add(namespaces, 2, PAGE)
    for namespace in (floored, other):
        store(namespace, 0, 20)
        namespaces.detach_engine(namespace)
    namespaces.make_room()
    assert list(namespaces) == [floored]


def test_space_moves_back_and_forth_without_fragments() -> None:
    """Chunks of three sizes fill the pool in turn, again and again, and each gets all of it."""
    namespaces = make_namespaces(MIB)
    models = [
        add(namespaces, 1, PAGE, PAGE),
        add(namespaces, 2, PAGE + 2048),
        add(namespaces, 3, 2 * PAGE + 2048),
    ]
    for model in models:
        namespaces.detach_engine(model)
    for turn in range(4):
        for model in models:
            namespaces.attach_engine(model)
            num_slots = model.geometry.num_slots
            for first in range(0, num_slots, 16):
                store(model, 10_000 * turn + first, 16)
            assert model.table.slots.stats()["ready"] == num_slots
            assert sum(other.table.slots.stats()["ready"] for other in models) == num_slots
            namespaces.check_integrity()
            namespaces.detach_engine(model)


@given(nbytes=st.integers(1, 400), piece=st.integers(1, 60))
def test_every_piece_comes_once(nbytes: int, piece: int) -> None:
    """The order names each piece once, and the last of them fills the pool."""
    fill = FillOrder(nbytes, piece)
    count = -(-nbytes // piece)
    assert sorted(fill.order) == list(range(count))
    assert sum(end - begin for begin, end in map(fill.span, range(count))) == nbytes
    done = 0
    for number in fill.order:
        begin, end = fill.span(number)
        done += end - begin
        assert fill.filled_with[number] == done
        assert fill.required_fill(begin, end) == done
    assert fill.required_fill(0, nbytes) == done == nbytes


@given(nbytes=st.integers(1, 2**43), page=st.sampled_from([2**12, 2**21, 2**25, 2**29, 2**30]))
def test_pieces_are_short_and_whole(nbytes: int, page: int) -> None:
    """Pieces are whole pages and whole units, at most 256 MiB, or a page where that is more."""
    piece = FillOrder.of(nbytes, page).piece_bytes
    assert piece % page == piece % UNIT_BYTES == 0
    assert piece <= max(MAX_PIECE_BYTES, page)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_chunks_become_usable_piece_by_piece(ranks: int) -> None:
    """Every slot handed out has all its shares among the pieces that are there."""
    cpu_bytes = 64 * PAGE * ranks
    fill = FillOrder(cpu_bytes, cpu_bytes // 16)
    namespaces = make_namespaces(cpu_bytes, fill=fill)
    namespace = add(namespaces, 0, *(PAGE,) * ranks)
    table = namespace.table
    filled: set[int] = set()
    done = accepted = offered = 0
    for piece in fill.order:
        filled.add(piece)
        first, end = fill.span(piece)
        done += end - first
        usable = done if done < fill.nbytes else None
        begun = begin(table, names(64, offered), usable=usable)
        offered += 64
        for slot in begun.slots:
            for first, after in namespace.geometry.shares(slot):
                pieces = range(first // fill.piece_bytes, (after - 1) // fill.piece_bytes + 1)
                assert filled.issuperset(pieces)
        accepted += len(begun.slots)
        if len(filled) == ranks:
            assert accepted >= 64 // 16  # as much of every arena is there as of the pool
        assert usable is None or not begun.evicted
        namespaces.check_integrity()
    assert accepted >= 64
