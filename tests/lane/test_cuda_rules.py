"""Each rule of order keeps the backend right; without it, a check fails.

`RULES` lists them.
"""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

from kvd.errors import LaneError
from kvd.lane import runner
from kvd.lane.cuda import driver, pinning, streams
from kvd.lane.cuda.backend import CudaDevice, CudaOptions
from kvd.lane.cuda.copies import BatchCopy
from kvd.lane.cuda.driver import Event, Stream
from kvd.lane.cuda.pinning import PinnedPool
from kvd.lane.jobs import JobOutcome, JobState, LaneJob
from kvd.machine import cuda
from kvd_proto.copies import Copies
from tests.fakecuda.harness import FakeCuda
from tests.lane import cuda_checks as checks
from tests.lane import cuda_pin_checks as pins
from tests.lane.cuda_memory import CudaWorkers
from tests.lane.cuda_rig import CudaRig, TestDriver, load
from tests.lane.device_contract import DeviceContract
from tests.processes import LONG

pytestmark = pytest.mark.fakecuda


def careless_batches() -> Callable[..., None]:
    """Stores let the driver read device memory before the stream gets there."""
    enqueue = BatchCopy.enqueue

    def careless(self: BatchCopy, *args: Any, **_order: bool) -> None:
        enqueue(self, *args, source_in_any_order=True)

    return careless


def segments_reversed() -> Callable[..., int]:
    """The last segment comes first."""
    map_descriptors = driver.map_descriptors
    return lambda segments, *rest: map_descriptors(segments[::-1], *rest)


def record_the_end_first(patch: pytest.MonkeyPatch) -> None:
    """The event that says that copies have ended is recorded before them."""
    copy, record = BatchCopy.copy, driver.record
    waiting: list[Callable[[], None]] = []

    def early(event: Event, stream: Stream) -> None:
        record(event, stream)
        while waiting:
            waiting.pop()()

    late = lambda self, *args: waiting.append(lambda: copy(self, *args))  # noqa: E731
    patch.setattr(BatchCopy, "copy", late)
    patch.setattr(driver, "record", early)


def reported_at_once() -> Callable[[streams.TransferStream, Any], bool]:
    """A transfer that could not be enqueued whole is over without a look at its parts."""
    has_ended = streams.TransferStream._has_ended
    return lambda self, entry: bool(entry.error) or has_ended(self, entry)


def look_only_before_the_copy() -> Callable[[LaneJob], JobOutcome | None]:
    """A job that was good when it started is good."""
    check_slots = LaneJob.check_slots
    return lambda job: check_slots(job) if job.state is JobState.QUEUED else None


def raise_as_the_bindings_do(_attempted: str, name: str, *arguments: object) -> Any:
    """What the bindings raise is not made an error of the lane."""
    return getattr(cuda.bindings(), name)(*arguments)


def unpin_or_raise(pool: PinnedPool, piece: int) -> None:
    """A piece that the driver does not unregister is an error like any other."""
    pool._is_pinned[piece] = False
    begin, end = pool._fill.span(piece)
    driver.unregister_host(pool._address + begin)
    pool.pinned_bytes -= end - begin


def request_the_whole_pool() -> Callable[..., None]:
    """An owner that requests a part of the pool has all of it pinned."""
    request = PinnedPool.request
    return lambda self, owner, _begin, _end: request(self, owner, 0, self.nbytes)


def one_priority() -> Callable[[int], Stream]:
    """Streams are made as they come."""
    create = driver.create_stream
    return lambda _priority: create(0)


Taken = tuple[object, str, object]  # whose attribute is replaced, and by what
NO_TIMELINE: Taken = (runner, "_start_check", lambda _now: lambda _job: True)
NO_SPLIT: Taken = (Copies, "split", lambda copies, _unit, _base: copies)
NO_PROBE: Taken = (driver, "is_alive", lambda _stream: False)
NO_SECOND_LOOK: Taken = (LaneJob, "check_slots", look_only_before_the_copy())


