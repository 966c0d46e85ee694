"""Playing a trace: hits by policy, and `kvd replay`."""

import json
import random
from collections import OrderedDict
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from kvd.cache.adaptive import POLICIES
from kvd.cache.eviction import LruPolicy
from kvd.cli import cli
from kvd.errors import TraceError
from kvd.metrics.reading import NOTHING
from kvd.replay import (
    Trace,
    TracedRequest,
    read_trace,
    replay_belady,
    replay_policy,
)


def trace_of(*prompts: Sequence[int]) -> Trace:
    """A request a second; equal chunks have all before them equal."""
    requests = [
        TracedRequest(float(second), 512 * len(prompt), np.array(prompt, np.int32))
        for second, prompt in enumerate(prompts)
    ]
    return Trace(requests, 1 + max(max(prompt, default=0) for prompt in prompts), 512)


def random_trace(seed: int, requests: int = 300) -> Trace:
    """Conversations that go on or end, with common beginnings."""
    rng, prompts = random.Random(seed), [[0]]
    fresh = iter(range(1, 100_000))
    for _ in range(requests):
        begin = rng.choice(prompts[-20:])
        begin = begin[: rng.randint(1, len(begin))] if rng.random() < 0.3 else begin
        prompts.append([*begin, *(next(fresh) for _ in range(rng.randint(0, 5)))])
    return trace_of(*prompts)


def lru_hits(trace: Trace, capacity: int) -> list[int]:
    """The rule in the plain way: a dictionary in order of use, the tail touched first."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = []
    for request in trace.requests:
        prompt = request.chunks.tolist()
        hits.append(next((i for i, c in enumerate(prompt) if c not in held), len(prompt)))
        for chunk in reversed(prompt):
            held[chunk] = None
            held.move_to_end(chunk)
        while len(held) > capacity:
            held.popitem(last=False)
    return hits


@pytest.mark.parametrize("num_slots", [1, 50, 400])
def test_lru_finds_what_a_plain_dictionary_in_order_of_use_finds(num_slots: int) -> None:
    """Request by request, also where a prompt is larger than the pool."""
    trace = random_trace(num_slots)
    assert replay_policy(trace, LruPolicy, num_slots).tolist() == lru_hits(trace, num_slots)


def best_hits(trace: Trace, capacity: int) -> int:
    """The most chunks that can be found: every choice of what to keep is tried."""
    best = {frozenset[int](): 0}
    for request in trace.requests:
        prompt = request.chunks.tolist()
        after: dict[frozenset[int], int] = {}
        for held, hits in best.items():
            num_hits = next((i for i, c in enumerate(prompt) if c not in held), len(prompt))
            candidates = sorted(held | set(prompt))
            for size in range(min(capacity, len(candidates)) + 1):
                for retained in combinations(candidates, size):
                    key = frozenset(retained)
                    after[key] = max(after.get(key, 0), hits + num_hits)
        best = after
    return max(best.values())


# Chunks of a tree: 0 stands before 1 and 2, 1 before 3 and 4, 5 before 6.
PATHS = ((0, 1, 3), (0, 1, 4), (0, 2), (5, 6))
PROMPTS = st.sampled_from(PATHS).flatmap(
    lambda path: st.integers(1, len(path)).map(lambda length: path[:length])
)


@given(st.lists(PROMPTS, min_size=1, max_size=6), st.integers(1, 3))
def test_belady_finds_as_much_as_the_best_choice(prompts: list[list[int]], slots: int) -> None:
    """Compared with every choice of chunks to keep, on small traces."""
    trace = trace_of(*prompts)
    assert replay_belady(trace, slots).sum() == best_hits(trace, slots)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_finds_more_than_belady(policy: str) -> None:
    """And with room for every chunk each policy finds as much."""
    trace = random_trace(1)
    for num_slots in (10, 40, 160):
        num_hits = replay_policy(trace, POLICIES[policy], num_slots).sum()
        assert 0 < num_hits <= replay_belady(trace, num_slots).sum()
    room = trace.num_chunks
    assert (replay_policy(trace, POLICIES[policy], room) == replay_belady(trace, room)).all()


def line(tokens: int, *hash_ids: int, timestamp: float = 1) -> str:
    """A request in Mooncake's form."""
    request = {"timestamp": timestamp, "input_length": tokens, "hash_ids": hash_ids, "type": "text"}
    return json.dumps(request) + "\n"


