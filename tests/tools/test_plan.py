"""What the demo's engine is asked to do, and which blocks it holds for it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd_tools.demo.blocks import NULL_BLOCK, BlockPool
from kvd_tools.demo.plan import BLOCKS_PER_CHUNK, longest_hit, step_ends, window_blocks
from kvd_tools.demo.workload import conversations, distinct_pieces
from kvd_tools.errors import OutOfBlocks


@given(st.integers(0, 1000))
def test_a_piece_always_has_the_same_prefix(seed: int) -> None:
    """In generated prompts a number names a piece together with all that is before it."""
    before: dict[int, int | None] = {}
    for prompt in conversations(40, seed):
        previous = None
        for piece in prompt:
            assert before.setdefault(piece, previous) == previous
            previous = piece


def test_conversations_share_prefixes_and_follow_the_seed() -> None:
    """Turns come back with what was said, so pieces repeat; the same seed gives the same."""
    prompts = list(conversations(200, 0))
    assert distinct_pieces(prompts) < sum(map(len, prompts)) / 2
    assert prompts == list(conversations(200, 0))
    assert prompts != list(conversations(200, 1))


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


@given(st.integers(2, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 20)), max_size=40))
def test_blocks_are_given_out_once(num_blocks: int, steps: list[tuple[bool, int]]) -> None:
    """Whatever is taken and given back, no block is out twice and the null block never."""
    pool = BlockPool(num_blocks)
    held: list[list[int]] = []
    for take, count in steps:
        if take:
            try:
                held.append(pool.allocate(count))
            except OutOfBlocks:
                assert count > num_blocks - 1 - pool.in_use
        elif held:
            pool.release(held.pop(count % len(held)))
        out = [block for blocks in held for block in blocks]
        assert len(out) == len(set(out)) == pool.in_use
        assert NULL_BLOCK not in out


def test_a_block_is_free_when_nobody_uses_it() -> None:
    """A shared block is released as often as it is used, and not once more."""
    pool = BlockPool(8)
    blocks = pool.allocate(7)
    pool.share(blocks[:1])
    pool.release(blocks)
    with pytest.raises(OutOfBlocks, match="7 blocks are needed, 6 of 8 are free"):
        pool.allocate(7)
    pool.release(blocks[:1])
    with pytest.raises(ValueError, match="not in use"):
        pool.release(blocks[:1])
