"""What must hold of copies on a device: checks, and rules without which each of them fails.

test_cuda_rules.py runs every check on the backend as it is, and on one from which the rule was
taken away.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest

from kvd.errors import DeviceLost, ImportFailed, LaneError
from kvd.lane.cuda import driver, streams
from kvd.lane.cuda.backend import CudaDevice, CudaOptions
from kvd.lane.cuda.copies import BatchCopy
from kvd.lane.cuda.driver import Stream
from kvd.lane.device import Direction
from kvd.lane.jobs import JobOutcome, JobState, LaneJob
from kvd.lane.runner import Runner
from kvd.lane.workers import Binding, WorkerTable
from kvd_proto.copies import Copies
from kvd_proto.directory import SlotState
from kvd_proto.jobs import CONTROL_BYTES
from kvd_proto.layout import TensorSpec
from kvd_proto.messages import IpcHandle, Job, JobStatus, Load, Store
from tests.lane.cuda_rig import POOL_BYTES, WHOLE_POOL, CudaRig
from tests.lane.device_contract import DeviceContract, drain, pattern
from tests.lane.support import EPOCH, Directory, Memory, bind_message, import_message, make_job
from tests.layouts import flat_layout

SIZES = (65536, 32768)
PAGE = 4096
TURNS = 40
COPY = "cuMemcpyBatchAsync"
NO_BATCHES = f"fail={COPY}:*:801"
FIVE_RUNS = [(0, at, at, 100) for at in range(0, 5000, 1000)]
STORE, LOAD = Direction.STORE, Direction.LOAD
Check = Callable[[CudaRig], None]

options = partial(CudaOptions, registration_bytes=65536, inline_runs=64)


@dataclass(frozen=True)
class Rule:
    """A check, what takes the rule behind it away, and the backend on which both are seen.

    owner, attribute, replacement: without the rule, `owner` has this attribute instead.
    before_start: the rule is one for setting up; it is taken away first.
    pinned: the pool is, before the check.
    """

    check: Check
    owner: object
    attribute: str
    replacement: object
    options: CudaOptions = field(default_factory=options)
    setting: str = ""
    before_start: bool = False
    pinned: bool = True

    @property
    def name(self) -> str:
        """The check's and the attribute's."""
        return f"{self.check.__name__}-{self.attribute}"


RULES: list[Rule] = []


def rule(
    owner: object, attribute: str, replacement: object, **how: Any
) -> Callable[[Check], Check]:
    """The check fails without this rule; `how` are fields of Rule."""

    def add(check: Check) -> Check:
        RULES.append(Rule(check, owner, attribute, replacement, **how))
        return check

    return add


rule(streams.TransferStream, "uses", lambda _self, _memory: False)(
    DeviceContract().test_memory_in_use_is_not_released
)


def careless_batches() -> Callable[..., None]:
    """Stores let the driver read device memory before the stream gets there."""
    enqueue = BatchCopy.enqueue

    def careless(self: BatchCopy, *args: Any, **_order: bool) -> None:
        enqueue(self, *args, source_in_any_order=True)

    return careless


@rule(BatchCopy, "enqueue", careless_batches())
def sources_are_read_at_their_turn(rig: CudaRig) -> None:
    """What a store reads is what is there when the stream gets to it, not what was before."""
    memory, source = rig.attach(SIZES)
    rig.put(source, 0, 0, pattern(4096, 1))
    rig.driver.set("any=early")
    rig.driver.set("hold=copies")
    rig.submit(1, memory, STORE, [(1, 0, 8192, 4096)])  # holds up the one behind it
    rig.submit(2, memory, STORE, [(0, 0, 0, 4096)])
    rig.put(source, 0, 0, pattern(4096, 2))
    rig.driver.set("hold=")
    drain(rig.device)
    np.testing.assert_array_equal(rig.get_pool(0, 4096), pattern(4096, 2))


@rule(driver, "device_address", lambda address: address, before_start=True)
def batches_are_given_the_devices_addresses(rig: CudaRig) -> None:
    """Pinned memory has another address for the device; batches know only that one."""
    memory, source = rig.attach(SIZES)
    rig.put(source, 0, 0, pattern(8192, 1))
    before = rig.driver.mark
    for direction, storage in ((STORE, 0), (LOAD, 1)):
        rig.move(memory, direction, [(storage, 0, 0, 4096), (storage, 6000, 70000, 1000)])
    np.testing.assert_array_equal(rig.get(source, 1, 6000, 1000), pattern(8192, 1)[6000:7000])
    assert rig.driver.calls(before).count(COPY) == 2  # one by one they may have the host's


@rule(streams.EnqueueThread, "idle", True, options=options(inline_runs=1))
def pieces_of_a_direction_keep_their_order(rig: CudaRig) -> None:
    """A piece of few runs is enqueued after one of many that is with the direction's thread.

    The other direction's is not.
    """
    memory, _ = rig.attach(SIZES)
    before = rig.driver.mark
    rig.driver.set(f"hang={COPY}:1")
    rig.submit(1, memory, STORE, FIVE_RUNS)
    rig.driver.wait_for("@hang", 1, before)
    rig.submit(2, memory, STORE, [(1, 0, 8192, 100)])
    assert rig.driver.calls(before).count(COPY) == 1
    rig.submit(3, memory, LOAD, [(1, 8192, 20000, 100)])
    assert rig.driver.calls(before).count(COPY) == 2
    with pytest.raises(LaneError, match="in flight"):
        rig.device.release_memory(memory)
    with pytest.raises(LaneError, match="in flight"):
        rig.device.close()
    rig.driver.set("unhang=")
    ends = list(drain(rig.device))
    assert ends.index(1) < ends.index(2)


def report_failures_at_once() -> Callable[[streams.TransferStream, Any], bool]:
    """A transfer that could not be enqueued whole is over without a look at its parts."""
    has_ended = streams.TransferStream._has_ended
    return lambda self, entry: bool(entry.error) or has_ended(self, entry)


@rule(streams.TransferStream, "_has_ended", report_failures_at_once(), setting=NO_BATCHES)
@rule(
    streams.StreamTransfer,
    "fail",
    lambda _self, _error: None,
    options=options(inline_runs=0),
    setting=NO_BATCHES,
)
def a_half_enqueued_transfer_is_drained(rig: CudaRig) -> None:
    """A transfer whose enqueueing failed is reported as failed when its first half has ended.

    The next one works. So it is in the lane's thread and in the direction's.
    """
    memory, source = rig.attach(SIZES)
    rig.put(source, 1, 0, pattern(4096, 1))
    rig.driver.set("hold=copies")
    rig.driver.set("fail=cuMemcpyAsync:3:801")
    before = rig.driver.mark
    rig.submit(1, memory, STORE, FIVE_RUNS)
    rig.submit(2, memory, STORE, [(1, 0, 8192, 4096)])
    rig.driver.wait_for("cuMemcpyAsync", 4, before)
    for _ in range(20):
        assert rig.device.progress() == []
    rig.driver.set("hold=")
    completed = drain(rig.device)
    assert "CUDA_ERROR_NOT_SUPPORTED" in completed[1].error
    assert completed[2].error == ""
    np.testing.assert_array_equal(rig.get_pool(8192, 4096), pattern(4096, 1))


def record_the_end_first() -> Callable[..., None]:
    """The event that says that copies have ended is recorded before them."""
    enqueue_copies = streams.TransferStream._enqueue_copies

    def early(self: streams.TransferStream, entry: streams.StreamTransfer) -> None:
        end, entry.end = entry.end, None
        assert end is not None
        driver.record(end, self.stream)
        enqueue_copies(self, entry)
        entry.end, entry.is_marked = end, True

    return early


@rule(streams.TransferStream, "_enqueue_copies", record_the_end_first())
def ends_are_reported_after_the_last_byte(rig: CudaRig) -> None:
    """Nothing is reported while copies are held, of either direction; then the bytes are there."""
    memory, source = rig.attach(SIZES)
    rig.put(source, 0, 0, pattern(4096, 1))
    rig.put_pool(8192, pattern(4096, 2))
    rig.driver.set("hold=copies")
    before = rig.driver.mark
    rig.submit(1, memory, STORE, [(0, 0, 0, 4096)])
    rig.submit(2, memory, LOAD, [(1, 0, 8192, 4096)])
    rig.driver.wait_for("@held-copy", 2, before)
    assert rig.device.progress() == []
    rig.driver.set("hold=")
    assert set(drain(rig.device)) == {1, 2}
    np.testing.assert_array_equal(rig.get_pool(0, 4096), pattern(4096, 1))
    np.testing.assert_array_equal(rig.get(source, 1, 0, 4096), pattern(4096, 2))


@rule(Copies, "split", lambda copies, _unit, _base: copies)
def no_copy_spans_two_registrations(rig: CudaRig) -> None:
    """A run across a boundary between registered pieces arrives whole."""
    memory, source = rig.attach(SIZES)
    rig.put(source, 0, 0, pattern(8192, 1))
    rig.move(memory, STORE, [(0, 0, 65536 - 4096, 8192)])
    np.testing.assert_array_equal(rig.get_pool(65536 - 4096, 8192), pattern(8192, 1))


@rule(
    CudaDevice,
    "is_usable",
    lambda _self, _begin, _end: True,
    setting="hang=cuMemHostRegister:2",  # the first is the lane's trial of batches
    pinned=False,
)
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


@rule(Copies, "check_bounds", lambda *_: None)
def a_run_stays_inside_its_storage(rig: CudaRig) -> None:
    """A block that the layout puts behind its storage is refused, and nothing moves."""
    served = Served(rig, SlotState.WRITING, offset=PAGE)
    served.submit(make_job(Store, 1, [15], [1]))
    served.finish(JobStatus.REFUSED)
    assert (rig.get_pool(PAGE, PAGE) == 0xAB).all()


@rule(driver, "address_range", lambda address: (address, 2**40))
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


@rule(driver, "is_alive", lambda _stream: True)
def a_context_that_does_not_answer_ends_the_lane(rig: CudaRig) -> None:
    """An import that cost the context is no import's own failure, nor is a copy's then."""
    memory, _ = rig.attach(SIZES)
    refused = rig.make_worker(SIZES)
    rig.driver.set("fail=cuIpcOpenMemHandle:1:719")
    with pytest.raises(DeviceLost):
        rig.device.import_memory(refused.handles, SIZES, refused.descriptors)
    rig.submit(1, memory, STORE, [(0, 0, 0, 100)])
    with pytest.raises(DeviceLost):
        drain(rig.device)


def create_streams_alike() -> Callable[[int], Stream]:
    """Streams have one priority."""
    create = driver.create_stream
    return lambda _priority: create(0)


@rule(driver, "create_stream", create_streams_alike(), before_start=True)
def loads_go_before_stores_on_the_device(rig: CudaRig) -> None:
    """The streams of loads have the greatest priority that there is, those of stores the least."""
    assert (rig.priority(STORE), rig.priority(LOAD)) == driver.priorities()


@rule(
    CudaDevice,
    "_check_liveness",
    lambda _self: None,
    options=options(stuck_seconds=0.05, inline_runs=0),
)
def what_hangs_is_given_up(rig: CudaRig) -> None:
    """A copy that never ends, or a call that does not return, ends the lane, which is replaced."""
    memory, _ = rig.attach(SIZES)
    for hang, go_on in (("hold=copies", "hold="), (f"hang={COPY}:1", "unhang=")):
        rig.driver.set(hang)
        rig.submit(1, memory, STORE, [(0, 0, 0, 100)])
        with pytest.raises(LaneError, match="hangs"):
            drain(rig.device, seconds=3.0)
        rig.driver.set(go_on)
        while rig.device.in_flight:
            with contextlib.suppress(LaneError):
                rig.device.progress()


def look_only_before_the_copy() -> Callable[[LaneJob], JobOutcome | None]:
    """A job that was good when it started is good."""
    check_slots = LaneJob.check_slots
    return lambda job: check_slots(job) if job.state is JobState.QUEUED else None


@rule(LaneJob, "check_slots", look_only_before_the_copy())
def what_changed_under_a_copy_is_seen(rig: CudaRig) -> None:
    """A store is VOID if its word moved on while it ran: it may have read what came after.

    A load is STALE if its slot was given to another chunk: it may have brought other bytes.
    """
    for kind, state in ((Store, SlotState.WRITING), (Load, SlotState.READY)):
        served = Served(rig, state)
        rig.driver.set("hold=copies")
        served.submit(make_job(kind, 1, [1], [1]))
        if kind is Store:
            served.page.bytes[8 * EPOCH] = 1
        else:
            served.directory.set([1], SlotState.READY, generation=2, count=1)
        rig.driver.set("hold=")
        served.finish(JobStatus.VOID if kind is Store else JobStatus.STALE)


class Served:
    """A runner over the rig's device, with one worker whose chunks are in this state.

    offset: of block 0 in its storage, which has room for blocks from 0 on.
    """

    def __init__(self, rig: CudaRig, state: SlotState, blocks: int = 16, offset: int = 0) -> None:
        layout = flat_layout(PAGE, blocks=blocks)
        tensors = (TensorSpec(0, offset, PAGE, PAGE),)
        layout = msgspec.structs.replace(layout, tensors=tensors)
        self.mark = rig.driver.mark
        self.source = rig.make_worker(layout.storages)
        self.page = Memory(CONTROL_BYTES)
        order = import_message(layout, self.source.handles)
        fds = [self.page.fd, *self.source.descriptors[1:]]
        self._worker = WorkerTable(rig.device).import_worker(order, fds)
        self.directory = Directory(blocks)
        self.directory.set(range(blocks), state, count=1)
        bind, fds = bind_message(1, self.directory), [self.directory.memory.fd]
        self._worker.binding = Binding.of(bind, fds, layout, POOL_BYTES)
        rig.device.pin_arena(WHOLE_POOL, 0, POOL_BYTES)
        self._runner = Runner(rig.device)

    def submit(self, job: Job) -> None:
        """Hand a job in, and let the lane take more turns than a copy needs."""
        self._runner.submit(self._worker, job, request_id=1)
        for _ in range(TURNS):
            self._turn()

    def finish(self, status: JobStatus = JobStatus.OK) -> None:
        """The engine's stream reaches the number; the job ends so."""
        self.page.bytes[0] = 1
        while len(self._runner):
            self._turn()
        (job,) = self._runner.take_ended()
        assert job.outcome[0] is status, job.outcome

    def _turn(self) -> None:
        self._runner.run_once()
        time.sleep(0.0005)
