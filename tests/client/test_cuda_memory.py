"""A worker's CUDA memory and its streams, on a test driver that is no GPU."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvd_client import Timeline, UsageError
from kvd_client.control import ControlPage
from tests.client import cuda_scenarios as scenarios

ROOT = Path(__file__).parents[2]


def run(name: str, **environment: str) -> None:
    """Run one scenario; its words where it fails."""
    done = outcome(name, **environment)
    assert done.returncode == 0, done.stderr


def outcome(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """How one scenario ended, with all rules or without one."""
    path = os.pathsep.join([str(ROOT), *sys.path])
    kept = {key: value for key, value in os.environ.items() if not key.startswith("FAKECUDA_")}
    kept.pop("LD_LIBRARY_PATH", None)
    return subprocess.run(
        [sys.executable, "-m", "tests.client.cuda_scenarios", *arguments],
        env=kept | {"PYTHONPATH": path} | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )


@pytest.mark.fakecuda
@pytest.mark.parametrize(
    "scenario",
    [
        scenarios.ipc_memory_is_its_allocation_and_an_offset,
        scenarios.virtual_memory_is_a_descriptor_for_each_allocation,
        scenarios.memory_across_allocations_is_refused,
        scenarios.memory_that_is_not_exportable_is_refused,
        scenarios.what_is_no_device_memory_is_refused,
        scenarios.numbers_are_reached_when_the_stream_is_there,
        scenarios.a_page_that_is_written_to_later_stays,
        scenarios.a_page_stays_when_a_write_is_not_marked,
        scenarios.a_number_after_one_that_was_not_marked_waits_for_it,
        scenarios.a_failed_signal_raises_and_the_next_one_counts,
    ],
    ids=lambda scenario: scenario.__name__,
)
def test_worker_on_the_test_driver(scenario: Callable[[], None], fakecuda_folder: Path) -> None:
    """The scenario's name is the behaviour."""
    run(scenario.__name__, LD_LIBRARY_PATH=str(fakecuda_folder), FAKECUDA_SEED="3")


@pytest.mark.fakecuda
def test_every_call_of_the_worker_may_fail_once(fakecuda_folder: Path, tmp_path: Path) -> None:
    """Whichever call fails, the error says what was attempted, and the next try works."""
    name = scenarios.every_failure_of_the_driver_names_what_was_attempted.__name__
    log = tmp_path / "calls.log"
    run(name, LD_LIBRARY_PATH=str(fakecuda_folder), FAKECUDA_LOG=str(log))


@pytest.mark.fakecuda
@pytest.mark.parametrize("fail", ["cuInit:1:999", "cuInit:1:999,cuGetErrorName:1:999"])
def test_a_driver_that_does_not_start(fakecuda_folder: Path, fail: str) -> None:
    """The first call fails, with and without a name for its error."""
    name = scenarios.a_driver_that_does_not_start_says_so.__name__
    run(name, LD_LIBRARY_PATH=str(fakecuda_folder), FAKECUDA_FAIL=fail)


@pytest.mark.fakecuda
def test_memory_of_one_worker_is_on_one_device(fakecuda_folder: Path) -> None:
    """Host and device memory, or two devices, are not one registration."""
    name = scenarios.memory_of_one_worker_is_on_one_device.__name__
    run(name, LD_LIBRARY_PATH=str(fakecuda_folder), FAKECUDA_DEVICES="2")


@pytest.mark.fakecuda
def test_streams_that_cannot_write(fakecuda_folder: Path) -> None:
    """Without stream memory operations the memory is refused."""
    name = scenarios.streams_that_cannot_write_are_refused.__name__
    run(name, LD_LIBRARY_PATH=str(fakecuda_folder), FAKECUDA_MEM_OPS="0")


@pytest.mark.fakecuda
@pytest.mark.parametrize(
    ("rule", "scenario"),
    [
        (
            scenarios.a_stream_waits_for_the_last_number_on_another,
            scenarios.numbers_are_reached_when_the_stream_is_there,
        ),
        (
            scenarios.the_stream_writes_the_number_at_its_turn,
            scenarios.numbers_are_reached_when_the_stream_is_there,
        ),
        (
            scenarios.a_write_counts_when_it_is_marked,
            scenarios.a_page_stays_when_a_write_is_not_marked,
        ),
        (
            scenarios.a_write_counts_when_it_is_marked,
            scenarios.a_number_after_one_that_was_not_marked_waits_for_it,
        ),
        (
            scenarios.a_page_is_let_go_when_nothing_will_write_to_it,
            scenarios.a_page_that_is_written_to_later_stays,
        ),
    ],
    ids=lambda part: part.__name__,
)
def test_every_rule_is_missed(
    rule: Callable[[], None], scenario: Callable[[], None], fakecuda_folder: Path
) -> None:
    """Without the rule the scenario, which succeeds with it, fails."""
    done = outcome(scenario.__name__, rule.__name__, LD_LIBRARY_PATH=str(fakecuda_folder))
    assert done.returncode == 1
    assert "AssertionError" in done.stderr


@pytest.mark.fakecuda
def test_devices_are_named_by_uuid_whatever_is_hidden(fakecuda_folder: Path) -> None:
    """With CUDA_VISIBLE_DEVICES device 0 is another one, and its name says so."""
    code = (
        "from tests.client.cuda_scenarios import *; start();"
        "print(DeviceMemory.at(int(call('cuMemAlloc', SIZE)), SIZE).device, flush=True);"
        "os._exit(0)"
    )
    names = set()
    for visible in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
            | {"LD_LIBRARY_PATH": str(fakecuda_folder)}
            | {"FAKECUDA_DEVICES": "2", "CUDA_VISIBLE_DEVICES": visible},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        names.add(done.stdout.strip())
    assert names == {
        "cuda:fa4ecda0000040008000000000000000",
        "cuda:fa4ecda0000040008000000000000001",
    }


@pytest.mark.parametrize(
    "scenario",
    [
        scenarios.without_a_driver_memory_is_unsupported,
        scenarios.without_the_bindings_memory_is_unsupported,
    ],
    ids=lambda scenario: scenario.__name__,
)
def test_without_cuda(scenario: Callable[[], None]) -> None:
    """The scenario's name is the behaviour."""
    if scenario is scenarios.without_a_driver_memory_is_unsupported:
        pytest.importorskip("cuda.bindings")
    run(scenario.__name__)


def test_a_worker_in_host_memory_has_no_streams() -> None:
    """The host's numbers are signalled by the host."""
    page = ControlPage()
    timeline = Timeline(page)
    with pytest.raises(UsageError, match="no CUDA memory"):
        timeline.signal_on(0)
    timeline.signal(timeline.reserve())
    assert timeline.reached == 1
    page.close()
