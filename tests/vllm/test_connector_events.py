"""What the connector's half in the scheduler does for KV events, stepped as vLLM does it."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_events import BlockStored

from kvd_client.change_reader import Place
from kvd_client.vllm import KvdOffloadingSpec
from kvd_proto.descriptions import decode
from tests.vllm.configs import BLOCK, configured
from tests.vllm.stepping import Lender, Stepping

PROMPT_BLOCKS = 3


@pytest.fixture
def lender() -> Lender:
    """A daemon that stores all it is offered."""
    return Lender(99)


def test_chunks_are_described_where_somebody_publishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lender: Lender
) -> None:
    """Each with its own description, or none at all where nobody would read them."""
    stepping = Stepping(tmp_path, monkeypatch, lender)
    stepping.add("silent", PROMPT_BLOCKS)
    stepping.step(silent=PROMPT_BLOCKS * BLOCK)
    assert lender.described == [None]
    lender.describes = True
    request = stepping.add("told", PROMPT_BLOCKS)
    stepping.step(told=PROMPT_BLOCKS * BLOCK)
    told = [decode(each) for each in lender.described[1] or []]
    assert [each.hashes[-1] + bytes(4) for each in told] == list(lender.offered[1])
    assert list(chain.from_iterable(each.hashes for each in told)) == list(request.block_hashes)


def test_an_engine_without_requests_steps_for_changes_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lender: Lender
) -> None:
    """VLLM is told of pending work until the step that publishes them, then not for a second."""
    half = Stepping(tmp_path, monkeypatch, lender, events=True)
    assert not half.half.has_pending_push_work()
    lender.changes.stored[b"another engine's".ljust(36)] = Place(1, 1, 0, 1, 0)
    assert half.half.has_pending_push_work()
    half.step()
    assert [type(event) for event in half.half.take_events()] == [BlockStored]
    assert not half.half.has_pending_push_work()
    lender.changes.stored[b"one more".ljust(36)] = Place(2, 1, 0, 1, 0)
    assert not half.half.has_pending_push_work()


def test_an_engine_that_publishes_nothing_steps_for_requests_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lender: Lender
) -> None:
    """Whatever changes in the pool."""
    half = Stepping(tmp_path, monkeypatch, lender).half
    lender.changes.stored[b"another engine's".ljust(36)] = Place(1, 1, 0, 1, 0)
    assert not half.has_pending_push_work()


def test_an_error_in_the_events_ends_them_and_not_the_engine(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lender: Lender,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is logged once, with its stack; later steps publish nothing."""
    half = Stepping(tmp_path, monkeypatch, lender, events=True).half
    assert half.events is not None
    monkeypatch.setattr(half.events, "take", lambda **_: 1 // 0)
    lender.changes.stored[b"a change".ljust(36)] = Place(1, 1, 0, 1, 0)
    assert [list(half.take_events()) for _ in range(2)] == [[], []]
    assert not half.has_pending_push_work()
    (line,) = [line for line in caplog.records if line.exc_info]
    assert "publishes none" in line.getMessage()


@pytest.mark.parametrize(
    ("extra", "engine", "publishes"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"events": False}, True, False),
        ({"self_describing_kv_events": True}, True, True),
    ],
)
def test_events_are_published_where_vllm_publishes_and_the_option_is_on(
    tmp_path: Path, extra: dict[str, Any], engine: bool, publishes: bool
) -> None:
    """What vLLM would remember of chunks to describe them stays empty, whatever is configured."""
    spec = KvdOffloadingSpec(*_spec_arguments(tmp_path, extra, events=engine))
    assert spec.publishes is publishes
    assert not spec.kv_events_config.self_describing_kv_events


def _spec_arguments(folder: Path, extra: dict[str, Any], *, events: bool) -> tuple[Any, Any, Any]:
    vllm_config, kv_cache_config, config = configured(folder, extra=extra, events=events)
    return config, vllm_config, kv_cache_config
