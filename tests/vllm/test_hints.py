"""Hints of requests over HTTP, through a real engine, to a real daemon."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvd_client import Label
from kvd_tools.vllm_engine import VllmServer
from tests.conftest import Daemon
from tests.vllm.conftest import StartEngine
from tests.vllm.support import (
    CACHED_TOKENS,
    ROOT,
    TEST_SECONDS,
    Setting,
    far_apart,
    prompts,
    wait_served,
    with_kvd,
)
from tests.waiting import eventually

PROMPT_CHUNKS = CACHED_TOKENS // 32

pytestmark = pytest.mark.timeout(TEST_SECONDS)


def records(path: Path, call: str) -> list[dict[str, Any]]:
    """What the engine's scheduler has reported by this call, one by one."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [record for record in map(json.loads, lines) if record["call"] == call]


def counted(daemon: Daemon) -> tuple[int, int, int]:
    """Hints that the broker has counted for its only engine: requests, ignored, cut."""
    (engine,) = daemon.status()["engines"]
    counters = engine["counters"]
    return counters["hints"], counters["hints_ignored"], counters["hints_cut"]


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """The file that the engine's connector writes."""
    return tmp_path / "record"


@pytest.fixture
def engine(
    daemon: Daemon, models: Path, record: Path, start_engine: StartEngine
) -> Iterator[VllmServer]:
    """An engine that records what it reports."""
    options = with_kvd(Setting("dense").options(models), daemon.runtime_dir)
    transfer = dict(options.kv_transfer or {})
    transfer |= {
        "kv_connector": "RecordingConnector",
        "kv_connector_module_path": "tests.vllm.recording_connector",
    }
    env = {"PYTHONPATH": str(ROOT), "RECORD": str(record)}
    engine = start_engine(replace(options, kv_transfer=transfer, env=env))
    engine.wait_ready()
    wait_served(daemon, engine)
    yield engine
    engine.close()


def test_hints_of_requests_are_labels_and_change_no_answer(
    daemon: Daemon, engine: VllmServer, record: Path
) -> None:
    """Valid ones are labels, invalid ones are counted, and every answer is that without a hint."""
    before = len(records(record, "request_finished"))
    (prompt,) = prompts(1)
    (plain,) = engine.generate([prompt])
    hints: list[tuple[Any, Label]] = [
        ({"continues": False}, Label.DONE),
        ({"resume_in_s": 30}, Label.UNDER_60S),
        ({"resume_in_s": -7}, Label.UNDER_10S),
        ("later", Label.NONE),
        ({"resume_in_s": "soon", "pin": True, "one_shot": 1}, Label.NONE),
    ]
    for kvd, _ in hints:
        (answer,) = engine.generate([prompt], kv_transfer_params={"kvd": kvd})
        assert not far_apart(answer, plain)
    expected = [Label.NONE, *(label for _, label in hints)]

    def finished() -> list[dict[str, Any]]:
        return records(record, "request_finished")[before:]

    ended = eventually(finished, lambda found: len(found) == len(expected))
    assert [Label(request["label"]) for request in ended] == expected
    keys = ended[0]["keys"]
    assert len(keys) == PROMPT_CHUNKS
    assert all(request["keys"] == keys for request in ended)
    assert {request["prompt"] for request in ended} == {PROMPT_CHUNKS}
    missed = [record["keys"] for record in records(record, "report_missed")]
    assert missed == [keys]
    eventually(lambda: counted(daemon), (len(hints), 4, 1).__eq__)
