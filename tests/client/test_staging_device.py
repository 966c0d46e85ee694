"""Staging where something fails, is too small, or goes away; and which memory is staged at all."""

import itertools
import logging
import os
import random
import select
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvd_client import (
    HostMemory,
    JobBlocks,
    JobStatus,
    Load,
    RegistrationError,
    Store,
    UnsupportedMemory,
    UsageError,
    Worker,
)
from kvd_client.torch_memory import describe_torch, work_so_far
from kvd_proto.messages import Error, ErrorCode, Message, Register, Wait
from tests.client.conftest import FINGERPRINT
from tests.client.double_device import NAME, DoubleDevice, DoubleTensors
from tests.client.fake_daemon import SECONDS
from tests.client.staging_rig import (
    BLOCKS,
    FACTOR,
    PAGE,
    STAGING_BYTES,
    CopyingDaemon,
    StagingRig,
    content,
    host_worker,
    layout_of,
)
from tests.descriptors import open_files
from tests.waiting import DEADLINE, eventually

BIG = 5  # chunks: more than fit the pages of a kind


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    """Undone after the rig's end."""
    with pytest.MonkeyPatch.context() as one:
        yield one


@pytest.fixture(params=[False, True], ids=["index", "swap"])
def any_rig(
    request: pytest.FixtureRequest, runtime_dir: Path, patch: pytest.MonkeyPatch
) -> Iterator[StagingRig]:
    """A rig with each way from blocks to pages."""
    with StagingRig(runtime_dir, patch, swaps=request.param) as rig:
        yield rig


@pytest.fixture
def rig(runtime_dir: Path, patch: pytest.MonkeyPatch) -> Iterator[StagingRig]:
    """A rig."""
    with StagingRig(runtime_dir, patch) as rig:
        yield rig


# ------------------------------------------------------------------- the ring


def test_a_job_larger_than_the_pages_is_done_in_pieces(any_rig: StagingRig) -> None:
    """One result each, with the bytes and seconds of all its pieces."""
    blocks, others, slots = range(1, 11), range(20, 30), range(BIG)
    any_rig.compute(blocks, 1)
    any_rig.submit(Store, 1, blocks, slots)
    result = any_rig.result(1)
    pieces = any_rig.received(Store)
    assert pieces > 2
    assert (result.status, result.bytes) == (JobStatus.OK, pieces * 64)
    assert result.seconds == pytest.approx(pieces * 0.002)
    any_rig.check_pool(slots, 1)
    any_rig.submit(Load, 1, others, slots)
    any_rig.expect(1)
    any_rig.check_blocks(others, 1)
    any_rig.worker.check_integrity()


def test_submit_never_waits_for_room(rig: StagingRig) -> None:
    """Jobs wait for pages in a queue; stores are voided there, loads done when there is room."""
    rig.daemon.hold_jobs = True
    rig.fill_pool(range(BIG), 1)
    for job in (1, 2, 3):
        rig.submit(Store, job, range(1, 11), range(10, 10 + BIG))
        rig.submit(Load, job + 3, range(20, 30), range(BIG))
    rig.let_pass()
    rig.worker.check_integrity()
    assert rig.worker.wait(range(1, 7), 0.0) == {4, 5, 6}
    results = rig.worker.get_finished()
    assert {result.job_id: result.status for result in results} == dict.fromkeys(
        (1, 2, 3), JobStatus.VOID
    )
    rig.daemon.hold_jobs = False
    rig.daemon.finish()
    rig.expect(4, 5, 6)
    rig.check_blocks(range(20, 30), 1)
    assert not any(slot in rig.daemon.pool for slot in range(10, 10 + BIG))


def test_an_expedited_load_is_the_next_one(rig: StagingRig) -> None:
    """It goes before those that wait for pages, and first in the lane."""
    rig.fill_pool(range(BIG), 1)
    rig.daemon.hold_jobs = True
    rig.submit(Load, 1, range(1, 5), [0, 1])  # takes all pages
    rig.daemon.wait_for(Load)
    rig.submit(Load, 2, [11, 12], [2])
    arrays = JobBlocks.of([13, 14], [2], [0], [3], [3])
    rig.worker.submit(Load, 3, arrays, expedited=True)
    rig.let_pass()
    rig.daemon.hold_jobs = False
    rig.daemon.finish()
    slots = [load.blocks.slots.tolist() for load in rig.daemon.wait_for(Load, 3)]
    assert slots == [[0, 1], [3], [2]]
    rig.expect(1, 2, 3)
    assert rig.daemon.wait_for(Wait)


