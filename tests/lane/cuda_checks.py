"""What must hold of copies on a device, as functions.

They are asked of the backend as it is, and of backends from which the rule that
makes it hold was taken away: test_cuda_rules.py.
"""

import contextlib
import time

import msgspec
import numpy as np
import pytest

from kvd.errors import DeviceLost, ImportFailed, LaneError
from kvd.lane.cuda import driver
from kvd.lane.cuda.backend import CudaOptions
from kvd.lane.device import Direction, MemoryId
from kvd.lane.runner import Runner
from kvd.lane.workers import Binding, WorkerTable
from kvd_proto.directory import SlotState
from kvd_proto.jobs import CONTROL_BYTES
from kvd_proto.layout import TensorSpec
from kvd_proto.messages import IpcHandle, Job, JobStatus, Load, Store
from tests.lane.cuda_memory import CudaWorkers
from tests.lane.cuda_rig import POOL_BYTES, WHOLE_POOL, CudaRig, switched
from tests.lane.device_contract import Source, drain, pattern
from tests.lane.support import (
    EPOCH,
    Directory,
    Memory,
    bind_message,
    import_message,
    make_job,
)
from tests.layouts import flat_layout

SIZES = (65536, 32768)
PAGE = 4096
TURNS = 40
COPY = "cuMemcpyBatchAsync"


def options(
    *, bytes_in_flight: int = 32 * 2**20, stuck_seconds: float = 60.0, inline_runs: int | None = 64
) -> CudaOptions:
    """Small registrations."""
    return CudaOptions(
        registration_bytes=65536,
        bytes_in_flight=bytes_in_flight,
        stuck_seconds=stuck_seconds,
        inline_runs=inline_runs,
    )


def sources_are_read_at_their_turn(rig: CudaRig) -> None:
    """What a store reads is what is there when the stream gets to it, not what was before."""
    memory, source = rig.attach(SIZES)
    rig.put(source, 0, 0, pattern(4096, 1))
    rig.driver.set("any=early")
    rig.driver.set("hold=copies")
    rig.submit(1, memory, Direction.STORE, [(1, 0, 8192, 4096)])  # holds up the one behind it
    rig.submit(2, memory, Direction.STORE, [(0, 0, 0, 4096)])
    rig.put(source, 0, 0, pattern(4096, 2))
    rig.driver.set("hold=")
    drain(rig.device)
    np.testing.assert_array_equal(rig.get_pool(0, 4096), pattern(4096, 2))


def batches_are_given_the_devices_addresses(rig: CudaRig) -> None:
    """Pinned memory has another address for the device; batches know only that one."""
    memory, source = rig.attach(SIZES)
    rig.put(source, 0, 0, pattern(8192, 1))
    before = rig.driver.mark
    rig.submit(1, memory, Direction.STORE, [(0, 0, 0, 4096), (0, 6000, 70000, 1000)])
    assert drain(rig.device)[1].error == ""
    rig.submit(2, memory, Direction.LOAD, [(1, 0, 0, 4096), (1, 6000, 70000, 1000)])
    assert drain(rig.device)[2].error == ""
    np.testing.assert_array_equal(rig.get(source, 1, 6000, 1000), pattern(8192, 1)[6000:7000])
    assert rig.driver.calls(before).count(COPY) == 2  # one by one they may have the host's


def pieces_of_a_direction_keep_their_order(rig: CudaRig) -> None:
    """A piece of few runs is enqueued after one of many that is with the direction's thread.

    The other direction's is not.
    """
    memory, _ = rig.attach(SIZES)
    before = rig.driver.mark
    rig.driver.set(f"hang={COPY}:1")
    rig.submit(1, memory, Direction.STORE, [(0, at, at, 100) for at in range(0, 5000, 1000)])
    rig.driver.wait_for("@hang", 1, before)
    rig.submit(2, memory, Direction.STORE, [(1, 0, 8192, 100)])
    assert rig.driver.calls(before).count(COPY) == 1
    rig.submit(3, memory, Direction.LOAD, [(1, 8192, 20000, 100)])
    assert rig.driver.calls(before).count(COPY) == 2
    with pytest.raises(LaneError, match="in flight"):
        rig.device.release_memory(memory)
    with pytest.raises(LaneError, match="in flight"):
        rig.device.close()
    rig.driver.set("unhang=")
    ends = list(drain(rig.device))
    assert ends.index(1) < ends.index(2)


