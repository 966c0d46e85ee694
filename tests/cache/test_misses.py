"""What is remembered of chunks that left memory, why keys are missed, and the miss-ratio curve."""

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvd.cache.chunks import ChunkTable
from kvd.cache.ghosts import Ghost, GhostCause, Ghosts, MissReasons
from kvd.cache.miss_curve import BINS_PER_POOL, HALVING_SECONDS, MissCurve
from kvd.metrics.counts import MissReason
from kvd_proto.messages import Label
from tests.cache.tables import make_table

CAPACITY = 6

keys = st.integers(0, 11).map(lambda number: b"key%d" % number)


class GhostMachine(RuleBasedStateMachine):
    """Ghosts beside a dictionary that is ordered by age."""

    def __init__(self) -> None:
        super().__init__()
        self.ghosts = Ghosts(CAPACITY)
        self.model: dict[bytes, Ghost] = {}
        self.now = 0.0

    @rule(
        key=keys,
        cause=st.sampled_from(GhostCause),
        seen=st.integers(0, 3),
        label=st.sampled_from(Label),
        used=st.floats(0, 1e9),
    )
    def add(self, key: bytes, cause: GhostCause, seen: int, label: Label, used: float) -> None:
        """The newest replaces the key's older one, or the oldest of all where there is no room."""
        self.now += 1.0
        self.ghosts.add(key, cause, self.now, used=used, seen=seen, label=label)
        older = self.model.pop(key, None)
        ghost = Ghost(cause, seen, label, used, self.now)
        if older is not None and not seen:
            ghost = older._replace(cause=cause, left_at=self.now)
        if len(self.model) == CAPACITY:
            del self.model[next(iter(self.model))]
        self.model[key] = ghost

    @rule(key=keys)
    def take(self, key: bytes) -> None:
        """A key that is taken is found no more."""
        assert self.ghosts.take(key) == self.model.pop(key, None)

    @invariant()
    def every_key_is_found_or_not(self) -> None:
        """All that the model has are found as they were added, and no others."""
        self.ghosts.check_integrity()
        assert len(self.ghosts) == len(self.model)
        for number in range(12):
            key = b"key%d" % number
            assert self.ghosts.find(key) == self.model.get(key)


TestGhostMachine: Any = GhostMachine.TestCase


def misses(table: ChunkTable, elsewhere: Callable[[bytes], bool] = lambda _: False) -> MissReasons:
    """What counts the missed keys of a table."""
    return MissReasons(table.directory, table.ghosts, table.counts, elsewhere)


def counted(table: ChunkTable) -> dict[str, int]:
    """The reasons that were counted."""
    return {reason: count for reason, count in table.counts.missed.items() if count}


@pytest.mark.parametrize("cause", list(GhostCause))
def test_a_ghost_says_why_its_key_is_missed(cause: GhostCause) -> None:
    """Evicted, refused, quota, reset and removed: each cause of a ghost is the reason of a miss."""
    table = make_table(4)
    table.ghosts.add(b"key 0", cause, 1.0)
    misses(table).count([b"key 0"], 2.0)
    assert counted(table) == {cause.name.lower(): 1}


def test_another_namespace_is_asked_last() -> None:
    """A key that another namespace has is of another layout, unless it was here itself."""
    table, asked = make_table(4), list[bytes]()
    table.ghosts.add(b"reset", GhostCause.RESET, 1.0)

    def elsewhere(key: bytes) -> bool:
        asked.append(key)
        return key == b"other"

    misses(table, elsewhere).count([b"other", b"reset", b"new"], 2.0)
    reasons = (MissReason.OTHER_LAYOUT, MissReason.RESET, MissReason.NEVER_SEEN)
    assert counted(table) == dict.fromkeys(reasons, 1)
    assert asked == [b"other", b"new"]


CHUNKS = BINS_PER_POOL  # a bin is one chunk: what the curve says is exact
TURNS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(1, 12), st.integers(0, 14)),
    max_size=60,
)


def prompt_of(conversation: int, branch: int, length: int) -> list[bytes]:
    """Keys of a conversation's first chunks; from the fifth on those of one of its branches."""
    return [
        b"%d/%d/%d" % (conversation, branch if position > 4 else 0, position)
        for position in range(length)
    ]


class Stack:
    """The LRU stack as a list, hottest first."""

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.distances: list[int] = []
        self.prompt_keys = 0

    def record(self, keys: Sequence[bytes], prompt: int) -> None:
        """Take in a request, as `MissCurve.record` does."""
        self.prompt_keys += min(prompt, len(keys))
        self.distances += [self.keys.index(key) for key in keys[:prompt] if key in self.keys]
        self.keys = [*keys, *(key for key in self.keys if key not in keys)]

    def hit_ratio(self, chunks: int) -> float:
        """Share of prompt keys that a pool of so many chunks finds."""
        return sum(distance < chunks for distance in self.distances) / max(1, self.prompt_keys)


