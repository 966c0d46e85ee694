"""vLLM's half of the connector in the scheduler: stores, refusals, reports of requests."""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.kv_offload.base import OffloadingManager, OffloadKey, get_offload_group_idx

from kvd_client import Label
from kvd_client.vllm import metrics
from kvd_client.vllm.promotions import SAMPLES
from tests.vllm.configs import BLOCK, window
from tests.vllm.stepping import WAITS, Lender, Stepping, hits


@pytest.fixture
def lender() -> Lender:
    """A daemon that lends what is asked for."""
    return Lender(100)


@pytest.fixture
def stepping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lender: Lender) -> Stepping:
    """A scheduler of one group; a chunk is a block."""
    return Stepping(tmp_path, monkeypatch, lender)


@pytest.fixture
def windowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lender: Lender) -> Stepping:
    """A scheduler of a group that attends to everything, and one with a window."""
    return Stepping(tmp_path, monkeypatch, lender, window(["c", "d"]))


def blocks_of(stepping: Stepping, jobs: Iterable[int]) -> list[int]:
    """The blocks that these stores read, in order."""
    return [int(block) for number in jobs for block in stepping.jobs[number].src_spec.block_ids]


# ------------------------------------------------------------------- stores


def test_a_request_whose_load_failed_stores_again_and_loads_no_more(
    stepping: Stepping, lender: Lender
) -> None:
    """All its chunks are offered again, once, and its lookups miss; others' lookups do not."""
    request = stepping.come("failed", 4)
    keys = stepping.keys("failed")
    lender.present = set(keys[:3])
    lender.evicted = {keys[1]}
    assert stepping.admit("failed", 0, [1, 2, 3]) == 3 * BLOCK
    stepping.step()
    (load,) = stepping.jobs.values()
    assert (load.src_spec.missing, len(load.src_spec.slots)) == (1, 0)
    assert [ticket.keys for ticket in lender.unpinned] == [(keys[0], keys[2])]
    stepping.report(stepping.jobs, failed_loads=["failed", "gone"])
    assert stepping.statistics()[metrics.LOAD_FAILURES] == 1
    assert stepping.ask("failed") == hits(0)
    lender.present.clear()
    stepping.new.append(NewRequestData.from_request(request, ([1, 2, 3, 4],)))
    stepping.report(stepping.step(failed=3 * BLOCK))
    assert not stepping.step(failed=1)
    assert lender.offered == [tuple(keys[:3])]
    stepping.finish("failed")
    stepping.step()
    stepping.come("failed", 4)
    lender.present.update(stepping.keys("failed"))
    assert stepping.ask("failed") == hits(4)


def test_a_store_that_a_rank_calls_failed_is_given_up(stepping: Stepping, lender: Lender) -> None:
    """It loses its slots and is counted; a later store of the chunks is not."""
    stepping.add("a", 3)
    jobs = stepping.step(a=3 * BLOCK)
    stepping.report(jobs, failed=True)
    assert sorted(lender.failed) == sorted(stepping.keys("a"))
    assert stepping.statistics()[metrics.STORE_FAILURES] == 1
    stepping.half.reset_cache()
    jobs = stepping.step(a=1)
    assert blocks_of(stepping, jobs) == [1, 2, 3]
    stepping.report(jobs)
    assert len(lender.failed) == 3
    assert metrics.STORE_FAILURES not in stepping.statistics()


def test_a_chunk_that_is_being_stored_is_waited_for_so_long(
    stepping: Stepping, lender: Lender
) -> None:
    """A miss once the request has waited for `pending_timeout`; each request waits anew."""
    for name in ("a", "b"):
        stepping.come(name, 2)
        lender.pending.update(stepping.keys(name))
    assert stepping.ask("a") == WAITS
    stepping.now += 0.75
    assert stepping.ask("a") == WAITS
    stepping.now += 0.25
    assert stepping.ask("a") == hits(0)
    assert stepping.ask("b") == WAITS