def test_jobs_that_wait_too_long_end_by_themselves(
    runtime_dir: Path, patch: pytest.MonkeyPatch
) -> None:
    """A store is voided; loads fail, whether they wait for pages or for the lane."""
    with StagingRig(runtime_dir, patch, job_timeout=0.1) as rig:
        rig.daemon.hold_jobs = True
        rig.fill_pool(range(BIG), 1)
        rig.submit(Load, 1, range(1, 5), [0, 1])
        rig.submit(Load, 2, range(5, 9), [2, 3])
        with rig.device.holding(rig.gathers):
            rig.submit(Store, 3, [11, 12], [9])
            results: dict[int, JobStatus] = {}
            while len(results) < 3:
                assert select.select([rig.worker], [], [], SECONDS)[0]
                results |= {one.job_id: one.status for one in rig.worker.get_finished()}
        timeout = JobStatus.TIMEOUT
        assert results == {1: timeout, 2: timeout, 3: JobStatus.VOID}
        rig.daemon.finish()


def test_job_numbers_are_the_callers(rig: StagingRig) -> None:
    """One that runs is refused, and those that pieces have."""
    rig.daemon.hold_jobs = True
    rig.submit(Store, 1, [1, 2], [0])
    with pytest.raises(UsageError, match="job 1 has not ended"):
        rig.submit(Load, 1, [3, 4], [0])
    with pytest.raises(UsageError, match=r"2\*\*62"):
        rig.submit(Load, 2**62, [3, 4], [0])
    rig.daemon.wait_for(Store)
    rig.daemon.finish()
    rig.expect(1)
    assert rig.worker.layers_loaded(1) == 0


# ------------------------------------------------------------ what goes away


def test_a_lane_that_dies_fails_its_jobs(rig: StagingRig) -> None:
    """Nothing is scattered; the next lane is used without a registration."""
    rig.daemon.hold_jobs = True
    rig.submit(Store, 1, [1, 2], [0])
    rig.submit(Load, 2, [3, 4], [0])
    rig.daemon.wait_for(Load)
    rig.daemon.wait_for(Store)
    rig.daemon.kill_lane()
    assert [rig.result(job).status for job in (1, 2)] == [JobStatus.FAILED] * 2
    rig.let_pass()
    rig.check_untouched([3, 4])
    rig.submit(Store, 3, [1, 2], [0])
    assert "lane process has ended" in rig.result(3).text
    rig.daemon.hold_jobs = False
    rig.daemon.start_lane()
    eventually(lambda: rig.worker.registered)
    rig.compute([1, 2], 1)
    rig.submit(Store, 1, [1, 2], [0])
    rig.expect(1)
    rig.check_pool([0], 1)
    assert len(rig.daemon.wait_for(Register)) == 1


def test_a_daemon_that_dies_fails_its_jobs(rig: StagingRig) -> None:
    """The next one gets the same pages."""
    rig.daemon.hold_jobs = True
    rig.submit(Store, 1, [1, 2], [0])
    rig.submit(Load, 2, [3, 4], [0])
    rig.daemon.wait_for(Load)
    rig.daemon.wait_for(Store)
    rig.daemon.kill()
    assert [rig.result(job).status for job in (1, 2)] == [JobStatus.FAILED] * 2
    rig.submit(Store, 3, [1, 2], [0])
    assert rig.result(3).status is JobStatus.FAILED
    rig.daemon = CopyingDaemon(rig.daemon.runtime_dir)
    eventually(lambda: rig.worker.registered)
    rig.compute([1, 2], 1)
    rig.submit(Store, 1, [1, 2], [0])
    rig.expect(1)
    rig.check_pool([0], 1)
    assert rig.worker.transfer == "staging"


