"""The engine's scheduler: serves prompts with few GPU blocks, and with kvd behind them.

For every prompt: look its chunks up, load the longest usable prefix, compute the rest step by
step, and store what each step made. Stores run on while the next steps and prompts are
computed; their blocks are free when they have ended.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from kvd_client.arguments import Blocks
from kvd_client.chunk_blocks import ChunkBlocks
from kvd_client.scheduler import Scheduler
from kvd_client.tickets import LoadTicket, StoreTicket
from kvd_proto.answers import LookupResult, StoreAnswer
from kvd_tools.demo.blocks import BlockPool
from kvd_tools.demo.content import chain, chunk_key
from kvd_tools.demo.plan import (
    BLOCKS_PER_CHUNK,
    FULL,
    WINDOW,
    full_blocks,
    longest_hit,
    step_ends,
    window_blocks,
)
from kvd_tools.demo.processes import Ranks
from kvd_tools.demo.rank import Compute, Finished, Transfer
from kvd_tools.demo.report import Figures
from kvd_tools.demo.workload import Prompt
from kvd_tools.errors import DemoError, OutOfBlocks

JOB_SECONDS = 30.0  # a job that takes longer means that something hangs
MAX_JOBS = 4  # in flight; an engine whose compute takes time has no more either
_TAKEN = {StoreAnswer.ACCEPTED, StoreAnswer.PRESENT, StoreAnswer.PENDING}


@dataclass(slots=True)
class _Job:
    """A job in flight on every rank."""

    kind: str
    blocks: list[int]
    ended: Callable[[bool], None]
    waiting: int
    ok: bool = True


@dataclass(slots=True)
class _Request:
    """A prompt while it is served: its chunks' hashes; block ids by group and logical index."""

    hashes: list[bytes]
    blocks: tuple[dict[int, int], dict[int, int]] = field(default_factory=lambda: ({}, {}))

    def name(self, group: int, logical: range) -> ChunkBlocks:
        """Return these blocks of a group with the keys of the chunks that they lie in."""
        if not logical:
            return ChunkBlocks([], [])
        chunks = range(logical.start // BLOCKS_PER_CHUNK, -(-logical.stop // BLOCKS_PER_CHUNK))
        return ChunkBlocks(
            [chunk_key(self.hashes[chunk], group) for chunk in chunks],
            [self.blocks[group][index] for index in logical],
            logical.start,
        )


class Engine:
    """Drives one scheduler session and the ranks.

    Args:
        scheduler: attached.
        ranks: ready.
        pool: the GPU's blocks, with room for the longest prompt.
        figures: where everything is counted.
    """

    def __init__(
        self, scheduler: Scheduler, ranks: Ranks, pool: BlockPool, figures: Figures
    ) -> None:
        self._scheduler = scheduler
        self._ranks = ranks
        self._pool = pool
        self._figures = figures
        self._jobs: dict[int, _Job] = {}
        self._last_job = 0

    def serve(self, prompt: Prompt) -> None:
        """Serve one prompt; its stores may still be running afterwards."""
        request = _Request(list(chain(prompt)))
        self._figures.requests += 1
        try:
            position = self._reuse(request)
            for end in step_ends(position, len(request.hashes)):
                self._compute(request, position, end)
                self._store(request, position, end)
                position = end
        finally:
            self._drop(request)

    def drain(self) -> None:
        """Wait for every job, then check that all blocks came back."""
        while self._jobs:
            self._pump()
        if self._pool.in_use:
            raise DemoError(f"{self._pool.in_use} blocks were never given back")

    # ------------------------------------------------------------------ steps

    def _reuse(self, request: _Request) -> int:
        """Load the longest prefix that is there; return how many chunks."""
        hashes = request.hashes
        prefix = takewhile(self._is_there, (chunk_key(h, FULL) for h in hashes))
        hit = longest_hit(
            len(list(prefix)),
            lambda chunk, first: self._is_there(chunk_key(hashes[chunk], WINDOW), first),
        )
        if not hit:
            return 0
        groups = self._allocate(request, full_blocks(0, hit), window_blocks(hit))
        keys, blocks = _offer(groups)
        ticket = self._scheduler.prepare_load(keys, blocks=blocks)
        loaded: list[bool] = []
        if len(ticket) == len(keys):
            self._begin(ticket, groups, loaded.append)
            while not loaded:
                self._pump()
        self._scheduler.complete_load(ticket)
        if not any(loaded):
            # What cannot be loaded is a miss, and computed again.
            self._figures.failed_loads += 1
            self._drop(request)
            return 0
        self._figures.hit_chunks += len(keys)
        self._figures.loaded_chunks += len(keys)
        return hit

    def _is_there(self, key: bytes, first: int = 0) -> bool:
        """Whether the chunk can be loaded. One that is being stored is worth waiting for."""
        while True:
            started = time.perf_counter_ns()
            answer = self._scheduler.lookup(key, first)
            self._figures.lookup_ns += time.perf_counter_ns() - started
            self._figures.lookups += 1
            if answer is not LookupResult.HIT_PENDING or not self._jobs:
                return answer is LookupResult.HIT
            self._pump()

    def _compute(self, request: _Request, start: int, end: int) -> None:
        """Have the ranks compute chunks [start, end): fill their blocks."""
        full, window = full_blocks(start, end), window_blocks(end)
        fresh = range(max(window.start, full.start), window.stop)
        self._ranks.send_all(Compute(self._allocate(request, full, fresh)))

    def _store(self, request: _Request, start: int, end: int) -> None:
        """Offer what a step made, store what is accepted, and move the window on."""
        window = window_blocks(end)
        groups = [request.name(FULL, full_blocks(start, end)), request.name(WINDOW, window)]
        keys, blocks = _offer(groups)
        ticket = self._scheduler.prepare_store(keys, blocks)
        self._figures.evicted_chunks += len(ticket.evicted)
        self._figures.refused_chunks += len(keys) - sum(a in _TAKEN for a in ticket.answers)

        def ended(ok: bool) -> None:
            # A lane tells the rank and the broker at the same time: pending ones are written, too.
            summary = self._scheduler.complete_store(ticket, ok)
            self._figures.stored_chunks += summary.ready + summary.pending
            self._figures.failed_stores += not ok

        if ticket.keys:
            self._begin(ticket, groups, ended)
        held = request.blocks[WINDOW]
        self._pool.release([held.pop(index) for index in list(held) if index < window.start])

    # ----------------------------------------------------------- blocks, jobs

    def _allocate(self, request: _Request, full: range, window: range) -> list[ChunkBlocks]:
        """Give the request these logical blocks of its groups; return them."""
        while True:
            try:
                ids = iter(self._pool.allocate(len(full) + len(window)))
                break
            except OutOfBlocks:
                if not self._jobs:
                    raise
                self._pump()
        for group, logical in ((FULL, full), (WINDOW, window)):
            request.blocks[group].update(zip(logical, ids, strict=False))
        return [request.name(FULL, full), request.name(WINDOW, window)]

    def _drop(self, request: _Request) -> None:
        for blocks in request.blocks:
            self._pool.release(blocks.values())
            blocks.clear()

    def _begin(
        self,
        ticket: StoreTicket | LoadTicket,
        groups: list[ChunkBlocks],
        ended: Callable[[bool], None],
    ) -> None:
        """Start a job; its blocks stay in use until every rank has ended it."""
        while len(self._jobs) >= MAX_JOBS:
            self._pump()
        self._last_job += 1
        blocks = [block for group in groups for block in group.blocks]
        self._pool.share(blocks)
        kind = "store" if isinstance(ticket, StoreTicket) else "load"
        self._jobs[self._last_job] = _Job(kind, blocks, ended, len(self._ranks))
        self._ranks.send_all(Transfer(self._last_job, ticket, groups))

    def _pump(self) -> None:
        """Take what the ranks report; waits for at least one report.

        Raises:
            DemoError: nothing was reported for too long.
        """
        reports = self._ranks.receive(JOB_SECONDS)
        if not reports:
            raise DemoError(f"{len(self._jobs)} jobs have not ended in {JOB_SECONDS:g} s")
        for report in reports:
            self._take(report)

    def _take(self, report: Finished) -> None:
        result = report.result
        job = self._jobs[result.job_id]
        self._figures.count_job(report, job.kind)
        job.waiting -= 1
        job.ok &= result.success
        if not job.waiting:
            del self._jobs[result.job_id]
            self._pool.release(job.blocks)
            job.ended(job.ok)

    def __repr__(self) -> str:
        return f"<Engine {self._figures.requests} requests, {len(self._jobs)} jobs in flight>"


def _offer(groups: Sequence[ChunkBlocks]) -> tuple[list[bytes], list[Blocks]]:
    """Return the groups' keys, and the blocks that are named of each chunk."""
    keys, blocks = [], []
    for group in groups:
        for at, key in enumerate(group.keys):
            first = 0 if at else group.first % BLOCKS_PER_CHUNK
            keys.append(key)
            blocks.append((first, BLOCKS_PER_CHUNK - first))
    return keys, blocks
