"""Each rule of order between engine, device and lane keeps staged bytes right.

Every check passes, and fails without its rule. Checks hold streams of the double or the lane, let
everything else run until nothing moves, and only then let the held part go on.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvd_client import JobResult, JobStatus, Load, Store, staging
from kvd_client.device_copier import DeviceCopier, EventSignals, _DeviceCopy
from kvd_client.jobs import JobTable
from kvd_client.staged_job import StagedJob
from kvd_client.staging import StagedJobs
from kvd_client.staging_layout import PageRing, PageRun
from kvd_client.staging_memory import Copy
from kvd_client.timeline import Timeline
from tests.client.double_device import DoubleStream
from tests.client.staging_rig import StagingRig
from tests.waiting import DEADLINE, eventually

Check = Callable[[StagingRig], None]
SOON = 0.2  # seconds in which a job that must not end would have ended


@dataclass(frozen=True)
class Rule:
    """A check, and what takes the rule behind it away: `owner` has this attribute instead."""

    check: Check
    owner: object
    attribute: str
    replacement: object

    @property
    def name(self) -> str:
        """The check's and the attribute's."""
        return f"{self.check.__name__}-{self.attribute}"


RULES: list[Rule] = []


def rule(owner: object, attribute: str, replacement: object) -> Callable[[Check], Check]:
    """The check fails without this rule."""

    def add(check: Check) -> Check:
        RULES.append(Rule(check, owner, attribute, replacement))
        return check

    return add


# ------------------------------------------------- what takes rules away


def without_events() -> Callable[..., Copy]:
    """Copies do not wait for the engine's work."""
    start = DeviceCopier._start

    def careless(self: Any, stream: Any, segments: Any, page: int, _after: Any, **way: Any) -> Copy:
        return start(self, stream, segments, page, (), **way)

    return careless


def only_the_last_event() -> Callable[..., Any]:
    """Copies wait for the event of their number, and not for earlier numbers."""
    events_until = EventSignals.events_until

    def careless(self: EventSignals, number: int) -> list[Any] | None:
        events = events_until(self, number)
        return events and events[-1:]

    return careless


def released_when_sent() -> Callable[..., None]:
    """A piece's pages are free as soon as the lane has its job."""
    send = StagedJobs._send

    def careless(self: StagedJobs, piece: Any) -> None:
        send(self, piece)
        self._rings[piece.job.kind].release(piece.run)
        piece.run = PageRun(piece.run.first, piece.run.count)

    return careless


def loaded_when_sent() -> Callable[..., None]:
    """A load is scattered as soon as the lane has its job."""
    send = StagedJobs._send

    def careless(self: StagedJobs, piece: Any) -> None:
        send(self, piece)
        if piece.job.kind is Load:
            del self._at_lane[piece.piece_id]
            piece.result = JobResult(piece.piece_id, JobStatus.OK)
            self._loaded.append(piece)

    return careless


def sent_in_any_case() -> Callable[..., None]:
    """A gathered piece goes to the lane, whatever has become of its store."""
    end_copy = StagedJobs._end_copy

    def careless(self: StagedJobs, piece: Any, error: Exception | None) -> None:
        if piece.job.kind is Store and error is None:
            with self._changed:
                self._copying.remove(piece)
                self._send(piece)
        else:
            end_copy(self, piece, error)

    return careless


def stopped_without_a_failure(job: StagedJob, _status: JobStatus, _text: str) -> None:
    """A job that is stopped begins no piece, but those that run end as if it were not."""
    job._peeked, job.is_over = None, True


def scattered_in_any_case() -> Callable[[StagedJobs], bool]:
    """What the lane has loaded is scattered, whatever has become of the job."""
    take_answers = StagedJobs._take_answers

    def careless(self: StagedJobs) -> bool:
        with self._changed:
            for piece in self._at_lane.values():
                piece.job.failure = None
            return take_answers(self)

    return careless


