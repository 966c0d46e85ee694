"""What LRU would find, and when it decides."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.cache.adaptive import AdaptivePolicy
from kvd.cache.ghosts import Ghosts
from kvd.cache.lru_floor import PARTS, LruContents, LruFloor
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
    """Of 100,000 chunks touched one by one there are about a thousand parts, and few errors."""
    slots, contents = 100_000, LruContents()
    for turn in range(2 * slots):
        contents.touch(None, 1, float(turn))
        contents.shrink(slots)
    assert len(contents._begins) <= 2 * PARTS
    assert contents.touch(1.0 * slots - 2 * slots / PARTS, 1, 2.0 * slots) == 0
    assert contents.touch(1.0 * slots + 2 * slots / PARTS, 1, 2.0 * slots) == 1


def serve(floor: LruFloor, requests: int, *, policy: int, lru: int, first: int = 0) -> list[int]:
    """Requests for 10 chunks each, of which the policy, and LRU, find so many.

    Returns:
        The numbers of those, counted from `first` on, after which somebody else decides.
    """
    turns = []
    for number in range(first, first + requests):
        before, now = floor.lru_decides, float(number)
        floor.touch(None, 10 - lru, now, found=False)
        for found_by_policy in (True, False):
            count = min(policy, lru) if found_by_policy else lru - min(policy, lru)
            if count:
                floor.touch(now - 1.0 if number else None, count, now, found=found_by_policy)
        if policy > lru:
            floor.touch(None, policy - lru, now, found=True)
        floor.end_request(1000)
        floor.check_integrity()
        if floor.lru_decides is not before:
            turns.append(number)
    return turns


def test_at_first_lru_decides() -> None:
    """The policy decides once as many requests have ended as it is to learn from."""
    assert serve(LruFloor(20), 40, policy=5, lru=5) == [19]
    assert not LruFloor(0).lru_decides


def test_where_lru_would_find_more_it_decides() -> None:
    """After a tenth of the window, and then for twice as many requests each time."""
    floor = LruFloor(0)
    tenth, rest = floor.window // 10, floor.rest
    first, again, second, at_last, *_ = serve(floor, 4000, policy=4, lru=5)
    assert first == tenth - 1
    assert again - first == rest
    assert second - again == tenth
    assert at_last - second == 2 * rest


def test_a_small_lead_of_lru_is_borne() -> None:
    """Less than one chunk of a hundred does not end what was learned."""
    floor = LruFloor(0)
    for turn in range(0, 3000, 30):  # 1 of 300
        assert serve(floor, 29, policy=5, lru=5, first=turn) == []
        assert serve(floor, 1, policy=4, lru=5, first=turn + 29) == []
    assert not floor.lru_decides


def test_what_has_held_for_long_is_tried_again_soon() -> None:
    """After four windows without a loss LRU decides as shortly as the first time."""
    floor = LruFloor(0)
    rest, window = floor.rest, floor.window
    first, again, *_ = serve(floor, window // 10 + rest, policy=4, lru=5)
    now = again + 1
    assert serve(floor, 5 * window, policy=6, lru=5, first=now) == []
    now += 5 * window
    second, at_last, *_ = serve(floor, 3 * window + rest, policy=2, lru=5, first=now)
    assert (again - first, at_last - second) == (rest, rest)


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
    """Of six chunks in eight slots LRU would find all; where each was evicted, it decides."""
    policy = EarlyPolicy(8, b"%d".__mod__, Ghosts(16))
    policy.insert_all(range(6), 0.0)
    for turn in range(200):
        if turn >= 60:
            policy.evict([turn % 6], float(turn))
            policy.insert_all([turn % 6], float(turn))
        policy.use_all([turn % 6], float(turn))
        assert policy.lru_decides == (turn >= 60)


def test_chunks_of_before_a_restart_lead_nowhere() -> None:
    """What nobody has touched since the start counts neither for the policy nor for LRU."""
    policy = EarlyPolicy(8, b"%d".__mod__, Ghosts(16))
    policy.restore(np.arange(6), np.zeros(6))
    policy.use_all(range(6), 1.0)
    assert "leads by 0 of" in repr(policy._floor)
