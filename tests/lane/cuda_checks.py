"""What must hold of copies on a device: checks, and rules without which each of them fails.

test_cuda_rules.py runs every check on the backend as it is, and on one from which the rule was
taken away.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvd.errors import DeviceLost, ImportFailed, LaneError
from kvd.lane.cuda import driver, streams
from kvd.lane.cuda.backend import CudaDevice, CudaOptions
from kvd.lane.cuda.copies import BatchCopy
from kvd.lane.device import Direction
from kvd.lane.runner import Runner
from kvd.lane.workers import WorkerTable
from kvd_proto.copies import Copies
from kvd_proto.directory import SlotState
from kvd_proto.jobs import CONTROL_BYTES
from kvd_proto.messages import IpcHandle, JobStatus, Store
from tests.lane.cuda_rig import POOL_BYTES, WHOLE_POOL, CudaRig
from tests.lane.device_contract import DeviceContract, drain, pattern
from tests.lane.support import Directory, Memory, bound_worker, make_job
from tests.layouts import flat_layout

SIZES = (65536, 32768)
PAGE = 4096
TURNS = 40
COPY = "cuMemcpyBatchAsync"
NO_BATCHES = f"fail={COPY}:*:801"
LAYOUT = flat_layout(PAGE, blocks=16)
FIVE_RUNS = [(0, at, at, 100) for at in range(0, 5000, 1000)]
STORE, LOAD = Direction.STORE, Direction.LOAD
Check = Callable[[CudaRig], None]

options = partial(CudaOptions, registration_bytes=65536, inline_runs=64)


@dataclass(frozen=True)
class Rule:
    """A check, what takes the rule behind it away, and the backend on which both are seen.

    owner, attribute, replacement: without the rule, `owner` has this attribute instead.
    pinned: the pool is, before the check.
    """

    check: Check
    owner: object
    attribute: str
    replacement: object
    options: CudaOptions = field(default_factory=options)
    setting: str = ""
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
    before = rig.driver.mark
    workers, source = WorkerTable(rig.device), rig.make_worker(LAYOUT.storages)
    page, directory = Memory(CONTROL_BYTES), Directory(16)
    directory.set(range(16), SlotState.WRITING)
    fds = [page.fd, *source.descriptors[1:]]
    worker = bound_worker(workers, LAYOUT, fds, directory.memory.fd, handles=source.handles)
    rig.device.pin_arena(WHOLE_POOL, 0, POOL_BYTES)
    rig.driver.wait_for("@hang", 1, rig.mark)
    runner = Runner(rig.device)
    for number, status in enumerate((JobStatus.STALE, JobStatus.OK)):
        directory.set([1], SlotState.WRITING, generation=1 + number)
        job = make_job(Store, number, [1], [1], generation=1 + number)
        runner.submit(worker, job, request_id=1)
        while not (ended := runner.take_ended()):
            runner.run_once()
        assert ended[0].outcome[0] is status, ended
        assert (COPY in rig.driver.calls(before)) == (status is JobStatus.OK)
        assert (rig.get_pool(PAGE, PAGE) == 0xAB).all() == (status is JobStatus.STALE)
        rig.driver.set("unhang=")
        rig.wait_until_pinned()


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
