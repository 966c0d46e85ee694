"""How a job's runs are cut into the pieces that a device is given."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from kvd.lane.jobs import cut
from kvd_proto.expand import Copies

MIB = 2**20


def copies_of(lengths: list[int]) -> Copies:
    """Runs of these lengths, side by side in the arena."""
    nbytes = np.array(lengths, dtype=np.int64)
    begins = np.cumsum(nbytes) - nbytes
    return Copies(np.zeros(len(lengths), dtype=np.int64), begins, begins, nbytes)


@pytest.mark.parametrize("run", [4096, 65536, 2 * MIB, 8 * MIB, 32 * MIB])
def test_a_job_of_whole_pieces_is_cut_into_just_these(run: int) -> None:
    """32 MiB are four pieces of 8 MiB, whatever the length of a run."""
    pieces = cut(copies_of([run] * (32 * MIB // run)), 8 * MIB)
    assert [nbytes for _, nbytes in pieces] == [8 * MIB] * 4
    assert [copies.total_bytes for copies, _ in pieces] == [8 * MIB] * 4


@given(
    lengths=st.lists(st.integers(1, 300), max_size=40),
    piece=st.integers(1, 200),
)
def test_no_job_has_more_pieces_than_its_bytes_need(lengths: list[int], piece: int) -> None:
    """Every byte is in one piece, in order; no piece has twice the bytes wanted."""
    pieces = cut(copies_of(lengths), piece)
    assert len(pieces) <= -(-sum(lengths) // piece)
    assert all(0 < nbytes < 2 * piece for _, nbytes in pieces)
    at = 0
    for copies, nbytes in pieces:
        assert copies.arena_offset.tolist() == [
            at + before for before in (np.cumsum(copies.nbytes) - copies.nbytes).tolist()
        ]
        assert copies.tensor_offset.tolist() == copies.arena_offset.tolist()
        assert copies.total_bytes == nbytes
        at += nbytes
    assert at == sum(lengths)
