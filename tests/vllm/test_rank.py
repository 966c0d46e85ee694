"""A rank's side: every job is reported once, failed ones too, and whose failure is whose."""

from collections.abc import Collection
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    DirectionalTransferStats,
    OffloadingConnectorMetadata,
    TransferJob,
    TransferStats,
)
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from kvd_client import CudaError, JobBlocks, JobResult, JobStatus, UsageError, Worker
from kvd_client.routes import EXPORT, STAGING, Transfer
from kvd_client.vllm import KvdOffloadingWorker, VllmOptions
from kvd_client.vllm.connector import KvdConnectorWorker
from kvd_client.vllm.manager import ChunkLoadStoreSpec
from kvd_client.vllm.scheduler import KvdWorkerMetadata

FACTOR = 4
OPTIONS = VllmOptions(load_timeout=3.0, preemption_timeout=2.0)


@dataclass
class FakeWorker:
    """A `Worker` whose lane is the test.

    Attributes:
        submitted: numbers of jobs.
        afters: what each job is to wait for.
        expedited: jobs that go first.
        ended: results that the next `get_finished` returns.
        refusal: why jobs are refused; "cuda": the device is lost.
        transfer: how the memory is reached.
        device: whose streams signal; None: the memory is the host's.
    """

    submitted: list[int] = field(default_factory=list)
    afters: list[int | None] = field(default_factory=list)
    ended: list[JobResult] = field(default_factory=list)
    waits: list[tuple[set[int], float]] = field(default_factory=list)
    expedited: list[int] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    refusal: str = ""
    transfer: Transfer = EXPORT
    device: int | None = None

    @property
    def timeline(self) -> "FakeWorker":
        """See Worker."""
        return self

    def signal_on(self, stream: Any) -> int:
        """See Timeline: numbers that show the driver's stream, or the torch stream."""
        if self.refusal == "cuda":
            raise CudaError(700, "CUDA_ERROR_ILLEGAL_ADDRESS", "write from a stream")
        is_torch_stream = hasattr(stream, "cuda_stream")
        assert is_torch_stream == (self.transfer == STAGING)
        return 1000 + int(stream.cuda_stream if is_torch_stream else stream)

    def submit(
        self,
        kind: type,
        job_id: int,
        blocks: JobBlocks,
        after: int | None,
        *,
        expedited: bool,
    ) -> None:
        """See Worker."""
        del kind
        self.afters.append(after)
        if self.refusal:
            raise UsageError(self.refusal)
        assert len(blocks.slots) == len(blocks.generations)
        assert sum(blocks.sizes) == len(blocks.block_ids)
        self.submitted.append(job_id)
        if expedited:
            self.expedited.append(job_id)

    def end(self, *job_ids: int, success: bool = True) -> None:
        """The lane has ended these jobs."""
        status, text = (JobStatus.OK, "") if success else (JobStatus.FAILED, "lost")
        self.ended += [JobResult(job_id, status, 4096, 0.5, text) for job_id in job_ids]

    def get_finished(self) -> list[JobResult]:
        """See Worker."""
        ended, self.ended = self.ended, []
        return ended

    def wait(self, job_ids: Collection[int], timeout: float) -> frozenset[int]:
        """See Worker: what the test has not ended takes too long."""
        self.waits.append((set(job_ids), timeout))
        return frozenset(job_ids) - {result.job_id for result in self.ended}

    def cancel(self, job_ids: Collection[int]) -> None:
        """See Worker."""
        self.cancelled.extend(job_ids)


@pytest.fixture
def lane() -> FakeWorker:
    """The fake."""
    return FakeWorker()


def offloading(
    lane: FakeWorker | None, groups: tuple[int, ...] = (0,), factor: int = FACTOR
) -> KvdOffloadingWorker:
    """The worker under test."""
    worker = cast("Worker | None", lane)
    return KvdOffloadingWorker(worker, groups, factor, OPTIONS, register=lambda _: None)


@pytest.fixture
def rank(lane: FakeWorker) -> KvdOffloadingWorker:
    """A rank with one group."""
    return offloading(lane)


def chunks(*counts: int) -> ChunkLoadStoreSpec:
    """Slots for so many chunks of group 0, of group 2 and so on: not every group is offloaded."""
    total = sum(counts)
    return ChunkLoadStoreSpec(
        np.arange(total, dtype="<u4"),
        np.ones(total, "<u8"),
        {2 * index: count for index, count in enumerate(counts) if count},
    )


