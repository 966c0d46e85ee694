"""vLLM's half of the connector in the scheduler: stores, refusals, reports of requests."""

import random
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.kv_offload.base import OffloadKey, get_offload_group_idx
from vllm.v1.outputs import KVConnectorOutput

from kvd_client import Label
from kvd_client.vllm import metrics
from tests.vllm.configs import BLOCK, window
from tests.vllm.stepping import Lender, Stepping


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


def blocks_of(stepping: Stepping, jobs: dict[int, object]) -> list[int]:
    """The blocks that these stores read, in order."""
    return [int(block) for number in jobs for block in stepping.jobs[number].src_spec.block_ids]


def counted(stepping: Stepping) -> dict[str, float]:
    """The manager's statistics since the last time."""
    figures: dict[str, float] = stepping.manager.get_stats().reduce()
    return figures


def keys_of(stepping: Stepping, name: str, group: int = 0) -> list[bytes]:
    """The keys of a running request's chunks."""
    state = stepping.half._req_status[name].group_states[group]
    return list(state.offload_keys)


def run(stepping: Stepping, name: str, tokens: int) -> None:
    """Compute so many tokens of the request in one step, which ends then."""
    jobs = stepping.step(**{name: tokens})
    stepping.finish(name)
    stepping.step()
    stepping.report(jobs)


# ------------------------------------------------------------------- stores


def test_what_was_stored_is_offered_again_after_a_failed_load(
    stepping: Stepping, lender: Lender
) -> None:
    """All of it; and not twice without one."""
    stepping.add("request", 3)
    jobs = stepping.step(request=3 * BLOCK)
    (offered,) = lender.offered
    assert len(offered) == 3
    stepping.report(jobs)
    assert not stepping.step(request=1)
    stepping.half.update_connector_output(KVConnectorOutput(failed_recving={"request", "gone"}))
    lender.present.clear()
    assert stepping.step(request=1)
    assert lender.offered == [offered, offered]


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


# ----------------------------------------------------- stores that find no slot


def test_a_pool_that_stays_full_is_not_asked_for_ever(stepping: Stepping, lender: Lender) -> None:
    """Where the daemon has lent nothing the chunks are given up, named to it, and counted."""
    lender.loans = None
    stepping.add("a", 3)
    stepping.add("b", 2)
    keys = keys_of(stepping, "a")
    stepping.step(a=3 * BLOCK, b=2 * BLOCK)
    stepping.finish("a")
    stepping.step(b=1)
    assert not lender.used
    lender.loans = 0
    for _ in range(3):
        assert not stepping.step(b=1)
    assert len(lender.offered) == 2
    assert not stepping.half.has_pending_push_work()
    assert counted(stepping)[metrics.CHUNKS_REFUSED] == 5
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
    assert counted(stepping)[metrics.CHUNKS_REFUSED] == 2


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
    assert metrics.CHUNKS_REFUSED not in counted(stepping)
    assert not stepping.half.has_pending_push_work()


# ------------------------------------------------------- reports of requests


@pytest.mark.parametrize(
    ("kvd", "label", "counted"),
    [
        ({"resume_in_s": 30}, Label.UNDER_60S, (1, 0, 0)),
        ({"continues": False}, Label.DONE, (1, 0, 0)),
        ({"continues": "perhaps", "resume_in_s": 1e9}, Label.LATER, (1, 1, 1)),
        (None, Label.NONE, None),
    ],
)
def test_a_requests_label_is_reported_at_its_end(
    stepping: Stepping,
    lender: Lender,
    kvd: dict[str, Any] | None,
    label: Label,
    counted: tuple[int, int, int] | None,
) -> None:
    """Its hints are read once, at its begin, and counted."""
    stepping.add("a", 3, params=kvd and {"kvd": kvd})
    keys = keys_of(stepping, "a")
    run(stepping, "a", 3 * BLOCK)
    assert lender.used == [(keys, 3, label)]
    assert lender.hints == ([] if counted is None else [counted])


def test_vllms_own_envelope_of_hints_is_read(stepping: Stepping, lender: Lender) -> None:
    """Actions that say when chunks are needed are the label; others are counted."""
    retain = KvHintAction("1", "kv.retain", "1.0", {"ttl_seconds": 30})
    fetch = KvHintAction("2", "kv.fetch", "1.0", {"block_hashes": [1]})
    stepping.add("a", 1, hints=KvHintsEnvelope("0.1", "m", [fetch, retain]))
    run(stepping, "a", BLOCK)
    assert [used.label for used in lender.used] == [Label.UNDER_60S]
    assert lender.hints == [(1, 1, 0)]


def test_a_request_is_reported_once_its_refused_chunks_have_slots(
    stepping: Stepping, lender: Lender
) -> None:
    """The daemon counts a use of chunks that it holds: the report does not come before them."""
    lender.loans = None
    stepping.add("a", 2)
    keys = keys_of(stepping, "a")
    run(stepping, "a", 2 * BLOCK)
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
    keys = keys_of(stepping, "a")
    lender.present = {keys[1]}
    assert not lender.missed
    assert stepping.admit("a", BLOCK, [1, 2, 3, 4, 5]) == BLOCK
    assert lender.missed == [keys[2:]]
    stepping.report(range(1))
    stepping.admit("a", 2 * BLOCK)  # again, as after a preemption
    assert lender.missed == [keys[2:]]
    run(stepping, "a", 5 * BLOCK)
    stepping.add("b", 1)
    lender.present.update(keys_of(stepping, "b"))
    stepping.admit("b", 0, [6])
    assert len(lender.missed) == 1


def test_each_missed_token_is_named_by_the_group_of_full_attention(
    windowed: Stepping, lender: Lender
) -> None:
    """With windows beside it, no token is named twice; windows' chunks are reported as offered."""
    windowed.add("a", 6)
    full, windows = keys_of(windowed, "a"), keys_of(windowed, "a", 1)
    windowed.admit("a", 0)
    assert lender.missed == [full]
    windowed.new[0].block_ids[1][:2] = [0, 0]  # the window has passed these blocks
    run(windowed, "a", 6 * BLOCK)
    (used,) = lender.used
    offered = {key for offer in lender.offered for key in offer}
    assert set(used.keys) == offered | set(full)
    assert not offered & set(windows[:2])
    assert [key for key in used.keys if key in full] == full
    assert used.prompt == len(used.keys)


def test_the_measured_speed_of_prefill_is_reported(stepping: Stepping, lender: Lender) -> None:
    """By the largest steps, which long prompts fill, once a step has ended."""
    stepping.add("a", 40)
    stepping.step(a=3)
    stepping.report(())
    small = lender.prefill_seconds
    assert small is not None
    stepping.step(a=30 * BLOCK)
    stepping.report(())
    large = lender.prefill_seconds
    measured = stepping.manager.tier_waits.speed.seconds(30 * BLOCK)
    assert measured is not None
    assert large == pytest.approx(measured / (30 * BLOCK))
    stepping.step(a=3)
    stepping.report(())
    assert lender.prefill_seconds == large
