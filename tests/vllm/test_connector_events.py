"""What the connector's half in the scheduler does for KV events, stepped as vLLM does it."""

import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_events import BlockStored, KVCacheEvent, KVEventBatch
from vllm.v1.engine.core import EngineCoreProc

from kvd_client.changes import ChunkLocation
from kvd_client.vllm import KvdOffloadingSpec, events
from tests.vllm.configs import configured
from tests.vllm.stepping import Lender, Stepping
from tests.waiting import PATIENCE

PROMPT_BLOCKS = 3


@pytest.fixture
def lender() -> Lender:
    """A daemon that stores all it is offered."""
    return Lender(99)


class Core(EngineCoreProc):  # type: ignore[misc]  # without vLLM's types
    """An engine that makes a connector's half, and has nothing else that it needs."""

    def __init__(self, make: Callable[[], Stepping]) -> None:
        self.input_queue: queue.Queue[object] = queue.Queue()
        self.batches: list[KVEventBatch] = []
        self.own_events: list[KVCacheEvent] = []
        self.scheduler: SimpleNamespace | None = SimpleNamespace(
            kv_cache_manager=SimpleNamespace(take_events=self._take),
            kv_event_publisher=SimpleNamespace(publish=self.batches.append),
        )
        self.half = make().half

    def _take(self) -> list[KVCacheEvent]:
        taken, self.own_events = self.own_events, []
        return taken


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread looks whether something waits."""
    monkeypatch.setattr(events, "POLL_SECONDS", 2 * PATIENCE)


@pytest.fixture
def core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lender: Lender) -> Iterator[Core]:
    """An engine that publishes KV events, with a connector."""
    core = Core(lambda: Stepping(tmp_path, monkeypatch, lender, events=True))
    yield core
    core.half.shutdown()


def change(lender: Lender, name: str) -> None:
    """Another engine has stored a chunk."""
    lender.changes.stored[name.encode().ljust(36)] = ChunkLocation(1, 1, 0, 1, 0)


def test_an_error_ends_idle_publishing_and_not_the_engine(
    core: Core, lender: Lender, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged once; the engine publishes in its steps."""
    core.scheduler = None
    change(lender, "another engine's")
    assert not core.half.has_pending_push_work()
    assert not core.half.has_pending_push_work()
    (line,) = [line for line in caplog.records if line.exc_info]
    assert "publishing without steps failed" in line.getMessage()
    assert [type(event) for event in core.half.take_events()] == [BlockStored]


def test_an_engine_in_its_callers_process_publishes_in_steps_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lender: Lender
) -> None:
    """Nothing can wake it, and nothing is lost."""
    half = Stepping(tmp_path, monkeypatch, lender, events=True).half
    change(lender, "another engine's")
    assert not half.has_pending_push_work()
    assert [type(event) for event in half.take_events()] == [BlockStored]


def test_an_error_in_the_events_ends_them_and_not_the_engine(
    core: Core,
    monkeypatch: pytest.MonkeyPatch,
    lender: Lender,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is logged once, with its stack; later steps publish nothing, and nothing wakes it."""
    half = core.half
    assert half.events is not None
    monkeypatch.setattr(half.events, "take", lambda **_: 1 // 0)
    change(lender, "another engine's")
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
