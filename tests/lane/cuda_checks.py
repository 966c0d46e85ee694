"""What must hold of copies on a device, as functions.

They are asked of the backend as it is, and of backends from which the rule that
makes it hold was taken away: test_cuda_rules.py.
"""

import time
from collections.abc import Sequence

import numpy as np
import pytest

from kvd.errors import LaneError
from kvd.lane.cuda.copier import Thresholds
from kvd.lane.cuda.device import Options
from kvd.lane.device import Direction, MemoryId
from kvd.lane.jobs import ReplyTo
from kvd.lane.runner import Runner
from kvd.lane.workers import Binding, Workers
from kvd.link import BindWorker, ImportWorker
from kvd_proto.directory import SlotState
from kvd_proto.layout import slot_bytes
from kvd_proto.messages import Job, JobStatus, Load, Store
from tests.lane.cuda_rig import POOL_BYTES, CudaRig
from tests.lane.device_contract import Run, drain, pattern, transfer
from tests.lane.support import NAMESPACE, Directory, Memory, make_job, simple_layout

SIZES = (65536, 32768)
PAGE = 4096
TURNS = 40


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


def stores_wait_for_the_timeline(rig: CudaRig) -> None:
    """A store reads what the engine's kernels wrote before the number that it names."""
    served = Served(rig, SlotState.WRITING)
    rig.put(served.source, 0, PAGE, pattern(PAGE, 1))
    served.submit(make_job(Store, 1, [1], [1], after=1))
    rig.put(served.source, 0, PAGE, pattern(PAGE, 2))
    served.finish()
    np.testing.assert_array_equal(rig.get_pool(PAGE, PAGE), pattern(PAGE, 2))


def loads_wait_for_the_timeline(rig: CudaRig) -> None:
    """A load writes after the engine's earlier work on the same blocks, not under it."""
    served = Served(rig, SlotState.READY)
    rig.put_pool(PAGE, pattern(PAGE, 1))
    served.submit(make_job(Load, 1, [1], [1], after=1))
    rig.put(served.source, 0, PAGE, pattern(PAGE, 2))
    served.finish()
    np.testing.assert_array_equal(rig.get(served.source, 0, PAGE, PAGE), pattern(PAGE, 1))


class Served:
    """A runner over the rig's device, with one worker whose chunks are in this state."""

    def __init__(self, rig: CudaRig, state: SlotState) -> None:
        layout = simple_layout(tensors=1, num_blocks=16, page=PAGE, blocks_per_chunk=1)
        self.source = rig.make_worker(layout.storages)
        self._page = Memory(4096)
        workers = Workers(rig.device)
        descriptors = [self._page.fd, *self.source.descriptors[1:]]
        self._worker = workers.add(
            ImportWorker(
                session=1,
                token=bytes(16),
                rank=0,
                world_size=1,
                layout=layout,
                handles=self.source.handles,
            ),
            descriptors,
        )
        self._directory = Directory(16)
        self._directory.set(range(16), state, count=1)
        size = slot_bytes(layout)
        bind = BindWorker(
            session=1, namespace=NAMESPACE, owner=7, arena_base=0, slot_bytes=size, num_slots=16
        )
        fds = [self._directory.memory.fd]
        self._worker.binding = Binding.of(bind, fds, layout, POOL_BYTES)
        self._runner = Runner(rig.device)

    def submit(self, job: Job) -> None:
        """Hand a job in, and let the lane take more turns than a copy needs."""
        self._runner.submit(self._worker, job, ReplyTo(b"", 1, b""))
        for _ in range(TURNS):
            self._turn()

    def finish(self) -> None:
        """The engine's stream reaches the number; the job ends well."""
        self._page.bytes[0] = 1
        while len(self._runner):
            self._turn()
        (job,) = self._runner.take_ended()
        assert job.outcome == (JobStatus.OK, "")

    def _turn(self) -> None:
        self._runner.turn()
        time.sleep(0.0005)
