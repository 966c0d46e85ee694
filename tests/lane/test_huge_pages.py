"""A pool in huge pages, as on hugetlbfs; skipped where the system has none to spare."""

import os
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvd.lane.devices.cuda.backend import Options
from kvd.lane.devices.device import Direction
from kvd.pool.filling import FillOrder
from tests.lane.cuda_checks import submit
from tests.lane.cuda_memory import CudaWorkers
from tests.lane.cuda_rig import CudaRig, TestDriver
from tests.lane.device_contract import drain, pattern
from tests.lane.support import Memory

pytestmark = pytest.mark.fakecuda

HUGE = 2 * 2**20
# The file is whole pages long, the pool need not be.
FILE_BYTES, POOL_BYTES = 4 * HUGE, 3 * HUGE + 8192
SIZES = (65536,)
OPTIONS = Options(registration_bytes=HUGE, kernel_below={})


@pytest.fixture
def huge_pool() -> Iterator[Memory]:
    """A file of four huge pages, none of which is there yet."""
    try:
        pool = Memory(FILE_BYTES, os.MFD_HUGETLB)
        os.posix_fallocate(pool.fd, 0, FILE_BYTES)
        pool.close()
        pool = Memory(FILE_BYTES, os.MFD_HUGETLB)
    except OSError as error:
        pytest.skip(f"four huge pages are not to be had (vm.nr_hugepages): {error}")
    yield pool
    if pool.fd >= 0:
        pool.close()


def test_a_pool_in_huge_pages_is_pinned_as_it_is_allocated(
    fake_driver: TestDriver, ipc_workers: CudaWorkers, huge_pool: Memory
) -> None:
    """Pages that are not there yet are not touched, which would end in SIGBUS; then all serves."""
    rig = CudaRig(
        fake_driver, ipc_workers, OPTIONS, pinned=False, pool=huge_pool, pool_bytes=POOL_BYTES
    )
    try:
        memory, source = rig.attach(SIZES)
        rig.put(source, 0, 0, pattern(SIZES[0], 1))
        fill = FillOrder(POOL_BYTES, HUGE)
        filled = 0
        for piece in fill.order:
            assert rig.cuda.usable_bytes == filled
            begin, end = fill.span(piece)
            os.posix_fallocate(huge_pool.fd, begin, end - begin)
            filled += end - begin
            while rig.cuda.usable_bytes < filled:
                assert not rig.cuda.pool_error
                time.sleep(0.001)
        edge = HUGE - 4096
        submit(rig, 1, memory, Direction.STORE, [(0, 0, edge, 8192), (0, 0, 3 * HUGE, 8192)])
        assert drain(rig.device)[1].error == ""
        for at in (edge, 3 * HUGE):
            np.testing.assert_array_equal(rig.get_pool(at, 8192), pattern(SIZES[0], 1)[:8192])
        submit(rig, 2, memory, Direction.LOAD, [(0, 16384, edge, 8192)])
        assert drain(rig.device)[2].error == ""
        np.testing.assert_array_equal(rig.get(source, 0, 16384, 8192), rig.get_pool(edge, 8192))
    finally:
        rig.close()
        huge_pool.fd = -1