def one_buffer() -> Callable[..., None]:
    """Both directions use the same buffer."""
    make = DeviceCopier._make_streams

    def careless(self: DeviceCopier) -> None:
        make(self)
        self._buffers[id(self._scatters)] = self._buffers[id(self._gathers)]

    return careless


def a_stream_for_each_copy() -> Callable[..., Copy]:
    """Gathers use one buffer, but not one stream."""

    def careless(self: DeviceCopier, segments: Any, page: int, after: Any) -> Copy:
        stream = self._accelerator.new_stream()
        self._buffers[id(stream)] = self._buffers[id(self._gathers)]
        return self._start(stream, segments, page, after, to_pages=True)

    return careless


def ids_in_one_place() -> Callable[..., None]:
    """Block ids of all copies are in the same place of host memory."""
    index_blocks = DeviceCopier._index_blocks

    class Same:
        """The copier's block ids, whichever pages they are of."""

        def __init__(self, ids: Any) -> None:
            self._ids = ids

        def __getitem__(self, part: slice) -> Any:
            return self._ids[: part.stop - part.start]

        def __setitem__(self, part: slice, ids: Any) -> None:
            self._ids[: part.stop - part.start] = ids

    def careless(self: Any, *arguments: Any, **way: Any) -> None:
        if not isinstance(self._host_ids, Same):
            self._host_ids = Same(self._host_ids)
        index_blocks(self, *arguments, **way)

    return careless


# ---------------------------------------------------------------- stores


@rule(DeviceCopier, "_start", without_events())
@rule(Timeline, "events_until", lambda _self, _number: [])
def a_gather_follows_the_engines_work(rig: StagingRig) -> None:
    """Blocks are read when the kernels before the store have written them."""
    with rig.device.holding(rig.engine):
        rig.compute([1, 2], 1)
        rig.submit(Store, 1, [1, 2], [0])
        rig.let_pass()
    rig.expect(1)
    rig.check_pool([0], 1)


@rule(EventSignals, "events_until", only_the_last_event())
def a_number_vouches_for_earlier_ones(rig: StagingRig) -> None:
    """A store behind a number on an idle stream waits for earlier numbers on a busy one."""
    idle = rig.device.new_stream()
    with rig.device.holding(rig.engine):
        rig.compute([1, 2], 1)
        rig.now()
        after = rig.worker.timeline.signal_on(idle)
        rig.submit_after(Store, 1, [1, 2], [0], after)
        rig.let_pass()
    rig.expect(1)
    rig.check_pool([0], 1)


@rule(_DeviceCopy, "is_done", lambda _self: True)
def the_lane_reads_when_the_gather_has_ended(rig: StagingRig) -> None:
    """It does not get the job before."""
    rig.compute([1, 2], 1)
    with rig.device.holding(rig.gathers):
        rig.submit(Store, 1, [1, 2], [0])
        rig.let_pass()
        assert not rig.received(Store)
    rig.expect(1)
    rig.check_pool([0], 1)


@rule(PageRing, "allocate", lambda self, count: PageRun(self.first, count))
@rule(StagedJobs, "_send", released_when_sent())
def pages_of_a_store_stay_until_the_lane_has_answered(rig: StagingRig) -> None:
    """The next store waits for pages; `submit` does not."""
    rig.daemon.hold_jobs = True
    rig.compute(range(1, 5), 1)
    rig.submit(Store, 1, range(1, 5), [0, 1])
    rig.compute(range(5, 9), 2)
    rig.submit(Store, 2, range(5, 9), [2, 3])
    rig.let_pass()
    rig.daemon.hold_jobs = False
    rig.daemon.finish()
    rig.expect(1, 2)
    rig.check_pool([0, 1], 1)
    rig.check_pool([2, 3], 2)


