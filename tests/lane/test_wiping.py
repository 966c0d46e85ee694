"""How a lane zeroes: step by step, seldom beside jobs, and never outside the pool."""

import numpy as np
import pytest

from kvd.errors import LaneError
from kvd.lane.host import HostDevice
from kvd.lane.wiping import PAUSE_NS, STEP_BYTES, Wiping
from kvd.link import Wipe
from kvd_proto.arrays import IntArray
from tests.lane.device_contract import pattern
from tests.lane.support import Memory

POOL = 4 * STEP_BYTES


def wipe(number: int, *runs: tuple[int, int]) -> Wipe:
    """The broker's message."""
    begins, ends = ([run[side] for run in runs] for side in (0, 1))
    return Wipe(number=number, begins=IntArray.of(begins, "u8"), ends=IntArray.of(ends, "u8"))


def test_pieces_are_wiped_in_steps_and_in_order() -> None:
    """A step is 1 MiB, over several runs; a piece is reported with its last byte."""
    memory = Memory(POOL)
    device = HostDevice(memory.fd, POOL)
    try:
        before = pattern(POOL, 1)
        memory.bytes[:] = before
        wiping = Wiping(device, POOL)
        wiping.add(wipe(7, (0, STEP_BYTES // 2), (STEP_BYTES, 2 * STEP_BYTES + 10)))
        wiping.add(wipe(8, (POOL - 1, POOL)))
        told = [wiping.turn(0, jobs=False)]
        before[: STEP_BYTES // 2] = before[STEP_BYTES : STEP_BYTES * 3 // 2] = 0
        np.testing.assert_array_equal(memory.bytes, before)
        told += [wiping.turn(now, jobs=False) for now in range(1, 4)]
        before[STEP_BYTES : 2 * STEP_BYTES + 10] = before[-1] = 0
        np.testing.assert_array_equal(memory.bytes, before)
        assert told == [(True, None), (True, 7), (True, 8), (False, None)]
        assert not len(wiping)
    finally:
        device.close()
        memory.close()


def test_jobs_come_first() -> None:
    """While there are jobs a step follows the last one after a pause only."""
    memory = Memory(POOL)
    device = HostDevice(memory.fd, POOL)
    try:
        wiping = Wiping(device, POOL)
        wiping.add(wipe(1, (0, POOL)))
        start = 10 * PAUSE_NS
        assert wiping.turn(start, jobs=True) == (True, None)
        assert wiping.turn(start + PAUSE_NS - 1, jobs=True) == (False, None)
        assert wiping.turn(start + PAUSE_NS, jobs=True) == (True, None)
        assert wiping.turn(start + PAUSE_NS, jobs=False) == (True, None)
        assert wiping.turn(start + PAUSE_NS, jobs=False) == (True, 1)
    finally:
        device.close()
        memory.close()


@pytest.mark.parametrize("run", [(0, POOL + 1), (5, 5), (9, 8), (POOL, 2**63)])
def test_what_is_not_in_the_pool_is_refused(run: tuple[int, int]) -> None:
    """One bad run, and nothing of its piece is taken."""
    memory = Memory(POOL)
    device = HostDevice(memory.fd, POOL)
    try:
        wiping = Wiping(device, POOL)
        with pytest.raises(LaneError, match=f"bytes {run[0]} to {run[1]}"):
            wiping.add(wipe(1, (0, 10), run))
        assert not len(wiping)
    finally:
        device.close()
        memory.close()