def a_thread_reports_a_failure_with_its_piece(rig: CudaRig) -> None:
    """What fails in a direction's thread is the piece's error, told when its first half has ended.

    The thread goes on with the next piece.
    """
    memory, source = rig.attach(SIZES)
    rig.put(source, 1, 0, pattern(4096, 1))
    rig.driver.set("hold=copies")
    rig.driver.set("fail=cuMemcpyAsync:3:801")
    before = rig.driver.mark
    rig.submit(1, memory, Direction.STORE, [(0, at, at, 100) for at in range(0, 5000, 1000)])
    rig.submit(2, memory, Direction.STORE, [(1, 0, 8192, 4096)])
    rig.driver.wait_for("cuMemcpyAsync", 4, before)
    assert rig.device.progress() == []
    rig.driver.set("hold=")
    ended = drain(rig.device)
    assert "CUDA_ERROR_NOT_SUPPORTED" in ended[1].error
    assert ended[2].error == ""
    np.testing.assert_array_equal(rig.get_pool(8192, 4096), pattern(4096, 1))


def a_thread_that_hangs_is_given_up(rig: CudaRig) -> None:
    """A call that does not return, in a direction's thread, ends the lane as a copy that hangs."""
    memory, _ = rig.attach(SIZES)
    rig.driver.set(f"hang={COPY}:1")
    rig.submit(1, memory, Direction.STORE, [(0, 0, 0, 100)])
    with pytest.raises(LaneError, match="hangs"):
        drain(rig.device, seconds=3.0)
    rig.driver.set("unhang=")
    while rig.device.in_flight:
        with contextlib.suppress(LaneError):
            rig.device.progress()


def ends_are_reported_after_the_last_byte(rig: CudaRig) -> None:
    """Nothing is reported while copies are held, of either direction; then the bytes are there."""
    memory, source = rig.attach(SIZES)
    rig.put(source, 0, 0, pattern(4096, 1))
    rig.put_pool(8192, pattern(4096, 2))
    rig.driver.set("hold=copies")
    before = rig.driver.mark
    rig.submit(1, memory, Direction.STORE, [(0, 0, 0, 4096)])
    rig.submit(2, memory, Direction.LOAD, [(1, 0, 8192, 4096)])
    rig.driver.wait_for("@held-copy", 2, before)
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
    rig.submit(1, memory, Direction.STORE, runs)
    for _ in range(20):
        assert rig.device.progress() == []
    rig.driver.set("fail=")
    rig.driver.set("hold=")
    assert "CUDA_ERROR_NOT_SUPPORTED" in drain(rig.device)[1].error


def no_copy_spans_two_registrations(rig: CudaRig) -> None:
    """A run across a boundary between registered pieces arrives whole."""
    memory, source = rig.attach(SIZES)
    rig.put(source, 0, 0, pattern(8192, 1))
    rig.submit(1, memory, Direction.STORE, [(0, 0, 65536 - 4096, 8192)])
    assert drain(rig.device)[1].error == ""
    np.testing.assert_array_equal(rig.get_pool(65536 - 4096, 8192), pattern(8192, 1))


def nothing_is_copied_before_it_is_pinned(rig: CudaRig) -> None:
    """A job is refused while the registration of its part of the pool hangs, and then works."""
    served = Served(rig, SlotState.WRITING)
    rig.driver.wait_for("@hang", 1, rig.mark)
    served.submit(make_job(Store, 1, [1], [1]))
    served.finish(JobStatus.STALE)
    assert COPY not in rig.driver.calls(served.mark)
    assert (rig.get_pool(0, POOL_BYTES) == 0xAB).all()
    rig.driver.set("unhang=")
    rig.wait_until_pinned()
    served.submit(make_job(Store, 2, [1], [1]))
    served.finish()


def a_run_stays_inside_its_storage(rig: CudaRig) -> None:
    """A block that the layout puts behind its storage is refused, and nothing moves."""
    served = Served(rig, SlotState.WRITING, offset=PAGE)
    served.submit(make_job(Store, 1, [15], [1]))
    served.finish(JobStatus.REFUSED)
    assert (rig.get_pool(PAGE, PAGE) == 0xAB).all()


def what_a_worker_claims_is_held_against_the_driver(rig: CudaRig) -> None:
    """A storage that is larger than its allocation is refused, and the allocation closed again."""
    before = rig.driver.mark
    source = rig.make_worker((4096,))
    (handle,) = source.handles
    assert isinstance(handle, IpcHandle)
    claim = IpcHandle(handle.handle, 2**30, handle.offset)
    with pytest.raises(ImportFailed, match="do not lie inside"):
        rig.device.import_memory((claim,), (2**29,), source.descriptors)
    assert rig.driver.calls(before).count("cuIpcCloseMemHandle") == 1


