"""Soil and its pieces: what is nobody's until it is wiped, and who gets it then."""

import numpy as np
import pytest

from kvd.errors import IntegrityError
from kvd.state.geometry import PAGE
from kvd.state.namespaces import Namespace, Namespaces
from kvd.state.scrubbing import IN_FLIGHT, MAX_RUNS, PIECE_BYTES, Piece, PieceState, Scrubber
from tests.state.test_pool import MIB, add, pool, store


def scrubber_of(namespaces: Namespaces) -> Scrubber:
    """The pool's scrubber."""
    assert namespaces.pool.scrubber is not None
    return namespaces.pool.scrubber


def wipe_all(namespaces: Namespaces) -> list[Piece]:
    """A lane does all that there is; the pieces, in order."""
    pieces = []
    while (piece := namespaces.pool.next_piece("host")) is not None:
        pieces.append(piece)
        namespaces.pool.wiped(piece.number)
        namespaces.check_integrity()
    return pieces


def free_slots(namespace: Namespace) -> int:
    """Slots that may be had without taking from others."""
    return namespace.table.space.free_slots


def test_a_slot_is_free_when_it_is_clean() -> None:
    """What an operator drops is nobody's until a lane has wiped it; then it may be had again."""
    namespaces = pool(MIB, scrub=True)
    namespace = add(namespaces, 1, PAGE)
    assert store(namespace, 0, 256) == 256
    assert namespace.table.remove(0, 4) == (4, 0)
    assert free_slots(namespace) == 0
    assert namespaces.pool.left_bytes == 4 * PAGE
    (piece,) = wipe_all(namespaces)
    assert piece.runs == [(0, 4 * PAGE)]
    assert (free_slots(namespace), namespaces.pool.left_bytes) == (4, 0)
    assert scrubber_of(namespaces).wiped_bytes == 4 * PAGE


def test_own_evictions_are_not_scrubbed() -> None:
    """A slot that goes from one chunk to the next of its namespace is never soil."""
    namespaces = pool(MIB, scrub=True)
    namespace = add(namespaces, 1, PAGE)
    assert store(namespace, 0, 256) == 256
    assert store(namespace, 1000, 100) == 100
    assert namespaces.pool.next_piece("host") is None


def test_room_that_is_taken_comes_when_it_is_clean() -> None:
    """A newcomer's first store finds no room, the next one does; nobody gets in between."""
    namespaces = pool(MIB, scrub=True)
    old = add(namespaces, 1, PAGE)
    assert store(old, 0, 256) == 256
    new, third = add(namespaces, 2, PAGE), add(namespaces, 3, PAGE)
    assert store(new, 0, 2) == 0
    assert store(third, 0, 2) == 0
    assert old.table.slots.stats()["ready"] == 254
    assert store(old, 1000, 2) == 2  # at the cost of its own, not of what is on its way out
    namespaces.check_integrity()
    assert [piece.space for piece in wipe_all(namespaces)] == [old.table.space]
    assert free_slots(new) == 2
    assert store(new, 0, 2) == 2


def test_a_taker_that_leaves_gets_nothing() -> None:
    """Room that was promised to a namespace that is gone by then is free for all."""
    namespaces = pool(MIB, scrub=True)
    old = add(namespaces, 1, PAGE)
    store(old, 0, 256)
    new = add(namespaces, 2, PAGE)
    assert store(new, 0, 2) == 0
    namespaces.detach_engine(new)
    namespaces.close(new)
    wipe_all(namespaces)
    assert namespaces.pool.free_bytes == 2 * PAGE


def test_a_namespace_ends_when_it_is_clean() -> None:
    """Closed and opened anew: the old room is nobody's until it is wiped, and free then."""
    namespaces = pool(MIB, scrub=True)
    old = add(namespaces, 1, PAGE)
    store(old, 0, 200)
    namespaces.detach_engine(old)
    namespaces.close(old)
    again = add(namespaces, 1, PAGE)
    namespaces.check_integrity()
    assert namespaces.pool.free_bytes == 56 * PAGE
    assert store(again, 0, 100) == 56
    wipe_all(namespaces)
    assert namespaces.pool.free_bytes == 200 * PAGE
    assert store(again, 100, 100) == 100
    namespaces.check_integrity()


