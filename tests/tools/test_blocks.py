import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd_tools.demo.blocks import NULL_BLOCK, BlockAllocator
from kvd_tools.demo.errors import OutOfBlocks


@given(st.integers(2, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 20)), max_size=40))
def test_blocks_are_given_out_once(num_blocks: int, steps: list[tuple[bool, int]]) -> None:
    """Whatever is taken and given back, no block is out twice and the null block never."""
    allocator = BlockAllocator(num_blocks)
    held: list[list[int]] = []
    for take, count in steps:
        if take and count <= allocator.free_blocks:
            held.append(allocator.allocate(count))
        elif held and not take:
            allocator.release(held.pop(count % len(held)))
        allocator.check_integrity()
        out = [block for blocks in held for block in blocks]
        assert len(out) == len(set(out))
        assert NULL_BLOCK not in out


def test_too_many_are_refused_with_the_figures() -> None:
    """Asking for more than is free takes nothing and says how many there are."""
    allocator = BlockAllocator(8)
    with pytest.raises(OutOfBlocks, match="9 blocks are needed, 7 of 8 are free"):
        allocator.allocate(9)
    assert allocator.free_blocks == 7


def test_giving_back_twice_is_an_error() -> None:
    """A block that is not in use cannot be given back."""
    allocator = BlockAllocator(4)
    blocks = allocator.allocate(1)
    allocator.release(blocks)
    with pytest.raises(ValueError, match="not in use"):
        allocator.release(blocks)