def test_a_reset_does_not_store_again_what_a_window_has_left_behind(
    windowed: Stepping, lender: Lender
) -> None:
    """Where a window has been the blocks may be another request's; the other groups' are stored."""
    windowed.add("request", 3)
    windowed.report(windowed.step(request=3 * BLOCK))
    windowed.half.reset_cache()
    assert windowed.step(request=1)
    first, again = ([OffloadKey(key) for key in keys] for keys in lender.offered)
    assert set(map(get_offload_group_idx, first)) == {0, 1}
    assert again == [key for key in first if get_offload_group_idx(key) == 0]


def test_a_load_that_a_reset_overtakes_keeps_its_chunks_until_all_ranks_have_reported(
    stepping: Stepping, lender: Lender
) -> None:
    """With vLLM 0.32, which does not tell of their reports, the load loses them at the reset."""
    stepping.come("a", 3)
    lender.present = set(stepping.keys("a"))
    stepping.admit("a", 0, [1, 2, 3])
    stepping.step()
    stepping.half.reset_cache()
    assert len(lender.unpinned) == (not hasattr(OffloadingManager, "on_reset_flushed"))
    stepping.report(stepping.jobs)
    assert [ticket.keys for ticket in lender.unpinned] == [tuple(stepping.keys("a"))]


# ----------------------------------------------------- stores that find no slot


def test_a_pool_that_stays_full_is_not_asked_for_ever(stepping: Stepping, lender: Lender) -> None:
    """Where the daemon has lent nothing the chunks are given up, named to it, and counted."""
    lender.loans = None
    stepping.add("a", 3)
    stepping.add("b", 2)
    keys = stepping.keys("a")
    stepping.step(a=3 * BLOCK, b=2 * BLOCK)
    stepping.finish("a")
    stepping.step(b=1)
    assert not lender.used
    lender.loans = 0
    for _ in range(3):
        assert not stepping.step(b=1)
    assert len(lender.offered) == 2
    assert not stepping.half.has_pending_push_work()
    assert stepping.statistics()[metrics.CHUNKS_REFUSED] == 5
    assert lender.unstored[:3] == keys
    assert lender.used == [(keys, 3, Label.NONE)]


def test_chunks_whose_blocks_others_have_are_given_up(stepping: Stepping, lender: Lender) -> None:
    """Of a request that has ended; what is given away in the step itself is stored before."""
    lender.loans = None
    stepping.add("a", 5)
    stepping.step(a=5 * BLOCK)
    stepping.finish("a")
    stepping.add("b", 2, first=2)
    stepping.step(b=1)
    lender.loans = 9
    stepping.add("c", 1, first=5)
    jobs = stepping.step(c=1)
    assert blocks_of(stepping, jobs) == [1, 4, 5]
    assert stepping.flushed == set(jobs)
    assert stepping.statistics()[metrics.CHUNKS_REFUSED] == 2


def test_a_chunk_of_several_blocks_is_given_up_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lender: Lender
) -> None:
    """One of its blocks is another request's: none of the others is stored in a wrong place."""
    lender.loans = None
    stepping = Stepping(tmp_path, monkeypatch, lender, extra={"blocks_per_chunk": 2})
    stepping.add("a", 6)
    stepping.step(a=6 * BLOCK)
    stepping.finish("a")
    stepping.add("b", 1, first=3)
    stepping.step(b=1)
    lender.loans = 9
    assert blocks_of(stepping, stepping.step(b=1)) == [1, 2, 5, 6]


def test_what_a_window_has_passed_is_given_up(windowed: Stepping, lender: Lender) -> None:
    """Its block may be another request's while the request still runs; a full group's is not."""
    lender.loans = None
    windowed.add("a", 5)
    windowed.step(a=5 * BLOCK)
    windowed.add("b", 1, first=6)
    lender.loans = 99
    # The window's last chunk, of block 10, is not offered: a load ends before the last token.
    assert blocks_of(windowed, windowed.step(a=1, b=1)) == [1, 2, 3, 4, 5, 8, 9]


