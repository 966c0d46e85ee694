"""What the demo's engine is asked to do, and which blocks it holds for it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvd_client.tickets import ChunkBlocks
from kvd_tools.demo.workload import (
    BLOCKS_PER_CHUNK,
    chunk_key,
    conversations,
    longest_hit,
    page_content,
    step_ends,
    window_blocks,
)


@given(st.integers(0, 1000))
def test_a_piece_always_has_the_same_prefix(seed: int) -> None:
    """In generated prompts a number names a piece together with all that is before it."""
    before: dict[int, int | None] = {}
    for prompt in conversations(40, seed):
        previous = None
        for piece in prompt:
            assert before.setdefault(piece, previous) == previous
            previous = piece


@given(st.integers(0, 30), st.integers(0, 30))
def test_steps_go_from_start_to_end(start: int, end: int) -> None:
    """Steps ascend, begin behind what is there and end with the prompt."""
    ends = step_ends(start, end)
    assert ends == sorted(set(ends))
    assert all(start < e <= end for e in ends)
    assert (ends[-1] == end) if start < end else not ends


@given(st.integers(0, 20), st.dictionaries(st.integers(0, 20), st.integers(0, 1)))
def test_the_longest_hit_is_longest(prefix: int, first_there: dict[int, int]) -> None:
    """The window after the answer is there, block for block, and after nothing longer."""

    def there(chunk: int, first: int) -> bool:
        return chunk in first_there and first_there[chunk] <= first

    def loadable(end: int) -> bool:
        return all(there(*divmod(block, BLOCKS_PER_CHUNK)) for block in window_blocks(end))

    hit = longest_hit(prefix, there)
    assert 0 <= hit <= prefix
    assert loadable(hit)
    assert not any(loadable(end) for end in range(hit + 1, prefix + 1))


PAGE = 256
NUM_BLOCKS = 8
KEYS = [chunk_key(piece, 0) for piece in (1, 2)]
BLOCKS = [
    ChunkBlocks(KEYS, [5, 2, 7], 1),  # the full group, the first chunk from its second block on
    ChunkBlocks([], []),
]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(1, PAGE // 8 - 1))
def test_other_and_shifted_pages_are_wrong(one: int, other: int, words: int) -> None:
    """A page of another key, rank, tensor or block is wrong in every word; a shifted one shows."""
    page = page_content(one, PAGE)
    if one != other:
        assert (page.view(np.uint64) != page_content(other, PAGE).view(np.uint64)).all()
    assert (np.roll(page, 8 * words) != page).any()
