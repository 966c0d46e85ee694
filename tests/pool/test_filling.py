"""The pool while its memory is still coming: what is handed out, and from what on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.cache.namespaces import Namespace, Namespaces
from kvd.errors import PoolError
from kvd.pool.geometry import MAX_PIECE_BYTES, UNIT_BYTES, FillOrder
from tests.cache.tables import PAGE, add, begin, finish, make_namespaces, names


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


def test_a_pool_of_a_terabyte_has_an_order() -> None:
    """Thousands of pieces, each once; the first few are spread over the whole pool."""
    fill = FillOrder.of(2**40)
    assert sorted(fill.order) == list(range(2**40 // MAX_PIECE_BYTES))
    eighths = {8 * fill.span(piece)[0] // fill.nbytes for piece in fill.order[:8]}
    assert eighths == set(range(8))


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


def test_nothing_is_evicted_while_the_pool_is_filling() -> None:
    """What does not fit what is there gets no slot; nothing goes for it."""
    namespaces, namespace = filling(1)
    table, usable = namespace.table, namespaces.pool.fill.filled_with[0]
    ready = begin(table, names(64), usable=usable)
    assert 0 < len(ready.slots) < 64
    finish(table, ready)
    assert not begin(table, names(5, 100), usable=usable).evicted
    assert len(begin(table, names(64, 200)).slots) == 64
    namespaces.check_integrity()