def test_a_copy_that_the_device_refuses_is_a_miss(any_rig: StagingRig) -> None:
    """It says why, and the next one is done."""
    any_rig.compute([1, 2], 1)
    for kind in (Store, Load):
        any_rig.device.launches_until_failure = 1
        any_rig.submit(kind, 1, [1, 2], [0])
        result = any_rig.result(1)
        assert result.status is JobStatus.FAILED
        assert "the device refuses this launch" in result.text
        any_rig.submit(kind, 1, [1, 2], [0])
        any_rig.expect(1)
    any_rig.check_pool([0], 1)
    any_rig.worker.check_integrity()


def test_a_device_that_is_lost_costs_misses(rig: StagingRig) -> None:
    """Jobs in copies fail, and all later ones; nothing hangs."""
    rig.fill_pool([0], 1)
    with rig.device.holding(rig.gathers, rig.scatters):
        rig.submit(Store, 1, [1, 2], [1])
        rig.submit(Load, 2, [3, 4], [0])
        rig.let_pass()
        with rig.device.holding(rig.engine):
            rig.engine.launch(lambda: None)
            number = rig.now()
            rig.device.lose()
        assert {rig.result(1).status, rig.result(2).status} == {JobStatus.FAILED}
    rig.submit_after(Load, 3, [3, 4], [0], None)
    assert rig.result(3).status is JobStatus.FAILED
    rig.submit_after(Load, 4, [3, 4], [0], number)  # an event that cannot be queried
    assert rig.result(4).status is JobStatus.FAILED
    assert rig.worker.suspend(DEADLINE)
    rig.worker.resume()
    rig.submit_after(Load, 5, [3, 4], [0], None)
    assert "staging has ended" in rig.result(5).text
    assert rig.worker.unregister()


def test_memory_is_free_after_unregister(rig: StagingRig) -> None:
    """Not while a copy runs; then other memory may be registered, and old results are reported."""
    with rig.device.holding(rig.gathers):
        rig.submit(Store, 1, [1, 2], [0])
        rig.let_pass()
        assert not rig.worker.unregister(timeout=0.0)
    assert (rig.worker.transfer, rig.worker.timeline.device) == (None, None)
    assert select.select([rig.worker], [], [], SECONDS)[0]
    assert [result.job_id for result in rig.worker.get_finished()] == [1]
    assert not select.select([rig.worker], [], [], 0)[0]
    eventually(lambda: not any("kvd-staging" in file for file in open_files().values()))
    eventually(lambda: not rig.device.pinned)
    first = len(rig.device.streams)
    rig.register()
    rig.compute([1, 2], 1)
    rig.submit(Store, 1, [1, 2], [0])
    rig.expect(1)
    rig.check_pool([0], 1)
    assert len(rig.device.streams) == first + 2
    assert rig.worker.unregister()


def test_close_ends_the_thread(rig: StagingRig) -> None:
    """Also while the lane has jobs and others wait for pages."""
    rig.daemon.hold_jobs = True
    for job in range(4):
        rig.submit(Store, job, range(1, 5), range(10, 12))
        rig.submit(Load, 4 + job, range(5, 9), range(2))
    rig.daemon.wait_for(Store)
    threads = rig.staging_threads()
    rig.worker.close()
    assert not any(thread.is_alive() for thread in threads)
    assert not rig.device.pinned
    with pytest.raises(UsageError, match="closed"):
        rig.worker.suspend()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_no_jobs(rig: StagingRig) -> None:
    """Its calls say so and never wait for the parent's thread or locks; the parent goes on."""
    rig.compute([1, 2], 1)
    with rig.device.holding(rig.gathers):
        rig.submit(Store, 1, [1, 2], [0])
        rig.let_pass()
        child = os.fork()
        if child == 0:
            signal.alarm(int(SECONDS))  # a hang is a failure, not a test that never ends
            failures = 0
            for call in (
                rig.worker.get_finished,
                rig.worker.suspend,
                lambda: rig.worker.wait([1], SECONDS),
                lambda: rig.submit_after(Store, 2, [3, 4], [1], None),
            ):
                try:
                    call()
                    failures += 1
                except UsageError as error:
                    failures += "forked" not in str(error)
            rig.worker.close()
            os._exit(failures)
        assert os.waitpid(child, 0)[1] == 0
    rig.expect(1)
    rig.check_pool([0], 1)


# -------------------------------------------------------------- host memory


