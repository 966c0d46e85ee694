"""The test driver itself: what it keeps of CUDA's rules, and what tests switch."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakecuda import scenarios
from tests.fakecuda.harness import FakeCuda, calls, mark

pytestmark = pytest.mark.fakecuda

FIRST = "cuda:fa4ecda0000040008000000000000000"
SECOND = "cuda:fa4ecda0000040008000000000000001"
Scenario = tuple[Callable[..., None], tuple[str, ...], dict[str, object]]


def test_devices_are_named_and_hidden(fakecuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices have UUIDs, and CUDA_VISIBLE_DEVICES chooses and orders them by UUID or number."""
    fakecuda.check(scenarios.devices, FIRST, SECOND, DEVICES=2)
    fakecuda.check(scenarios.devices, DEVICES=0)
    environment = fakecuda.environment(DEVICES=2)

    def visible(text: str, *names: str) -> None:
        monkeypatch.setattr(
            FakeCuda, "environment", lambda _: environment | {"CUDA_VISIBLE_DEVICES": text}
        )
        fakecuda.check(scenarios.devices, *names)

    visible("GPU-fa4ecda0-0000-4000-8000-000000000001,0", SECOND, FIRST)
    visible("0,7,1", FIRST)


@pytest.mark.parametrize("part", ["4", "41", "41 ", "41 cuInit"])
def test_of_the_call_log_only_whole_lines_are_read(tmp_path: Path, part: str) -> None:
    """A line that a process is writing is read when it is there, wherever it was cut."""
    log = tmp_path / "log"
    log.write_text("")
    assert (calls(log), mark(log)) == ([], 0)
    log.write_text(f"41 cuCtxSetCurrent\n{part}", "ascii")
    assert (calls(log), calls(log, 4)) == (["cuCtxSetCurrent"], [])
    place = mark(log)
    log.write_text("41 cuCtxSetCurrent\n41 cuInit\n", "ascii")
    assert calls(log, 41, place) == ["cuInit"]


# Whatever the timing, nothing overtakes what was submitted before it to the same stream.
ORDER: list[Scenario] = [(scenarios.stream_order, (), {"SEED": seed}) for seed in (1, 2, 3)]
# Only STREAM order sees the work before it for sure; ANY may read too early.
SOURCES: list[Scenario] = [
    (scenarios.source_access, (order, sees), {"ANY": any_reads})
    for order, any_reads, sees in (
        ("STREAM", "early", "7"),
        ("ANY", "early", "1"),
        ("ANY", "late", "7"),
        ("DURING_API_CALL", "late", "1"),
    )
]
SCENARIOS: list[Scenario] = [
    (scenarios.thread_without_context, (), {}),
    (scenarios.forked, (), {}),
    (scenarios.allocations, (), {}),
    (scenarios.ipc, (), {}),
    (scenarios.virtual_memory, (), {}),
    (scenarios.registration, (), {}),
    *ORDER,
    *SOURCES,
    (scenarios.legacy_stream, (), {}),
    (scenarios.batch_arguments, (), {}),
    (scenarios.use_after_close, ("device",), {}),
    (scenarios.use_after_close, ("host",), {}),
    (scenarios.unmapped_under_a_copy, (), {}),
    (scenarios.failures, (), {"FAIL": "cuMemAlloc:2:2"}),
    (scenarios.failing_work, ("@memset",), {}),
    (scenarios.failing_work, ("@copy",), {}),
]


@pytest.mark.parametrize(
    ("scenario", "arguments", "switches"), SCENARIOS, ids=lambda part: getattr(part, "__name__", "")
)
def test_the_driver_keeps_the_rule(
    fakecuda: FakeCuda,
    scenario: Callable[..., None],
    arguments: tuple[str, ...],
    switches: dict[str, object],
) -> None:
    """What the scenario's first line says, in a process of its own."""
    fakecuda.check(scenario, *arguments, **switches)


def test_host_code_cannot_touch_device_memory(fakecuda: FakeCuda) -> None:
    """A device pointer that the host dereferences ends the process, as it would with a GPU."""
    assert fakecuda.run(scenarios.touched_by_host).returncode == -signal.SIGSEGV


def test_a_copy_can_be_held_half_way(fakecuda: FakeCuda, tmp_path: Path) -> None:
    """So that a test can kill a process in the middle of one."""
    log = tmp_path / "log"
    fakecuda.check(scenarios.half_a_copy, str(log), LOG=log)
    assert "cuMemcpyDtoHAsync" in calls(log)


def test_calls_hang_as_told(fakecuda: FakeCuda, tmp_path: Path) -> None:
    """A hung call does not block other threads, and a control file frees it."""
    control = tmp_path / "control"
    fakecuda.check(scenarios.hang, str(control), HANG="cuMemAlloc:1", CONTROL=control)


def test_work_hangs_as_told(fakecuda: FakeCuda) -> None:
    """Hung work is never done, and a process that waits for it can be killed."""
    done = fakecuda.run(scenarios.hanging_copy, HANG="@copy:1")
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "hanging\n"), done.stderr
