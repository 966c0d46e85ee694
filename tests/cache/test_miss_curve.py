"""The miss-ratio curve beside a plain LRU stack, and what bounds its time and memory."""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.cache.miss_curve import BINS_PER_POOL, HALVING_SECONDS, MissCurve

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
