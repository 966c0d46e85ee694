"""An idle engine is woken from its input queue, and by nothing but work to publish."""

import queue
import threading
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc

from kvd_client.vllm import idle
from kvd_client.vllm.idle import IdleStepper, calling_engine_core
from tests.waiting import PATIENCE

WAKEUP = (EngineCoreRequestType.WAKEUP, None)


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds are short."""
    monkeypatch.setattr(idle, "IDLE_STEP_SECONDS", 0.01)


class Core(EngineCoreProc):  # type: ignore[misc]  # without vLLM's types
    """An engine that has an input queue and nothing else."""

    def __init__(self, made: Any = None) -> None:
        self.input_queue: queue.Queue[tuple[EngineCoreRequestType, None]] = queue.Queue()
        self.found = None if made is None else made()


@pytest.fixture
def core() -> Core:
    """An engine without a model."""
    return Core()


def test_the_engine_is_woken_while_it_needs_a_step(core: Core) -> None:
    """Again and again, with a message that vLLM knows; not when nothing waits."""
    asked, needs = threading.Semaphore(0), threading.Event()

    def needs_step() -> bool:
        asked.release()
        return needs.is_set()

    stepper = IdleStepper(core, needs_step)
    for _ in range(3):
        assert asked.acquire(timeout=PATIENCE)
    assert core.input_queue.empty()
    needs.set()
    assert [core.input_queue.get(timeout=PATIENCE) for _ in range(2)] == [WAKEUP] * 2
    stepper.close()


def test_a_closed_stepper_asks_no_more(core: Core) -> None:
    """Its thread ends."""
    stepper = IdleStepper(core, lambda: False)
    stepper.close()
    stepper._thread.join(PATIENCE)
    assert not stepper._thread.is_alive()


def test_an_error_ends_the_waking_and_not_the_engine(
    core: Core, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged once."""
    stepper = IdleStepper(core, lambda: bool(1 // 0))
    stepper._thread.join(PATIENCE)
    assert not stepper._thread.is_alive()
    (line,) = [record for record in caplog.records if record.exc_info]
    assert "not woken any more" in line.getMessage()


def test_the_engine_that_makes_a_connector_is_found() -> None:
    """From within its constructor, however deep; elsewhere there is none."""

    class Connector:
        def __init__(self) -> None:
            self.core = calling_engine_core()

    core = Core(lambda: Connector().core)
    assert core.found is core
    assert calling_engine_core() is None