def test_host_memory_is_staged_behind_numbers_of_the_host(runtime_dir: Path) -> None:
    """A store whose work has not finished does not hold up others; a load's blocks wait, too."""
    tensors = [torch.zeros((BLOCKS, PAGE), dtype=torch.uint8) for _ in range(2)]
    moved = [tensor.data_ptr() for tensor in tensors]
    jobs = [JobBlocks.of([n, n + 1], [2], [0], [n], [n]) for n in (1, 3, 5)]
    with CopyingDaemon(runtime_dir) as daemon, host_worker(daemon, tensors) as worker:
        assert [tensor.data_ptr() for tensor in tensors] == moved
        assert (worker.transfer, worker.transfer_reason) == ("staging", "")
        assert work_so_far(worker) is None
        number = worker.timeline.reserve()
        worker.submit(Store, 1, jobs[0], after=number)
        worker.submit(Store, 2, jobs[1])
        assert worker.wait([2], SECONDS) == frozenset()
        assert list(daemon.pool) == [3]
        for tensor, page in itertools.product(range(2), range(2)):
            tensors[tensor][1 + page] = torch.from_numpy(content(1, tensor, page))
        worker.submit(Load, 3, JobBlocks.of([1, 2], [2], [0], [3], [3]), after=number)
        worker.submit(Load, 4, JobBlocks.of([7, 8], [2], [0], [3], [3]))
        assert worker.wait([4], SECONDS) == frozenset()
        assert tensors[0][1].any()
        worker.cancel([3])
        assert worker.wait([3], SECONDS) == frozenset()
        worker.timeline.signal(number)
        assert worker.wait([1], SECONDS) == frozenset()
        by_id = {result.job_id: result.status for result in worker.get_finished()}
        assert by_id == dict.fromkeys((1, 2, 4), JobStatus.OK) | {3: JobStatus.CANCELLED}
        pages = [content(1, tensor, page) for tensor, page in itertools.product(range(2), range(2))]
        np.testing.assert_array_equal(daemon.pool[1], np.concatenate(pages))
        assert torch.equal(tensors[0][1], torch.from_numpy(content(1, 0, 0)))


# ------------------------------------------------------------- which memory


def refusing(daemon: CopyingDaemon, code: ErrorCode = ErrorCode.BAD_LAYOUT) -> list[Message]:
    """Let a daemon refuse memory of devices; the registrations that it gets from now on."""
    accept, seen = daemon.replies[Register], list[Message]()

    def answer(message: Register) -> Message | None:
        seen.append(message)
        if message.device != "host":
            return Error(code=code, text="no lane can map this")
        return accept(message)

    daemon.replies[Register] = answer
    return seen


def register(worker: Worker, memory: Any, tensors: Sequence[torch.Tensor], **how: Any) -> bool:
    """Register with little staging memory."""
    layout = layout_of(tensors)
    return worker.register(memory, layout, FINGERPRINT, staging_bytes=STAGING_BYTES, **how)


@pytest.fixture
def tensors() -> list[torch.Tensor]:
    """Two of them."""
    return [torch.zeros((BLOCKS, PAGE), dtype=torch.uint8) for _ in range(2)]


def check_staged(worker: Worker, caplog: pytest.LogCaptureFixture, *words: str) -> None:
    """It stages, and one line of the log says why and what it costs."""
    assert worker.transfer == "staging"
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    told = [line for line in lines if "the KV cache is staged" in line]
    assert len(told) == 1, lines
    for word in (*words, "copies each byte", "1 MiB of host memory"):
        assert word in told[0]
    for word in words:
        assert word in worker.transfer_reason
    assert worker.submit(Store, 1, JobBlocks.of([1, 2], [2], [0], [0], [0]))
    assert worker.wait([1], SECONDS) == frozenset()
    assert [result.success for result in worker.get_finished()] == [True]


