"""The adaptive policy beside its formulas, and beside LRU where nothing is learned."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import repeat
from math import log2
from random import Random
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvd.cache.adaptive import BINS, POLICIES, AdaptivePolicy, LruContents, LruFloor, gains
from kvd.cache.eviction import TICKS_PER_SECOND, EvictionPolicy, LruPolicy, SlotLists
from kvd.cache.ghosts import Ghosts
from kvd_proto.messages import Label
from tests.exploring import explored

SLOTS = 12
KEYS = 30
LABELS = (Label.NONE, Label.DONE)
seeds = st.integers(0, 2**32)
Class = tuple[int, Label]


class QuickPolicy(AdaptivePolicy):
    """The policy, learning after a few requests."""

    min_touches: ClassVar[int] = 6
    requests_per_lesson: ClassVar[int] = 3
    requests_per_decay: ClassVar[int] = 7
    first_requests: ClassVar[int] = 3


class Chunk:
    """What the model knows of a chunk."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.seen, self.label, self.used = 0, Label.NONE, 0.0
        self.order = self.run = 0  # of its last move: of all moves, and the call's
        self.under_way = True
        self.reserved = False


def model_bin(age: float) -> int:
    """The bin of an age, as the formula has it."""
    return min(BINS - 1, int(3 * log2(1 + age)))


def model_gain(touches: float, next_uses: Sequence[float], age: int) -> float:
    """The gain at an age bin, by the formula, in the obvious slow way."""
    if not touches:
        return 0.0
    unused = [1.0]
    for uses in next_uses:
        unused.append(max(0.001, unused[-1] - uses / touches))
    edges = [2 ** (j / 3) - 1 for j in range(BINS + 1)]
    best = hits = occupied = 0.0
    for j in range(age, BINS):
        hits += next_uses[j] / touches
        occupied += (unused[j] + unused[j + 1]) / 2 * (edges[j + 1] - edges[j])
        best = max(best, hits / occupied)
    return best


