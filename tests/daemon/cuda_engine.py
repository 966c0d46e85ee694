"""An engine in CUDA memory: its scheduler here, its ranks in processes of their own.

Handles do not open at home.
"""

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvd_client import (
    DeviceMemory,
    Fingerprint,
    JobBlocks,
    JobResult,
    Load,
    LookupResult,
    Scheduler,
    Store,
    StoreTicket,
    Worker,
)
from tests.asked import Asked
from tests.daemon.engines import (
    FACTOR,
    PAGE,
    POISON,
    TENSORS,
    content,
    lend,
    make_layout,
    wait_served_by,
)
from tests.daemon.serving import Daemon
from tests.daemon.users import OTHER_UID
from tests.fakecuda import cudatensor
from tests.fakecuda.harness import switch
from tests.waiting import DEADLINE, PATIENCE, eventually

GAP = 512


class Rank:
    """The rank, for `Asked`. Blocks are those of `make_layout`, both storages in one allocation.

    Its memory is "ipc", "vmm" (exportable) or "closed" (not exportable).
    """

    def __init__(
        self,
        runtime_dir: Path,
        engine: str,
        rank: int,
        world_size: int,
        *,
        kind: str = "ipc",
        device: int = 0,
        page: int = PAGE,
    ) -> None:
        self._rank = rank
        self._results: dict[int, JobResult] = {}
        self._layout = make_layout(page=page)
        cudatensor.use_device(device)
        self._stream = cudatensor.new_stream()
        self._storages = self._make_storages(kind, device)
        self.worker = Worker(runtime_dir, engine, rank, world_size, deadline=DEADLINE)

    def close(self) -> None:
        """Take the memory back from the daemon."""
        self.worker.close()

    def register(self) -> str:
        """Give the daemon the memory; the device's name."""
        memory, fingerprint = self._share(), Fingerprint(model="model")
        seconds = 0.8 * PATIENCE  # less than its caller waits
        self.worker.register(memory, self._layout, fingerprint, required=True, timeout=seconds)
        for part in memory:
            part.close()
        return memory[0].device

    def memory_files(self) -> set[int]:
        """What the memory is to the test driver: files, by their numbers."""
        return {os.fstat(fd).st_ino for fd in self.worker._registration.memory.fds}

    def sleep(self) -> None:
        """Take the memory back and free it, as an engine does that sleeps."""
        assert self.worker.unregister()
        assert isinstance(self._memory, cudatensor.VirtualMemory)
        self._memory.unmap()

    def wake_up(self) -> None:
        """Other memory at the same addresses, registered."""
        assert isinstance(self._memory, cudatensor.VirtualMemory)
        self._memory.map()
        self.register()

    def wait_served_by(self, pid: int) -> None:
        """Until its session is one with the daemon that is this process."""
        wait_served_by(self.worker, pid)

    switch = staticmethod(switch)  # of the test driver in this process

    def fill(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Write the keys' content into blocks, now."""
        for page, expected in self._pages(keys, blocks):
            page.write(expected.tobytes())
        cudatensor.call("cuStreamSynchronize", 0)  # pageable bytes may arrive later

    def poison(self, blocks: Sequence[int]) -> None:
        """Overwrite blocks, now."""
        for tensor, block in itertools.product(range(TENSORS), blocks):
            page = self._page(tensor, block)
            page.write(bytes([POISON]) * page.nbytes)
        cudatensor.call("cuStreamSynchronize", 0)

    def wrong_bytes(self, keys: Sequence[bytes], blocks: Sequence[int]) -> int:
        """Bytes of blocks that are not the keys' content."""
        return sum(
            int((np.frombuffer(page.read(), np.uint8) != expected).sum())
            for page, expected in self._pages(keys, blocks)
        )

    def _pages(
        self, keys: Sequence[bytes], blocks: Sequence[int]
    ) -> Iterator[tuple[cudatensor.DeviceBytes, npt.NDArray[np.uint8]]]:
        """Every page of these blocks, and what it is to hold."""
        factor = len(blocks) // len(keys)
        for tensor, (at, block) in itertools.product(range(TENSORS), enumerate(blocks)):
            page = self._page(tensor, block)
            yield page, content(keys[at // factor], self._rank, tensor, at % factor, page.nbytes)

    def _page(self, tensor: int, block: int) -> cudatensor.DeviceBytes:
        nbytes = self._layout.tensors[tensor].page_bytes
        return cudatensor.DeviceBytes(self._storages[tensor] + block * nbytes, nbytes)

    def submit(
        self,
        kind: str,
        job: int,
        blocks: Sequence[int],
        slots: Sequence[int],
        generations: Sequence[int],
    ) -> None:
        """A job on group 0 that comes after all that is on the stream."""
        after = self.worker.timeline.signal_on(self._stream)
        arrays = JobBlocks.of(blocks, [len(blocks), 0], [0, 0], slots, generations)
        self.worker.submit(Store if kind == "store" else Load, job, arrays, after=after)

    def submit_many(
        self,
        jobs: Sequence[int],
        kind: str,
        blocks: Sequence[int],
        slots: Sequence[int],
        generations: Sequence[int],
    ) -> None:
        """The same job under many numbers, faster than they can be done."""
        for job in jobs:
            self.submit(kind, job, blocks, slots, generations)

    def result(self, job: int) -> JobResult:
        """Wait for a job's end."""

        def ended() -> bool:
            self._results |= {result.job_id: result for result in self.worker.get_finished()}
            return job in self._results

        eventually(ended)
        return self._results.pop(job)

    def _make_storages(self, kind: str, device: int) -> list[int]:
        """Their addresses; with gaps, in one allocation, or the first of them in two."""
        del device
        nbytes = sum(self._layout.storages) + TENSORS * GAP
        if kind == "ipc":
            self._memory: cudatensor.DeviceBytes = cudatensor.DeviceMemory(nbytes)
            base = self._memory.address
        else:
            segment = -(-nbytes // cudatensor.GRANULARITY) * cudatensor.GRANULARITY
            self._memory = cudatensor.VirtualMemory(
                segment, segments=2, kinds=cudatensor.POSIX_FD if kind == "vmm" else None
            )
            base = self._memory.address + segment - self._layout.storages[0] // 2
        addresses = []
        for size in self._layout.storages:
            addresses.append(base + GAP)
            base += size + GAP
        return addresses

    def _share(self) -> Sequence[DeviceMemory]:
        """The storages as memory to register."""
        return [
            DeviceMemory.at(address, size)
            for address, size in zip(self._storages, self._layout.storages, strict=True)
        ]


@dataclass
class CudaEngine:
    """A scheduler here, ranks in processes of their own with memory on one device."""

    runtime_dir: Path
    name: str = "engine"
    world_size: int = 2
    kind: str = "ipc"
    page: int = PAGE
    device: int = 0
    rank_type: type[Rank] = Rank
    ranks: dict[int, Asked] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.runtime_dir, self.name, deadline=DEADLINE)
        self.job = 0
        for rank in range(self.world_size):
            self.add(rank)

    def add(self, rank: int) -> None:
        """Start a rank."""
        make = partial(self.rank_type, kind=self.kind, device=self.device, page=self.page)
        self.ranks[rank] = Asked(make, self.runtime_dir, self.name, rank, self.world_size)

    def register(self) -> str:
        """Register all ranks that are not; the name of their device."""
        (device,) = {rank.ask("register") for rank in self.ranks.values()}
        self.wait_attached()
        assert isinstance(device, str)
        return device

    def replace(self, rank: int) -> None:
        """Another process for a rank that was killed, registered."""
        self.add(rank)
        self.ranks[rank].ask("register")
        self.wait_attached()

    def wait_attached(self, to: Daemon | None = None) -> None:
        """Until the engine is complete for everybody; `to` is as for `Engine.wait_attached`."""
        if to is not None:
            pid = to.status()["pid"]
            wait_served_by(self.scheduler, pid)
            for rank in self.ranks.values():
                rank.ask("wait_served_by", pid)
        assert self.scheduler.wait_attached(PATIENCE)
        assert all(rank.ask("worker.wait_attached", PATIENCE / 2) for rank in self.ranks.values())

    def submit(self, kind: str, ticket: Any, blocks: Sequence[int]) -> int:
        """One job of every rank; its number."""
        self.job += 1
        for rank in self.ranks.values():
            slots, generations = ticket.slots.tolist(), ticket.generations.tolist()
            rank.ask("submit", kind, self.job, blocks, slots, generations)
        return self.job

    def succeeded(self, job: int) -> bool:
        """Wait for a job; whether all ranks did it."""
        results = [rank.ask("result", job) for rank in self.ranks.values()]
        return all(result.success for result in results)

    def begin(self, keys: Sequence[bytes]) -> StoreTicket:
        """A ticket for these keys, with slots for all of them on loan before."""
        lend(self.scheduler, len(keys))
        return self.scheduler.prepare_store(keys)

    def store(self, keys: list[bytes], first_block: int = 1) -> None:
        """Fill, store and complete; until all of it is a hit."""
        blocks = blocks_of(keys, first_block)
        for rank in self.ranks.values():
            rank.ask("fill", keys, blocks)
        ticket = self.begin(keys)
        assert list(ticket.keys) == keys
        assert self.succeeded(self.submit("store", ticket, blocks))
        self.scheduler.complete_store(ticket)
        self.wait_hit(keys)

    def wait_hit(self, keys: list[bytes]) -> None:
        """Until every lane's report has been counted."""
        eventually(lambda: self.scheduler.lookup_many(keys), {LookupResult.HIT}.issuperset)

    def load(self, keys: list[bytes], first_block: int = 33) -> int:
        """Poison other blocks and load there; wrong bytes of all ranks."""
        wrong_bytes = self.try_load(keys, first_block)
        assert wrong_bytes is not None
        return wrong_bytes

    def try_load(self, keys: list[bytes], first_block: int = 33) -> int | None:
        """The same; None where a job failed, as while a rank does not know of its new lane yet."""
        ticket = self.scheduler.prepare_load(keys)
        assert list(ticket.keys) == keys
        blocks = blocks_of(keys, first_block)
        for rank in self.ranks.values():
            rank.ask("poison", blocks)
        succeeded = self.succeeded(self.submit("load", ticket, blocks))
        self.scheduler.complete_load(ticket)
        if not succeeded:
            return None
        wrong_bytes: int = sum(
            rank.ask("wrong_bytes", keys, blocks) for rank in self.ranks.values()
        )
        return wrong_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks.values():
            rank.close()
        self.scheduler.close()


def foreign_rank(*arguments: Any, kind: str) -> Rank:
    """A rank of another user, for `Asked`."""
    cudatensor.use_device()  # which reads the driver's file
    os.seteuid(OTHER_UID)
    return Rank(*arguments, kind=kind)


def blocks_of(keys: Sequence[bytes], first: int) -> list[int]:
    """Blocks for these keys."""
    return list(range(first, first + len(keys) * FACTOR))


def cuda_lanes(daemon: Daemon) -> list[dict[str, Any]]:
    """The status of the CUDA lanes."""
    return [lane for lane in daemon.status()["lanes"] if lane["device"] != "host"]


def lane_of(daemon: Daemon) -> dict[str, Any]:
    """The status of the only CUDA lane."""
    (lane,) = cuda_lanes(daemon)
    return lane


def wait_lane(daemon: Daemon, **status: object) -> dict[str, Any]:
    """Until the CUDA lane's status, its counters among it, is as given."""
    return eventually(
        lambda: lane_of(daemon), lambda lane: status.items() <= {**lane["counters"], **lane}.items()
    )
