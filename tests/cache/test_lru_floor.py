"""What LRU would find, and when it decides."""

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from kvd.cache.adaptive import AdaptivePolicy, LruContents, LruFloor
from kvd.cache.ghosts import Ghosts


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


def test_where_lru_would_find_more_it_decides() -> None:
    """Three requests' worth of chunks is what is lost each time; LRU decides ever longer."""
    requests = Requests(LruFloor(0))
    first, again, second, at_last = requests.serve(70 + 5 * LruFloor.rest, policy=4, lru=5)
    assert 30 <= first <= 33
    assert again - first == LruFloor.rest
    assert 30 <= second - again <= 33
    assert at_last - second == 4 * LruFloor.rest


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
