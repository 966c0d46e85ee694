"""Requests are reported to the daemon as a whole, each with its label, and what it has missed."""

from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

from kvd_client import Label
from tests.vllm.configs import BLOCK, window
from tests.vllm.stepping import Lender, Stepping

ROOM = 100


@pytest.fixture
def lender() -> Lender:
    """A daemon that lends what is asked for."""
    return Lender(ROOM)


@pytest.fixture
def stepping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lender: Lender) -> Stepping:
    """A scheduler of one group; a chunk is a block."""
    return Stepping(tmp_path, monkeypatch, lender)


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


def test_the_answers_chunks_are_reported_behind_the_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lender: Lender
) -> None:
    """How many are the prompt's is part of the report."""
    stepping = Stepping(tmp_path, monkeypatch, lender, extra={"offload_prompt_only": False})
    request = stepping.add("a", 2)
    stepping.step(a=2 * BLOCK)
    request.append_output_token_ids(list(range(BLOCK + 1)))
    stepping.half._req_status["a"].group_states[0].block_ids.append(9)
    request.num_computed_tokens += BLOCK
    stepping.finish("a")
    keys = keys_of(stepping, "a")
    assert len(keys) == 3
    stepping.step()
    assert lender.used == [(keys, 2, Label.NONE)]


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


def test_refused_chunks_that_are_given_up_are_named_to_the_daemon(
    stepping: Stepping, lender: Lender
) -> None:
    """And their request is reported, with them: it has asked for them."""
    lender.loans = None
    stepping.add("a", 2)
    keys = keys_of(stepping, "a")
    run(stepping, "a", 2 * BLOCK)
    lender.loans = 0
    stepping.step()
    assert lender.unstored == keys
    assert lender.used == [(keys, 2, Label.NONE)]


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lender: Lender
) -> None:
    """With windows beside it, no token is named twice; windows' chunks are reported as offered."""
    stepping = Stepping(tmp_path, monkeypatch, lender, window(["w"]))
    stepping.add("a", 6)
    full, windows = keys_of(stepping, "a"), keys_of(stepping, "a", 1)
    stepping.admit("a", 0)
    assert lender.missed == [full]
    stepping._new[0].block_ids[1][:2] = [0, 0]  # the window has passed these blocks
    run(stepping, "a", 6 * BLOCK)
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
