"""A rank's memory: what every page must hold, and how a wrong byte is found."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd_client.tickets import ChunkBlocks
from kvd_tools.demo.workload import (
    POISON,
    STRIDES,
    USED_BYTES,
    KvMemory,
    chunk_key,
    page_content,
)

PAGE = 256
NUM_BLOCKS = 8
KEYS = [chunk_key(piece, 0) for piece in (1, 2)]
BLOCKS = [
    ChunkBlocks(KEYS, [5, 2, 7], 1),  # the full group, the first chunk from its second block on
    ChunkBlocks([], []),
]


def make_memory(rank: int = 0) -> KvMemory:
    """A rank's memory in plain arrays, with the content of `BLOCKS`."""
    storages = [np.zeros((NUM_BLOCKS, stride), np.uint8) for stride in STRIDES]
    memory = KvMemory(rank, storages)
    memory.fill(BLOCKS)
    return memory


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(1, PAGE // 8 - 1))
def test_other_and_shifted_pages_are_wrong(one: int, other: int, words: int) -> None:
    """A page of another key, rank, tensor or block is wrong in every word; a shifted one shows."""
    page = page_content(one, PAGE)
    if one != other:
        assert (page.view(np.uint64) != page_content(other, PAGE).view(np.uint64)).all()
    assert (np.roll(page, 8 * words) != page).any()


def test_blocks_that_nothing_was_loaded_into_are_wrong() -> None:
    """A load that wrote nothing would be found out."""
    memory = make_memory()
    memory.poison(BLOCKS)
    verified, mismatched = memory.verify(BLOCKS)
    assert mismatched > 0.98 * verified


@pytest.mark.parametrize(("tensor", "block", "byte"), [(0, 0, 3), (2, 0, 3), (2, 4, USED_BYTES[2])])
def test_a_write_to_null_block_or_padding_strays(tensor: int, block: int, byte: int) -> None:
    """The null block, and bytes between a page's end and the next page, may never be written."""
    memory = make_memory()
    memory.pages[tensor][block, byte] = POISON ^ 1
    assert memory.count_stray_bytes() == 1