@rule(StagedJobs, "_end_copy", sent_in_any_case())
def a_store_that_is_voided_before_the_lane_has_it_goes_nowhere(rig: StagingRig) -> None:
    """The engine has reused its blocks when the gather reads them."""
    with rig.device.holding(rig.gathers):
        rig.submit(Store, 1, [1, 2], [0])
        rig.let_pass()
        assert rig.worker.wait([1], 0.0) == frozenset()
        assert [result.status for result in rig.worker.get_finished()] == [JobStatus.VOID]
        rig.compute([1, 2], 2)
    rig.let_pass()
    assert not rig.received(Store)
    rig.submit(Store, 1, [1, 2], [1])
    rig.expect(1)
    rig.check_pool([1], 2)
    assert 0 not in rig.daemon.pool


@rule(JobTable, "void", lambda _self, _jobs, _text: None)
def a_store_that_is_voided_at_the_lane_is_discarded(rig: StagingRig) -> None:
    """By its word of the control page: the lane is not asked."""
    rig.daemon.hold_jobs = True
    rig.submit(Store, 1, [1, 2], [0])
    rig.daemon.wait_for(Store)
    assert rig.worker.wait([1], 0.0) == frozenset()
    assert [result.status for result in rig.worker.get_finished()] == [JobStatus.VOID]
    rig.daemon.finish()
    rig.let_pass()
    assert 0 not in rig.daemon.pool


# ----------------------------------------------------------------- loads


@rule(StagedJobs, "_send", loaded_when_sent())
def a_scatter_follows_the_lane(rig: StagingRig) -> None:
    """No block is written before the lane has put the chunk into the pages."""
    rig.fill_pool([0], 1)
    rig.daemon.hold_jobs = True
    rig.submit(Load, 1, [1, 2], [0])
    rig.daemon.wait_for(Load)
    rig.let_pass()
    rig.daemon.finish()
    rig.expect(1)
    rig.check_blocks([1, 2], 1)


@rule(DeviceCopier, "_start", without_events())
@rule(Timeline, "events_until", lambda _self, _number: [])
def a_scatter_follows_the_engines_earlier_work(rig: StagingRig) -> None:
    """A kernel that reads the blocks before the load sees what was in them."""
    rig.fill_pool([0], 1)
    rig.compute([1, 2], 5)
    with rig.device.holding(rig.engine):
        rig.engine.launch(lambda: rig.check_blocks([1, 2], 5))
        rig.submit(Load, 1, [1, 2], [0])
        rig.let_pass()
        while rig.engine.queue:
            assert rig.device.run_one(rig.engine)
    rig.expect(1)
    rig.check_blocks([1, 2], 1)


@rule(_DeviceCopy, "is_done", lambda _self: True)
def the_engine_is_told_when_the_scatter_has_ended(rig: StagingRig) -> None:
    """`wait` and `get_finished` know of a load when its blocks are there."""
    rig.fill_pool([0], 1)
    with rig.device.holding(rig.scatters):
        rig.submit(Load, 1, [1, 2], [0])
        rig.let_pass()
        assert rig.worker.wait([1], 0.0) == {1}
        assert rig.worker.get_finished() == []
    rig.expect(1)
    rig.check_blocks([1, 2], 1)


@rule(PageRing, "allocate", lambda self, count: PageRun(self.first, count))
@rule(StagedJobs, "_send", released_when_sent())
def pages_of_a_load_stay_until_the_scatter_has_ended(rig: StagingRig) -> None:
    """The lane does not put the next chunks there before."""
    rig.fill_pool([0, 1], 1)
    rig.fill_pool([2, 3], 2)
    with rig.device.holding(rig.scatters):
        rig.submit(Load, 1, range(1, 5), [0, 1])
        rig.submit(Load, 2, range(5, 9), [2, 3])
        rig.let_pass()
    rig.expect(1, 2)
    rig.check_blocks(range(1, 5), 1)
    rig.check_blocks(range(5, 9), 2)


