"""A staging worker between two doubles: of a device that copies late, and of a lane that waits.

Each side does its part when the test lets it: kernels and copies of the device, and the lane's
copies between staging pages and its pool.
"""

import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvd_client import JobBlocks, JobResult, Load, RankLayout, Store, Worker, device_copier
from kvd_client.staging import StagedJobs
from kvd_client.torch_memory import describe_torch
from kvd_proto.expand import Expander
from kvd_proto.jobs import CONTROL_BYTES
from kvd_proto.messages import Job, JobStatus, Register
from tests.client import double_device
from tests.client.conftest import FINGERPRINT
from tests.client.double_device import DoubleDevice, DoubleStream, DoubleTensors
from tests.client.fake_daemon import FakeDaemon
from tests.layouts import flat_layout
from tests.waiting import DEADLINE, PATIENCE, eventually

PAGE, BLOCKS, FACTOR = 65536, 32, 2
RING_CHUNKS = 2  # of each kind, that fit the staging pages
STAGING_BYTES = 2**20
Bytes = npt.NDArray[np.uint8]


class CopyingDaemon(FakeDaemon):
    """A fake daemon whose lane copies host memory, when it answers.

    Attributes:
        pool: its slots.
        ignores_cancels: jobs end as if they had not been cancelled.
    """

    def __init__(self, runtime_dir: Path) -> None:
        self.pool: dict[int, Bytes] = {}
        self.ignores_cancels = False
        super().__init__(runtime_dir)

    def _finish(self, status: JobStatus) -> None:
        if status is JobStatus.CANCELLED and self.ignores_cancels:
            return
        if status is JobStatus.OK:
            for _, _, job in self._held:
                self._copy(job)
        super()._finish(status)

    def _copy(self, job: Job) -> None:
        """Do a job, unless it is void."""
        control, memory = self.worker_fds()
        *_, registration = [message for message in self.received if isinstance(message, Register)]
        layout = registration.layout
        job.blocks.check(layout)
        empty = np.zeros(layout.slot_bytes, np.uint8)
        copied = {slot: self.pool.get(slot, empty).copy() for slot in job.blocks.slots.tolist()}
        with mmap.mmap(memory, os.fstat(memory).st_size) as mapped:
            for _, at, arena, nbytes in Expander(layout).expand(job.blocks).runs:
                slot, begin = divmod(arena, layout.slot_bytes)
                there = copied[slot][begin : begin + nbytes]
                if isinstance(job, Store):
                    there[:] = np.frombuffer(mapped[at : at + nbytes], np.uint8)
                else:
                    mapped[at : at + nbytes] = there.tobytes()
        if isinstance(job, Store) and is_valid(control, job):
            self.pool |= copied


def is_valid(control: int, store: Store) -> bool:
    """Whether a store has not been voided, by its word of the control page."""
    with mmap.mmap(control, CONTROL_BYTES) as page:
        return int(np.frombuffer(page[:], "<u8")[store.word]) == store.epoch


def content(seed: int, tensor: int, position: int) -> Bytes:
    """The bytes of one page: different for each seed, tensor and position."""
    return np.random.default_rng((seed, tensor, position)).integers(0, 256, PAGE, np.uint8)


