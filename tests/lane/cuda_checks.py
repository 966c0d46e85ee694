"""What must hold of copies on a device, as functions.

They are asked of the backend as it is, and of backends from which the rule that
makes it hold was taken away: test_cuda_rules.py.
"""

import contextlib
import os
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvd.errors import ImportFailed, LaneError
from kvd.lane.devices.cuda import calibration, driver
from kvd.lane.devices.cuda.driver import Stream, Undo
from kvd.lane.devices.cuda.moves import HOST, NBYTES, Runs
from kvd.lane.devices.cuda.options import Options
from kvd.lane.devices.cuda.pinning import LONGEST_PAUSE, PinnedPool
from kvd.lane.devices.device import Direction
from kvd.lane.runner import Runner
from kvd.lane.workers import Binding, Workers
from kvd_proto.control import CONTROL_BYTES
from kvd_proto.directory import SlotState
from kvd_proto.layout import TensorSpec
from kvd_proto.messages import IpcHandle, Job, JobStatus, Load, Store
from tests.lane.cuda_memory import CudaWorkers
from tests.lane.cuda_rig import POOL_BYTES, CudaRig, switched
from tests.lane.device_contract import drain, pattern
from tests.lane.support import (
    EPOCH,
    Directory,
    Memory,
    bind_message,
    import_message,
    make_job,
)
from tests.layouts import flat_layout
from tests.waiting import eventually

SIZES = (65536, 32768)
PAGE = 4096
TURNS = 40
COPY = "cuMemcpyBatchAsync"


def engine_only(
    *, bytes_in_flight: int = 32 * 2**20, stuck_seconds: float = 60.0, inline_runs: int | None = 64
) -> Options:
    """No kernel, small registrations."""
    return Options(
        registration_bytes=65536,
        bytes_in_flight=bytes_in_flight,
        stuck_seconds=stuck_seconds,
        kernel_below={},
        any_order=True,
        inline_runs=inline_runs,
    )


def by_kernel(below: int) -> Options:
    """Runs below that many bytes go by the kernel."""
    way = dict.fromkeys(Direction, below)
    return Options(registration_bytes=65536, kernel_below=way, any_order=True)


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


def an_event_marks_one_piece(rig: CudaRig) -> None:
    """An event that ends one piece and begins the next is used for a third after both."""
    memory, _ = rig.attach(SIZES)
    for number in range(3):
        rig.submit(number, memory, Direction.STORE, [(0, 0, number * 8192, 100)])
    assert set(drain(rig.device)) == {0, 1, 2}
    rig.submit(3, memory, Direction.STORE, [(0, 0, 0, 100)])
    stream = rig.cuda._flows[Direction.STORE].stream
    eventually(lambda: driver.is_idle(stream))
    before = rig.driver.mark
    rig.driver.set("hold=copies")
    rig.submit(4, memory, Direction.STORE, [(0, 0, 8192, 100)])
    rig.driver.wait_for("@held-copy", 1, before)
    assert [finished.transfer.job for finished in rig.device.progress()] == [3]


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


def what_was_measured_of_another_driver_is_not_used(rig: CudaRig) -> None:
    """A file that another driver's lane has kept is measured anew; this driver's is used."""
    options = Options(kernel_below={})
    with tempfile.TemporaryDirectory() as folder, Undo() as undo:
        place = Path(folder) / "calibration.json"
        for version, measured in ((13000, True), (13000, False), (13010, True)):
            rig.driver.set(f"driver_version={version}")
            before = rig.driver.mark
            calibration.choose(0, options, ("cuda:1", "model"), place, undo)
            assert (rig.driver.calls(before).count(COPY) > 2) == measured


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


def no_kernel_access_spans_two_registrations(rig: CudaRig) -> None:
    """The same by the kernel, in both directions; every run that it is given lies in one piece."""
    memory, source = rig.attach(SIZES)
    rig.put(source, 0, 0, pattern(2048, 1))
    edge = 65536
    given: list[tuple[int, int]] = []
    kernel = rig.cuda.copier.kernel
    assert kernel is not None
    enqueue = kernel.enqueue

    where, unit = rig.cuda._pool.where, rig.cuda._pool.piece_bytes

    def watched(runs: Runs, direction: Direction, stream: Stream, taken: list[int]) -> bool:
        for address, nbytes in zip(*runs.table[[HOST, NBYTES]].tolist(), strict=True):
            (offset,) = {
                at
                for piece, base in enumerate(where.tolist())
                if (at := (address - base) % 2**64) // unit == piece
            }
            given.append((offset, nbytes))
        return enqueue(runs, direction, stream, taken)

    kernel.enqueue = watched  # type: ignore[method-assign]  # to look at what it is given
    rig.submit(1, memory, Direction.STORE, [(0, 0, edge - 1024, 2048)])
    assert drain(rig.device)[1].error == ""
    rig.submit(2, memory, Direction.LOAD, [(1, 0, edge - 1024, 2048)])
    assert drain(rig.device)[2].error == ""
    assert given == 2 * [(edge - 1024, 1024), (edge, 1024)]
    np.testing.assert_array_equal(rig.get(source, 1, 0, 2048), pattern(2048, 1))


