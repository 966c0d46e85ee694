"""One rank of the demo, in a process of its own: computes, stores, loads and verifies.

The engine's scheduler sends `Compute` and `Transfer` through a pipe and closes it with
`None`; the rank sends `Ready`, a `Finished` for every transfer, and `Stopped` at its end, or
a text that says why it cannot go on. It ends when the pipe does.
"""

import contextlib
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from kvd_client.chunk_blocks import ChunkBlocks
from kvd_client.errors import KvdClientError
from kvd_client.jobs import JobResult
from kvd_client.tickets import LoadTicket, StoreTicket
from kvd_client.worker import Worker
from kvd_proto.messages import Fingerprint
from kvd_tools.demo.memory import STRIDES, KvMemory, rank_layout

POLL_SECONDS = 100e-6  # an engine's step looks for finished jobs about so often
MODEL = "kvd-demo"


@dataclass(frozen=True, slots=True)
class Setup:
    """Who the rank is, and what it owns. corrupt: flip a bit in what is stored first."""

    runtime_dir: Path
    engine: str
    rank: int
    world_size: int
    num_blocks: int
    corrupt: bool


@dataclass(frozen=True, slots=True)
class Compute:
    """Write the content of these blocks, group by group."""

    groups: list[ChunkBlocks]


@dataclass(frozen=True, slots=True)
class Transfer:
    """Store the ticket's chunks from these blocks, or load them into the blocks and verify."""

    job: int
    ticket: StoreTicket | LoadTicket
    groups: list[ChunkBlocks]


@dataclass(frozen=True, slots=True)
class Ready:
    """The rank's memory is registered."""

    device: str


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


@dataclass(frozen=True, slots=True)
class Stopped:
    """The rank's end. strayed: bytes that changed where nothing may ever be written."""

    strayed: int


def run(pipe: Connection, setup: Setup) -> None:
    """Serve the scheduler at the other end of `pipe`: the main function of a rank's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the scheduler ends its ranks
    with contextlib.suppress(EOFError, BrokenPipeError):
        try:
            _run(pipe, setup)
        except KvdClientError as error:
            pipe.send(str(error))


def _run(pipe: Connection, setup: Setup) -> None:
    # An engine has torch; the scheduler's side of the demo does not need it.
    import torch  # noqa: PLC0415

    from kvd_client.torch_memory import share_torch  # noqa: PLC0415

    tensors = [torch.empty((setup.num_blocks, stride), dtype=torch.uint8) for stride in STRIDES]
    shared = share_torch(tensors)
    memory = KvMemory(setup.rank, [tensor.numpy() for tensor in tensors])
    with Worker(setup.runtime_dir, setup.engine, setup.rank, setup.world_size) as worker:
        worker.register(
            shared.memory,
            rank_layout(setup.num_blocks),
            Fingerprint(model=MODEL, dtype="uint8"),
            required=True,
        )
        pipe.send(Ready(shared.device))
        _serve(pipe, memory, worker, corrupt=setup.corrupt)
        pipe.send(Stopped(memory.strayed()))


def _serve(pipe: Connection, memory: KvMemory, worker: Worker, *, corrupt: bool) -> None:
    jobs: dict[int, tuple[int, Transfer]] = {}  # with the time of submission, in ns
    while True:
        if pipe.poll(POLL_SECONDS if jobs else None):
            command = pipe.recv()
            if command is None:
                return
            if isinstance(command, Compute):
                memory.fill(command.groups)
            else:
                jobs[command.job] = time.perf_counter_ns(), command
                if isinstance(command.ticket, LoadTicket):
                    memory.poison(command.groups)
                    worker.load(command.job, command.ticket, command.groups)
                else:
                    if corrupt:
                        memory.corrupt(command.groups)
                        corrupt = False
                    worker.store(command.job, command.ticket, command.groups)
        for result in worker.get_finished():
            now_ns = time.perf_counter_ns()
            started_ns, transfer = jobs.pop(result.job_id)
            verified = mismatched = 0
            if isinstance(transfer.ticket, LoadTicket) and result.success:
                verified, mismatched = memory.verify(transfer.groups)
            pipe.send(Finished(result, now_ns - started_ns, verified, mismatched))
