"""A worker's CUDA memory and its streams, on a test driver that is no GPU."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvd_client import (
    DeviceMemory,
    HostMemory,
    Timeline,
    UnsupportedMemory,
    UsageError,
    cuda_driver,
)
from kvd_client.timeline import ControlPage
from tests.client import cuda_scenarios as scenarios
from tests.fakecuda.harness import FakeCuda
from tests.processes import python

IN_TURN = [  # of one process, which leave its device as it was
    scenarios.ipc_memory_is_its_allocation_and_an_offset,
    scenarios.a_storage_of_several_allocations_is_its_segments,
    scenarios.no_more_segments_than_a_registration_can_carry,
    scenarios.memory_that_cannot_be_shared_is_refused,
    scenarios.memory_that_was_taken_back_is_freed,
    scenarios.bindings_that_lack_a_constant_are_named,
    scenarios.numbers_are_reached_when_the_stream_is_there,
    scenarios.a_page_that_is_written_to_later_stays,
    scenarios.a_number_after_one_that_was_not_marked_waits_for_it,
]
NEVER_STARTS = scenarios.a_driver_that_does_not_start_says_so


@pytest.mark.fakecuda
def test_worker_on_the_test_driver(fakecuda: FakeCuda) -> None:
    """A scenario's name is the behaviour."""
    fakecuda.check(scenarios.run, *(scenario.__name__ for scenario in IN_TURN), SEED=3)


@pytest.mark.fakecuda
@pytest.mark.parametrize(
    ("scenario", "switches"),
    [
        (scenarios.a_thread_without_a_context_shares_memory, {"DEVICES": 2}),
        (scenarios.memory_of_one_worker_is_on_one_device, {"DEVICES": 2}),
        (scenarios.a_process_without_a_device_has_no_device_memory, {}),
        (scenarios.streams_that_cannot_write_are_refused, {"MEM_OPS": 0}),
        # Its first call fails, with and without a name for the error.
        (NEVER_STARTS, {"FAIL": "cuInit:1:999"}),
        (NEVER_STARTS, {"FAIL": f"cuInit:1:{scenarios.UNKNOWN_CODE}"}),
    ],
    ids=lambda part: getattr(part, "__name__", ""),
)
def test_worker_on_a_test_driver_of_its_own(
    scenario: Callable[[], None], switches: dict[str, object], fakecuda: FakeCuda
) -> None:
    """Of scenarios that need a process, or a driver, that no other has used."""
    fakecuda.check(scenario, SEED=3, **switches)


@pytest.mark.fakecuda
def test_a_capture_in_another_thread_goes_on(fakecuda: FakeCuda, tmp_path: Path) -> None:
    """The calls that CUDA forbids beside a capture are made in relaxed mode, which then ends."""
    fakecuda.check(scenarios.a_capture_in_another_thread_goes_on, LOG=tmp_path / "calls.log")


@pytest.mark.fakecuda
def test_every_call_of_the_worker_may_fail_once(fakecuda: FakeCuda, tmp_path: Path) -> None:
    """Whichever call fails, the error says what was attempted, and the next try works."""
    scenario = scenarios.every_failure_of_the_driver_names_what_was_attempted
    fakecuda.check(scenario, LOG=tmp_path / "calls.log")


@pytest.mark.fakecuda
@pytest.mark.parametrize("rule", scenarios.RULES, ids=lambda rule: rule.__name__)
def test_every_rule_is_missed(rule: Callable[[], None], fakecuda: FakeCuda) -> None:
    """Without the rule the scenario, which succeeds with it, fails."""
    names = rule.__name__, scenarios.RULES[rule].__name__
    done = fakecuda.run(scenarios.run, *names, DEVICES=2)
    assert done.returncode == 1
    signs = "AssertionError", "error 700", "CUDA_ERROR_INVALID_CONTEXT"
    assert any(sign in done.stderr for sign in signs), done.stderr


@pytest.mark.fakecuda
def test_devices_are_named_by_uuid_whatever_is_hidden(
    fakecuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With CUDA_VISIBLE_DEVICES device 0 is another one, and its name says so."""
    environment = fakecuda.environment(DEVICES=2) | {"CUDA_VISIBLE_DEVICES": "1"}
    monkeypatch.setattr(FakeCuda, "environment", lambda _: environment)
    name = fakecuda.check(scenarios.names_its_memory).strip()
    assert name == "cuda:fa4ecda0000040008000000000000001"


def test_without_a_driver_memory_is_unsupported() -> None:
    """No libcuda.so.1: the sentence names it."""
    pytest.importorskip("cuda.bindings")
    environment = {key: value for key, value in os.environ.items() if key != "LD_LIBRARY_PATH"}
    code = "from kvd_client import DeviceMemory; DeviceMemory.at(4096, 1)"
    done = python("-c", code, environment=environment)
    assert "UnsupportedMemory: CUDA memory needs the NVIDIA driver, libcuda.so.1" in done.stderr


def test_without_the_bindings_memory_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cuda-bindings: the sentence says how to install them; host memory needs none."""
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    cuda_driver._bindings.cache_clear()
    with pytest.raises(UnsupportedMemory, match="pip install cuda-bindings"):
        DeviceMemory.at(4096, 1)
    HostMemory.allocate(4096).close()


def test_a_worker_in_host_memory_has_no_streams() -> None:
    """The host's numbers are signalled by the host."""
    page = ControlPage()
    timeline = Timeline(page)
    with pytest.raises(UsageError, match="no memory of a GPU"):
        timeline.signal_on(0)
    timeline.signal(timeline.reserve())
    assert timeline.reached == 1
    page.close()