def segments_lie_in_their_order(rig: CudaRig) -> None:
    """A storage that begins in one allocation and goes on in the next is copied as one."""
    with switched(rig.driver.environment):
        workers = CudaWorkers(ipc=False)
    try:
        rig.use(workers)
        memory, source = rig.attach((65536,))
        rig.put_pool(0, pattern(65536, 1))
        rig.submit(1, memory, Direction.LOAD, [(0, 0, 0, 65536)])
        assert drain(rig.device)[1].error == ""
        np.testing.assert_array_equal(rig.get(source, 0, 0, 65536), pattern(65536, 1))
    finally:
        workers.close()


def an_import_that_fails_costs_that_memory_alone(rig: CudaRig) -> None:
    """A driver that refuses a handle works on, whatever its code; the memory before it is served.

    999 and 719 were seen at imports that cost no context; the bindings do not know 99999.
    """
    memory, source = rig.attach(SIZES)
    for code in ("999", "719~", "99999"):
        bad = rig.make_worker(SIZES)
        rig.driver.set(f"fail=cuIpcOpenMemHandle:1:{code}")
        with pytest.raises(ImportFailed, match=r"^opening a worker's memory: "):
            rig.device.import_memory(bad.handles, SIZES, bad.descriptors)
        _is_served(rig, memory, source)


def a_release_that_fails_costs_that_memory_alone(rig: CudaRig) -> None:
    """Memory that the driver does not close is this lane's until it ends; others are served on."""
    memory, source = rig.attach(SIZES)
    for code in ("999", "719~", "99999"):
        other, _ = rig.attach(SIZES)
        rig.driver.set(f"fail=cuIpcCloseMemHandle:1:{code}")
        rig.device.release_memory(other)
        _is_served(rig, memory, source)


def _is_served(rig: CudaRig, memory: MemoryId, source: Source) -> None:
    data = pattern(4096, rig.driver.mark)
    rig.put(source, 0, 0, data)
    rig.submit(1, memory, Direction.STORE, [(0, 0, 8192, 4096)])
    rig.submit(2, memory, Direction.LOAD, [(1, 0, 4096, 4096)])
    assert {done.error for done in drain(rig.device).values()} == {""}
    np.testing.assert_array_equal(rig.get_pool(8192, 4096), data)


def a_context_that_does_not_answer_ends_the_lane(rig: CudaRig) -> None:
    """An import that cost the context is no import's own failure, nor is a copy's then."""
    memory, _ = rig.attach(SIZES)
    bad = rig.make_worker(SIZES)
    rig.driver.set("fail=cuIpcOpenMemHandle:1:719")
    with pytest.raises(DeviceLost):
        rig.device.import_memory(bad.handles, SIZES, bad.descriptors)
    rig.submit(1, memory, Direction.STORE, [(0, 0, 0, 100)])
    with pytest.raises(DeviceLost):
        drain(rig.device)


def a_code_that_the_bindings_do_not_know_fails_one_transfer(rig: CudaRig) -> None:
    """They raise ValueError; the transfer's error names the code, and the next one works."""
    memory, _ = rig.attach(SIZES)
    rig.driver.set("fail=cuEventRecord:1:99999")
    rig.submit(1, memory, Direction.STORE, [(0, 0, 0, 100)])
    assert "99999" in drain(rig.device)[1].error
    rig.submit(2, memory, Direction.STORE, [(0, 0, 0, 100)])
    assert drain(rig.device)[2].error == ""


def bytes_in_flight_are_bounded(rig: CudaRig) -> None:
    """However long a job is, the device has no more of it than is allowed, and one piece.

    The other direction is open.
    """
    served = Served(rig, SlotState.WRITING, blocks=64)
    most = 2 * PAGE
    rig.cuda.piece_bytes = rig.cuda.bulk_bytes = dict.fromkeys(Direction, most)
    rig.driver.set("hold=copies")
    served.submit(make_job(Store, 1, range(1, 64), range(1, 64)))
    flying = rig.driver.calls(served.mark).count(COPY) * most
    assert 0 < flying <= 10_000 + most
    assert rig.device.has_room(Direction.LOAD)
    rig.driver.set("hold=")
    served.finish()


def loads_go_before_stores_on_the_device(rig: CudaRig) -> None:
    """The streams of loads have the greatest priority that there is, those of stores the least."""
    greatest, least = (rig.priority(direction) for direction in (Direction.LOAD, Direction.STORE))
    assert (least, greatest) == driver.priorities()


