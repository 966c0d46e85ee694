"""Each rule of order keeps the backend right; without it, a check fails.

docs/testing.md lists them.
"""

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

from kvd.errors import LaneError
from kvd.lane import runner
from kvd.lane.devices.cuda import (
    calibration_file,
    copier,
    driver,
    feeder,
    flow,
    move_kernel,
    pinning,
)
from kvd.lane.devices.cuda.backend import CudaDevice
from kvd.lane.devices.cuda.driver import Event, Stream
from kvd.lane.devices.cuda.options import Options
from kvd.lane.jobs import JobState, LaneJob, Refusal
from kvd_proto.copies import Copies
from tests.fakecuda.harness import FakeCuda
from tests.lane import cuda_checks as checks
from tests.lane.cuda_memory import CudaWorkers
from tests.lane.cuda_rig import CudaRig, TestDriver, load
from tests.lane.device_contract import DeviceContract
from tests.processes import LONG

pytestmark = pytest.mark.fakecuda


def careless_batches() -> Callable[..., None]:
    """Stores let the driver read device memory before the stream gets there."""
    enqueue = driver.BatchCopy.enqueue

    def careless(self: driver.BatchCopy, *args: Any, **_order: bool) -> None:
        enqueue(self, *args, source_in_any_order=True)

    return careless


def segments_reversed() -> Callable[..., int]:
    """The last segment comes first."""
    map_descriptors = driver.map_descriptors
    return lambda segments, *rest: map_descriptors(segments[::-1], *rest)


def record_the_end_first(patch: pytest.MonkeyPatch) -> None:
    """The event that says that copies have ended is recorded before them."""
    enqueue, record = copier.Copier.enqueue, driver.record
    waiting: list[Callable[[], None]] = []

    def early(event: Event, stream: Stream) -> None:
        record(event, stream)
        while waiting:
            waiting.pop()()

    late = lambda self, *args: waiting.append(lambda: enqueue(self, *args))  # noqa: E731
    patch.setattr(copier.Copier, "enqueue", late)
    patch.setattr(driver, "record", early)


def reported_at_once() -> Callable[[flow.Flow, Any], bool]:
    """A transfer that could not be enqueued whole is over without a look at its parts."""
    has_ended = flow.Flow._has_ended
    return lambda self, entry: bool(entry.error) or has_ended(self, entry)


def look_only_before_the_copy() -> Callable[[LaneJob], Refusal | None]:
    """A job that was good when it started is good."""
    objection = LaneJob.objection
    return lambda job: objection(job) if job.state is JobState.QUEUED else None


def one_priority() -> Callable[[int], Stream]:
    """Streams are made as they come."""
    create = driver.create_stream
    return lambda _priority: create(0)


Taken = tuple[object, str, object]  # whose attribute is replaced, and by what
NO_TIMELINE: Taken = (runner, "_reached", lambda _now: lambda _job: True)
NO_SPLIT: Taken = (Copies, "split", lambda copies, _unit, _base: copies)
NO_SECOND_LOOK: Taken = (LaneJob, "objection", look_only_before_the_copy())


@dataclass(frozen=True)
class Rule:
    """A check, what takes the rule behind it away, and the backend on which both are seen.

    before_start: the rule is one for setting up; it is taken away first.
    """

    check: Callable[[CudaRig], None]
    taken: tuple[Taken, ...] | Callable[[pytest.MonkeyPatch], None]
    options: Options = field(default_factory=checks.engine_only)
    setting: str = ""
    before_start: bool = False

    def take_away(self) -> None:
        """In this process, for good."""
        patch = pytest.MonkeyPatch()
        if callable(self.taken):
            self.taken(patch)
            return
        for where, name, instead in self.taken:
            patch.setattr(where, name, instead)

    def rig(self, fake_driver: TestDriver, workers: CudaWorkers) -> CudaRig:
        """That backend."""
        if self.setting:
            fake_driver.set(self.setting)
        return CudaRig(fake_driver, workers, self.options, pinned="hang" not in self.setting)