class Model:
    """The policy as its formulas say, in dictionaries."""

    def __init__(self) -> None:
        self.chunks: dict[int, Chunk] = {}
        self.ghosts: dict[bytes, tuple[int, Label, float]] = {}
        self.touches: dict[Class, float] = {}
        self.uses: dict[Class, list[float]] = {}
        self.learned: dict[Class, tuple[float, list[float]]] = {}
        self.known: set[Class] = set()
        self.requests = self.order = self.run = 0
        self.now = 0.0
        self.lru_decides = True

    def move(self, slots: Sequence[int], *, under_way: bool) -> None:
        """These are the hottest, the last most of all, and one run."""
        self.run = max(self.run + 1, int(self.now * TICKS_PER_SECOND))
        for slot in slots:
            self.order += 1
            chunk = self.chunks[slot]
            chunk.order, chunk.run = self.order, self.run
            chunk.under_way, chunk.reserved = under_way, False

    def insert(self, slot: int, key: bytes) -> None:
        """A chunk has got a slot; its ghost says what it was."""
        self.chunks[slot] = chunk = Chunk(key)
        if key in self.ghosts:
            seen, label, used = self.ghosts.pop(key)
            if seen:
                chunk.seen, chunk.label, chunk.used = seen, label, used

    def use(self, slots: Sequence[int], label: Label) -> None:
        """A request has finished."""
        for slot in slots:
            chunk = self.chunks[slot]
            if chunk.seen:
                uses = self.uses.setdefault((chunk.seen, chunk.label), [0.0] * BINS)
                uses[model_bin(self.now - chunk.used)] += 1
            chunk.seen, chunk.label, chunk.used = min(3, chunk.seen + 1), label, self.now
            self.count((chunk.seen, label), 1)
        self.move(slots, under_way=False)
        self.requests += 1
        if self.requests % QuickPolicy.requests_per_decay == 0:
            self.touches = {kind: 0.9 * touches for kind, touches in self.touches.items()}
            self.uses = {kind: [0.9 * n for n in uses] for kind, uses in self.uses.items()}

    def relabel(self, slots: Sequence[int], label: Label) -> None:
        """A label comes late: those of the deepest chunk's run, if used, change their class."""
        for slot in slots:
            chunk = self.chunks[slot]
            same_run = chunk.run == self.chunks[slots[0]].run
            if not chunk.under_way and same_run and chunk.label != label:
                self.count((chunk.seen, chunk.label), -1)
                chunk.label = label
                self.count((chunk.seen, label), 1)

    def remember(self, chunk: Chunk) -> None:
        """A chunk was evicted; of all ghosts the oldest goes where there are too many."""
        self.ghosts.pop(chunk.key, None)
        used = chunk.used if chunk.seen else chunk.run / TICKS_PER_SECOND
        self.ghosts[chunk.key] = chunk.seen, chunk.label, used
        if len(self.ghosts) > 2 * SLOTS:
            del self.ghosts[next(iter(self.ghosts))]

    def count(self, kind: Class, touches: int) -> None:
        """Count touches of a class."""
        self.touches[kind] = max(0.0, self.touches.get(kind, 0.0) + touches)

    def learn(self) -> None:
        """Take the counts as they are."""
        for kind, touches in self.touches.items():
            if touches > 0:
                self.learned[kind] = touches, list(self.uses.get(kind, [0.0] * BINS))
        self.known = {
            k for k, touches in self.touches.items() if touches >= QuickPolicy.min_touches
        }

    def gain(self, chunk: Chunk) -> float:
        """The gain of keeping a chunk, at the latest insert, refresh or use."""
        age = max(0.0, self.now - chunk.run / TICKS_PER_SECOND)
        if self.lru_decides:
            return 0.3 / (age + 60)
        if chunk.seen:
            kinds = [(chunk.seen, chunk.label)]
        else:
            kinds = [(1, label) for label in Label if (1, label) in self.known]
        learned = [self.learned[kind] for kind in kinds if kind in self.learned]
        gains = [model_gain(*counts, model_bin(age)) for counts in learned]
        if chunk.seen and kinds[0] in self.known:
            return gains[0]
        return max([*gains, 0.3 / (age + 60)])

    def next_victims(self, pinned: set[int]) -> dict[int, float]:
        """The deepest chunk of the oldest and of the newest run of each list, and its gain."""
        lists: dict[tuple[Class, bool], list[int]] = {}
        for slot, chunk in sorted(self.chunks.items(), key=lambda item: item[1].order):
            if not chunk.reserved and slot not in pinned:
                lists.setdefault(((chunk.seen, chunk.label), chunk.under_way), []).append(slot)
        victims: dict[int, float] = {}
        for (kind, under_way), slots in lists.items():
            ends = [slots[0]]
            if not under_way and kind in self.known and not self.lru_decides:
                newest = self.chunks[slots[-1]].run
                ends.append(next(slot for slot in slots if self.chunks[slot].run == newest))
            victims.update((slot, self.gain(self.chunks[slot])) for slot in ends)
        return victims


def some_of(slots: Iterable[int], seed: int) -> list[int]:
    """Some of these slots, in any order."""
    rng, every = Random(seed), sorted(slots)
    return rng.sample(every, rng.randint(0, len(every)))