def test_pieces_are_bounded() -> None:
    """Bytes and runs of a piece have a limit, and so has what a lane is told at a time."""
    namespaces = pool(256 * MIB, scrub=True)
    namespace = add(namespaces, 1, 64 * 1024)
    assert store(namespace, 0, 4096) == 4096
    for slot in range(0, 4096, 2):
        namespace.table.remove(slot, 1)
    namespace.table.reset()
    pieces: list[Piece] = []
    while (piece := namespaces.pool.next_piece("host")) is not None:
        pieces.append(piece)
    assert len(pieces) == IN_FLIGHT
    for piece in pieces:
        namespaces.pool.wiped(piece.number)
    pieces += wipe_all(namespaces)
    assert all(p.nbytes <= PIECE_BYTES and len(p.runs) <= MAX_RUNS for p in pieces)
    assert sum(piece.nbytes for piece in pieces) == 256 * MIB
    assert namespaces.pool.free_bytes == 256 * MIB


def test_a_lost_lanes_pieces_come_first_and_in_order() -> None:
    """Another lane does them again; a late word of the dead one counts for nothing."""
    namespaces = pool(256 * MIB, scrub=True)
    namespace = add(namespaces, 1, MIB)
    store(namespace, 0, 256)
    namespace.table.reset()
    pieces = [namespaces.pool.next_piece("cuda") for _ in range(2)]
    scrubber_of(namespaces).lane_lost("host")
    assert namespaces.pool.next_piece("host") is None
    scrubber_of(namespaces).lane_lost("cuda")
    namespaces.check_integrity()
    assert pieces[0] is not None
    namespaces.pool.wiped(pieces[0].number)
    assert namespaces.pool.left_bytes == 256 * MIB
    assert [namespaces.pool.next_piece("host") for _ in range(2)] == pieces
    assert pieces[0].machine.state is PieceState.WIPING


def test_the_rest_of_a_kept_pool_is_wiped_around_what_is_in_use() -> None:
    """Stores wait for it, piece by piece of the filling; chunks that were kept stay."""
    namespaces = pool(256 * MIB, scrub=True)
    kept = add(namespaces, 1, MIB, MIB)
    store(kept, 0, 10)
    namespaces.pool.scrub_rest()
    clean = namespaces.pool.clean_bytes
    assert clean == 0
    used = {
        run
        for slot in range(128)
        if kept.directory.state(slot)
        for run in kept.geometry.shares(slot)
    }
    assert len(used) == 20
    wiped = np.zeros(256 * MIB, bool)
    while (piece := namespaces.pool.next_piece("host")) is not None:
        new = kept.table.prepare_store([b"new %d" % piece.number], 1, 0.0, clean)
        for run in (run for slot in new.slots.tolist() for run in kept.geometry.shares(slot)):
            assert wiped[slice(*run)].all()  # before; and nothing is wiped twice
        for begin, end in piece.runs:
            assert not wiped[begin:end].any()
            wiped[begin:end] = True
        namespaces.pool.wiped(piece.number)
        clean, before = namespaces.pool.clean_bytes, clean
        assert clean is None or (before is not None and clean >= before)
    assert clean is None
    assert kept.table.slots.stats()["writing"] > 0
    for begin, end in used:
        assert not wiped[begin:end].any()
    assert (~wiped).sum() <= sum(end - begin for begin, end in used) + 2 * MIB


def test_a_leak_is_noticed() -> None:
    """A soiled slot that nobody will wipe is an error of integrity."""
    namespaces = pool(MIB, scrub=True)
    namespace = add(namespaces, 1, PAGE)
    store(namespace, 0, 8)
    namespace.table.remove(0, 2)
    scrubber_of(namespaces)._soil.clear()  # what must never happen
    with pytest.raises(IntegrityError, match="soiled slots"):
        namespaces.pool.check_integrity()