def test_memory_that_cannot_be_exported_is_staged(
    runtime_dir: Path, tensors: list[torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    """By itself, unless export is required, which raises."""
    with (
        DoubleDevice() as device,
        CopyingDaemon(runtime_dir),
        Worker(runtime_dir, "engine", 0, 1, deadline=DEADLINE) as worker,
    ):
        memory = DoubleTensors(device, tensors)
        with pytest.raises(UnsupportedMemory, match="memory of the double cannot be mapped"):
            register(worker, memory, tensors, transfer="export")
        assert worker.transfer is None
        assert register(worker, memory, tensors)
        check_staged(worker, caplog, "memory of the double cannot be mapped")


@pytest.mark.parametrize("late", [False, True], ids=["at once", "by the keeper"])
def test_memory_that_the_daemon_refuses_is_staged(
    runtime_dir: Path, tensors: list[torch.Tensor], caplog: pytest.LogCaptureFixture, late: bool
) -> None:
    """Also if the daemon comes when `register` has returned; it is not exported again."""
    with (
        DoubleDevice() as device,
        Worker(runtime_dir, "engine", 0, 1, deadline=DEADLINE) as worker,
    ):
        memory = DoubleTensors(device, tensors, exports=True)
        if late:
            assert not register(worker, memory, tensors)
            assert (worker.transfer, worker.device) == ("export", NAME)
        with CopyingDaemon(runtime_dir) as daemon:
            seen = refusing(daemon)
            if late:
                eventually(lambda: worker.registered)
            else:
                assert register(worker, memory, tensors, required=True)
            assert [message.device for message in seen] == [NAME, "host"]  # type: ignore[attr-defined]
            check_staged(worker, caplog, "no lane can map this")
            daemon.disconnect()
            eventually(lambda: len(seen) == 3 and worker.registered)
            assert worker.device == "host"
            assert worker.unregister()
            assert worker.transfer is None


def test_a_refusal_that_staging_does_not_heal_is_the_daemons(
    runtime_dir: Path, tensors: list[torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    """With `export`, of a limit, or where staging is not possible either."""
    with DoubleDevice() as device, CopyingDaemon(runtime_dir) as daemon:
        memory = DoubleTensors(device, tensors, exports=True)
        refusing(daemon)
        with Worker(runtime_dir, "engine", 0, 1, deadline=DEADLINE) as worker:
            with pytest.raises(RegistrationError, match="no lane can map this"):
                register(worker, memory, tensors, transfer="export")
            layout = layout_of(tensors)
            layout = type(layout)(**{**layout_fields(layout), "blocks_per_chunk": BLOCKS})
            with pytest.raises(RegistrationError, match="no lane can map this"):
                worker.register(memory, layout, FINGERPRINT, staging_bytes=STAGING_BYTES)
            assert "staging is not possible either" in caplog.text
            assert worker.transfer is None
        refusing(daemon, ErrorCode.LIMIT)
        with (
            Worker(runtime_dir, "engine", 0, 1, deadline=DEADLINE) as worker,
            pytest.raises(RegistrationError, match="no lane can map this"),
        ):
            register(worker, memory, tensors)


def layout_fields(layout: Any) -> dict[str, Any]:
    """The fields of a layout."""
    return {name: getattr(layout, name) for name in layout.__struct_fields__}


def test_what_staging_needs_is_named(runtime_dir: Path, tensors: list[torch.Tensor]) -> None:
    """Tensors, the layout's storages, a chunk's pages; and what only staging can do."""
    memory = [HostMemory.allocate(BLOCKS * PAGE) for _ in tensors]
    with Worker(runtime_dir, "engine", 0, 1, deadline=DEADLINE) as worker:
        with pytest.raises(UsageError, match="transfer=staging: tensors are needed"):
            register(worker, memory, tensors, transfer="staging")
        with pytest.raises(UsageError, match="storages have"):
            register(worker, describe_torch(tensors[:1]), tensors, transfer="staging")
        assert not register(worker, memory, tensors)
        assert worker.transfer == "export"
        for call in (worker.suspend, worker.resume):
            with pytest.raises(UsageError, match="is not staged; use unregister"):
                call()
    for part in memory:
        part.close()


# ---------------------------------------------------------------- any order


@pytest.mark.parametrize("seed", range(4))
def test_jobs_in_any_order_end_once_with_the_right_bytes(
    runtime_dir: Path, patch: pytest.MonkeyPatch, seed: int
) -> None:
    """Stores and loads behind late kernels, cancelled, voided and suspended, with held streams.

    Blocks of a job that has ended are written at once by the next kernel: what is still copied from
    or to them would be seen.
    """
    chance = random.Random(seed)
    with StagingRig(runtime_dir, patch, swaps=bool(seed % 2)) as rig:
        game = Game(rig, chance)
        for _ in range(150):
            game.step()
        game.finish()
        rig.worker.check_integrity()
        assert rig.device.pinned


class Game:
    """An engine that owns blocks: each is free, or of one job."""

    def __init__(self, rig: StagingRig, chance: random.Random) -> None:
        self.rig, self.chance = rig, chance
        self.free = set(range(1, BLOCKS - 1, FACTOR))  # the first block of a chunk
        self.jobs: dict[int, tuple[type[Store | Load], list[int], list[int], int]] = {}
        self.stored: dict[int, tuple[int, int]] = {}  # slot: seed and number of its chunk
        self.numbers = itertools.count(1)
        self.slots = itertools.count(0)
        self.expected: dict[int, tuple[int, int]] = {}

    def step(self) -> None:
        """Do one thing."""
        rig, chance = self.rig, self.chance
        action = chance.choice(["store"] * 5 + ["load"] * 5 + ["take"] * 4 + ["stop", "hold"])
        if action == "store" and self.free:
            self.store()
        elif action == "load" and self.free and self.stored:
            self.load()
        elif action == "stop" and self.jobs:
            job = chance.choice(list(self.jobs))
            if chance.random() < 0.3:
                assert rig.worker.suspend(DEADLINE)
                rig.worker.resume()
            elif self.jobs[job][0] is Store:
                rig.worker.wait([job], 0.0)
            else:
                rig.worker.cancel([job])
        elif action == "hold":
            streams = chance.sample(rig.device.streams, 2)
            with rig.device.holding(*streams):
                for _ in range(3):
                    if self.free:
                        self.store()
                    if self.free and self.stored:
                        self.load()
        else:
            self.take()

    def chunks(self) -> list[int]:
        """First blocks of some chunks that are free no more."""
        count = self.chance.randint(1, min(4, len(self.free)))
        taken = self.chance.sample(sorted(self.free), count)
        self.free -= set(taken)
        return taken

    def store(self) -> None:
        """Compute blocks late, and store them."""
        taken, job = self.chunks(), next(self.numbers)
        blocks = [block for first in taken for block in range(first, first + FACTOR)]
        slots = [next(self.slots) for _ in taken]
        self.rig.compute(blocks, job)
        self.rig.submit(Store, job, blocks, slots)
        self.jobs[job] = (Store, taken, slots, job)

    def load(self) -> None:
        """Load stored chunks of one seed into blocks that a kernel uses before."""
        slot = self.chance.choice(list(self.stored))
        taken, job = self.chunks()[:1], next(self.numbers)
        blocks = list(range(taken[0], taken[0] + FACTOR))
        self.rig.compute(blocks, 10**6 + job)
        self.rig.submit(Load, job, blocks, [slot])
        self.jobs[job] = (Load, taken, [slot], job)

    def take(self) -> None:
        """Check what has ended; its blocks are free, and written at once."""
        rig = self.rig
        for result in rig.worker.get_finished():
            kind, taken, slots, seed = self.jobs.pop(result.job_id)
            blocks = [block for first in taken for block in range(first, first + FACTOR)]
            if result.success and kind is Store:
                for number, slot in enumerate(slots):
                    np.testing.assert_array_equal(rig.daemon.pool[slot], rig.chunk(number, seed))
                    self.stored[slot] = (seed, number)
            elif result.success:
                seed, number = self.stored[slots[0]]
                for tensor, block in itertools.product(range(2), range(FACTOR)):
                    np.testing.assert_array_equal(
                        rig.tensors[tensor][blocks[block]].numpy(),
                        content(seed, tensor, number * FACTOR + block),
                    )
            else:
                assert result.status in {JobStatus.VOID, JobStatus.CANCELLED}, result
            self.reuse(blocks)
            self.free |= set(taken)

    def reuse(self, blocks: Sequence[int]) -> None:
        """Let a kernel write blocks, which nothing else writes afterwards."""

        def kernel() -> None:
            for pages in self.rig.tensors:
                pages[list(blocks)] = 0xEE

        self.rig.engine.launch(kernel)
        self.rig.device.settle()
        for pages in self.rig.tensors:
            assert (pages[list(blocks)] == 0xEE).all()

    def finish(self) -> None:
        """Wait for all that is left."""
        while self.jobs:
            assert self.rig.worker.wait(self.jobs, SECONDS) == frozenset()
            self.take()
        assert self.stored
