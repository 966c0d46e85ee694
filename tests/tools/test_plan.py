from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvd_tools.demo.plan import FULL, WINDOW, Shape, runs

SHAPES = st.builds(Shape, st.integers(1, 4), st.integers(1, 9), st.integers(1, 6))


@given(SHAPES, st.integers(0, 30), st.integers(0, 30))
def test_steps_go_from_start_to_end(shape: Shape, start: int, end: int) -> None:
    """Steps ascend, begin behind what is there and end with the prompt."""
    ends = shape.step_ends(start, end)
    assert ends == sorted(set(ends))
    assert all(start < e <= end for e in ends)
    assert (ends[-1] == end) if start < end else not ends


@given(SHAPES, st.integers(1, 30))
def test_window_chunks_hold_the_window_and_no_more(shape: Shape, end: int) -> None:
    """Every block of the window lies in one of its chunks, and every such chunk has one."""
    factor = shape.blocks_per_chunk
    assert set(shape.window_chunks(end)) == {b // factor for b in shape.window_blocks(end)}
    present = shape.blocks_present(WINDOW, shape.window_chunks(end), end)
    assert present == shape.window_blocks(end)
    assert len(shape.blocks_present(FULL, range(end), end)) == end * factor


def test_the_windows_edge_skips_a_block() -> None:
    """Five blocks after four chunks of two begin with the second block of chunk 1."""
    shape = Shape(blocks_per_chunk=2, window=5)
    assert shape.window_chunks(4) == range(1, 4)
    assert shape.blocks_present(WINDOW, range(1, 2), 4) == range(3, 4)


@given(SHAPES, st.integers(0, 20), st.sets(st.integers(0, 20)), st.integers(0, 3))
def test_the_longest_hit_is_longest(
    shape: Shape, prefix: int, whole: set[int], edge_skipped: int
) -> None:
    """The window after the answer is there, and after nothing longer."""

    def there(chunk: int, skipped: int) -> bool:
        return chunk in whole or (skipped > 0 and skipped == edge_skipped)

    def loadable(end: int) -> bool:
        needed = {b // shape.blocks_per_chunk: b for b in reversed(shape.window_blocks(end))}
        return all(there(c, first % shape.blocks_per_chunk) for c, first in needed.items())

    hit = shape.longest_hit(prefix, there)
    assert 0 <= hit <= prefix
    assert loadable(hit)
    assert not any(loadable(end) for end in range(hit + 1, prefix + 1))


@given(st.sets(st.integers(0, 50)))
def test_runs_are_maximal(numbers: set[int]) -> None:
    """Runs hold exactly the numbers, and no two of them touch."""
    found = runs(sorted(numbers))
    assert {n for run in found for n in run} == numbers
    assert all(a.stop < b.start for a, b in pairwise(found))