@rule(StagedJobs, "_take_answers", scattered_in_any_case())
@rule(StagedJob, "stop", stopped_without_a_failure)
def a_load_that_is_cancelled_at_the_lane_is_not_scattered(rig: StagingRig) -> None:
    """It ends before the lane has answered, even if the lane does it all the same."""
    rig.fill_pool([0], 1)
    rig.daemon.hold_jobs = rig.daemon.ignores_cancels = True
    rig.submit(Load, 1, [1, 2], [0])
    rig.daemon.wait_for(Load)
    rig.worker.cancel([1])
    assert [result.status for result in rig.worker.get_finished()] == [JobStatus.CANCELLED]
    rig.daemon.finish()
    rig.let_pass()
    rig.check_untouched([1, 2])


@rule(StagedJob, "has_ended", property(lambda job: job.is_over))
def a_load_that_is_cancelled_while_it_is_scattered_ends_later(rig: StagingRig) -> None:
    """The engine may write its blocks when the result says so, and not before."""
    rig.fill_pool([0], 1)
    with rig.device.holding(rig.scatters):
        rig.submit(Load, 1, [1, 2], [0])
        rig.let_pass()
        rig.worker.cancel([1])
        assert rig.worker.wait([1], 0.0) == {1}
        assert rig.worker.get_finished() == []
    assert rig.result(1).status is JobStatus.CANCELLED


@rule(DoubleStream, "synchronize", lambda _self: None)
def a_load_whose_scatter_fails_half_way_ends_later(rig: StagingRig) -> None:
    """What the device has taken of it may still write."""
    rig.fill_pool([0], 1)
    with rig.device.holding(rig.scatters):
        rig.device.launches_until_failure = 4  # ids, pages, the first tensor, the second one
        rig.submit(Load, 1, [1, 2], [0])
        eventually(lambda: not rig.device.launches_until_failure)
        assert rig.worker.wait([1], SOON) == {1}
    assert rig.result(1).status is JobStatus.FAILED
    rig.submit(Load, 2, [1, 2], [0])
    rig.expect(2)
    rig.check_blocks([1, 2], 1)


# ------------------------------------------------------ buffers, suspension


@rule(DeviceCopier, "_make_streams", one_buffer())
def directions_have_buffers_of_their_own(rig: StagingRig) -> None:
    """A gather and a scatter run step by step in turn."""
    rig.fill_pool([0], 1)
    rig.compute([1, 2], 2)
    with rig.device.holding(rig.gathers, rig.scatters):
        rig.submit(Store, 1, [1, 2], [1])
        rig.submit(Load, 2, [3, 4], [0])
        rig.let_pass()
        in_turn(rig, [rig.gathers, rig.scatters])
    rig.expect(1, 2)
    rig.check_pool([1], 2)
    rig.check_blocks([3, 4], 1)


@rule(DeviceCopier, "_index_blocks", ids_in_one_place())
@rule(DeviceCopier, "gather", a_stream_for_each_copy())
def copies_of_one_direction_do_not_meet(rig: StagingRig) -> None:
    """Two gathers are queued; whatever may run in turn does."""
    rig.compute([1, 2], 1)
    rig.compute([8, 9], 2)
    rig.let_pass()
    rig.device.holds_new_streams = True
    with rig.device.holding(rig.gathers):
        rig.submit(Store, 1, [1, 2], [0])
        rig.submit(Store, 2, [8, 9], [1])
        rig.let_pass()
        in_turn(rig, rig.device.streams[1:])
    rig.expect(1, 2)
    rig.check_pool([0], 1)
    rig.check_pool([1], 2)


def in_turn(rig: StagingRig, streams: list[DoubleStream]) -> None:
    """Run an item of each stream after the other, until nothing is left."""
    while sum(rig.device.run_one(stream) for stream in streams):
        pass


@rule(_DeviceCopy, "is_done", lambda _self: True)
@rule(StagedJobs, "suspend", lambda _self, _timeout: True)
def suspend_waits_for_gathers(rig: StagingRig) -> None:
    """Memory whose blocks are read must not be freed; afterwards jobs fail until `resume`."""
    with rig.device.holding(rig.gathers):
        rig.submit(Store, 1, [1, 2], [0])
        rig.let_pass()
        assert not rig.worker.suspend(0.0)
    check_suspended(rig)
    assert rig.received(Store) == 1  # the one after `resume`