def run_lists_are_left_alone_while_a_kernel_reads_them(rig: CudaRig) -> None:
    """Transfers that wait for their kernel at the same time each move their own runs."""
    memory, source = rig.attach(SIZES)
    rig.put(source, 0, 0, pattern(8192, 1))
    rig.driver.set("hold=copies")  # a kernel reads its list when it starts
    for number in range(8):
        rig.submit(number, memory, Direction.STORE, [(0, number * 1024, number * 1024, 1024)])
        assert rig.device.progress() == []
    rig.driver.set("hold=")
    drain(rig.device)
    np.testing.assert_array_equal(rig.get_pool(0, 8192), pattern(8192, 1))


def nothing_is_copied_before_it_is_pinned(rig: CudaRig) -> None:
    """A transfer waits while the registration of its part of the pool hangs, and then works."""
    memory, source = rig.attach(SIZES)
    rig.put(source, 0, 0, pattern(4096, 1))
    before = rig.driver.mark
    rig.submit(1, memory, Direction.STORE, [(0, 0, 0, 4096)])
    assert rig.device.progress() == []
    assert not rig.device.holds(0, 4096)
    assert COPY not in rig.driver.calls(before)
    assert rig.device.in_flight == 1
    with pytest.raises(LaneError, match="in flight"):
        rig.device.release_memory(memory)
    rig.driver.set("unhang=")
    assert drain(rig.device)[1].error == ""
    assert rig.device.holds(0, 4096)
    np.testing.assert_array_equal(rig.get_pool(0, 4096), pattern(4096, 1))


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


def what_was_pinned_is_unpinned_when_the_rest_cannot_be(rig: CudaRig) -> None:
    """The third piece fails: the two before it are let go, and nothing is copied unpinned.

    Workers are refused with the remedy.
    """
    memory, _ = rig.attach(SIZES)
    rig.submit(1, memory, Direction.STORE, [(0, 0, POOL_BYTES - 4096, 4096)])
    rig.driver.wait_for("cuMemHostRegister", 3, rig.mark)  # the second piece of the pool
    before = rig.driver.mark
    rig.driver.set("fail=cuMemHostRegister:1:2")
    rig.driver.set("unhang=")
    rig.wait_until_pinned()
    assert "cannot be pinned" in drain(rig.device)[1].error
    with pytest.raises(ImportFailed, match="LimitMEMLOCK"):
        rig.attach(SIZES)
    assert rig.driver.calls(before).count("cuMemHostUnregister") == 2


def a_registration_is_short(rig: CudaRig) -> None:
    """A machine that pins no more than 256 MiB at a time pins a large pool, piece by piece."""
    rig.driver.set(f"max_pin={256 * 2**20}")
    large = Memory(70 * 2**30)  # of which one piece is there
    pool = PinnedPool(large.fd, len(large.bytes), rig.cuda._pool._context)
    try:
        begin, end = pool.fill.span(pool.fill.order[0])
        os.posix_fallocate(large.fd, begin, end - begin)
        eventually(lambda: pool.error or pool.pinned)
        assert (pool.error, pool.pinned) == ("", end - begin)
    finally:
        pool.close()
        large.close()


def others_have_the_driver_between_two_registrations(rig: CudaRig) -> None:
    """After each piece the driver is left alone for as long as the piece took."""
    busy: list[tuple[float, float]] = []
    register = driver.register_host

    def slow(address: int, nbytes: int) -> None:
        began = time.monotonic()
        time.sleep(0.005)
        register(address, nbytes)
        busy.append((began, time.monotonic()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "register_host", slow)
        memory = Memory(POOL_BYTES)
        memory.bytes[:] = 0
        pool = PinnedPool(memory.fd, POOL_BYTES, rig.cuda._pool._context, POOL_BYTES // 8)
        try:
            eventually(lambda: pool.error or pool.pinned == POOL_BYTES)
        finally:
            pool.close()
            memory.close()
    assert len(busy) == 8
    for (began, ended), (next_began, _) in pairwise(busy):
        assert next_began - ended >= min(ended - began, LONGEST_PAUSE)


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
        self._worker = Workers(rig.device).add(known, fds)
        self._directory = Directory(blocks)
        self._directory.set(range(blocks), state, count=1)
        bind, fds = bind_message(1, self._directory), [self._directory.memory.fd]
        self._worker.binding = Binding.of(bind, fds, layout, POOL_BYTES)
        self._runner = Runner(rig.device)

    def submit(self, job: Job) -> None:
        """Hand a job in, and let the lane take more turns than a copy needs."""
        self._runner.submit(self._worker, job, lambda _answer: None)
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
        self._runner.turn()
        time.sleep(0.0005)
