"""The test driver itself: what it keeps of CUDA's rules, and what tests switch."""

import signal
from pathlib import Path

import pytest

from tests.fakecuda import scenarios
from tests.fakecuda.harness import FakeCuda, calls, mark

pytestmark = pytest.mark.fakecuda

FIRST = "cuda:fa4ecda0000040008000000000000000"
SECOND = "cuda:fa4ecda0000040008000000000000001"
SEEDS = (1, 2, 3)


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


def test_a_thread_without_context_is_refused(fakecuda: FakeCuda) -> None:
    """A context is a thread's, not a process's."""
    fakecuda.check(scenarios.thread_without_context)


def test_a_forked_child_cannot_use_the_driver(fakecuda: FakeCuda) -> None:
    """As with the real driver, only a new process can."""
    fakecuda.check(scenarios.forked)


def test_allocations_have_bounds(fakecuda: FakeCuda) -> None:
    """Copies stay inside one allocation, memory runs out, and fresh memory is not zero."""
    fakecuda.check(scenarios.allocations)


def test_host_code_cannot_touch_device_memory(fakecuda: FakeCuda) -> None:
    """A device pointer that the host dereferences ends the process, as it would with a GPU."""
    assert fakecuda.run(scenarios.touched_by_host).returncode == -signal.SIGSEGV


def test_handles_open_elsewhere(fakecuda: FakeCuda) -> None:
    """A handle opens in other processes while its exporter lives, never at home."""
    fakecuda.check(scenarios.ipc)


def test_virtual_memory_goes_by_descriptor(fakecuda: FakeCuda) -> None:
    """Legacy handles refuse it; a descriptor works if it was asked for when it was made."""
    fakecuda.check(scenarios.virtual_memory)


def test_registration_is_checked(fakecuda: FakeCuda) -> None:
    """Overlaps, sizes and copies outside one registration are errors."""
    fakecuda.check(scenarios.registration)


def test_pageable_copies_can_be_allowed(fakecuda: FakeCuda) -> None:
    """PAGEABLE=sync does what CUDA does: the call waits."""
    fakecuda.check(scenarios.pageable_memory, PAGEABLE="sync")


@pytest.mark.parametrize("seed", SEEDS)
def test_streams_keep_order(fakecuda: FakeCuda, seed: int) -> None:
    """Nothing overtakes what was submitted before it to the same stream, whatever the timing."""
    fakecuda.check(scenarios.stream_order, SEED=seed)


@pytest.mark.parametrize(
    ("order", "any_reads", "sees"),
    [
        ("STREAM", "early", 7),
        ("ANY", "early", 1),
        ("ANY", "late", 7),
        ("DURING_API_CALL", "late", 1),
    ],
)
def test_source_access_order(fakecuda: FakeCuda, order: str, any_reads: str, sees: int) -> None:
    """Only STREAM order sees the work before it for sure; ANY may read too early."""
    fakecuda.check(scenarios.source_access, order, str(sees), ANY=any_reads)


def test_the_null_stream_orders_blocking_streams(fakecuda: FakeCuda) -> None:
    """And leaves non-blocking ones alone."""
    fakecuda.check(scenarios.legacy_stream)


def test_batches_are_checked(fakecuda: FakeCuda) -> None:
    """A batch needs valid attributes and a stream of its own."""
    fakecuda.check(scenarios.batch_arguments)


@pytest.mark.parametrize("what", ["device", "host"])
def test_memory_let_go_too_early_is_a_fault(fakecuda: FakeCuda, what: str) -> None:
    """Unmapping or unregistering under a copy loses the context for good."""
    fakecuda.check(scenarios.use_after_close, what)


def test_pinned_pages_outlive_their_mapping(fakecuda: FakeCuda) -> None:
    """What is registered stays reachable for copies when the program unmaps it."""
    fakecuda.check(scenarios.unmapped_under_a_copy)


def test_a_copy_can_be_held_half_way(fakecuda: FakeCuda, tmp_path: Path) -> None:
    """So that a test can kill a process in the middle of one."""
    log = tmp_path / "log"
    fakecuda.check(scenarios.half_a_copy, str(log), LOG=log)
    assert "cuMemcpyDtoHAsync" in calls(log)


def test_calls_fail_as_told(fakecuda: FakeCuda) -> None:
    """The n-th call of a function fails, and a sticky code fails everything after it."""
    fakecuda.check(scenarios.failures, FAIL="cuMemAlloc:2:2")


@pytest.mark.parametrize("work", ["@memset", "@copy"])
def test_work_fails_as_told(fakecuda: FakeCuda, work: str) -> None:
    """What goes wrong on the device is seen by a later call, and nothing more is done."""
    fakecuda.check(scenarios.failing_work, work)


def test_calls_hang_as_told(fakecuda: FakeCuda, tmp_path: Path) -> None:
    """A hung call does not block other threads, and a control file frees it."""
    control = tmp_path / "control"
    fakecuda.check(scenarios.hang, str(control), HANG="cuMemAlloc:1", CONTROL=control)


def test_work_hangs_as_told(fakecuda: FakeCuda) -> None:
    """Hung work is never done, and a process that waits for it can be killed."""
    done = fakecuda.run(scenarios.hanging_copy, HANG="@copy:1")
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "hanging\n"), done.stderr