@pytest.mark.parametrize("seed", range(10))
def test_every_chunk_is_stored_in_the_end(stepping: Stepping, lender: Lender, seed: int) -> None:
    """Whatever loans come when, as long as some come: from its own block, and once."""
    source = random.Random(seed)
    going: dict[str, int] = {}
    begun: set[int] = set()
    names = iter(f"r{number}" for number in range(30))
    for _ in range(400):
        new = next(names, None)
        if new is not None:
            blocks = source.randint(1, 6)
            going[new] = blocks * BLOCK
            stepping.add(new, blocks)
        tokens = {
            name: min(left, source.randint(1, 3 * BLOCK))
            for name, left in going.items()
            if name == new or source.random() < 0.7
        }
        lender.loans = source.choice([None, None, 1, 2, 5])
        begun.update(stepping.step(**tokens))
        for name, count in tokens.items():
            going[name] -= count
            if not going[name]:
                del going[name]
                stepping.finish(name)
        ended = {number for number in begun if source.random() < 0.5}
        stepping.report(ended)
        begun -= ended
        if not going and not stepping.half.has_pending_push_work() and not stepping.ended:
            break
    stored = sorted(blocks_of(stepping, stepping.jobs))
    assert stored == list(range(1, stepping.next_block))
    assert metrics.CHUNKS_REFUSED not in stepping.statistics()
    assert not stepping.half.has_pending_push_work()


# ------------------------------------------------------- reports of requests


RETAIN = KvHintAction("1", "kv.retain", "1.0", {"ttl_seconds": 30})
FETCH = KvHintAction("2", "kv.fetch", "1.0", {"block_hashes": [1]})


@pytest.mark.parametrize(
    ("fields", "label", "counted"),
    [
        ({"params": {"kvd": {"resume_in_s": 30}}}, Label.UNDER_60S, [(1, 0, 0)]),
        (
            {"params": {"kvd": {"continues": "perhaps", "resume_in_s": 1e9}}},
            *(Label.LATER, [(1, 1, 1)]),
        ),
        ({"hints": KvHintsEnvelope("0.1", "m", [FETCH, RETAIN])}, Label.UNDER_60S, [(1, 1, 0)]),
        ({}, Label.NONE, []),
    ],
)
def test_a_requests_label_is_reported_at_its_end(
    stepping: Stepping,
    lender: Lender,
    fields: dict[str, Any],
    label: Label,
    counted: list[tuple[int, int, int]],
) -> None:
    """Its hints, kvd's own or vLLM's, are read once, when it comes, and counted."""
    stepping.add("a", 3, **fields)
    stepping.run("a", 3 * BLOCK)
    assert lender.used == [(stepping.keys("a"), 3, label)]
    assert lender.hints == counted


def test_a_request_is_reported_once_its_refused_chunks_have_slots(
    stepping: Stepping, lender: Lender
) -> None:
    """The daemon counts a use of chunks that it holds: the report does not come before them."""
    lender.loans = None
    stepping.add("a", 2)
    keys = stepping.keys("a")
    stepping.run("a", 2 * BLOCK)
    assert not lender.used
    lender.loans = 1
    stepping.step()
    assert not lender.used
    lender.loans = 1
    stepping.step()
    stepping.step()
    assert lender.used == [(keys, 2, Label.NONE)]
    assert not lender.unstored


def test_what_neither_cache_has_is_missed_once(stepping: Stepping, lender: Lender) -> None:
    """Without chunks of the engine's own cache, found ones and the answer; not at each lookup."""
    stepping.add("a", 5)
    keys = stepping.keys("a")
    lender.present = {keys[1]}
    assert not lender.missed
    assert stepping.admit("a", BLOCK, [1, 2, 3, 4, 5]) == BLOCK
    assert lender.missed == [keys[2:]]
    stepping.report(range(1))
    stepping.admit("a", 2 * BLOCK)  # again, as after a preemption
    assert lender.missed == [keys[2:]]
    stepping.run("a", 5 * BLOCK)
    stepping.add("b", 1)
    lender.present.update(stepping.keys("b"))
    stepping.admit("b", 0, [6])
    assert len(lender.missed) == 1


