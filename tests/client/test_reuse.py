"""The filter of keys that are offered for the first time."""

import pytest

from kvd_client.decisions import ReuseFilter


@pytest.mark.parametrize("threshold", [1, 2, 3])
def test_a_key_passes_at_its_nth_offer(threshold: int) -> None:
    """And is forgotten then."""
    reuse = ReuseFilter(threshold, 10)
    assert [reuse.offer(b"k") for _ in range(threshold)] == [False] * (threshold - 1) + [True]
    assert len(reuse) == 0


@pytest.mark.parametrize("threshold", [1, 2, 3])
def test_a_key_that_passed_and_was_not_stored_passes_again(threshold: int) -> None:
    """Want of room is no reason to count from the beginning."""
    reuse = ReuseFilter(threshold, 10)
    while not reuse.offer(b"k"):
        pass
    reuse.give_back(b"k")
    assert reuse.offer(b"k")


def test_the_latest_keys_are_remembered() -> None:
    """Those that were offered longest ago make room."""
    reuse = ReuseFilter(2, 3)
    for key in (b"a", b"b", b"c", b"d"):
        assert not reuse.offer(key)
    assert len(reuse) == 3
    assert not reuse.offer(b"a")
    assert reuse.offer(b"d")
