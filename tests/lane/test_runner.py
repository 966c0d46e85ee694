"""Jobs on a device whose transfers stay in flight until the test lets them end.

And what the lane reports to the broker meanwhile: nothing too early.
"""

from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace

from kvd.errors import LaneError
from kvd.lane.device import CompletedTransfer, Direction, Transfer
from kvd.lane.host_device import HostDevice, HostRuns
from kvd.lane.orders import OrderHandler, RequestHandler
from kvd.lane.queue import FLOOR_PART, QueueLimits
from kvd.lane.reports import Reporter
from kvd.lane.runner import Runner
from kvd.lane.workers import Bindings, LaneWorker, WorkerTable
from kvd.wire.link import LINK, Imported, Released, ReleaseWorker, Revoke, Revoked, ShareDone
from kvd_proto.codec import WIRE
from kvd_proto.directory import SlotState
from kvd_proto.errors import DescriptorsLost, JobShapeError
from kvd_proto.expand import Expander
from kvd_proto.jobs import EPOCH_WORDS, IntArray
from kvd_proto.layout import GroupSpec, RankLayout, TensorRef, TensorSpec
from kvd_proto.messages import Job, JobStatus, Load, Message, Store
from tests.lane.support import (
    EPOCH,
    NAMESPACE,
    SLOTS,
    TIMELINE,
    Directory,
    FakeWorker,
    Memory,
    bind_message,
    bound_worker,
    make_job,
)
from tests.layouts import flat_layout

PAGE = 2 * 2**20  # one page is one piece


class HeldDevice(HostDevice):
    """Moves nothing; up to `width` transfers fly until the test lets them end."""

    piece_bytes = bulk_bytes = dict.fromkeys(Direction, PAGE)

    def __init__(self, pool: Memory) -> None:
        super().__init__(pool.fd, len(pool.bytes))
        self.flying: list[Transfer] = []
        self.landed: list[CompletedTransfer] = []
        self.width = 2

    @property
    def in_flight(self) -> int:
        """What is not reported."""
        return len(self.flying) + len(self.landed)

    def has_room(self, direction: Direction) -> bool:  # noqa: ARG002  # for both in common
        """Whether fewer than `width` are in flight."""
        return self.in_flight < self.width

    def submit(self, transfer: Transfer) -> None:
        """Take it."""
        self.flying.append(transfer)

    def land(self, index: int = 0, error: str = "") -> None:
        """Let one end."""
        self.landed.append(CompletedTransfer(self.flying.pop(index), 1000, error))

    def progress(self) -> list[CompletedTransfer]:
        """What the test has let end."""
        landed, self.landed = self.landed, []
        return landed


class Bench:
    """A runner over a held device, with a clock that the test moves."""

    def __init__(self, limits: QueueLimits | None = None, layout: RankLayout | None = None) -> None:
        self.now = 0
        self.layout = layout or flat_layout(PAGE, blocks=16)
        self.pool = Memory(self.layout.slot_bytes * SLOTS)
        self.device = HeldDevice(self.pool)
        self.runner = Runner(self.device, limits, clock=lambda: self.now)
        self.directory = Directory(SLOTS)
        self.directory.set(range(SLOTS), SlotState.WRITING)
        self.sources: list[FakeWorker] = []
        self.workers = WorkerTable(self.device)

    def worker(self, owner: int = 7, session: int | None = None) -> LaneWorker:
        """A bound worker; its session has the owner's number if nothing else is said."""
        source = FakeWorker(self.layout, session=owner)
        self.sources.append(source)
        directory = self.directory.memory.fd
        return bound_worker(
            self.workers, self.layout, source.fds, directory, owner=owner, session=session
        )

    def submit(self, worker: LaneWorker, job: Job) -> None:
        """Hand a job in."""
        self.runner.submit(worker, job, request_id=1)

    def run(self) -> None:
        """Turn once, and then until nothing flies."""
        self.runner.run_once()
        while self.device.flying:
            self.device.land()
            self.runner.run_once()

    def ended(self) -> list[tuple[int, JobStatus]]:
        """What has ended, by number and status."""
        self.runner.check_integrity()
        return [(job.request.job, job.outcome[0]) for job in self.runner.take_ended()]

    def close(self) -> None:
        """Let go."""
        self.device.flying.clear()
        self.device.close()
        self.pool.close()
        for source in self.sources:
            source.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    """A runner, a held device, no workers."""
    made = Bench()
    yield made
    made.close()