@dataclass(frozen=True)
class Rule:
    """A check, what takes the rule behind it away, and the backend on which both are seen.

    before_start: the rule is one for setting up; it is taken away first.
    pinned: the pool is, before the check.
    ends: the check costs the process its device.
    """

    check: Callable[[CudaRig], None]
    taken: tuple[Taken, ...] | Callable[[pytest.MonkeyPatch], None]
    options: CudaOptions = field(default_factory=checks.options)
    setting: str = ""
    before_start: bool = False
    pinned: bool = True
    ends: bool = False

    @property
    def name(self) -> str:
        """The check's."""
        return self.check.__name__

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
        return CudaRig(fake_driver, workers, self.options, pinned=self.pinned)


RULES = [
    Rule(checks.stores_wait_for_the_timeline, (NO_TIMELINE,)),
    Rule(checks.loads_wait_for_the_timeline, (NO_TIMELINE,)),
    Rule(
        checks.sources_are_read_at_their_turn,
        ((BatchCopy, "enqueue", careless_batches()),),
    ),
    Rule(
        checks.batches_are_given_the_devices_addresses,
        ((driver, "device_address", lambda address: address),),
        before_start=True,
    ),
    Rule(
        checks.pieces_of_a_direction_keep_their_order,
        ((streams.EnqueueThread, "idle", True),),
        checks.options(inline_runs=1),
    ),
    Rule(
        checks.a_thread_reports_a_failure_with_its_piece,
        ((streams.StreamTransfer, "fail", lambda _self, _error: None),),
        checks.options(inline_runs=0),
        setting="fail=cuMemcpyBatchAsync:*:801",
    ),
    Rule(checks.ends_are_reported_after_the_last_byte, record_the_end_first),
    Rule(
        checks.a_half_enqueued_transfer_is_drained,
        ((streams.TransferStream, "_has_ended", reported_at_once()),),
        setting="fail=cuMemcpyBatchAsync:*:801",
    ),
    Rule(
        DeviceContract().test_memory_in_use_is_not_released,
        ((streams.TransferStream, "uses", lambda _self, _memory: False),),
    ),
    Rule(checks.no_copy_spans_two_registrations, (NO_SPLIT,)),
    Rule(
        checks.nothing_is_copied_before_it_is_pinned,
        ((CudaDevice, "is_usable", lambda _self, _begin, _end: True),),
        setting="hang=cuMemHostRegister:2",  # the first is the lane's trial of batches
        pinned=False,
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
    Rule(checks.an_import_that_fails_costs_that_memory_alone, (NO_PROBE,)),
    Rule(checks.a_release_that_fails_costs_that_memory_alone, (NO_PROBE,)),
    Rule(
        checks.a_context_that_does_not_answer_ends_the_lane,
        ((driver, "is_alive", lambda _stream: True),),
        ends=True,
    ),
    Rule(
        checks.a_code_that_the_bindings_do_not_know_fails_one_transfer,
        (
            (cuda, "call_raw", raise_as_the_bindings_do),
            (driver, "call_raw", raise_as_the_bindings_do),
        ),
    ),
    Rule(
        pins.only_arenas_in_use_are_pinned,
        ((PinnedPool, "request", request_the_whole_pool()),),
        pinned=False,
    ),
    Rule(
        pins.pieces_of_a_rank_that_left_go_when_another_is_bound,
        ((PinnedPool, "release", lambda _self, _owner: None),),
        pinned=False,
    ),
    Rule(
        pins.one_process_pins_at_a_time,
        ((PinnedPool, "_acquire_lock", lambda _self: True),),
        pinned=False,
    ),
    Rule(
        pins.others_have_the_driver_between_two_pieces,
        ((pinning, "pause_after", lambda _seconds: 0.0),),
        pinned=False,
    ),
    Rule(
        pins.a_registration_is_short,
        ((pinning, "piece_bytes_for", lambda *_: 512 * 2**20),),
        pinned=False,
    ),
    Rule(
        pins.what_was_pinned_stays_until_its_users_have_gone,
        ((PinnedPool, "release", lambda _self, _owner: None),),
        pinned=False,
    ),
    Rule(
        pins.a_piece_that_cannot_be_unpinned_costs_no_other,
        ((PinnedPool, "_unpin_piece", unpin_or_raise),),
        pinned=False,
    ),
    Rule(
        pins.a_lane_that_stops_unpins_piece_by_piece,
        ((CudaDevice, "unpin", lambda _self: True),),
    ),
    Rule(
        checks.bytes_in_flight_are_bounded,
        ((CudaDevice, "has_room", lambda _self, _direction: True),),
        checks.options(bytes_in_flight=10_000),
    ),
    Rule(
        checks.loads_go_before_stores_on_the_device,
        ((driver, "create_stream", one_priority()),),
        before_start=True,
    ),
    Rule(
        checks.a_device_that_hangs_is_given_up,
        ((CudaDevice, "_check_liveness", lambda _self: None),),
        checks.options(stuck_seconds=0.05),
    ),
    Rule(
        checks.a_thread_that_hangs_is_given_up,
        ((CudaDevice, "_check_liveness", lambda _self: None),),
        checks.options(stuck_seconds=0.05, inline_runs=0),
    ),
    Rule(checks.a_store_is_void_when_its_blocks_were_taken_back, (NO_SECOND_LOOK,)),
    Rule(checks.a_load_is_stale_when_its_chunk_was_replaced, (NO_SECOND_LOOK,)),
]
KEPT, NOTICED = 76, 77  # exit statuses that no other way to end has
SOON = 1.0  # seconds for what does not happen once the rule is gone
NAMES = [rule.name for rule in RULES]


@pytest.mark.parametrize("rule", [rule for rule in RULES if not rule.ends], ids=lambda r: r.name)
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


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.ends], ids=lambda r: r.name)
def test_the_backend_keeps_the_rule_and_loses_its_device(
    fakecuda: FakeCuda, forks: ForkServerContext, tmp_path: Path, rule: Rule
) -> None:
    """The same, for checks that cost a process its device."""
    assert exit_status(forks, fakecuda, tmp_path, rule.name, taken=False) == KEPT