def test_each_missed_token_is_named_by_the_group_of_full_attention(
    windowed: Stepping, lender: Lender
) -> None:
    """With windows beside it, no token is named twice; windows' chunks are reported as offered."""
    windowed.add("a", 6)
    full, windows = windowed.keys("a"), windowed.keys("a", 1)
    windowed.admit("a", 0)
    assert lender.missed == [full]
    windowed.new[0].block_ids[1][:2] = [0, 0]  # the window has passed these blocks
    windowed.run("a", 6 * BLOCK)
    (used,) = lender.used
    offered = {key for offer in lender.offered for key in offer}
    assert set(used.keys) == offered | set(full)
    assert not offered & set(windows[:2])
    assert [key for key in used.keys if key in full] == full
    assert used.prompt == len(used.keys)


# ------------------------------------------------------------ how fast an engine computes


def compute(stepping: Stepping, seconds: float, **tokens: int) -> None:
    """Compute so many tokens of these requests in one step that takes so long."""
    stepping.step(**tokens)
    stepping.now += seconds
    stepping.report(())


def test_prompts_are_measured_without_answers_and_idle_time(stepping: Stepping) -> None:
    """Nothing is known before one was computed; one may be computed in several steps."""
    speed = stepping.manager.tier_waits.speed
    stepping.add("answered", 1)
    assert speed.seconds(1000) is None
    compute(stepping, 0.016, answered=BLOCK)
    stepping.add("long", 5 * BLOCK)
    compute(stepping, 9.0, long=8)  # larger than any later one of its size
    for number in range(3):
        stepping.now += 60.0
        stepping.add(f"new-{number}", 63)
        tokens = {f"new-{number}": 63 * BLOCK, "long": BLOCK, "answered": 1}
        compute(stepping, 0.5, **tokens)
    assert speed.seconds(2048) == 1.0


def test_one_slow_step_changes_nothing(stepping: Stepping, lender: Lender) -> None:
    """The median of the latest ones counts, so that it follows a lasting change."""
    stepping.add("a", 16 * 64)
    for seconds in (0.5, 0.5, 9.0, 0.5):
        compute(stepping, seconds, a=1024)
    assert stepping.manager.tier_waits.speed.seconds(1024) == 0.5
    for _ in range(SAMPLES // 2 + 1):
        compute(stepping, 0.25, a=1024)
    assert stepping.manager.tier_waits.speed.seconds(1024) == 0.25
    assert lender.prefill_seconds == 0.25 / 1024


def test_small_and_large_steps_are_kept_apart(stepping: Stepping, lender: Lender) -> None:
    """A prompt goes by the largest steps that are no larger than it; the daemon gets the largest.

    A step has a fixed cost.
    """
    stepping.add("a", 100)
    for tokens, seconds in ((1024, 0.128), (16, 0.016)):
        compute(stepping, seconds, a=tokens)
    for tokens, seconds in ((17, 0.017), (600, 0.6), (4096, 0.512), (8, 0.008)):
        assert stepping.manager.tier_waits.speed.seconds(tokens) == pytest.approx(seconds)
    assert lender.prefill_seconds == pytest.approx(125e-6)


# ------------------------------------------------------------------ statistics


def test_whether_a_daemon_serves_is_told_when_it_changes(
    stepping: Stepping, lender: Lender
) -> None:
    """And once a second; a step with nothing to tell has no statistics."""
    told = []
    for attached, seconds in [(True, 0.0), (True, 0.9), (False, 0.0), (False, 1.0), (False, 0.5)]:
        lender.attached = attached
        stepping.now += seconds
        told.append(stepping.statistics().get(metrics.ATTACHED))
    assert told == [1, None, 0, 0, None]
    assert stepping.manager.get_stats() is None
