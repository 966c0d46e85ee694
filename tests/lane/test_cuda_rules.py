"""Each rule of order keeps the backend right; without it, a check fails."""

import contextlib
import multiprocessing
import os
import traceback
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from kvd.errors import DeviceLost, LaneError
from tests.fakecuda.harness import FakeCuda
from tests.lane import cuda_pin_checks as pins
from tests.lane.cuda_checks import RULES
from tests.lane.cuda_memory import CudaWorkers
from tests.lane.cuda_rig import CudaRig, load
from tests.processes import LONG

pytestmark = pytest.mark.fakecuda

PASSED, FAILED = 76, 77  # exit statuses that no other way to end has
SOON = 1.0  # seconds for what does not happen once the rule is gone


@pytest.fixture(scope="module")
def forks() -> ForkServerContext:
    """Starts processes that have imported this module, and no driver, before they begin."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


@pytest.mark.parametrize("name", [rule.name for rule in RULES])
def test_the_backend_keeps_the_rule_and_its_check_fails_without(
    fakecuda: FakeCuda, forks: ForkServerContext, tmp_path: Path, name: str
) -> None:
    """As it is, the backend passes the check; so the rule is tested, not only written."""
    statuses = []
    for without in (False, True):
        log = tmp_path / f"{without}.log"
        process = forks.Process(target=check, args=(fakecuda, log, name, without))
        process.start()
        process.join(LONG)
        process.kill()
        statuses.append(process.exitcode)
    assert statuses == [PASSED, FAILED]


def check(fakecuda: FakeCuda, log: Path, name: str, without: bool) -> None:
    """Run a check with or without its rule.

    In a process of its own, for a backend without its rules may lose the device.
    """
    os.environ.update(fakecuda.environment())  # for the process with the device memory
    (rule,) = (rule for rule in RULES if rule.name == name)
    patch = pytest.MonkeyPatch()
    workers = CudaWorkers(ipc=True, library=fakecuda.library)
    fake_driver = load(fakecuda, log)
    if rule.setting:
        fake_driver.set(rule.setting)
    if without:
        pins.SOON = SOON
    if without and rule.before_start:
        patch.setattr(rule.owner, rule.attribute, rule.replacement)
    rig = CudaRig(fake_driver, workers, rule.options, pinned=rule.pinned)
    if without and not rule.before_start:
        patch.setattr(rule.owner, rule.attribute, rule.replacement)
    try:
        rule.check(rig)
        if not without:
            with contextlib.suppress(DeviceLost):  # which one check is about
                rig.close()
    except (AssertionError, LaneError, ValueError, pytest.fail.Exception):
        traceback.print_exc()
        os._exit(FAILED)  # without letting go of what may be out of order
    os._exit(PASSED)