class AdaptiveMachine(RuleBasedStateMachine):
    """The policy beside the model: every victim is one of smallest gain at an end of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: dict[int, bytes] = {}
        self.policy = QuickPolicy(SLOTS, self.keys.__getitem__, Ghosts(2 * SLOTS))
        self.model = Model()
        self.pinned: set[int] = set()

    @rule(seed=seeds)
    def serve(self, seed: int) -> None:
        """Requests come, each for a few neighbouring keys, of which low ones come back sooner.

        Between them the other things happen.
        """
        rng = Random(seed)
        for _ in range(40):
            self.model.now += rng.choice([0.5, 3.0, 40.0, 3000.0])
            first, count = int(KEYS * rng.random() ** 2), rng.randrange(1, 5)
            keys = [b"key%d" % (number % KEYS) for number in range(first, first + count)]
            slot_of = {key: slot for slot, key in self.keys.items() if slot in self.model.chunks}
            missing = [key for key in keys if key not in slot_of]
            room = SLOTS - len(self.model.chunks)
            if room < len(missing):
                self.go(self.reserve(len(missing) - room), evict=True)
            free = [slot for slot in range(SLOTS) if slot not in self.model.chunks]
            self.insert(dict(zip(free, missing, strict=False)))
            slot_of = {self.keys[slot]: slot for slot in self.model.chunks}
            self.use([slot_of[key] for key in keys if key in slot_of], rng.choice(LABELS))
            match rng.randrange(10):
                case 0:
                    self.refresh(rng.randrange(1000))
                case 1:
                    self.relabel(rng.randrange(1000), rng.choice(LABELS))
                case 2:
                    self.lend(rng.randrange(4))
                case 3:
                    self.release(rng.randrange(1000))
                case 4:
                    self.pin(rng.randrange(1000))

    def insert(self, keys: dict[int, bytes]) -> None:
        """Slots get chunks with these keys."""
        self.keys.update(keys)
        for slot, key in keys.items():
            self.model.insert(slot, key)
        self.model.move(list(keys), under_way=True)
        self.policy.insert_all(list(keys), self.model.now)

    def use(self, slots: Sequence[int], label: Label) -> None:
        """A request finishes; with some of them the policy learns."""
        self.model.use(slots, label)
        self.policy.use_all(slots, self.model.now, label)
        self.model.lru_decides = self.policy.lru_decides
        while self.policy.learn():
            pass
        if self.model.requests % QuickPolicy.requests_per_lesson == 0:
            self.model.learn()

    def go(self, slots: Sequence[int], *, evict: bool) -> None:
        """Chunks are evicted, and leave ghosts, or removed, and leave none."""
        if evict:
            self.policy.evict(slots, self.model.now)
        for slot in slots:
            chunk = self.model.chunks.pop(slot)
            if evict:
                self.model.remember(chunk)
            else:
                self.policy.remove(slot)

    def reserve(self, n: int) -> list[int]:
        """Each victim is at an end of a list and has the smallest gain of all ends."""
        reserved = self.policy.reserve(n, lambda slot: slot not in self.pinned, self.model.now)
        for slot in reserved:
            victims = self.model.next_victims(self.pinned)
            assert victims[slot] <= min(victims.values()) * (1 + 1e-9)
            self.model.chunks[slot].reserved = True
        assert len(reserved) == n or not self.model.next_victims(self.pinned)
        return reserved

    @rule(seconds=st.sampled_from([0.00001, 0.5, 3.0, 40.0, 3000.0, 90_000.0]))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.model.now += seconds

    @rule(seed=seeds)
    def store(self, seed: int) -> None:
        """A request stores chunks where there is room."""
        stored = {chunk.key for chunk in self.model.chunks.values()}
        keys = [key for number in range(KEYS) if (key := b"key%d" % number) not in stored]
        free = [slot for slot in range(SLOTS) if slot not in self.model.chunks]
        slots = some_of(free, seed)
        self.insert(dict(zip(slots, Random(seed).sample(keys, len(slots)), strict=True)))

    @rule(seed=seeds)
    def refresh(self, seed: int) -> None:
        """Chunks are pinned for a load."""
        slots = some_of(self.model.chunks, seed)
        self.model.move(slots, under_way=True)
        self.policy.refresh_all(slots, self.model.now)

    @rule(seed=seeds, label=st.sampled_from(LABELS))
    def finish(self, seed: int, label: Label) -> None:
        """A request finishes whose chunks are any."""
        self.use(some_of(self.model.chunks, seed), label)

    @rule(seed=seeds, label=st.sampled_from(LABELS))
    def relabel(self, seed: int, label: Label) -> None:
        """A label comes late, for those chunks of the request that were not of use since."""
        slots = some_of(self.model.chunks, seed)
        slots.sort(key=lambda slot: self.model.chunks[slot].order)
        self.model.relabel(slots, label)
        self.policy.relabel_all(slots, label)

    @rule(seed=seeds)
    def pin(self, seed: int) -> None:
        """Other chunks than before may not go."""
        self.pinned = set(some_of(range(SLOTS), seed)[:4])

    @rule(n=st.integers(0, 4))
    def lend(self, n: int) -> None:
        """Some that go next are reserved."""
        self.reserve(n)

    @rule(seed=seeds)
    def release(self, seed: int) -> None:
        """Reserved chunks are candidates again."""
        slots = some_of((s for s, chunk in self.model.chunks.items() if chunk.reserved), seed)
        for slot in slots:
            self.model.chunks[slot].reserved = False
        self.policy.release(slots)

    @rule(seed=seeds, evict=st.booleans())
    def leave(self, seed: int, evict: bool) -> None:
        """Some chunks are evicted or removed."""
        self.go(some_of(self.model.chunks, seed)[:3], evict=evict)

    @rule()
    def clear(self) -> None:
        """A reset: chunks go, ghosts and what was learned stay."""
        self.policy.clear()
        self.model.chunks.clear()

    @invariant()
    def they_agree(self) -> None:
        """Both have the same chunks, reservations, ghosts and order."""
        self.policy.check_integrity()
        chunks = self.model.chunks
        assert self.policy.order() == sorted(chunks, key=lambda slot: chunks[slot].order)
        reserved = {slot for slot in chunks if self.policy.is_reserved(slot)}
        assert reserved == {slot for slot, chunk in chunks.items() if chunk.reserved}
        for number in range(KEYS):
            key = b"key%d" % number
            ghost = self.policy.ghosts.find(key)
            remembered = None if ghost is None else (ghost.seen, ghost.label, ghost.used)
            assert remembered == self.model.ghosts.get(key)


def test_the_policy_does_what_its_formulas_say() -> None:
    """After every step each victim is the one that the formulas name."""
    run_state_machine_as_test(AdaptiveMachine, settings=explored(40, 30))


@given(st.integers(1, 1000), st.lists(st.integers(0, 30), min_size=BINS, max_size=BINS))
def test_gains_are_those_of_the_formula(touches: int, next_uses: list[int]) -> None:
    """At each age the gain is the best rate of hits until any later age."""
    computed = gains(touches, np.array(next_uses, np.float64))
    expected = [model_gain(touches, next_uses, age) for age in range(BINS)]
    assert computed.tolist() == pytest.approx(expected)


operations = st.lists(
    st.tuples(
        st.sampled_from(["insert", "refresh", "use", "relabel", "reserve", "release", "evict"]),
        st.lists(st.integers(0, SLOTS - 1), unique=True),
        st.sampled_from(Label),
        st.sampled_from([0.0, 0.00005, 1.0, 500.0, 1e6]),
    ),
    max_size=60,
)


@given(operations)
@example(  # a request whose chunks are by turns of two classes
    [
        ("insert", [0, 1, 2, 3], Label.NONE, 0.0),
        ("use", [0, 2], Label.NONE, 0.0),
        ("use", [0, 1, 2, 3], Label.NONE, 0.0),
        ("reserve", [5, 0, 6, 1], Label.NONE, 0.0),
        ("reserve", [5, 4, 6, 7], Label.NONE, 0.0),
    ]
)
def test_before_anything_is_learned_it_is_lru(
    operations: list[tuple[str, list[int], Label, float]],
) -> None:
    """The same operations reserve the same chunks in the same order as with LRU."""
    adaptive, lru = (
        policy(SLOTS, b"%d".__mod__, Ghosts(2 * SLOTS)) for policy in (AdaptivePolicy, LruPolicy)
    )
    now = 1.7e9
    for name, slots, label, seconds in operations:
        now += seconds
        present = [slot for slot in slots if slot in lru]
        reserved = [slot for slot in slots if lru.is_reserved(slot)]
        may_evict = set(range(SLOTS)).difference(slots[::2]).__contains__
        for policy in (adaptive, lru):
            match name:
                case "insert":
                    policy.insert_all([slot for slot in slots if slot not in present], now)
                case "refresh":
                    policy.refresh_all(present, now)
                case "use":
                    policy.use_all(present, now, label)
                case "relabel":
                    policy.relabel_all([s for s in lru.order() if s in present], label)
                case "release":
                    policy.release(reserved)
                case "evict":
                    policy.evict(present, now)
        if name == "reserve":
            expected = lru.reserve(len(slots), may_evict, now)
            assert adaptive.reserve(len(slots), may_evict, now) == expected
        assert adaptive.order() == lru.order()


def test_a_part_of_a_working_set_larger_than_the_pool_stays() -> None:
    """Of conversations that come back in turns the adaptive policy finds chunks, LRU none."""

    def hits(policy_type: type[EvictionPolicy]) -> int:
        keys: dict[int, bytes] = {}
        policy = policy_type(8, keys.__getitem__, Ghosts(16))
        found = 0
        for turn in range(1500):
            key = b"%d" % (turn % 12)
            present = [slot for slot, known in keys.items() if known == key]
            found += len(present)
            if not present:
                if len(keys) == 8:
                    present = policy.reserve(1, lambda _: True, float(turn))
                    policy.evict(present, float(turn))
                present = present or [len(keys)]
                keys[present[0]] = key
                policy.insert_all(present, float(turn))
            policy.use_all(present, float(turn))
            policy.learn()
        return found

    assert hits(LruPolicy) == 0
    assert hits(AdaptivePolicy) > 400


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


def test_where_lru_would_find_more_it_decides() -> None:
    """Three requests' worth of chunks is what is lost each time; LRU decides ever longer.

    Of the ten chunks of each request the policy finds four, and LRU one more.
    """
    floor, now, changes = LruFloor(0), 1.0, list[int]()
    floor.touch(None, 10, now, in_pool=False)
    floor.end_request(1000)
    for number in range(1, 71 + 5 * LruFloor.min_lru_requests):
        before, last, now = floor.lru_decides, now, now + 1.0
        floor.touch(last, 4, now, in_pool=True)
        floor.touch(last, 1, now, in_pool=False)
        floor.touch(None, 5, now, in_pool=False)
        floor.end_request(1000)
        floor.check_integrity()
        if floor.lru_decides is not before:
            changes.append(number)
    first, again, second, at_last = changes
    assert 30 <= first <= 33
    assert again - first == LruFloor.min_lru_requests
    assert 30 <= second - again <= 33
    assert at_last - second == 4 * LruFloor.min_lru_requests


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


@given(st.sets(st.integers(0, 19)), st.sampled_from([1, 2]))
def test_slots_are_put_back_between_the_others(gone: set[int], which: int) -> None:
    """Whichever were taken out, each has the neighbours again that it had."""
    lists = SlotLists(20, 2)
    lists.append_all(range(20), repeat(which), 100)
    lists.remove_all(gone)
    lists.insert_all(which, sorted(gone))
    assert list(lists.walk(which)) == list(lists.walk_back(which))[::-1] == list(range(20))
    lists.check_integrity()


@pytest.mark.parametrize("policy_type", POLICIES.values(), ids=POLICIES)
def test_restored_chunks_go_by_their_last_use(policy_type: type[EvictionPolicy]) -> None:
    """The previous daemon's chunks go before all new ones, those used longest ago first."""
    policy = policy_type(8, b"%d".__mod__, Ghosts(16))
    policy.restore(np.array([5, 3, 4]), np.array([10.0, 10.0, 20.0]))
    policy.insert_all([0], 30.0)
    policy.check_integrity()
    assert policy.reserve(4, lambda _: True, 200.0) == [5, 3, 4, 0]
