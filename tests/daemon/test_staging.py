"""Ranks that stage, on the double of an accelerator, against a real daemon."""

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvd_client import Fingerprint, JobBlocks, Load, Store, Worker, device_copier
from tests.client.double_device import DoubleDevice, DoubleTensors
from tests.daemon.engines import Engine, keys_of, make_layout, wait_hit
from tests.daemon.serving import Daemon, StartDaemon
from tests.waiting import eventually

PAGE = 65536
STAGING_BYTES = 2**20  # two chunks of each kind


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[DoubleDevice]:
    """The device of all ranks that stage."""
    monkeypatch.setattr(device_copier, "swap_blocks_batch", lambda: None)
    with DoubleDevice() as double:
        yield double


@dataclass
class StagedEngine(Engine):
    """An engine some of whose ranks have memory on the double, filled by late kernels."""

    device: Any = None
    staged: Sequence[int] = (0, 1)
    tensors: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stream = self.device.new_stream()
        super().__post_init__()

    def add(self, rank: int) -> None:
        """Register one rank."""
        if rank not in self.staged:
            return super().add(rank)
        worker = self.workers[rank] = Worker(
            self.runtime_dir, self.name, rank, self.world_size, deadline=self.deadline
        )
        tensors = [torch.zeros(size, dtype=torch.uint8) for size in self.layout.storages]
        rows = [tensor.view(self.layout.num_blocks, -1) for tensor in tensors]
        self.memory[rank] = [  # as the engine reads and writes host memory
            SimpleNamespace(array=tensor.numpy(), close=lambda: None)  # type: ignore[misc]
            for tensor in tensors
        ]
        worker.register(
            DoubleTensors(self.device, rows),
            self.layout,
            Fingerprint(model=self.model),
            staging_bytes=STAGING_BYTES,
        )
        assert worker.transfer == "staging"
        return None

    def fill(self, keys: Sequence[bytes], first_block: int, group: int = 0) -> list[int]:
        """Compute, when the stream gets to it."""
        self.stream.launch(lambda: Engine.fill(self, keys, first_block, group))
        return self.blocks_of(keys, first_block)

    def poison(self, blocks: Sequence[int]) -> None:
        """Overwrite blocks, when the stream gets to it."""
        self.stream.launch(lambda: Engine.poison(self, blocks))

    def submit(
        self,
        kind: str,
        ranks: Sequence[int],
        blocks: Sequence[int],
        slots: Any,
        generations: Any,
        group: int = 0,
        index: int = 0,
    ) -> dict[int, int]:
        """A job for each rank, behind all of the engine's work; exporting ranks wait for it."""
        sizes, indices = [0, 0], [0, 0]
        sizes[group], indices[group] = len(blocks), index
        arrays = JobBlocks.of(blocks, sizes, indices, slots, generations)
        jobs = {}
        for rank in ranks:
            self.job += 1
            after = None
            if rank in self.staged:
                after = self.workers[rank].timeline.signal_on(self.stream)
            else:
                self.stream.synchronize()
            self.workers[rank].submit(Store if kind == "store" else Load, self.job, arrays, after)
            jobs[rank] = self.job
        return jobs


def check_all_bytes(engine: Engine, keys: list[bytes]) -> None:
    """Chunks of both groups come back into other blocks of every rank."""
    for group, of_group in enumerate((keys[::2], keys[1::2])):
        engine.store(of_group, group=group)
        wait_hit(engine, of_group)
        assert engine.load(of_group, group=group) == (len(of_group), 0)


@pytest.mark.parametrize("staged", [(0, 1), (1,)], ids=["all ranks", "one of two"])
@pytest.mark.parametrize("replicated", [False, True], ids=["shares", "replicated"])
def test_ranks_that_stage_and_export_make_one_engine(
    shared_daemon: Daemon,
    device: DoubleDevice,
    label: str,
    staged: Sequence[int],
    replicated: bool,
) -> None:
    """Jobs larger than the pages; a replicated chunk is written by one rank and read by both.

    An engine that exports all of its memory finds the same chunks.
    """
    layout = make_layout(page=PAGE, replicated=replicated)
    with StagedEngine(
        shared_daemon.runtime_dir, label, model=label, layout=layout, device=device, staged=staged
    ) as engine:
        engine.wait_attached()
        keys = keys_of("first", 14)
        check_all_bytes(engine, keys)
        with Engine(
            shared_daemon.runtime_dir, f"{label}-exports", model=label, layout=layout
        ) as exporting:
            exporting.wait_attached()
            assert exporting.load(keys[::2]) == (7, 0)
            later = keys_of("later", 4)
            exporting.store(later)
            wait_hit(engine, later)
            assert engine.load(later) == (4, 0)


def test_kills_cost_the_jobs_of_the_moment(start_daemon: StartDaemon, device: DoubleDevice) -> None:
    """A lane's, then the daemon's; afterwards everything is stored and loaded as before."""
    daemon = start_daemon()
    layout = make_layout(page=PAGE)
    with StagedEngine(daemon.runtime_dir, layout=layout, device=device) as engine:
        engine.wait_attached()
        keys = engine.stored("first", 6)
        (lane,) = daemon.status()["lanes"]
        ticket = engine.scheduler.prepare_load(keys)
        blocks = engine.blocks_of(keys, 33)
        jobs = engine.submit("load", [0, 1], blocks, ticket.slots, ticket.generations)
        os.kill(lane["pid"], signal.SIGKILL)
        engine.results(jobs)  # each is reported, whatever it has become
        engine.scheduler.complete_load(ticket)
        eventually(lambda: daemon.status()["lanes"][0]["pid"] not in {None, lane["pid"]})
        daemon.wait_ready()
        engine.wait_attached()
        eventually(lambda: engine.load(keys), (6, 0).__eq__)
        daemon.stop(signal.SIGKILL)
        jobs = engine.submit("load", [0, 1], blocks, ticket.slots, ticket.generations)
        assert not any(result.success for result in engine.results(jobs).values())
        engine.wait_attached(to=start_daemon())
        keys = engine.stored("second", 6)
        assert engine.load(keys) == (6, 0)
        for worker in engine.workers.values():
            worker.check_integrity()
