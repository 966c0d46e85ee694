"""One rank of the demo, in a process of its own: computes, stores, loads and verifies.

The rank sends its device's name once its memory is registered, then takes `Step`s and sends a
`Finished` for every transfer. `None` ends it: then it sends how many bytes changed where nothing
may ever be written. A `DemoError` says why it cannot go on. It ends when the pipe does.
"""

import contextlib
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from kvd_client.errors import KvdClientError
from kvd_client.jobs import JobResult
from kvd_client.memory import HostMemory
from kvd_client.tickets import ChunkBlocks, LoadTicket, StoreTicket
from kvd_client.worker import Worker
from kvd_proto.messages import Fingerprint
from kvd_tools.demo.memory import STRIDES, KvMemory, rank_layout
from kvd_tools.errors import DemoError

POLL_SECONDS = 100e-6  # an engine's step looks for finished jobs about so often
ENGINE = "demo"


@dataclass(frozen=True, slots=True)
class Setup:
    """Who the rank is, and what it owns. corrupt: flip a bit in what is stored first."""

    runtime_dir: Path
    rank: int
    world_size: int
    num_blocks: int
    corrupt: bool


@dataclass(frozen=True, slots=True)
class Step:
    """Write the content of these blocks, group by group; or, with a ticket, do a transfer.

    A transfer stores the ticket's chunks from the blocks, or loads them and verifies the blocks.
    """

    groups: list[ChunkBlocks]
    job: int = 0
    ticket: StoreTicket | LoadTicket | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """A transfer's end on one rank.

    took_ns: from submission to seen finished.
    verified, mismatched: bytes of a load that were compared, and of these the wrong ones.
    """

    result: JobResult
    took_ns: int
    verified: int
    mismatched: int


def run(pipe: Connection, setup: Setup) -> None:
    """Serve the scheduler at the other end of `pipe`: the main function of a rank's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the scheduler ends its ranks
    with contextlib.suppress(EOFError, ConnectionError):
        try:
            _run(pipe, setup)
        except KvdClientError as error:
            pipe.send(DemoError(f"rank {setup.rank}: {error}"))


def _run(pipe: Connection, setup: Setup) -> None:
    storages = [HostMemory.allocate(setup.num_blocks * stride) for stride in STRIDES]
    arrays = [storage.array.reshape(setup.num_blocks, -1) for storage in storages]
    memory = KvMemory(setup.rank, arrays)
    with Worker(setup.runtime_dir, ENGINE, setup.rank, setup.world_size) as worker:
        worker.register(
            storages,
            rank_layout(setup.num_blocks),
            Fingerprint(model="kvd-demo", dtype="uint8"),
            required=True,
        )
        pipe.send(storages[0].device)
        _serve(pipe, memory, worker, corrupt=setup.corrupt)
        pipe.send(memory.strayed())


def _serve(pipe: Connection, memory: KvMemory, worker: Worker, *, corrupt: bool) -> None:
    jobs: dict[int, tuple[int, Step]] = {}  # with the time of submission, in ns
    while True:
        if pipe.poll(POLL_SECONDS if jobs else None):
            step = pipe.recv()
            if step is None:
                return
            if step.ticket is None:
                memory.fill(step.groups)
                continue
            jobs[step.job] = time.perf_counter_ns(), step
            if isinstance(step.ticket, LoadTicket):
                memory.poison(step.groups)
                worker.load(step.job, step.ticket, step.groups)
            else:
                if corrupt:
                    memory.corrupt(step.groups)
                    corrupt = False
                worker.store(step.job, step.ticket, step.groups)
        for result in worker.get_finished():
            now_ns = time.perf_counter_ns()
            started_ns, step = jobs.pop(result.job_id)
            verified = mismatched = 0
            if isinstance(step.ticket, LoadTicket) and result.success:
                verified, mismatched = memory.verify(step.groups)
            pipe.send(Finished(result, now_ns - started_ns, verified, mismatched))
