"""Requests that come twice."""

from hypothesis import given
from hypothesis import strategies as st

from kvd.lane.workers import REQUEST_WINDOW, RequestNumbers

numbers = st.lists(st.integers(0, 3 * REQUEST_WINDOW), max_size=200)


@given(numbers, numbers)
def test_a_number_is_new_once(before: list[int], after: list[int]) -> None:
    """Never twice, nor zero, nor once closed; and else always, unless far behind the highest."""
    once, seen, closed = RequestNumbers(), {0}, before[-1] if before else 0
    for index, number in enumerate([*before, *after]):
        if index == len(before):
            once.close_before(closed)
        floor = closed if index >= len(before) else 0
        new = once.is_new(number)
        assert not (new and (number in seen or number < floor))
        assert new or number in seen or number < floor or number <= max(seen) - REQUEST_WINDOW
        seen.add(number)