def test_pieces_are_short_only_while_others_wait_for_the_direction(bench: Bench) -> None:
    """Alone a job is given in bulk; beside another engine's in short pieces, each as many bytes."""
    bench.device.bulk_bytes = dict.fromkeys(Direction, 4 * PAGE)
    bench.device.width = 1
    one, other = bench.worker(), bench.worker(8)
    bench.directory.set(range(4, SLOTS), SlotState.READY, count=1)
    bench.directory.set([3], SlotState.WRITING, owner=8)
    bench.submit(one, make_job(Load, 1, range(1, 9), range(4, 12)))
    bench.runner.run_once()
    bench.submit(other, make_job(Load, 1, range(1, 7), range(4, 10)))
    bench.submit(other, make_job(Store, 2, [3], [3]))
    given = []
    while bench.device.flying:
        (piece,) = bench.device.flying
        given.append((piece.job.worker is one, piece.direction, piece.nbytes // PAGE))
        bench.device.land()
        bench.runner.run_once()
        bench.runner.run_once()
    load, store = Direction.LOAD, Direction.STORE
    load, store = Direction.LOAD, Direction.STORE
    assert given[:2] == [(True, load, 4), (False, store, 1)]
    assert given[2:6] == [(False, load, 1)] * 4  # as many as the other engine had before
    assert given[6:] == [*[(True, load, 1), (False, load, 1)] * 2, (True, load, 2)]


def test_a_store_moves_beside_loads_that_are_waited_for_without_end(bench: Bench) -> None:
    """Its pieces take turns with another engine's loads, a fixed part of the bytes."""
    bench.device.width = 1
    loading, storing = bench.worker(), bench.worker(8)
    bench.directory.set(range(4, SLOTS), SlotState.READY, count=1)
    bench.directory.set(range(3), SlotState.WRITING, owner=8)
    bench.submit(storing, make_job(Store, 0, [1, 2, 3], [0, 1, 2]))
    given: list[Direction] = []
    for number in range(1, 3 * FLOOR_PART):
        bench.submit(loading, make_job(Load, number, [1], [4]))
        for job in bench.runner.jobs_of(loading):
            bench.runner.prioritize(job)
        bench.runner.run_once()
        given.append(bench.device.flying[0].direction)
        bench.device.land()
        bench.runner.run_once()
    stored = [turn for turn, direction in enumerate(given) if direction is Direction.STORE]
    assert stored == [1, FLOOR_PART, 2 * FLOOR_PART]
    assert (0, JobStatus.OK) in bench.ended()


def test_layers_are_reported_when_all_their_bytes_are_in() -> None:
    """The word follows the pieces that have landed, layer after layer, and never goes before.

    What arrives after a slot has moved on is not reported, and the load is STALE.
    """
    refs = tuple(TensorRef(i, PAGE, 2 - i) for i in range(3))  # the last layer comes first
    layout = flat_layout(PAGE, PAGE, PAGE, blocks=16, groups=(GroupSpec(refs, 16),))
    with closing(Bench(layout=layout)) as bench:
        bench.directory.set(range(SLOTS), SlotState.READY, count=1)
        bench.device.bulk_bytes = dict.fromkeys(Direction, 100 * PAGE)
        worker, words = bench.worker(), bench.sources[0].words
        bench.submit(worker, make_job(Load, 1, [1, 2], [3, 4], progress=2))
        reported, moved = [], []
        bench.runner.run_once()
        while bench.device.flying:
            piece = bench.device.flying[0]
            assert isinstance(piece.runs, HostRuns)
            moved += piece.runs.copies.runs[piece.begin : piece.end]
            bench.device.land()
            bench.runner.run_once()
            reported.append(int(words[EPOCH_WORDS + 1]))
        assert [run[0] for run in moved] == [2, 2, 1, 1, 0, 0]
        assert reported == [0, 1, 1, 2, 2, 3]
        assert bench.ended() == [(1, JobStatus.OK)]
        bench.submit(worker, make_job(Load, 2, [1], [3], progress=1))
        bench.runner.run_once()
        bench.device.land()
        bench.runner.run_once()
        bench.directory.set([3], SlotState.DRAINING)
        bench.run()
        assert words[EPOCH_WORDS] == 1
        assert bench.ended() == [(2, JobStatus.STALE)]


@pytest.mark.parametrize("status", [JobStatus.TIMEOUT, JobStatus.VOID, JobStatus.STALE])
def test_a_store_that_awaits_the_broker_ends_without_a_copy(
    bench: Bench, status: JobStatus
) -> None:
    """At its deadline, when its blocks are taken back, and when its loan has ended."""
    bench.directory.set([3], SlotState.READY, count=1, owner=8, loan=2)
    bench.submit(bench.worker(), make_job(Store, 1, [1], [3], generation=2, deadline_ms=10))
    bench.now = 9_000_000
    bench.runner.run_once()
    assert bench.ended() == []
    if status is JobStatus.TIMEOUT:
        bench.now = 10_000_000
    elif status is JobStatus.VOID:
        bench.sources[0].words[EPOCH] = 9
    else:
        bench.directory.set([3], SlotState.READY, count=1, owner=8)
    bench.runner.run_once()
    assert bench.ended() == [(1, status)]
    assert not bench.device.flying


def test_an_arena_outside_the_pool_is_refused(bench: Bench) -> None:
    """A worker is not bound to bytes that the pool does not have, by as little as one."""
    bind, fds = bind_message(1), [bench.directory.memory.fd]
    with pytest.raises(LaneError, match="does not lie inside the pool"):
        Bindings().bind(bind, fds, bench.layout, bench.layout.slot_bytes * SLOTS - 1)


def test_a_block_behind_its_storage_is_refused(bench: Bench) -> None:
    """The layout puts it there: nothing of the job moves."""
    worker = bench.worker()
    tensors = (TensorSpec(0, PAGE, PAGE, PAGE),)
    worker.expander = Expander(replace(bench.layout, tensors=tensors))
    bench.submit(worker, make_job(Store, 1, [15], [3]))
    bench.run()
    assert bench.ended() == [(1, JobStatus.REFUSED)]


@pytest.mark.parametrize("status", [JobStatus.VOID, JobStatus.STALE])
def test_what_changed_under_a_copy_is_seen(bench: Bench, status: JobStatus) -> None:
    """A store is VOID if its word moved on while it ran: it may have read what came after.

    A load is STALE if its slot was given to another chunk: it may have brought other bytes.
    """
    bench.directory.set([4], SlotState.READY, count=1)
    store = status is JobStatus.VOID
    job = make_job(Store, 1, [1], [3]) if store else make_job(Load, 1, [1], [4])
    bench.submit(bench.worker(), job)
    bench.runner.run_once()
    if store:
        bench.sources[0].words[EPOCH] = 1
    else:
        bench.directory.set([4], SlotState.READY, generation=2, count=1)
    bench.run()
    assert bench.ended() == [(1, status)]


class RunnerMachine(RuleBasedStateMachine):
    """Jobs in any order of events: each ends once, and never with a transfer in flight."""

    @initialize()
    def make(self) -> None:
        """Two engines."""
        self.bench = Bench(QueueLimits(jobs=8))
        self.pair = [self.bench.worker(), self.bench.worker(8)]
        self.bench.directory.set(range(6), SlotState.READY, count=1)
        self.open: set[int] = set()
        self.broken: set[int] = set()  # jobs of which a transfer failed
        self.taken_back: set[int] = set()  # stores whose words have moved on
        self.number = 0
        self.generation = 1  # of the loads' slots
        self.stored = 1  # generation of the stores' slots
        self.accepted = [0, 0]  # how many of them have had a store, by worker

    @rule(
        which=st.integers(0, 1),
        load=st.booleans(),
        size=st.integers(0, 3),
        after=st.sampled_from([0, 0, 0, 1, 2]),
    )
    def submit(self, which: int, load: bool, size: int, after: int) -> None:
        """A job of up to three pieces; stores of the second engine are stale.

        While a store is open, the engine's next one of the same chunks is refused.
        """
        self.number += 1
        first = 0 if load else 6
        blocks, slots = list(range(1, size + 1)), list(range(first, first + size))
        if load:
            job = make_job(Load, self.number, blocks, slots, after=after)
        else:
            if not any(isinstance(job.request, Store) for job in self.bench.runner):
                self.stored += 1
                self.bench.directory.set(range(6, 9), SlotState.WRITING, generation=self.stored)
                self.accepted = [0, 0]
            job = make_job(
                Store,
                self.number,
                blocks,
                slots,
                after=after,
                word=self.number,
                generation=self.stored,
            )
            if size and self.accepted[which]:
                with pytest.raises(JobShapeError, match="has had its store"):
                    self.bench.submit(self.pair[which], job)
                return
            self.accepted[which] += size
        self.bench.submit(self.pair[which], job)
        self.open.add(self.number)

    @rule(
        which=st.none() | st.integers(0, 1),
        error=st.sampled_from([""] * 5 + ["broken"]),
        ms=st.sampled_from([0] * 9 + [30_000]),
    )
    def turn(self, which: int | None, error: str, ms: int) -> None:
        """The loop turns, perhaps after a long time, and one of the transfers ends."""
        self.bench.now += ms * 1_000_000
        self.bench.runner.run_once()
        flying = self.bench.device.flying
        if which is not None and which < len(flying):
            if error:
                self.broken.add(flying[which].job.request.job)
            self.bench.device.land(which, error)

    @rule(data=st.data(), action=st.sampled_from(["cancel", "prioritize", "take back"]))
    def touch(self, data: st.DataObject, action: str) -> None:
        """Any job is cancelled, perhaps twice, or waited for, or a store's blocks are used again.

        Then other jobs of its worker go on.
        """
        jobs = list(self.bench.runner)
        if not jobs:
            return
        job = data.draw(st.sampled_from(jobs))
        if action == "cancel":
            self.bench.runner.stop(job, JobStatus.CANCELLED, "cancelled")
        elif action == "prioritize":
            self.bench.runner.prioritize(job)
        elif isinstance(job.request, Store):
            self.bench.sources[self.pair.index(job.worker)].words[job.request.word] = 1
            self.taken_back.add(job.request.job)

    @rule(which=st.integers(0, 1), value=st.integers(0, 2), generation=st.integers(1, 2))
    def others_go_on(self, which: int, value: int, generation: int) -> None:
        """A worker gets on, and the loads' slots change hands."""
        words = self.bench.sources[which].words
        words[0] = max(int(words[0]), value)
        self.generation = generation
        self.bench.directory.set(range(6), SlotState.READY, count=1, generation=generation)

    @invariant()
    def each_job_ends_once_and_at_rest(self) -> None:
        """Whatever ended was open, has nothing in flight, and the rest is still known."""
        self.bench.runner.check_integrity()
        for job in self.bench.runner.take_ended():
            assert job.transfers_in_flight == 0
            number, status = job.request.job, job.outcome[0]
            assert status is not JobStatus.VOID or number in self.taken_back
            if status is JobStatus.OK:
                assert number not in self.broken | self.taken_back
                assert job.worker.control.timeline >= job.request.after
                assert isinstance(job.request, Store) or not job.nbytes or self.generation == 1
            self.open.remove(number)
        assert {job.request.job for job in self.bench.runner} == self.open

    def teardown(self) -> None:
        """Everything ends once the workers' timelines are there."""
        if hasattr(self, "bench"):
            for source in self.bench.sources:
                source.words[0] = 2
            for _ in range(50):
                self.bench.run()
            self.each_job_ends_once_and_at_rest()
            assert not self.open
            self.bench.close()


TestRunnerMachine = RunnerMachine.TestCase
TestRunnerMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("when", ["queued", "copying", "cancelled", "ended"])
def test_a_chunk_is_stored_by_one_job(bench: Bench, when: str) -> None:
    """A second store of a slot's generation is refused at once, also by another session.

    Neither the first store nor a store of the slot's next generation suffers from it.
    """
    worker = bench.worker()
    bench.submit(worker, make_job(Store, 1, [1, 2, 3], [3, 4, 5], after=1))
    if when != "queued":
        bench.sources[0].words[TIMELINE] = 1
        bench.runner.run_once()
        assert bench.device.in_flight
    if when == "cancelled":
        (job,) = bench.runner.find_jobs(worker, [1])
        bench.runner.stop(job, JobStatus.CANCELLED, "")
    if when == "ended":
        bench.run()
    for other in (worker, bench.worker(session=9)):
        with pytest.raises(JobShapeError, match="slot 5 generation 1 has had its store"):
            bench.submit(other, make_job(Store, 2, [4, 5], [5, 6]))
        bench.submit(other, make_job(Store, 3, [4], [7 if other is worker else 8]))
    bench.sources[0].words[TIMELINE] = 1
    bench.run()
    status = JobStatus.CANCELLED if when == "cancelled" else JobStatus.OK
    assert sorted(bench.ended()) == [(1, status), (3, JobStatus.OK), (3, JobStatus.OK)]
    bench.directory.set([5], SlotState.WRITING, generation=2)
    bench.submit(worker, make_job(Store, 4, [4], [5], generation=2))
    bench.run()
    assert bench.ended() == [(4, JobStatus.OK)]


def test_what_a_refused_store_leaves_out_is_reported(bench: Bench) -> None:
    """Of a store that repeats a chunk, the other chunks are given up, and that one is not."""
    _, reports, sent = orders_on(bench)
    worker = bench.worker()
    requests = RequestHandler(reports, bench.workers)
    worker.client = mock.Mock(owner=worker)
    for number, slots in enumerate(([3, 4], [4, 5])):
        job = make_job(Store, number, [1, 2], slots)
        requests.serve((worker.client, WIRE.encode(job, 1), ()))
    reports.send_shares()
    (share,) = sent
    assert isinstance(share, ShareDone)
    assert (share.ok, share.slots.tolist()) == (False, [5])


NAMING = [
    make_job(Load, 1, [1], [9], after=1),
    make_job(Load, 1, [1], [9], progress=1),
    make_job(Store, 1, [1], [3], word=0, after=1),
    make_job(Store, 1, [1], [3], word=1),
    make_job(Store, 1, [1], [3], word=0, epoch=1),
]


def test_without_a_control_page_a_job_names_none_of_its_words(bench: Bench) -> None:
    """Others are refused, and those that name none run."""
    worker = bench.worker()
    worker.has_control_page = False
    bench.directory.set([9], SlotState.READY, count=1)
    for job in NAMING:
        with pytest.raises(JobShapeError, match="without a control page"):
            bench.submit(worker, job)
    bench.submit(worker, make_job(Load, 2, [1], [9]))
    bench.submit(worker, make_job(Store, 3, [2], [3], word=0))
    bench.run()
    assert sorted(bench.ended()) == [(2, JobStatus.OK), (3, JobStatus.OK)]


def orders_on(bench: Bench) -> tuple[OrderHandler, Reporter, list[Message]]:
    """The broker's orders and the reports of ended jobs; what is sent to the broker."""
    sent: list[Message] = []
    # Of the one order that comes over it the descriptors are lost.
    lost = DescriptorsLost("too many open files", LINK.encode(bind_message(1)))
    link = mock.Mock(
        send=lambda frame: sent.append(LINK.decode(frame)[1]),
        receive=mock.Mock(side_effect=[lost, None]),
        take_descriptors=tuple,
        more=False,
    )
    server: Any = SimpleNamespace(limits={}, send=lambda *_: True)
    reports = Reporter(server, link, bench.runner)
    return OrderHandler(reports, bench.workers, bench.device, pool_bytes=1), reports, sent


def test_what_was_lost_is_not_waited_for(bench: Bench) -> None:
    """A binding without its directory is counted, as the broker does, which hears of it.

    A connection that takes no answer is ended: its worker joins anew.
    """
    orders, reports, sent = orders_on(bench)
    worker = bench.worker(session=1)
    orders.read_orders()
    orders.execute(bind_message(1), (bench.pool.fd,))
    assert orders.num_bindings == 2
    assert [type(message) for message in sent] == [Imported, Imported]
    lost, damaged = (message.error for message in sent if isinstance(message, Imported))
    assert "too many open files" in lost
    assert "does not lie inside the pool" in damaged
    server: Any = reports.server
    server.send, server.end = (lambda *_: False), mock.Mock()
    worker.client = mock.Mock()
    reports.refuse_job(worker, make_job(Load, 1, [1], [9]), 5, "no")
    server.end.assert_called_once_with(worker.client)


def test_a_slot_is_given_back_only_when_no_copy_into_it_flies(bench: Bench) -> None:
    """Revoked is sent after the last transfer of every job that writes there has landed.

    What is enqueued is drained, never abandoned; no further piece is submitted.
    """
    orders, reports, sent = orders_on(bench)
    bench.submit(bench.worker(), make_job(Store, 1, [1, 2, 3, 5], [1, 2, 3, 4]))
    bench.runner.run_once()
    assert len(bench.device.flying) == 2
    revoke = Revoke(
        namespace=NAMESPACE, slots=IntArray.of([4], "u4"), generations=IntArray.of([1], "u8")
    )
    orders.execute(revoke)
    for _ in range(2):
        reports.report_ended()
        assert not sent
        bench.device.land()
        bench.runner.run_once()
    assert bench.device.flying == []
    reports.report_ended()
    answer = Revoked(namespace=NAMESPACE, slots=revoke.slots, generations=revoke.generations)
    assert sent[-1] == answer
    orders.execute(revoke)  # nothing writes there now
    reports.report_ended()
    assert sent[-2:] == [answer, answer]


def test_a_store_goes_on_when_other_slots_are_given_back(bench: Bench) -> None:
    """Of a slot that it has left out, as another engine writes there, the broker hears at once."""
    orders, reports, sent = orders_on(bench)
    bench.directory.set([4], SlotState.WRITING, owner=8)
    bench.submit(bench.worker(), make_job(Store, 1, [1, 2], [3, 4]))
    bench.runner.run_once()
    slots, generations = IntArray.of([4], "u4"), IntArray.of([1], "u8")
    orders.execute(Revoke(namespace=NAMESPACE, slots=slots, generations=generations))
    reports.report_ended()
    assert isinstance(sent[-1], Revoked)
    bench.device.land()
    bench.runner.run_once()
    assert bench.ended() == [(1, JobStatus.OK)]


def test_memory_is_released_only_when_no_copy_touches_it(bench: Bench) -> None:
    """Released is sent after the worker's last transfer has landed, to each order for it."""
    orders, reports, sent = orders_on(bench)
    worker = bench.worker()
    bench.submit(worker, make_job(Store, 1, [1], [3]))
    bench.runner.run_once()
    for _ in range(2):
        orders.execute(ReleaseWorker(session=worker.order.session))
    reports.report_ended()
    assert not sent
    bench.device.land()
    bench.runner.run_once()
    reports.report_ended()
    assert sum(isinstance(message, Released) for message in sent) == 2
    assert bench.workers.by_session(worker.order.session) is None
