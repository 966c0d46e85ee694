"""Requests that come twice."""

from hypothesis import given
from hypothesis import strategies as st

from kvd.lane.once import WINDOW, Once


@given(st.lists(st.integers(1, 3 * WINDOW), max_size=200))
def test_a_number_is_new_once(numbers: list[int]) -> None:
    """Never twice; and the first time always, unless it is far behind the highest."""
    once, seen, highest = Once(), set[int](), 0
    for number in numbers:
        new = once.is_new(number)
        if number in seen:
            assert not new
        elif number > highest - WINDOW:
            assert new
        seen.add(number)
        highest = max(highest, number)


def test_no_request_has_number_zero() -> None:
    """Zero is the number of what is no request."""
    assert not Once().is_new(0)
