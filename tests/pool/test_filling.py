"""The pool while its memory is still coming: what is handed out, and from what on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.cache.namespaces import Namespace, Namespaces
from kvd.errors import PoolError
from kvd.pool.filling import MAX_PIECE_BYTES, FillOrder
from kvd_proto.messages import StoreAnswer
from tests.cache.tables import MIB, PAGE, add, finish, make_namespaces, names, store


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
        assert fill.needed(begin, end) == done
    assert fill.needed(0, nbytes) == done == nbytes


def test_a_large_pool_has_few_pieces_of_whole_huge_pages() -> None:
    """Pieces are whole pages, at most 4 GiB, about 256 of them."""
    for nbytes in (MIB, 5 * 2**30 + 1, 500 * 2**30):
        fill = FillOrder.of(nbytes, 2**30)
        assert fill.piece_bytes % 2**30 == 0
        assert fill.piece_bytes <= MAX_PIECE_BYTES
        assert len(fill.order) <= 256


def test_no_bytes_are_no_pool() -> None:
    """A pool of nothing is refused."""
    with pytest.raises(PoolError, match="0 bytes"):
        FillOrder(0, 4096)


def filling(ranks: int, pieces: int = 16) -> tuple[Namespaces, Namespace]:
    """A pool of 16 pieces with room for 64 chunks."""
    cpu_bytes = 64 * PAGE * ranks
    fill = FillOrder(cpu_bytes, cpu_bytes // pieces)
    namespaces = make_namespaces(cpu_bytes, fill=fill)
    return namespaces, add(namespaces, 0, *(PAGE,) * ranks)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_chunks_become_usable_piece_by_piece(ranks: int) -> None:
    """Every slot handed out has all its shares among the pieces that are there."""
    namespaces, namespace = filling(ranks)
    fill, table = namespaces.pool.fill, namespace.table
    filled: set[int] = set()
    done = accepted = offered = 0
    for piece in fill.order:
        filled.add(piece)
        begin, end = fill.span(piece)
        done += end - begin
        usable = done if done < fill.nbytes else None
        decision = table.prepare_store(names(64, offered), 1, 0.0, usable)
        offered += 64
        for slot in decision.slots.numpy().tolist():
            for first, after in namespace.geometry.shares(slot):
                pieces = range(first // fill.piece_bytes, (after - 1) // fill.piece_bytes + 1)
                assert filled.issuperset(pieces)
        accepted += len(decision.slots)
        if len(filled) == ranks:
            assert accepted >= 64 // 16  # as much of every arena is there as of the pool
        assert usable is None or not decision.evicted
        namespaces.check_integrity()
    assert accepted >= 64


def test_nothing_is_evicted_while_the_pool_is_filling() -> None:
    """What does not fit what is there is refused; nothing goes for it."""
    namespaces, namespace = filling(1)
    table, usable = namespace.table, namespaces.pool.fill.filled_with[0]
    ready = table.prepare_store(names(64), 1, 0.0, usable)
    held = len(ready.slots)
    assert 0 < held < 64
    assert ready.answers.numpy().tolist().count(StoreAnswer.FULL) == 64 - held
    finish(table, ready)
    assert not table.prepare_store(names(5, 100), 1, 0.0, usable).evicted
    assert table.prepare_store(names(64, 200), 1, 0.0).slots.numpy().size == 64
    namespaces.check_integrity()


def test_a_load_beyond_what_is_there_is_a_miss() -> None:
    """A READY chunk whose bytes a lane cannot reach yet is missed, not waited for."""
    namespaces, namespace = filling(2)
    table = namespace.table
    store(table, names(64))
    fill = namespaces.pool.fill
    usable = fill.filled_with[fill.order[1]]
    some = table.prepare_load(names(64), 1, 0.0, 9.0, usable)
    assert 0 < some.found.numpy().sum() < 64
    for slot in some.slots.numpy().tolist():
        assert all(fill.needed(*share) <= usable for share in namespace.geometry.shares(slot))
    assert table.prepare_load(names(64), 1, 0.0, 9.0).found.numpy().all()