@given(TURNS)
def test_the_curve_of_all_keys_is_exact(turns: list[tuple[int, int, int, int]]) -> None:
    """With prompts that branch, and answers that are stored without having been prompt_keys for."""
    curve, stack = MissCurve(CHUNKS, sample_every=1), Stack()
    for conversation, branch, length, prompt in turns:
        keys = prompt_of(conversation, branch, length)
        curve.record(keys, prompt)
        stack.record(keys, prompt)
        curve.tidy()
    curve.check_integrity()
    for chunks in range(CHUNKS // 4, CHUNKS):
        assert curve.hit_ratio(chunks) == pytest.approx(stack.hit_ratio(chunks))
    if stack.prompt_keys:
        assert curve.ceiling == pytest.approx(len(stack.distances) / stack.prompt_keys)
        assert curve.first_time == pytest.approx(1 - curve.ceiling)


def conversations(seed: int, requests: int) -> list[list[bytes]]:
    """Prompts of conversations that grow, those begun lately more often, with system prompts."""
    rng = random.Random(seed)
    turns: dict[int, int] = {}
    prompts = []
    for number in range(requests):
        conversation = number // 4 - int(rng.expovariate(1 / 60))
        turns[conversation] = turns.get(conversation, 0) + rng.randint(1, 12)
        system = [b"system %d/%d" % (conversation % 3, position) for position in range(6)]
        own = [b"%d/%d" % (conversation, position) for position in range(turns[conversation])]
        prompts.append(system + own)
    return prompts


def test_a_sample_tells_the_same_as_all_keys() -> None:
    """One key of twenty, for pools of half to three times the size: within three points."""
    all_keys, sample = MissCurve(1000, sample_every=1), MissCurve(1000, sample_every=20)
    for keys in conversations(1, 4000):
        all_keys.record(keys, len(keys))
        sample.record(keys, len(keys))
    assert sample.num_keys < all_keys.num_keys / 4
    assert 0.2 < all_keys.hit_ratio(500) < all_keys.hit_ratio(3000) - 0.2
    for chunks in (500, 750, 1000, 1250, 1500, 2000, 3000):
        assert sample.hit_ratio(chunks) == pytest.approx(all_keys.hit_ratio(chunks), abs=0.03)
    assert sample.ceiling == pytest.approx(all_keys.ceiling, abs=0.03)
    assert sample.missed_depth(1000) == pytest.approx(all_keys.missed_depth(1000), rel=0.2)


@given(st.lists(st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=30), max_size=30))
@settings(max_examples=50)
def test_any_keys_leave_it_consistent(requests: list[list[bytes]]) -> None:
    """Also those of a client that repeats keys, or names them elsewhere in a prompt."""
    curve = MissCurve(1, sample_every=2)
    for keys in requests:
        curve.record(keys, len(keys) + 1)
        curve.check_integrity()
        ratios = [curve.hit_ratio(chunks) for chunks in (0, 0.5, 1, 2, 4, 8, 1000)]
        assert all(smaller <= larger for smaller, larger in pairwise([*ratios, curve.ceiling, 1]))


def test_an_hour_halves_what_was_before() -> None:
    """Of two hours with other reuse the later one counts twice; a long pause counts as an hour."""
    curve = MissCurve(CHUNKS, sample_every=1)
    curve.note_lookups(0, 0, 0.0)
    for number in range(8):
        curve.record([b"%d" % number], 1)
    curve.note_lookups(800, 0, HALVING_SECONDS)
    assert (curve.requests, curve.prompt_keys, curve.first_time, curve.lookup_tokens) == (
        4,
        4,
        1,
        400,
    )
    for _ in range(8):
        curve.record([b"0"], 1)
    curve.note_lookups(800, 800, HALVING_SECONDS + 1)
    assert (curve.ceiling, curve.hit_ratio(16)) == (8 / 12, 8 / 12)
    assert (curve.lookup_tokens, curve.hit_tokens, curve.seconds) == (
        1200,
        800,
        HALVING_SECONDS / 2 + 1,
    )
    curve.note_lookups(0, 0, 100 * HALVING_SECONDS)
    assert (curve.requests, curve.lookup_tokens) == (6, 600)
    assert curve.seconds == (HALVING_SECONDS * 3 / 2 + 1) / 2