def blocks(first: int = 1) -> GPULoadStoreSpec:
    """The blocks of two chunks of group 0, from this one on."""
    return GPULoadStoreSpec(list(range(first, first + 2 * FACTOR)), (2 * FACTOR,), (0,))


def outcomes(rank: KvdOffloadingWorker) -> dict[int, bool]:
    """Success by job of what has ended now; none is named twice."""
    ended = rank.get_finished()
    assert len({result.job_id for result in ended}) == len(ended)
    return {result.job_id: result.success for result in ended}


@pytest.mark.parametrize("transfer", [EXPORT, STAGING])
def test_cuda_memory_is_ready_when_the_engines_stream_is_there(
    rank: KvdOffloadingWorker,
    lane: FakeWorker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    transfer: Transfer,
) -> None:
    """Every job waits for what is on torch's current stream; a lost device fails the jobs.

    The log tells it once.
    """
    lane.device, lane.transfer = 0, transfer
    stream = SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: stream)
    rank.submit_store(1, blocks(), chunks(2))
    stream.cuda_stream = 8
    rank.submit_load(2, chunks(2), blocks())
    assert lane.afters == [1007, 1008]
    lane.refusal = "cuda"
    for number in (3, 4):
        rank.submit_load(number, chunks(2), blocks())
    assert outcomes(rank) == {3: False, 4: False}
    (line,) = [record.message for record in caplog.records]
    assert line.startswith(
        "kvd: a load failed and is a cache miss: CUDA cannot write from a stream"
    )


def test_a_refused_job_is_a_failed_one(rank: KvdOffloadingWorker, lane: FakeWorker) -> None:
    """Arrays that the client refuses do not stop the engine; the next job is not affected."""
    lane.refusal = "these blocks lie in 3 chunks, 2 slots were given"
    assert rank.submit_store(1, blocks(), chunks(2))
    assert rank.submit_load(2, chunks(2), blocks())
    assert rank.submit_load(3, ChunkLoadStoreSpec(missing=3), blocks())
    assert outcomes(rank) == {1: False, 2: False, 3: False}
    assert not outcomes(rank)
    lane.refusal = ""
    assert rank.submit_store(4, blocks(), chunks(2))
    lane.end(4)
    assert outcomes(rank) == {4: True}