class StagingRig:
    """One worker, whose two tensors lie in the double's memory.

    Attributes:
        device: the double, with the `engine`'s stream, and those for `gathers` and `scatters`.
        daemon: with the lane.
        worker: registered.
    """

    def __init__(
        self, runtime_dir: Path, patch: pytest.MonkeyPatch, *, swaps: bool = False, **options: Any
    ) -> None:
        self._idle = 0
        self._idling = threading.Condition()
        self._results: dict[int, JobResult] = {}
        patch.setattr(StagedJobs, "_wait_for_news", self._counting(StagedJobs._wait_for_news))
        self.device = DoubleDevice()
        swap = double_device.swap_blocks_batch(self.device) if swaps else None
        patch.setattr(device_copier, "swap_blocks_batch", lambda: swap)
        self.engine = self.device.new_stream()
        self.daemon = CopyingDaemon(runtime_dir)
        self.tensors = [torch.zeros((BLOCKS, PAGE), dtype=torch.uint8) for _ in range(2)]
        self.layout = layout_of(self.tensors)
        self.worker = Worker(runtime_dir, "engine", 0, 1, **{"deadline": DEADLINE, **options})
        self.register()

    def register(self) -> None:
        """Register the tensors."""
        memory = DoubleTensors(self.device, self.tensors)
        assert self.worker.register(
            memory, self.layout, FINGERPRINT, transfer="staging", staging_bytes=STAGING_BYTES
        )
        eventually(lambda: len(self.device.streams) > 2)  # made by the worker's thread

    def _counting(self, wait_for_news: Any) -> Any:
        def counting(jobs: StagedJobs) -> None:
            with self._idling:
                self._idle += 1
                self._idling.notify_all()
            wait_for_news(jobs)

        return counting

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.close()
        self.daemon.kill()
        self.device.__exit__()

    @property
    def gathers(self) -> DoubleStream:
        """The stream of stores."""
        return self.device.streams[1]

    @property
    def scatters(self) -> DoubleStream:
        """The stream of loads."""
        return self.device.streams[2]

    def let_pass(self) -> None:
        """Wait until neither the worker's thread, nor the device, nor the lane has more to do."""
        for _ in range(3):  # a job passes through each of them at most so often
            with self._idling:
                goal = self._idle + 2
                while self._idle < goal:
                    self.worker.wait([])  # wakes the thread
                    self._idling.wait(0.02)
            self.device.settle()
            for _ in range(2):  # between two calls the lane reads what it has been sent
                self.daemon.call(lambda: None)

    def staging_threads(self) -> list[threading.Thread]:
        """Threads of the worker that copy."""
        return [thread for thread in threading.enumerate() if thread.name == "kvd-staging"]

    def now(self) -> int:
        """The timeline's number of what is on the engine's stream."""
        return self.worker.timeline.signal_on(self.engine)

    def compute(self, blocks: Sequence[int], seed: int, stream: DoubleStream | None = None) -> None:
        """Let a kernel of the engine write blocks, at its turn."""

        def kernel() -> None:
            for tensor, pages in enumerate(self.tensors):
                for position, block in enumerate(blocks):
                    pages[block] = torch.from_numpy(content(seed, tensor, position))

        (stream or self.engine).launch(kernel)

    def submit(
        self, kind: type[Store | Load], job: int, blocks: Sequence[int], slots: Sequence[int]
    ) -> None:
        """Submit a job behind all of the engine's work so far."""
        self.submit_after(kind, job, blocks, slots, self.now())

    def submit_after(
        self,
        kind: type[Store | Load],
        job: int,
        blocks: Sequence[int],
        slots: Sequence[int],
        after: int | None,
    ) -> None:
        """Submit a job behind a number of the timeline."""
        arrays = JobBlocks.of(blocks, [len(blocks)], [0], slots, slots)
        self.worker.submit(kind, job, arrays, after=after)

    def result(self, job: int) -> JobResult:
        """Wait for a job's end."""
        assert self.worker.wait([job], PATIENCE) == frozenset()
        self._results |= {result.job_id: result for result in self.worker.get_finished()}
        return self._results.pop(job)

    def expect(self, *jobs: int) -> None:
        """Wait for jobs, which succeed."""
        for job in jobs:
            result = self.result(job)
            assert result.success, result

    def fill_pool(self, slots: Sequence[int], seed: int) -> None:
        """Put chunks into the pool."""
        for number, slot in enumerate(slots):
            self.daemon.pool[slot] = self.chunk(number, seed)

    def chunk(self, number: int, seed: int) -> Bytes:
        """A slot with one of the chunks that `compute` writes."""
        positions = range(number * FACTOR, (number + 1) * FACTOR)
        pages = [content(seed, tensor, position) for tensor in range(2) for position in positions]
        return np.concatenate(pages)

    def check_pool(self, slots: Sequence[int], seed: int) -> None:
        """These slots hold what `compute` has written."""
        for number, slot in enumerate(slots):
            np.testing.assert_array_equal(self.daemon.pool[slot], self.chunk(number, seed))

    def check_blocks(self, blocks: Sequence[int], seed: int) -> None:
        """These blocks hold what `compute` writes."""
        for tensor, pages in enumerate(self.tensors):
            for position, block in enumerate(blocks):
                np.testing.assert_array_equal(
                    pages[block].numpy(), content(seed, tensor, position), f"block {block}"
                )

    def check_untouched(self, blocks: Sequence[int]) -> None:
        """These blocks are as they were made."""
        for pages in self.tensors:
            assert not pages[list(blocks)].any()

    def received(self, kind: type[Store | Load]) -> int:
        """Number of jobs of this kind that the lane has got."""
        return sum(isinstance(message, kind) for message in self.daemon.received)


def layout_of(tensors: Sequence[torch.Tensor]) -> RankLayout:
    """One group over these tensors."""
    return flat_layout(*[PAGE] * len(tensors), blocks=BLOCKS, factor=FACTOR)


@contextmanager
def host_worker(daemon: FakeDaemon, tensors: list[torch.Tensor]) -> Iterator[Worker]:
    """A worker with tensors of the CPU that are staged."""
    with Worker(daemon.runtime_dir, "engine", 0, 1, deadline=DEADLINE) as worker:
        assert worker.register(
            describe_torch(tensors),
            layout_of(tensors),
            FINGERPRINT,
            transfer="staging",
            staging_bytes=STAGING_BYTES,
        )
        yield worker
