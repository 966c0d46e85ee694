"""What must hold of copies on a device, as functions.

They are asked of the backend as it is, and of backends from which the rule that
makes it hold was taken away: test_cuda_rules.py.
"""

from collections.abc import Sequence

import numpy as np
import pytest

from kvd.errors import LaneError
from kvd.lane.cuda.copier import Thresholds
from kvd.lane.cuda.device import Options
from kvd.lane.device import Direction, MemoryId
from tests.lane.cuda_rig import CudaRig
from tests.lane.device_contract import Run, drain, pattern, transfer

SIZES = (65536, 32768)


def engine_only(*, bytes_in_flight: int = 32 * 2**20, stuck_seconds: float = 60.0) -> Options:
    """No kernel, small registrations."""
    return Options(
        registration_bytes=65536,
        bytes_in_flight=bytes_in_flight,
        stuck_seconds=stuck_seconds,
        thresholds=Thresholds(),
    )


def by_kernel(below: int) -> Options:
    """Runs below that many bytes go by the kernel."""
    return Options(registration_bytes=65536, thresholds=Thresholds(below, below))


def submit(
    rig: CudaRig, number: int, memory: MemoryId, direction: Direction, runs: Sequence[Run]
) -> None:
    """Start a transfer of these runs."""
    rig.device.submit(transfer(number, memory, direction, runs))


def sources_are_read_at_their_turn(rig: CudaRig) -> None:
    """What a store reads is what is there when the stream gets to it, not what was before."""
    memory, source = rig.attach(SIZES)
    rig.put(source, 0, 0, pattern(4096, 1))
    rig.driver.set("any=early")
    rig.driver.set("hold=copies")
    submit(rig, 1, memory, Direction.STORE, [(1, 0, 8192, 4096)])  # holds up the one behind it
    submit(rig, 2, memory, Direction.STORE, [(0, 0, 0, 4096)])
    rig.put(source, 0, 0, pattern(4096, 2))
    rig.driver.set("hold=")
    drain(rig.device)
    np.testing.assert_array_equal(rig.get_pool(0, 4096), pattern(4096, 2))


def ends_are_reported_after_the_last_byte(rig: CudaRig) -> None:
    """Nothing is reported while copies are held, of either direction; then the bytes are there."""
    memory, source = rig.attach(SIZES)
    rig.put(source, 0, 0, pattern(4096, 1))
    rig.put_pool(8192, pattern(4096, 2))
    rig.driver.set("hold=copies")
    submit(rig, 1, memory, Direction.STORE, [(0, 0, 0, 4096)])
    submit(rig, 2, memory, Direction.LOAD, [(1, 0, 8192, 4096)])
    for _ in range(20):
        assert rig.device.progress() == []
    rig.driver.set("hold=")
    assert set(drain(rig.device)) == {1, 2}
    np.testing.assert_array_equal(rig.get_pool(0, 4096), pattern(4096, 1))
    np.testing.assert_array_equal(rig.get(source, 1, 0, 4096), pattern(4096, 2))


def a_half_enqueued_transfer_is_drained(rig: CudaRig) -> None:
    """A transfer whose enqueueing failed half-way is reported when the first half has ended."""
    memory, _ = rig.attach(SIZES)
    rig.driver.set("hold=copies")
    rig.driver.set("fail=cuMemcpyAsync:3:801")
    runs = [(0, 8192 * index, 8192 * index, 4096) for index in range(4)]
    submit(rig, 1, memory, Direction.STORE, runs)
    for _ in range(20):
        assert rig.device.progress() == []
    rig.driver.set("fail=")
    rig.driver.set("hold=")
    assert "CUDA_ERROR_NOT_SUPPORTED" in drain(rig.device)[1].error


def memory_is_unmapped_after_its_copies(rig: CudaRig) -> None:
    """While a copy is on its way memory cannot be released, and the copy ends well."""
    memory, _ = rig.attach(SIZES)
    rig.driver.set("hold=copies")
    submit(rig, 1, memory, Direction.STORE, [(0, 0, 0, 4096)])
    with pytest.raises(LaneError, match="in flight"):
        rig.device.release_memory(memory)
    rig.driver.set("hold=")
    assert drain(rig.device)[1].error == ""
    rig.device.release_memory(memory)


def no_copy_spans_two_registrations(rig: CudaRig) -> None:
    """A run across a boundary between registered pieces arrives whole."""
    memory, source = rig.attach(SIZES)
    rig.put(source, 0, 0, pattern(8192, 1))
    submit(rig, 1, memory, Direction.STORE, [(0, 0, 65536 - 4096, 8192)])
    assert drain(rig.device)[1].error == ""
    np.testing.assert_array_equal(rig.get_pool(65536 - 4096, 8192), pattern(8192, 1))


def run_lists_are_left_alone_while_a_kernel_reads_them(rig: CudaRig) -> None:
    """Transfers that wait for their kernel at the same time each move their own runs."""
    memory, source = rig.attach(SIZES)
    rig.put(source, 0, 0, pattern(8192, 1))
    rig.driver.set("hold=copies")  # a kernel reads its list when it starts
    for number in range(8):
        submit(rig, number, memory, Direction.STORE, [(0, number * 1024, number * 1024, 1024)])
        assert rig.device.progress() == []
    rig.driver.set("hold=")
    drain(rig.device)
    np.testing.assert_array_equal(rig.get_pool(0, 8192), pattern(8192, 1))


def nothing_is_copied_before_it_is_pinned(rig: CudaRig) -> None:
    """A transfer waits while the registration of its part of the pool hangs, and then works."""
    memory, source = rig.attach(SIZES)
    rig.put(source, 0, 0, pattern(4096, 1))
    submit(rig, 1, memory, Direction.STORE, [(0, 0, 0, 4096)])
    for _ in range(20):
        assert rig.device.progress() == []
    assert rig.device.in_flight == 1
    with pytest.raises(LaneError, match="in flight"):
        rig.device.release_memory(memory)
    rig.driver.set("unhang=")
    assert drain(rig.device)[1].error == ""
    np.testing.assert_array_equal(rig.get_pool(0, 4096), pattern(4096, 1))
