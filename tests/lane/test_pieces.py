"""How many runs of a job a device is given at a time."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.lane.device import PreparedRuns

MIB = 2**20


def pieces_of(moves: PreparedRuns, most: int) -> list[tuple[int, int]]:
    """End and bytes of every piece."""
    pieces, begin = [], 0
    while begin < len(moves):
        pieces.append(moves.next_piece(begin, most))
        begin = pieces[-1][0]
    return pieces


@pytest.mark.parametrize("most", [8 * MIB, 32 * MIB])
@pytest.mark.parametrize("run", [4096, 65536, 2 * MIB, 8 * MIB])
def test_a_job_of_whole_pieces_is_cut_into_just_these(run: int, most: int) -> None:
    """32 MiB are four pieces of 8 MiB or one of 32, whatever the length of a run."""
    moves = PreparedRuns(np.full(32 * MIB // run, run).cumsum())
    assert [nbytes for _, nbytes in pieces_of(moves, most)] == [most] * (32 * MIB // most)


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
