"""One rank of the demo: owns KV tensors, computes, stores, loads, verifies.

Started as `python -m kvd_tools.demo.rank FD` with a pipe to the scheduler;
ends when the scheduler says so or is gone.
"""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt

from kvd_client.errors import KvdClientError
from kvd_client.jobs import JobResult
from kvd_client.worker import Worker
from kvd_proto.messages import Fingerprint
from kvd_tools.demo.blocks import NULL_BLOCK
from kvd_tools.demo.content import POISON, Page, PageContent, page_seed
from kvd_tools.demo.errors import DemoError
from kvd_tools.demo.memory import GROUPS, TENSORS, KvTensors
from kvd_tools.demo.wire import (
    Farewell,
    Fetch,
    Fill,
    Finished,
    Pipe,
    Ready,
    Save,
    Setup,
    Span,
    Stop,
    next_command,
    send,
)

POLL_SECONDS = 100e-6  # an engine's step looks for finished jobs about so often
MODEL = "kvd-demo"
DEVICE = "host"


@dataclass(frozen=True, slots=True)
class _Open:
    """A job that has not ended; `fetch` where it is a load."""

    started_ns: int
    fetch: Fetch | None


class Rank:
    """The state of one rank.

    Args:
        setup: who it is.
        pages: u8[num_blocks, page bytes] of every tensor, as the engine sees them.
    """

    def __init__(self, setup: Setup, pages: Sequence[npt.NDArray[np.uint8]]) -> None:
        self._setup = setup
        self._pages = pages
        self._content = {size: PageContent(size) for size in {t.page_bytes for t in TENSORS}}
        for tensor in pages:
            tensor[:] = POISON
        self._corrupt_next = setup.corrupt

    def fill(self, spans: Sequence[Span]) -> None:
        """Compute: write the content of these blocks."""
        for page, seed in self._seeded(spans):
            self._content[len(page)].fill(page, seed)

    def poison(self, spans: Sequence[Span]) -> None:
        """Spoil these blocks, padding included, so that nothing is right by chance."""
        for span in spans:
            for tensor in GROUPS[span.group]:
                self._pages[tensor][span.block_ids] = POISON

    def corrupt(self, spans: Sequence[Span]) -> None:
        """Flip one byte of the first block; once, and only where the setup says so."""
        if self._corrupt_next:
            page, _ = next(self._seeded(spans))
            page[len(page) // 2] ^= 1
            self._corrupt_next = False

    def verify(self, spans: Sequence[Span]) -> tuple[int, int]:
        """Bytes compared and bytes wrong in these blocks."""
        verified = mismatched = 0
        for page, seed in self._seeded(spans):
            verified += len(page)
            mismatched += self._content[len(page)].mismatches(page, seed)
        return verified, mismatched

    def strayed(self) -> int:
        """Changed bytes where nothing may ever be written: the null block, and all padding."""
        changed = 0
        for tensor, pages in zip(TENSORS, self._pages, strict=True):
            changed += int(np.count_nonzero(pages[NULL_BLOCK] != POISON))
            changed += int(np.count_nonzero(pages[:, tensor.page_bytes :] != POISON))
        return changed

    def _seeded(self, spans: Sequence[Span]) -> Iterator[tuple[Page, int]]:
        """Every page of these blocks, without its padding, and the seed of its content."""
        for span in spans:
            for key, index, block_id in span.places(self._setup.blocks_per_chunk):
                for tensor in GROUPS[span.group]:
                    page = self._pages[tensor][block_id, : TENSORS[tensor].page_bytes]
                    yield page, page_seed(key, self._setup.rank, tensor, index)

    def __repr__(self) -> str:
        return f"<Rank {self._setup.rank} of {self._setup.world_size}>"


def run(pipe: Pipe) -> None:
    """Serve the scheduler at the other end of `pipe` until it says Stop.

    Raises:
        EOFError: it is gone.
    """
    setup = next_command(pipe)
    if not isinstance(setup, Setup):
        raise DemoError(f"a scheduler began with {setup!r}")
    tensors = KvTensors(setup.num_blocks)
    with Worker(setup.runtime_dir, setup.engine, setup.rank, setup.world_size) as worker:
        worker.register(
            tensors.memory,
            tensors.layout(setup.blocks_per_chunk, setup.block_tokens, setup.window_tokens),
            Fingerprint(model=MODEL, dtype="uint8"),
            device=DEVICE,
            required=True,
        )
        rank = Rank(setup, tensors.pages())
        send(pipe, Ready(device=DEVICE))
        _serve(pipe, rank, worker)
        send(pipe, Farewell(strayed=rank.strayed()))


def _serve(pipe: Pipe, rank: Rank, worker: Worker) -> None:
    jobs: dict[int, _Open] = {}
    while True:
        if pipe.poll(POLL_SECONDS if jobs else None):
            command = next_command(pipe)
            if isinstance(command, Stop):
                return
            if isinstance(command, Fill):
                rank.fill(command.spans)
            elif isinstance(command, Save):
                rank.corrupt(command.spans)
                _submit(worker, command, jobs)
            elif isinstance(command, Fetch):
                rank.poison(command.spans)
                _submit(worker, command, jobs)
        for result in worker.get_finished():
            now_ns = time.perf_counter_ns()
            send(pipe, _finished(rank, result, jobs.pop(result.job_id), now_ns))


def _submit(worker: Worker, command: Save | Fetch, jobs: dict[int, _Open]) -> None:
    fetch = command if isinstance(command, Fetch) else None
    submit = worker.submit_store if fetch is None else worker.submit_load
    jobs[command.job] = _Open(time.perf_counter_ns(), fetch)
    submit(
        command.job,
        [block for span in command.spans for block in span.block_ids],
        [len(span.block_ids) for span in command.spans],
        [span.first for span in command.spans],
        command.slots,
        command.generations,
    )


def _finished(rank: Rank, result: JobResult, job: _Open, now_ns: int) -> Finished:
    verified = mismatched = 0
    if job.fetch is not None and result.success:
        verified, mismatched = rank.verify(job.fetch.spans)
    return Finished(
        job=result.job_id,
        ok=result.success,
        text=f"{result.status}: {result.text}",
        bytes=result.bytes,
        copy_ns=round(result.seconds * 1e9),
        took_ns=now_ns - job.started_ns,
        verified=verified,
        mismatched=mismatched,
    )


def main() -> None:
    """Entry point of the rank process."""
    with Connection(int(sys.argv[1])) as pipe:
        os.set_inheritable(pipe.fileno(), False)
        try:
            run(pipe)
        except KvdClientError as error:
            sys.exit(str(error))  # what the demo quotes


if __name__ == "__main__":
    main()
