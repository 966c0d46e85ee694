"""A job's runs: the addresses that a device is given, and how many of them at a time."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvd.lane.cuda.copies import PoolSide, prepare
from kvd.lane.device import PreparedRuns
from kvd_proto.copies import Copies
from kvd_proto.expand import Expander
from kvd_proto.jobs import JobBlocks
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
    where = rng.integers(2**40, 2**41, pieces).astype(np.uint64)
    storages = np.arange(1, len(layout.storages) + 1, dtype=np.uint64) * np.uint64(2**42)
    pool = PoolSide(base, registration, where)
    forms = (grids, Copies(*grids.columns), Copies.of(expander.expand_few(blocks)))
    made = [prepare(copies, pool, storages, longest) for copies in forms]
    for moves in made[1:]:
        np.testing.assert_array_equal(moves.columns.table, made[0].columns.table)
        np.testing.assert_array_equal(moves.ends, made[0].ends)
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


def pieces_of(moves: PreparedRuns, most: int) -> list[tuple[int, int]]:
    """End and bytes of every piece."""
    pieces, begin = [], 0
    while begin < len(moves):
        pieces.append(moves.next_piece(begin, most))
        begin = pieces[-1][0]
    return pieces


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=40),
    most=st.integers(1, 2000),
    few=st.booleans(),
)
def test_no_job_has_more_pieces_than_its_bytes_need(
    lengths: list[int], most: int, few: bool
) -> None:
    """Every run is in one piece, in order; none is above what is wanted by a whole run."""
    ends = list(itertools.accumulate(lengths))
    pieces = pieces_of(PreparedRuns(ends if few else np.array(ends)), most)
    assert len(pieces) <= -(-sum(lengths) // most)
    begins = [0, *(end for end, _ in pieces)]
    assert begins[-1] == len(lengths)
    for (begin, end), (_, nbytes) in zip(itertools.pairwise(begins), pieces, strict=True):
        assert nbytes == sum(lengths[begin:end])
        assert nbytes < most + lengths[end - 1]
