"""Requests that come twice."""

from hypothesis import given
from hypothesis import strategies as st

from kvd.lane.workers import REQUEST_WINDOW, RequestNumbers


@given(st.lists(st.integers(1, 3 * REQUEST_WINDOW), max_size=200))
def test_a_number_is_new_once(numbers: list[int]) -> None:
    """Never twice; and the first time always, unless it is far behind the highest."""
    once, seen, highest = RequestNumbers(), set[int](), 0
    for number in numbers:
        new = once.is_new(number)
        if number in seen:
            assert not new
        elif number > highest - REQUEST_WINDOW:
            assert new
        seen.add(number)
        highest = max(highest, number)


@given(
    st.lists(st.integers(1, 2 * REQUEST_WINDOW), min_size=1, max_size=50),
    st.lists(st.integers(1, 3 * REQUEST_WINDOW), max_size=200),
)
def test_below_a_closed_number_nothing_is_new(before: list[int], after: list[int]) -> None:
    """What is late is dropped; numbers above it are new once, as ever."""
    once, closed = RequestNumbers(), before[-1]
    seen = {number for number in before if once.is_new(number)}
    once.close_before(closed)
    for number in after:
        new = once.is_new(number)
        assert not (new and (number < closed or number in seen))
        assert new or number < closed or number in seen or number <= max(seen) - REQUEST_WINDOW
        seen.add(number)


def test_no_request_has_number_zero() -> None:
    """Zero is the number of what is no request."""
    assert not RequestNumbers().is_new(0)