def test_the_log_tells_a_reason_once_until_a_job_succeeds(
    rank: KvdOffloadingWorker, lane: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    """However many jobs fail for it, in however many steps; stores and loads have a line each."""
    lines = [f"kvd: a {kind} failed and is a cache miss: lost" for kind in ("store", "load")]
    for number in range(0, 9, 3):
        rank.submit_store(number, blocks(), chunks(2))
        rank.submit_store(number + 1, blocks(), chunks(2))
        rank.submit_load(number + 2, chunks(2), blocks())
        lane.end(number, number + 1, number + 2, success=False)
        assert set(outcomes(rank).values()) == {False}
    assert [record.message for record in caplog.records] == lines
    caplog.clear()
    for number, success in ((10, True), (11, False), (12, False)):
        rank.submit_load(number, chunks(2), blocks())
        lane.end(number, success=success)
        assert outcomes(rank) == {number: success}
    assert [record.message for record in caplog.records] == lines[1:]


def test_waiting_never_waits_for_loads(rank: KvdOffloadingWorker, lane: FakeWorker) -> None:
    """Blocks of loads stay with their requests; stores are waited for as long as is set."""
    rank.submit_load(1, chunks(2), blocks())
    rank.submit_store(2, blocks(), chunks(2))
    rank.wait({1, 2, 3})
    assert lane.waits == [({2, 3}, OPTIONS.preemption_timeout)]


def test_a_step_waits_for_expedited_loads(rank: KvdOffloadingWorker, lane: FakeWorker) -> None:
    """Up to sync_load_timeout; what is late, has failed or was refused is told, and stopped."""
    rank.submit_load(1, chunks(2), blocks())
    for number in (2, 3, 4):
        rank.submit_load(number, chunks(2), blocks(), expedited=True)
    rank.submit_load(5, ChunkLoadStoreSpec(missing=3), blocks(), expedited=True)
    assert lane.expedited == [2, 3, 4]
    lane.end(2)
    lane.end(3, success=False)
    rank.wait({2, 3, 4, 5})
    assert lane.waits == [({2, 3, 4}, OPTIONS.sync_load_timeout)]
    assert (rank.take_late_loads(), rank.take_late_loads()) == ({3, 4, 5}, set())
    assert lane.cancelled == [4]
    assert outcomes(rank) == {2: True, 3: False, 5: False}
    rank.wait({4})  # its blocks are kept
    assert len(lane.waits) == 1
    lane.end(1)
    lane.end(4, success=False)
    assert outcomes(rank) == {1: True, 4: False}


# ------------------------------------------------------------------ torn stores


@st.composite
def block_tables(draw: st.DrawFn) -> tuple[int, list[list[list[bool]]], list[int]]:
    """A factor; groups of chunks of blocks, true where a block is still there; first indices."""
    factor = draw(st.integers(1, 4))
    chunk = st.lists(st.booleans(), min_size=factor, max_size=factor)
    whole = st.just([True] * factor)
    groups = draw(
        st.lists(st.lists(st.one_of(whole, whole, chunk), max_size=4), min_size=1, max_size=3)
    )
    starts = draw(st.lists(st.integers(0, 9), min_size=len(groups), max_size=len(groups)))
    return factor, groups, starts


@given(block_tables())
def test_stores_with_holes_are_not_done(
    tables: tuple[int, list[list[list[bool]]], list[int]],
) -> None:
    """A store is done just when its blocks, from its first one to its chunks' end, are all there.

    Blocks that a window gave up are left out as vLLM's scheduler leaves them out. A group that is
    not offloaded leaves a gap in the numbers of the groups, not in the arrays.
    """
    factor, groups, starts = tables
    sizes, indices, whole = [], [], True
    for chunks_of_group, start in zip(groups, starts, strict=True):
        is_there = [block for chunk in chunks_of_group for block in chunk]
        positions = [position for position, present in enumerate(is_there) if present]
        sizes.append(len(positions))
        indices.append(start * factor + positions[0] if positions else 0)
        if is_there:
            whole &= bool(positions) and positions[0] < factor and all(is_there[positions[0] :])
    lane = FakeWorker()
    rank = offloading(lane, tuple(range(0, 2 * len(groups), 2)), factor)
    listed = GPULoadStoreSpec(list(range(1, sum(sizes) + 1)), sizes, indices)
    rank.submit_store(1, listed, chunks(*map(len, groups)))
    assert bool(lane.submitted) is whole
    assert outcomes(rank) == ({} if whole else {1: False})


# -------------------------------------------------------- what ranks report


def half_of(*, replicated: bool = False) -> KvdConnectorWorker:
    """A connector's half, in the second rank where all ranks hold the same."""
    config = SimpleNamespace(canonical_layout=False, parallel=SimpleNamespace(rank=int(replicated)))
    spec: Any = SimpleNamespace(replicated_layout=replicated, config=config)
    return KvdConnectorWorker(spec, None, None)


def test_failed_jobs_are_reported(rank: KvdOffloadingWorker, lane: FakeWorker) -> None:
    """A request whose load failed is finished and failed; a store's failure is in the report."""
    half = half_of()
    half.worker = rank
    loads = {n: TransferJob(f"request-{n}", chunks(2), blocks(n * 10)) for n in (1, 2)}
    stores = {n: TransferJob(f"request-{n}", blocks(n * 10), chunks(2)) for n in (3, 4)}
    half.start_kv_transfers(OffloadingConnectorMetadata(loads, {}))
    half.prepare_store_kv(OffloadingConnectorMetadata({}, stores))
    half.start_kv_transfers(OffloadingConnectorMetadata({}, {}))
    assert half.build_connector_worker_meta() is None
    lane.end(1, 3, success=False)
    lane.end(2, 4)
    results = half.get_transfer_results()
    assert results.finished_recving == {"request-1", "request-2"}
    assert results.failed_recving == {"request-1"}
    assert not results.finished_sending
    moved = DirectionalTransferStats(4096, 0.5, [4096])  # of a success
    assert half.build_connector_worker_meta() == KvdWorkerMetadata(
        dict.fromkeys((1, 2, 3, 4), 1), TransferStats(load=moved, store=moved), {1, 3}
    )
    assert not half.get_transfer_results().finished_recving
    assert half.build_connector_worker_meta() is None


def test_vllm_reports_the_stores_that_a_rank_leaves_to_another() -> None:
    """Where all ranks hold the same, vLLM enters them into the report that kvd gives it."""
    half = half_of(replicated=True)
    job = TransferJob("request", blocks(), chunks(2))
    half.prepare_store_kv(OffloadingConnectorMetadata({}, {5: job}))
    report = half.build_connector_worker_meta()
    assert report is not None
    assert report.completed_jobs == {5: 1}
