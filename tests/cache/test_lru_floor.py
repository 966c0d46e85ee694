"""What LRU would find, and when it decides."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.cache.adaptive import NUM_INTERVALS, AdaptivePolicy, LruContents, LruFloor
from kvd.cache.ghosts import Ghosts
from kvd.errors import IntegrityError


@given(st.integers(1, 12), st.lists(st.integers(0, 20), max_size=200))
def test_lru_would_find_what_it_holds(slots: int, keys: list[int]) -> None:
    """Requests for one chunk each are found by the counts as by a true LRU of as many slots."""
    contents, cache = LruContents(), OrderedDict[int, None]()
    last: dict[int, float] = {}
    for turn, key in enumerate(keys):
        now = float(turn)
        assert contents.touch(last.get(key), 1, now) == (key in cache)
        contents.shrink(slots)
        contents.check_integrity()
        last[key] = now
        cache[key] = None
        cache.move_to_end(key)
        if len(cache) > slots:
            cache.popitem(last=False)
        assert len(contents) == len(cache)


def test_a_large_pool_takes_few_parts() -> None:
    """Of 100,000 chunks touched one by one there are a few hundred parts, and few errors."""
    slots, contents = 100_000, LruContents()
    for turn in range(2 * slots):
        contents.touch(None, 1, float(turn))
        contents.shrink(slots)
    assert len(contents._begins) <= 2 * NUM_INTERVALS
    assert contents.touch(1.0 * slots - 2 * slots / NUM_INTERVALS, 1, 2.0 * slots) == 0
    assert contents.touch(1.0 * slots + 2 * slots / NUM_INTERVALS, 1, 2.0 * slots) == 1


def test_chunks_that_are_touched_again_and_again_take_few_parts() -> None:
    """However often requests of a full pool come back, there are at most twice as many parts."""
    slots, contents = 4096, LruContents()
    contents.touch(None, slots, 0.0)
    for turn in range(1, 20_000):
        last = max(0.0, float(turn - 40))
        assert contents.touch(last, 8, float(turn)) == 8
        contents.touch(0.0, 1, turn + 0.5)
        contents.shrink(slots)
        assert len(contents._begins) <= 2 * NUM_INTERVALS
    contents.check_integrity()


class Requests:
    """Requests for 10 chunks each, one a second, of which a policy and LRU find a few."""

    def __init__(self, floor: LruFloor) -> None:
        self.floor = floor
        self._now = 0.0
        self.serve(1, policy=0, lru=0)

    def serve(self, count: int, *, policy: int, lru: int) -> list[int]:
        """Serve so many, of each of which both find as many chunks as is said.

        Returns:
            After how many of them it changed who decides, each time.
        """
        changes, both = [], min(policy, lru)
        for number in range(1, count + 1):
            before, last = self.floor.lru_decides, self._now
            self._now += 1.0
            self.floor.touch(last, both, self._now, in_pool=True)
            self.floor.touch(last, lru - both, self._now, in_pool=False)
            self.floor.touch(None, policy - both, self._now, in_pool=True)
            self.floor.touch(None, 10 - max(policy, lru), self._now, in_pool=False)
            self.floor.end_request(1000)
            self.floor.check_integrity()
            if self.floor.lru_decides is not before:
                changes.append(number)
        return changes


def test_at_first_lru_decides() -> None:
    """The policy decides once as many requests have ended as it is to learn from."""
    assert Requests(LruFloor(21)).serve(40, policy=5, lru=5) == [20]
    assert not LruFloor(0).lru_decides


def test_where_lru_would_find_more_it_decides() -> None:
    """Three requests' worth of chunks is what is lost each time; LRU decides ever longer."""
    requests = Requests(LruFloor(0))
    first, again, second, at_last = requests.serve(
        70 + 5 * LruFloor.min_lru_requests, policy=4, lru=5
    )
    assert 30 <= first <= 33
    assert again - first == LruFloor.min_lru_requests
    assert 30 <= second - again <= 33
    assert at_last - second == 4 * LruFloor.min_lru_requests


def test_a_small_lead_of_lru_is_borne() -> None:
    """One chunk of 300 does not end what was learned."""
    requests = Requests(LruFloor(0))
    for _ in range(100):
        assert requests.serve(29, policy=5, lru=5) == []
        assert requests.serve(1, policy=4, lru=5) == []


def test_what_has_held_for_long_is_tried_again_soon() -> None:
    """After four windows without a loss LRU decides as shortly as the first time."""
    requests = Requests(LruFloor(0))
    first, again = requests.serve(33 + LruFloor.min_lru_requests, policy=4, lru=5)[:2]
    assert requests.serve(5 * LruFloor.window, policy=6, lru=5) == []
    second, at_last = requests.serve(1000 + LruFloor.min_lru_requests, policy=2, lru=5)[:2]
    assert again - first == at_last - second == LruFloor.min_lru_requests


def test_a_count_that_cannot_be_is_noticed() -> None:
    """Counts that contradict each other do not go unseen."""
    contents = LruContents()
    contents.touch(None, 3, 1.0)
    contents._counts[0] = 2
    with pytest.raises(IntegrityError):
        contents.check_integrity()


class EarlyPolicy(AdaptivePolicy):
    """The policy, which decides from the first request on."""

    first_requests = 0


def test_a_policy_that_evicts_what_comes_next_gives_way() -> None:
    """Of six chunks in eight slots LRU would find all; after three were evicted, it decides."""
    policy = EarlyPolicy(8, b"%d".__mod__, Ghosts(16))
    policy.insert_all(range(6), 0.0)
    for turn in range(200):
        if turn >= 60:
            policy.evict([turn % 6], float(turn))
            policy.insert_all([turn % 6], float(turn))
        policy.use_all([turn % 6], float(turn))
        assert policy.lru_decides == (turn >= 63)


def test_chunks_of_before_a_restart_lead_nowhere() -> None:
    """What nobody has touched since the start counts neither for the policy nor for LRU."""
    policy = EarlyPolicy(8, b"%d".__mod__, Ghosts(16))
    policy.restore(np.arange(6), np.zeros(6))
    policy.use_all(range(6), 1.0)
    assert policy._floor._lead == 0
