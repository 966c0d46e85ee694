"""What the connector's half in the scheduler does for KV events, stepped as vLLM does it."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_events import BlockStored

from kvd_client.vllm import KvdOffloadingSpec
from kvd_proto.descriptions import decode
from kvd_proto.said import Place
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


def test_an_engine_goes_on_stepping_until_its_stores_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lender: Lender
) -> None:
    """Until the change of the last one has come; not for what other engines store."""
    stepping = Stepping(tmp_path, monkeypatch, lender, events=True)
    half = stepping.half
    stepping.add("request", PROMPT_BLOCKS)
    jobs = stepping.step(request=PROMPT_BLOCKS * BLOCK)
    assert not list(half.take_events())
    stepping.report(jobs)
    stepping.finish("request")
    stepping.step()
    assert half.has_pending_push_work()
    (keys,) = lender.offered
    lender.changes.stored.update(dict.fromkeys(keys, Place(0, 1, 0, 1, 0)))
    events = list(half.take_events())
    assert [type(event) for event in events] == [BlockStored] * len(keys)
    assert not half.has_pending_push_work()
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
    monkeypatch.setattr(half.events, "take", lambda: 1 // 0)
    assert [list(half.take_events()) for _ in range(2)] == [[], []]
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
def test_events_are_told_where_vllm_publishes_and_the_daemon_does_not(
    tmp_path: Path, extra: dict[str, Any], engine: bool, publishes: bool
) -> None:
    """What vLLM would remember of chunks to describe them stays empty, whatever is configured."""
    spec = KvdOffloadingSpec(*_spec_arguments(tmp_path, extra, events=engine))
    assert spec.publishes is publishes
    assert not spec.kv_events_config.self_describing_kv_events


def _spec_arguments(folder: Path, extra: dict[str, Any], *, events: bool) -> tuple[Any, Any, Any]:
    vllm_config, kv_cache_config, config = configured(folder, extra=extra, events=events)
    return config, vllm_config, kv_cache_config