def test_kvd_replay_shows_each_policy_at_several_sizes(tmp_path: Path) -> None:
    """Hit tokens, their share, and the prefill seconds that they save; a last chunk is shorter."""

    def run(*arguments: str) -> str:
        done = CliRunner().invoke(cli, ["replay", *arguments])
        assert done.exit_code == 0, done.output
        return done.stdout

    path = tmp_path / "trace.jsonl"
    prompts = [[1, 2], [3, 4], [1, 2], [5, 6], [1, 2]]
    path.write_text("".join(line(1000, *ids, timestamp=1000 * n) for n, ids in enumerate(prompts)))
    size = ("--cpu-bytes", "4MiB", "--bytes-per-chunk", "1MiB")
    shown = json.loads(run(str(path), *size, "--prefill-seconds-per-token", "0.01", "--json"))
    sizes = [(pool["cpu_bytes"] >> 20, pool["slots"]) for pool in shown["pools"]]
    assert sizes == [(2, 2), (4, 4), (8, 8), (16, 16)]
    half, whole, *_ = (pool["policies"] for pool in shown["pools"])
    assert list(half) == [*POLICIES, "adaptive+hints", "belady"]
    assert half["lru"]["hit_tokens"] == 0
    assert half["belady"]["hit_tokens"] == 2000
    assert whole["lru"] == {"hit_tokens": 2000, "hit_ratio": 0.4, "prefill_seconds_saved": 20.0}
    assert (shown["requests"], shown["prompt_tokens"], shown["chunks"]) == (5, 5000, 6)
    table = run(str(path), *size, "--policy", "lru")
    assert [line.split() for line in table.splitlines() if "lru" in line][1] == [
        *("│", "4", "MiB", "│", "4", "│", "lru", "│", "2,000", "│", "40", "%", "│", NOTHING, "│")
    ]


def test_lines_become_requests_in_order_of_time(tmp_path: Path) -> None:
    """Times are in seconds, equal beginnings are equal chunks; a blank first line is none."""
    path = tmp_path / "trace.jsonl"
    path.write_text(line(1024, 7, 9, timestamp=2500) + line(1300, 7, 8, 5, timestamp=1000))
    trace = read_trace(path)
    assert [request.time for request in trace.requests] == [1.0, 2.5]
    assert [request.tokens for request in trace.requests] == [1300, 1024]
    (head, second, _), (same, other) = (request.chunks.tolist() for request in trace.requests)
    assert head == same
    assert second != other
    assert (trace.num_chunks, trace.tokens, trace.tokens_per_chunk) == (4, 2324, 512)
    texts = [{"timestamp": 2.5e6, "input": "a" * 512}, {"timestamp": 1e6, "input": "a" * 300}]
    path.write_text("\n" + "".join(json.dumps(text) + "\n" for text in texts))
    trace = read_trace(path)
    assert [request.time for request in trace.requests] == [1.0, 2.5]
    assert [request.tokens for request in trace.requests] == [75, 128]
    assert [request.chunks.tolist() for request in trace.requests] == [[0], [0, 1]]


def test_conversations_overlap_as_many_at_a_time_as_there_are_users(tmp_path: Path) -> None:
    """Their ids are their own, sub-agents are nested, and a user begins when the last has ended."""
    agent = {"t": 1, "type": "subagent", "requests": [{"t": 0.5, "in": 64, "hash_ids": [9]}]}
    first, last = {"t": 0, "in": 64, "hash_ids": [1]}, {"t": 4, "in": 130, "hash_ids": [1, 2]}
    for name in "abc":
        conversation = {"block_size": 64, "requests": [first, agent, last]}
        (tmp_path / f"{name}.json").write_text(json.dumps(conversation))
    trace = read_trace(tmp_path, users=2)
    assert [request.time for request in trace.requests] == [0, 0, 1.5, 1.5, 4, 4, 4, 5.5, 8]
    assert trace.num_chunks == 9
    assert trace.tokens_per_chunk == 64


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (line(512, 1) + "x\n", "t.jsonl:2: JSON is mal"),
        ("{}\n", "t.jsonl:1: Object missing required field `timestamp`; a line is {"),
        (line(512, 1, timestamp=-1), "t.jsonl:1: Expected `float` >= 0"),
        (
            "\n" + line(512, 1, 2, 3, 4),
            "t.jsonl:2: 4 hash_ids for input_length = 512, where --tokens-per-id 512 needs 1; 1",
        ),
        (
            line(4096, 1),
            "t.jsonl:1: 1 hash_ids for input_length = 4,096, where --tokens-per-id 512 needs 8; 4",
        ),
        ("", "t.jsonl: holds no request; a line is {"),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong_and_the_remedy(
    tmp_path: Path, text: str, error: str
) -> None:
    """One error: file, line, fault, what a line must be."""
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError) as raised:
        read_trace(path)
    assert str(raised.value).startswith(f"{tmp_path}/{error}")


def test_what_is_no_trace_is_named(tmp_path: Path) -> None:
    """A file that is missing, a folder without traces, a document of another kind."""
    with pytest.raises(TraceError, match=r"absent\.jsonl: cannot be read \(No such file"):
        read_trace(tmp_path / "absent.jsonl")
    with pytest.raises(TraceError, match=r"no \*\.json or \*\.jsonl in it"):
        read_trace(tmp_path)
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(TraceError, match=r"a\.json: Expected `object`, got `array`; .*\*\.jsonl"):
        read_trace(tmp_path)
