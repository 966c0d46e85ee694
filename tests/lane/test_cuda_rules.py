"""Each rule of order keeps the backend right; without it, a check fails.

The checks of copies are in cuda_checks.py, those of pinning are here.
"""

import contextlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from itertools import pairwise
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from kvd.errors import DeviceLost, ImportFailed, LaneError
from kvd.lane.cuda import driver, pinning
from kvd.lane.cuda.backend import CudaDevice
from kvd.lane.cuda.pinning import LONGEST_PAUSE_SECONDS, PinnedPool
from kvd.pool.geometry import FillOrder
from tests.fakecuda import cudatensor
from tests.fakecuda.harness import FakeCuda
from tests.lane.cuda_checks import RULES, SIZES, STORE, rule
from tests.lane.cuda_rig import POOL_BYTES, WHOLE_POOL, CudaRig, CudaWorkers, load
from tests.lane.support import Memory
from tests.processes import LONG
from tests.waiting import eventually

pytestmark = pytest.mark.fakecuda

PASSED, FAILED = 76, 77  # exit statuses that no other way to end has
UNIT = 65536  # of the rig's registrations
SOON = 10.0  # seconds; less once a rule is gone
REGISTER, UNREGISTER = "cuMemHostRegister", "cuMemHostUnregister"


def is_soon(question: Callable[[], bool]) -> bool:
    """Whether it becomes so within SOON: without a rule it never does."""
    end = time.monotonic() + SOON
    while not (answer := question()) and time.monotonic() < end:
        time.sleep(0.001)
    return answer


def request_the_whole_pool() -> Callable[..., None]:
    """An owner that requests a part of the pool has all of it pinned."""
    request = PinnedPool.request
    return lambda self, owner, _begin, _end: request(self, owner, 0, self.nbytes)


@rule(PinnedPool, "request", request_the_whole_pool(), pinned=False)
def only_arenas_in_use_are_pinned(rig: CudaRig) -> None:
    """Nothing is pinned for an engine without an arena; then the pieces that its arena touches."""
    memory, _ = rig.attach(SIZES)
    assert (rig.device.usable_bytes, rig.device.pinned_bytes) == (POOL_BYTES, 0)
    *_, last = FillOrder(POOL_BYTES, UNIT).order
    begin, end = last * UNIT, (last + 1) * UNIT
    rig.device.pin_arena(memory, begin + 10, end - 10)
    eventually(lambda: rig.device.is_usable(begin, end))
    assert (rig.device.usable_bytes, rig.device.pinned_bytes) == (POOL_BYTES, UNIT)


@rule(PinnedPool, "release", lambda _self, _owner: None, pinned=False)
def pieces_of_a_rank_that_left_go_when_another_is_bound(rig: CudaRig) -> None:
    """An engine that restarts finds its arena pinned; one with another arena has that one alone."""
    memory, _ = rig.attach(SIZES)
    rig.device.pin_arena(memory, 0, UNIT)
    eventually(lambda: rig.device.pinned_bytes == UNIT)
    before = rig.driver.mark
    rig.device.release_memory(memory)
    again, _ = rig.attach(SIZES)
    rig.device.pin_arena(again, 0, UNIT)
    rig.device.release_memory(again)
    other, _ = rig.attach(SIZES)
    assert rig.device.is_usable(0, UNIT)
    rig.device.pin_arena(other, 2 * UNIT, 3 * UNIT)
    assert is_soon(lambda: rig.driver.calls(before).count(UNREGISTER) == 1)
    eventually(lambda: rig.device.pinned_bytes == UNIT)
    assert rig.driver.calls(before).count(REGISTER) == 1
    assert not rig.device.is_usable(0, UNIT)
    assert rig.device.is_usable(2 * UNIT, 3 * UNIT)