@pytest.mark.parametrize("name", NAMES)
def test_without_the_rule_the_check_fails(
    fakecuda: FakeCuda, forks: ForkServerContext, tmp_path: Path, name: str
) -> None:
    """With the rule taken away the check notices; so the rule is tested, not only written."""
    assert exit_status(forks, fakecuda, tmp_path, name, taken=True) == NOTICED


def exit_status(
    forks: ForkServerContext, fakecuda: FakeCuda, folder: Path, name: str, *, taken: bool
) -> int | None:
    """Check a rule, kept or taken away, in a process of its own; how that ends."""
    process = forks.Process(target=check, args=(fakecuda, folder / "calls.log", name, taken))
    process.start()
    process.join(LONG)
    process.kill()
    return process.exitcode


def check(fakecuda: FakeCuda, log: Path, name: str, taken: bool) -> None:
    """A process of its own, for a backend without its rules may lose the device."""
    os.environ.update(fakecuda.environment())  # for the process with the device memory
    (rule,) = (rule for rule in RULES if rule.name == name)
    pins.SOON = SOON if taken else pins.SOON
    workers = CudaWorkers(ipc=True, library=fakecuda.library)
    fake_driver = load(fakecuda, log)
    if taken and rule.before_start:
        rule.take_away()
    rig = rule.rig(fake_driver, workers)
    if taken and not rule.before_start:
        rule.take_away()
    try:
        rule.check(rig)
    except (AssertionError, LaneError, ValueError, pytest.fail.Exception):
        traceback.print_exc()
        os._exit(NOTICED)  # without letting go of what may be out of order
    os._exit(KEPT)