@rule(_DeviceCopy, "is_done", lambda _self: True)
def suspend_waits_for_scatters(rig: StagingRig) -> None:
    """Memory whose blocks are written must not be freed."""
    rig.fill_pool([0], 1)
    with rig.device.holding(rig.scatters):
        rig.submit(Load, 1, [1, 2], [0])
        rig.let_pass()
        assert not rig.worker.suspend(0.0)
    check_suspended(rig)


@rule(StagedJob, "stop", stopped_without_a_failure)
def no_scatter_begins_after_suspend(rig: StagingRig) -> None:
    """Also of a load that the lane ends only then."""
    rig.fill_pool([0], 1)
    rig.daemon.hold_jobs = rig.daemon.ignores_cancels = True
    rig.submit(Load, 1, [1, 2], [0])
    rig.daemon.wait_for(Load)
    assert rig.worker.suspend(DEADLINE)
    rig.daemon.hold_jobs = False
    rig.daemon.finish()
    check_suspended(rig)
    rig.check_untouched([1, 2])


def check_suspended(rig: StagingRig) -> None:
    """The one job is cancelled, the next one fails, the one after `resume` is done."""
    assert rig.worker.suspend(DEADLINE)
    assert rig.result(1).status is JobStatus.CANCELLED
    rig.let_pass()
    assert not any(stream.queue for stream in rig.device.streams)
    rig.submit(Store, 2, [5, 6], [7])
    result = rig.result(2)
    assert (result.status, "suspended" in result.text) == (JobStatus.FAILED, True)
    rig.worker.resume()
    rig.compute([5, 6], 3)
    rig.submit(Store, 2, [5, 6], [7])
    rig.expect(2)
    rig.check_pool([7], 3)
    rig.worker.check_integrity()


@rule(staging, "_has_ended", lambda _piece: True)
def pinned_memory_stays_while_a_copy_uses_it(rig: StagingRig) -> None:
    """`close` does not wait for ever; the memory is unpinned when the copy has ended."""
    rig.worker.deadline = 0.01
    with rig.device.holding(rig.gathers):
        rig.submit(Store, 1, [1, 2], [0])
        rig.let_pass()
        (thread,) = rig.staging_threads()
        rig.worker.close()
        thread.join(SOON)
        assert rig.device.pinned
    thread.join(DEADLINE)
    assert not rig.device.pinned


CHECKS = list(dict.fromkeys(rule.check for rule in RULES))
OF_BUFFERS = {
    directions_have_buffers_of_their_own,
    copies_of_one_direction_do_not_meet,
    a_load_whose_scatter_fails_half_way_ends_later,
}


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    """Undone after the rig's end."""
    with pytest.MonkeyPatch.context() as one:
        yield one


WAYS = [(check, swaps) for check in CHECKS for swaps in (False, True)]


@pytest.mark.parametrize(
    ("check", "swaps"),
    [way for way in WAYS if way not in {(check, True) for check in OF_BUFFERS}],
    ids=lambda part: ("swap" if part else "index") if isinstance(part, bool) else part.__name__,
)
def test_staging_keeps_the_rule(
    check: Check, swaps: bool, runtime_dir: Path, patch: pytest.MonkeyPatch
) -> None:
    """With both ways from blocks to pages, but for checks of the buffers that one way has."""
    with StagingRig(runtime_dir, patch, swaps=swaps) as rig:
        check(rig)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_is_missed(rule: Rule, runtime_dir: Path, patch: pytest.MonkeyPatch) -> None:
    """Without the rule the check fails: so the rule is tested."""
    patch.setattr(rule.owner, rule.attribute, rule.replacement)
    with StagingRig(runtime_dir, patch) as rig, pytest.raises(AssertionError):
        rule.check(rig)