RULES = [
    Rule(checks.stores_wait_for_the_timeline, (NO_TIMELINE,)),
    Rule(checks.loads_wait_for_the_timeline, (NO_TIMELINE,)),
    Rule(
        checks.sources_are_read_at_their_turn,
        ((driver.BatchCopy, "enqueue", careless_batches()),),
    ),
    Rule(
        checks.batches_are_given_the_devices_addresses,
        ((driver, "device_address", lambda address: address),),
        before_start=True,
    ),
    Rule(
        checks.pieces_of_a_direction_keep_their_order,
        ((feeder.Feeder, "idle", True),),
        checks.engine_only(inline_runs=1),
    ),
    Rule(
        checks.an_event_marks_one_piece,
        ((flow.Flow, "_begins_next", lambda _self, _end: False),),
    ),
    Rule(
        checks.a_thread_reports_a_failure_with_its_piece,
        ((flow._Enqueued, "fail", lambda _self, _error: None),),
        checks.engine_only(inline_runs=0),
        setting="fail=cuMemcpyBatchAsync:*:801",
    ),
    Rule(
        checks.what_was_measured_of_another_driver_is_not_used,
        ((calibration_file, "_is_of", lambda _kept, _identity: True),),
    ),
    Rule(checks.ends_are_reported_after_the_last_byte, record_the_end_first),
    Rule(
        checks.a_half_enqueued_transfer_is_drained,
        ((flow.Flow, "_has_ended", reported_at_once()),),
        setting="fail=cuMemcpyBatchAsync:*:801",
    ),
    Rule(
        DeviceContract().test_memory_in_use_is_not_released,
        ((flow.Flow, "uses", lambda _self, _memory: False),),
    ),
    Rule(checks.no_copy_spans_two_registrations, (NO_SPLIT,)),
    Rule(checks.no_kernel_access_spans_two_registrations, (NO_SPLIT,), checks.by_kernel(4096)),
    Rule(
        checks.run_lists_are_left_alone_while_a_kernel_reads_them,
        ((move_kernel.Ring, "take", lambda _self, words: (0, words)),),
        checks.by_kernel(4096),
    ),
    Rule(
        checks.nothing_is_copied_before_it_is_pinned,
        ((CudaDevice, "_is_pinned", lambda _self, _transfer: True),),
        setting="hang=cuMemHostRegister:2",  # the first is the lane's own scratch memory
    ),
    Rule(checks.a_run_stays_inside_its_storage, ((Copies, "check_bounds", lambda *_: None),)),
    Rule(
        checks.what_a_worker_claims_is_held_against_the_driver,
        ((driver, "address_range", lambda address: (address, 2**40)),),
    ),
    Rule(
        checks.segments_lie_in_their_order,
        ((driver, "map_descriptors", segments_reversed()),),
    ),
    Rule(
        checks.what_was_pinned_is_unpinned_when_the_rest_cannot_be,
        ((pinning.PinnedPool, "_unregister", lambda _self: None),),
        setting="hang=cuMemHostRegister:3",
    ),
    Rule(
        checks.a_registration_is_short,
        ((pinning, "piece_bytes_for", lambda *_: 512 * 2**20),),
    ),
    Rule(
        checks.others_have_the_driver_between_two_registrations,
        ((pinning, "pause_after", lambda _seconds: 0.0),),
    ),
    Rule(
        checks.bytes_in_flight_are_bounded,
        ((CudaDevice, "has_room", lambda _self, _direction: True),),
        checks.engine_only(bytes_in_flight=10_000),
    ),
    Rule(
        checks.loads_go_before_stores_on_the_device,
        ((driver, "create_stream", one_priority()),),
        before_start=True,
    ),
    Rule(
        checks.a_device_that_hangs_is_given_up,
        ((CudaDevice, "_check_pulse", lambda _self: None),),
        checks.engine_only(stuck_seconds=0.05),
    ),
    Rule(
        checks.a_thread_that_hangs_is_given_up,
        ((CudaDevice, "_check_pulse", lambda _self: None),),
        checks.engine_only(stuck_seconds=0.05, inline_runs=0),
    ),
    Rule(checks.a_store_is_void_when_its_blocks_were_taken_back, (NO_SECOND_LOOK,)),
    Rule(checks.a_load_is_stale_when_its_chunk_was_replaced, (NO_SECOND_LOOK,)),
]
NOTICED = 77  # an exit status that no other way to end has
NAMES = [rule.check.__name__ for rule in RULES]


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_the_backend_keeps_the_rule(
    fake_driver: TestDriver, ipc_workers: CudaWorkers, rule: Rule
) -> None:
    """As it is, the backend passes the check."""
    rig = rule.rig(fake_driver, ipc_workers)
    try:
        rule.check(rig)
    finally:
        rig.close()


@pytest.fixture(scope="module")
def forks() -> ForkServerContext:
    """Starts processes that have imported this module, and no driver, before they begin."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


@pytest.mark.parametrize("name", NAMES)
def test_without_the_rule_the_check_fails(
    fakecuda: FakeCuda, forks: ForkServerContext, tmp_path: Path, name: str
) -> None:
    """With the rule taken away the check notices; so the rule is tested, not only written."""
    process = forks.Process(target=miss_the_rule, args=(fakecuda, tmp_path / "calls.log", name))
    process.start()
    process.join(LONG)
    process.kill()
    assert process.exitcode == NOTICED


def miss_the_rule(fakecuda: FakeCuda, log: Path, name: str) -> None:
    """A process of its own, for a backend without its rules may lose the device."""
    os.environ.update(fakecuda.environment())  # for the process with the device memory
    (rule,) = (rule for rule in RULES if rule.check.__name__ == name)
    fake_driver = load(fakecuda, log)
    workers = CudaWorkers(ipc=True)
    if rule.before_start:
        rule.take_away()
    rig = rule.rig(fake_driver, workers)
    if not rule.before_start:
        rule.take_away()
    try:
        rule.check(rig)
    except (AssertionError, LaneError, pytest.fail.Exception):
        os._exit(NOTICED)  # without letting go of what may be out of order
    os._exit(0)