@rule(pinning, "pause_after", lambda _seconds: 0.0, pinned=False)
def others_have_the_driver_between_two_pieces(rig: CudaRig) -> None:
    """After each piece the driver is left alone for as long as the piece took, at both ends."""
    busy: list[tuple[float, float]] = []
    register, unregister = driver.register_host, driver.unregister_host

    def slow(address: int, *nbytes: int) -> None:
        began = time.monotonic()
        time.sleep(0.005)
        register(address, *nbytes) if nbytes else unregister(address)
        busy.append((began, time.monotonic()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "register_host", slow)
        patch.setattr(driver, "unregister_host", slow)
        rig.device.pin_arena(WHOLE_POOL, 0, POOL_BYTES)
        rig.wait_until_pinned()
        eventually(rig.device.unpin)
    assert len(busy) == 2 * POOL_BYTES // UNIT
    for (began, ended), (next_began, _) in pairwise(busy):
        assert next_began - ended >= min(ended - began, LONGEST_PAUSE_SECONDS)


@rule(pinning, "piece_bytes_for", lambda *_: 512 * 2**20, pinned=False)
def a_registration_is_short(rig: CudaRig) -> None:
    """A machine that pins no more than 256 MiB at a time pins a large pool, piece by piece."""
    rig.driver.set(f"max_pin={256 * 2**20}")
    large = Memory(70 * 2**30)  # of which one piece is there
    pool = PinnedPool(large.fd, len(large.bytes), cudatensor.call("cuCtxGetCurrent"))
    try:
        os.posix_fallocate(large.fd, 0, pool.piece_bytes)
        pool.request(1, 0, pool.piece_bytes)
        eventually(lambda: pool.error or pool.pinned_bytes)
        assert (pool.error, pool.pinned_bytes) == ("", pool.piece_bytes)
    finally:
        pool.close()
        large.close()


@rule(PinnedPool, "release", lambda _self, _owner: None, pinned=False)
def what_was_pinned_stays_until_its_users_have_gone(rig: CudaRig) -> None:
    """The third piece fails: jobs and imports are refused, and two pieces wait for a release."""
    memory, _ = rig.attach(SIZES)
    before = rig.driver.mark
    rig.driver.set(f"fail={REGISTER}:3:2")
    rig.device.pin_arena(memory, 0, POOL_BYTES)
    eventually(lambda: rig.device.pool_error)
    with pytest.raises(ImportFailed, match="cannot be pinned"):
        rig.attach(SIZES)
    assert rig.device.usable_bytes == 0
    assert rig.device.pinned_bytes == 2 * UNIT
    assert not rig.device.is_usable(0, UNIT)
    assert UNREGISTER not in rig.driver.calls(before)
    rig.device.release_memory(memory)
    assert is_soon(lambda: rig.driver.calls(before).count(UNREGISTER) == 2)


def unpin_or_raise(pool: PinnedPool, piece: int) -> None:
    """A piece that the driver does not unregister is an error like any other."""
    pool._is_pinned[piece] = False
    begin, end = pool._fill.span(piece)
    driver.unregister_host(pool._address + begin)
    pool.pinned_bytes -= end - begin


@rule(PinnedPool, "_unpin_piece", unpin_or_raise, pinned=False)
def a_piece_that_cannot_be_unpinned_costs_no_other(rig: CudaRig) -> None:
    """The driver refuses to unregister one piece: the pool serves, and the lane can stop."""
    memory, _ = rig.attach(SIZES)
    rig.device.pin_arena(memory, 0, 2 * UNIT)
    eventually(lambda: rig.device.pinned_bytes == 2 * UNIT)
    rig.device.release_memory(memory)
    rig.driver.set(f"fail={UNREGISTER}:1:801")
    later, _ = rig.attach(SIZES)
    before = rig.driver.mark
    rig.device.pin_arena(later, 2 * UNIT, 3 * UNIT)
    assert is_soon(lambda: rig.driver.calls(before).count(UNREGISTER) == 2)
    rig.device.pin_arena(later, 0, 3 * UNIT)  # the piece is pinned still
    assert is_soon(lambda: rig.device.is_usable(0, 3 * UNIT))
    assert (rig.device.pool_error, rig.device.usable_bytes) == ("", POOL_BYTES)
    rig.move(later, STORE, [(0, 0, 2 * UNIT, 4096)])
    rig.device.release_memory(later)
    assert is_soon(rig.device.unpin)


@rule(CudaDevice, "unpin", lambda _self: True)
def a_lane_that_stops_unpins_piece_by_piece(rig: CudaRig) -> None:
    """`unpin` returns at once, and True only when nothing is pinned."""
    before = rig.driver.mark
    rig.driver.set(f"hang={UNREGISTER}:2")
    assert not rig.device.unpin()
    rig.driver.wait_for("@hang", 1, before)
    assert not rig.device.unpin()
    assert rig.device.pinned_bytes == POOL_BYTES - UNIT
    rig.driver.set("unhang=")
    eventually(rig.device.unpin)
    assert rig.driver.calls(before).count(UNREGISTER) == POOL_BYTES // UNIT


@pytest.fixture(scope="module")
def forks() -> ForkServerContext:
    """Starts processes that have imported this module, and no driver, before they begin."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


@pytest.mark.parametrize("name", [rule.name for rule in RULES])
def test_the_backend_keeps_the_rule(
    fakecuda: FakeCuda, forks: ForkServerContext, tmp_path: Path, name: str
) -> None:
    """It passes the check, which fails without the rule: so the rule is tested."""
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
    workers = CudaWorkers(fakecuda.library)
    fake_driver = load(fakecuda, log)
    if rule.setting:
        fake_driver.set(rule.setting)
    rig = CudaRig(fake_driver, workers, rule.options, pinned=rule.pinned)
    if without:
        patch.setattr(f"{__name__}.SOON", 1.0)
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
