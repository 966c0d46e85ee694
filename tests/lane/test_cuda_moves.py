"""A job's runs as addresses: the same in each of the ways in which they are worked out."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvd.lane.devices.cuda.moves import CudaMoves, prepare
from kvd_proto.blocks import JobBlocks
from kvd_proto.copies import Copies
from kvd_proto.expand import Expander
from kvd_proto.layout import RankLayout
from tests.layouts import flat_layout

NUM_BLOCKS = 24


@st.composite
def jobs(draw: st.DrawFn) -> tuple[RankLayout, JobBlocks]:
    """Blocks of one group, some of them neighbours, in layers of one or two lengths of page."""
    factor = draw(st.integers(1, 4))
    pages = draw(st.lists(st.sampled_from([512, 1536]), min_size=1, max_size=5))
    layout = flat_layout(*pages, blocks=NUM_BLOCKS, factor=factor)
    ids = draw(
        st.lists(st.integers(1, NUM_BLOCKS - 1), min_size=1, max_size=12)
        | st.integers(1, 12).map(lambda count: list(range(1, count + 1)))
    )
    chunks = -(-len(ids) // factor)
    slots = draw(st.lists(st.integers(0, 99), min_size=chunks, max_size=chunks, unique=True))
    return layout, JobBlocks.of(ids, [len(ids)], [0], slots, slots)


@given(
    job=jobs(),
    longest=st.sampled_from([512, 700, 4096, 2**23]),
    registration=st.sampled_from([512, 4096, 2**14, 2**30]),
    base=st.sampled_from([0, 512, 4096, 10_000]),
)
def test_addresses_are_the_same_however_runs_are_given(
    job: tuple[RankLayout, JobBlocks], longest: int, registration: int, base: int
) -> None:
    """Few, alike or as columns: the same bytes move, each run inside one registration and short."""
    layout, blocks = job
    expander = Expander(layout)
    grids = expander.expand_many(blocks)
    pieces = 2**22 // registration + 1
    rng = np.random.default_rng(1)
    filled = rng.permutation(pieces) + 1
    where = rng.integers(2**40, 2**41, pieces).astype(np.uint64)
    storages = np.arange(1, len(layout.storages) + 1, dtype=np.uint64) * np.uint64(2**42)
    made: list[CudaMoves] = []
    for copies in (grids, Copies(*grids.columns), Copies.of(expander.expand_few(blocks))):
        moves = prepare(
            copies,
            pool_base=base,
            storages=storages,
            longest=longest,
            registration_bytes=registration,
            filled_with=filled,
        )
        moves.place(where)
        made.append(moves)
        placed = prepare(
            copies,
            pool_base=base,
            storages=storages,
            longest=longest,
            registration_bytes=registration,
            filled_with=filled,
            where=where,
        )
        if not placed.placed:
            placed.place(where)
        np.testing.assert_array_equal(placed.columns.table, moves.columns.table)
        assert placed.needed == 0
    for moves in made[1:]:
        np.testing.assert_array_equal(moves.columns.table, made[0].columns.table)
        np.testing.assert_array_equal(moves.ends, made[0].ends)
        assert moves.needed == made[0].needed
    moved = []
    for storage, offset, arena, nbytes in grids.runs:
        for byte in range(0, nbytes, 4):  # pages, boundaries and lengths are multiples of it
            at = base + arena + byte
            address = at + int(where[at // registration])
            moved.append((address, int(storages[storage]) + offset + byte))
    found = []
    for host, device, nbytes in made[0].columns.table.T.tolist():
        assert 0 < nbytes <= longest
        found += [(host + byte, device + byte) for byte in range(0, nbytes, 4)]
    assert found == moved
    np.testing.assert_array_equal(made[0].ends, made[0].columns.table[2].cumsum())
    touched = {(base + a + b) // registration for _, _, a, n in grids.runs for b in range(n)}
    assert made[0].needed == max(int(filled[piece]) for piece in touched)


def test_a_job_without_runs_needs_nothing() -> None:
    """No run, no byte to be pinned."""
    for copies in (Copies.of([]), Copies.of_grids([])):
        moves = prepare(
            copies,
            pool_base=0,
            storages=np.zeros(1, np.uint64),
            longest=1,
            registration_bytes=1,
            filled_with=np.array([7]),
        )
        moves.place(np.zeros(1, np.uint64))
        assert (len(moves), moves.needed) == (0, 0)
