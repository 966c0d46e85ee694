"""What every policy must do."""

from collections.abc import Callable
from itertools import repeat

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.cache.adaptive import POLICIES
from kvd.cache.eviction import EvictionPolicy, SlotLists
from kvd.cache.ghosts import Ghosts

Make = Callable[[int], EvictionPolicy]


def key_of(slot: int) -> bytes:
    """The slot's number as the key of its chunk."""
    return slot.to_bytes(4, "little")


def anything(slot: int) -> bool:
    """Everything may be evicted."""
    del slot
    return True


NOW = 200.0


@pytest.fixture(params=sorted(POLICIES))
def make(request: pytest.FixtureRequest) -> Make:
    """A maker of each policy in turn."""
    return lambda num_slots: POLICIES[request.param](num_slots, key_of, Ghosts(2 * num_slots))


def filled(make: Make, num_slots: int, count: int) -> EvictionPolicy:
    """A policy holding slots 0..count - 1, inserted in this order."""
    policy = make(num_slots)
    policy.insert_all(range(count), 100.0)
    return policy


def test_the_coldest_that_may_go_are_reserved(make: Make) -> None:
    """As many as are asked for, or as there are: what was used last; what is pinned stays."""
    policy = filled(make, 8, 6)
    policy.use_all([1], 101.0)
    assert policy.reserve(2, lambda slot: slot not in {0, 3}, NOW) == [2, 4]
    assert policy.reserve(9, lambda slot: slot not in {0, 3}, NOW) == [5, 1]
    assert policy.reserve(0, anything, NOW) == []
    assert (policy.num_reserved, len(policy), policy.order()) == (4, 6, [0, 2, 3, 4, 5, 1])
    policy.check_integrity()


def test_what_is_used_again_is_reserved_no_more(make: Make) -> None:
    """A reserved chunk that is refreshed or used is a candidate again, and the hottest."""
    policy = filled(make, 8, 4)
    assert policy.reserve(3, anything, NOW) == [0, 1, 2]
    policy.refresh_all([0], 101.0)
    policy.use_all([1], 102.0)
    assert [policy.is_reserved(slot) for slot in range(4)] == [False, False, True, False]
    assert policy.reserve(4, anything, NOW) == [3, 0, 1]
    policy.check_integrity()


def test_what_is_released_has_its_place_again(make: Make) -> None:
    """Released chunks go in the order in which they would have gone, whoever is released first."""
    policy = filled(make, 8, 6)
    assert policy.reserve(4, anything, NOW) == [0, 1, 2, 3]
    policy.release([2])
    policy.release([3, 0])
    assert policy.reserve(3, anything, NOW) == [0, 2, 3]
    policy.check_integrity()


def test_restored_chunks_go_by_their_last_use(make: Make) -> None:
    """The previous daemon's chunks go before all new ones, those used longest ago first."""
    policy = make(8)
    policy.restore(np.array([5, 3, 4]), np.array([10.0, 10.0, 20.0]))
    policy.insert_all([0], 30.0)
    policy.check_integrity()
    assert policy.reserve(4, anything, NOW) == [5, 3, 4, 0]


class Counted:
    """Stamps, counting how often one is read."""

    def __init__(self, stamps: memoryview) -> None:
        self._stamps = stamps
        self.reads = 0

    def __getitem__(self, slot: int) -> int:
        self.reads += 1
        stamp: int = self._stamps[slot]
        return stamp


@given(st.sets(st.integers(0, 19)), st.sampled_from([1, 2]))
def test_slots_are_put_back_between_the_others(gone: set[int], which: int) -> None:
    """Whichever were taken out, each has the neighbours again that it had."""
    lists = SlotLists(20, 2)
    lists.append_all(range(20), repeat(which), 100)
    lists.remove_all(gone)
    lists.insert_all(which, sorted(gone))
    assert list(lists.walk(which)) == list(lists.walk_back(which))[::-1] == list(range(20))
    lists.check_integrity()