def a_device_that_hangs_is_given_up(rig: CudaRig) -> None:
    """A copy that never ends ends the lane, which is replaced, instead of waiting for ever."""
    memory, _ = rig.attach(SIZES)
    rig.driver.set("hold=copies")
    rig.submit(1, memory, Direction.STORE, [(0, 0, 0, 100)])
    with pytest.raises(LaneError, match="hangs"):
        drain(rig.device, seconds=3.0)
    rig.driver.set("hold=")
    while rig.device.in_flight:
        with contextlib.suppress(LaneError):
            rig.device.progress()


def a_store_is_void_when_its_blocks_were_taken_back(rig: CudaRig) -> None:
    """Its word has moved on while the copy ran: it may have read what came after."""
    served = Served(rig, SlotState.WRITING)
    rig.driver.set("hold=copies")
    served.submit(make_job(Store, 1, [1], [1]))
    served.take_back()
    rig.driver.set("hold=")
    served.finish(JobStatus.VOID)


def a_load_is_stale_when_its_chunk_was_replaced(rig: CudaRig) -> None:
    """The slot was given to another chunk while the copy ran: it may have brought other bytes."""
    served = Served(rig, SlotState.READY)
    rig.driver.set("hold=copies")
    served.submit(make_job(Load, 1, [1], [1]))
    served.replace(1)
    rig.driver.set("hold=")
    served.finish(JobStatus.STALE)


def stores_wait_for_the_timeline(rig: CudaRig) -> None:
    """A store reads what the engine's kernels wrote before the number that it names."""
    served = Served(rig, SlotState.WRITING)
    rig.put(served.source, 0, PAGE, pattern(PAGE, 1))
    served.submit(make_job(Store, 1, [1], [1], after=1))
    assert COPY not in rig.driver.calls(served.mark)
    rig.put(served.source, 0, PAGE, pattern(PAGE, 2))
    served.finish()
    np.testing.assert_array_equal(rig.get_pool(PAGE, PAGE), pattern(PAGE, 2))


def loads_wait_for_the_timeline(rig: CudaRig) -> None:
    """A load writes after the engine's earlier work on the same blocks, not under it."""
    served = Served(rig, SlotState.READY)
    rig.put_pool(PAGE, pattern(PAGE, 1))
    served.submit(make_job(Load, 1, [1], [1], after=1))
    assert COPY not in rig.driver.calls(served.mark)
    rig.put(served.source, 0, PAGE, pattern(PAGE, 2))
    served.finish()
    np.testing.assert_array_equal(rig.get(served.source, 0, PAGE, PAGE), pattern(PAGE, 1))


class Served:
    """A runner over the rig's device, with one worker whose chunks are in this state.

    offset: of block 0 in its storage, which has room for blocks from 0 on.
    """

    def __init__(
        self,
        rig: CudaRig,
        state: SlotState,
        blocks: int = 16,
        offset: int = 0,
    ) -> None:
        layout = flat_layout(PAGE, blocks=blocks)
        tensors = (TensorSpec(0, offset, PAGE, PAGE),)
        layout = msgspec.structs.replace(layout, tensors=tensors)
        self.mark = rig.driver.mark
        self.source = rig.make_worker(layout.storages)
        self._page = Memory(CONTROL_BYTES)
        known = import_message(layout, self.source.handles)
        fds = [self._page.fd, *self.source.descriptors[1:]]
        self._worker = WorkerTable(rig.device).import_worker(known, fds)
        self._directory = Directory(blocks)
        self._directory.set(range(blocks), state, count=1)
        bind, fds = bind_message(1, self._directory), [self._directory.memory.fd]
        self._worker.binding = Binding.of(bind, fds, layout, POOL_BYTES)
        rig.device.pin_arena(WHOLE_POOL, 0, POOL_BYTES)
        self._runner = Runner(rig.device)

    def submit(self, job: Job) -> None:
        """Hand a job in, and let the lane take more turns than a copy needs."""
        self._runner.submit(self._worker, job, request_id=1)
        for _ in range(TURNS):
            self._turn()

    def take_back(self) -> None:
        """The worker voids the store."""
        self._page.bytes[8 * EPOCH] = 1

    def replace(self, slot: int) -> None:
        """The broker gives the slot to another chunk."""
        self._directory.set([slot], SlotState.READY, generation=2, count=1)

    def finish(self, status: JobStatus = JobStatus.OK) -> None:
        """The engine's stream reaches the number; the job ends so."""
        self._page.bytes[0] = 1
        while len(self._runner):
            self._turn()
        (job,) = self._runner.take_ended()
        assert job.outcome[0] is status, job.outcome

    def _turn(self) -> None:
        self._runner.run_once()
        time.sleep(0.0005)
