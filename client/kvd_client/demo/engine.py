"""The engine's scheduler: serves requests with few blocks, and with kvd behind them.

Every request: look its chunks up, load the longest usable prefix, compute the
rest step by step, store what each step made. Stores run on while the next
steps and requests are computed; their blocks are free when they have ended.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile, zip_longest

from kvd_client.demo.blocks import BlockAllocator
from kvd_client.demo.content import chain, chunk_key
from kvd_client.demo.errors import DemoError, OutOfBlocks
from kvd_client.demo.plan import FULL, WINDOW, Shape, runs
from kvd_client.demo.processes import Ranks
from kvd_client.demo.report import Figures, Rate
from kvd_client.demo.wire import Fetch, Fill, Finished, Save, Span
from kvd_client.demo.workload import Request
from kvd_client.scheduler import Scheduler
from kvd_proto.answers import LookupResult, StoreAnswer

JOB_SECONDS = 30.0  # a job that takes longer means that something hangs
MAX_JOBS = 4  # in flight; an engine whose compute takes time has no more either
_TAKEN = {StoreAnswer.ACCEPTED, StoreAnswer.PRESENT, StoreAnswer.PENDING}


@dataclass(slots=True)
class _Job:
    """A job in flight on every rank."""

    ended: Callable[[bool], None]
    rate: Rate
    waiting: int
    ok: bool = True


@dataclass(slots=True)
class _Running:
    """One request while it is served: block ids by group and logical index."""

    keys: list[list[bytes]]  # [group][chunk]
    blocks: list[dict[int, int]] = field(default_factory=lambda: [{}, {}])

    @property
    def chunks(self) -> int:
        """How many chunks can be cached."""
        return len(self.keys[FULL])


class Engine:
    """Drives one scheduler session and the ranks.

    Args:
        scheduler: attached.
        ranks: ready.
        shape: the engine's figures.
        allocator: the GPU's blocks, with room for the longest request.
        figures: where everything is counted.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        ranks: Ranks,
        shape: Shape,
        allocator: BlockAllocator,
        figures: Figures,
    ) -> None:
        self._scheduler = scheduler
        self._ranks = ranks
        self._shape = shape
        self._allocator = allocator
        self._figures = figures
        self._jobs: dict[int, _Job] = {}
        self._last_job = 0
        self._users: Counter[int] = Counter()  # block id -> requests and jobs that need it

    def serve(self, request: Request) -> None:
        """Serve one request; its stores may still be running afterwards."""
        hashes = list(chain(request.full_pieces))
        running = _Running([[chunk_key(h, group) for h in hashes] for group in (FULL, WINDOW)])
        self._figures.requests += 1
        try:
            position = self._reuse(running)
            for end in self._shape.step_ends(position, running.chunks):
                self._compute(running, position, end)
                self._store(running, position, end)
                position = end
        finally:
            for blocks in running.blocks:
                self._unuse(blocks.values())

    def drain(self) -> None:
        """Wait for every job, then check that all blocks came back."""
        while self._jobs:
            self._pump()
        self._allocator.check_integrity()
        if self._users:
            raise DemoError(f"{len(self._users)} blocks were never given back")

    # ------------------------------------------------------------------ steps

    def _reuse(self, running: _Running) -> int:
        """Load the longest prefix that is there; how many chunks."""
        full = list(takewhile(bool, map(self._is_there, running.keys[FULL])))
        window = [self._is_there(key) for key in running.keys[WINDOW][: len(full)]]
        hit = self._shape.longest_hit(full, window)
        if not hit:
            return 0
        window_chunks = self._shape.window_chunks(hit)
        keys = running.keys[FULL][:hit]
        keys += running.keys[WINDOW][window_chunks.start : window_chunks.stop]
        ticket = self._scheduler.prepare_load(keys)
        loaded = False
        if len(ticket) == len(keys):
            self._allocate(running, range(hit), hit)
            spans = [self._span(running, FULL, range(hit), hit)]
            spans.append(self._span(running, WINDOW, window_chunks, hit))
            outcome: list[bool] = []
            job = self._begin(self._figures.load, spans, outcome.append)
            self._ranks.send_all(
                Fetch(job, spans, ticket.slots.tolist(), ticket.generations.tolist())
            )
            while not outcome:
                self._pump()
            loaded = outcome[0]
        self._scheduler.complete_load(ticket)
        if not loaded:
            # What cannot be loaded is a miss, and computed again.
            self._figures.failed_loads += 1
            for blocks in running.blocks:
                self._unuse(blocks.values())
                blocks.clear()
            return 0
        self._figures.hit_chunks += len(keys)
        self._figures.loaded_chunks += len(keys)
        return hit

    def _is_there(self, key: bytes) -> bool:
        started = time.perf_counter_ns()
        answer = self._scheduler.lookup(key)
        self._figures.lookup_ns += time.perf_counter_ns() - started
        self._figures.lookups += 1
        return answer is LookupResult.HIT

    def _compute(self, running: _Running, start: int, end: int) -> None:
        """Have the ranks compute chunks [start, end): fill their blocks."""
        before = [set(blocks) for blocks in running.blocks]
        self._allocate(running, range(start, end), end)
        spans = []
        for group, blocks in enumerate(running.blocks):
            fresh = [index for index in sorted(blocks) if index not in before[group]]
            spans += [
                self._blocks_span(running, group, range(run.start, run.stop)) for run in runs(fresh)
            ]
        self._ranks.send_all(Fill(spans))

    def _store(self, running: _Running, start: int, end: int) -> None:
        """Offer what a step made, and store what is accepted."""
        offered = [(FULL, chunk) for chunk in range(start, end)]
        offered += [(WINDOW, chunk) for chunk in self._shape.window_chunks(end)]
        keys = [running.keys[group][chunk] for group, chunk in offered]
        ticket = self._scheduler.prepare_store(keys)
        self._figures.evicted_chunks += len(ticket.evicted)
        self._figures.refused_chunks += len(keys) - sum(a in _TAKEN for a in ticket.answers)
        places = zip(ticket.slots.tolist(), ticket.generations.tolist(), strict=True)
        where = dict(zip(ticket.keys, places, strict=True))
        by_group = [
            runs(c for g, c in offered if g == group and running.keys[g][c] in where)
            for group in (FULL, WINDOW)
        ]
        # A job has one run of consecutive chunks a group; holes make several jobs.
        for parts in zip_longest(*by_group, fillvalue=range(0)):
            self._save(running, parts, end, where)
        # The window moves on: blocks behind it are not needed any more.
        window = running.blocks[WINDOW]
        behind = [i for i in window if i < self._shape.window_blocks(end).start]
        self._unuse([window.pop(i) for i in behind])

    def _save(
        self,
        running: _Running,
        parts: Sequence[range],
        end: int,
        where: dict[bytes, tuple[int, int]],
    ) -> None:
        spans = [self._span(running, group, chunks, end) for group, chunks in enumerate(parts)]
        keys = [key for span in spans for key in span.keys]

        def ended(ok: bool) -> None:
            # A lane tells the rank and the broker at the same time: pending ones are written, too.
            summary = self._scheduler.complete_store(keys, ok)
            self._figures.stored_chunks += summary.ready + summary.pending
            self._figures.failed_stores += not ok

        job = self._begin(self._figures.store, spans, ended)
        slots, generations = zip(*(where[key] for key in keys), strict=True)
        self._ranks.send_all(Save(job, spans, list(slots), list(generations)))

    # ----------------------------------------------------------- blocks, jobs

    def _span(self, running: _Running, group: int, chunks: range, end: int) -> Span:
        return self._blocks_span(running, group, self._shape.blocks_present(group, chunks, end))

    def _blocks_span(self, running: _Running, group: int, logical: range) -> Span:
        factor = self._shape.blocks_per_chunk
        if not logical:
            return Span(group, 0, [], [])
        chunks = range(logical.start // factor, -(-logical.stop // factor))
        return Span(
            group,
            logical.start,
            [running.blocks[group][index] for index in logical],
            running.keys[group][chunks.start : chunks.stop],
        )

    def _allocate(self, running: _Running, chunks: range, end: int) -> None:
        """Give the request the blocks of `chunks` and of the window after `end` chunks."""
        wanted = [
            (FULL, self._shape.blocks_present(FULL, chunks, end)),
            (WINDOW, self._shape.window_blocks(end)),
        ]
        missing = [(g, i) for g, logical in wanted for i in logical if i not in running.blocks[g]]
        while True:
            try:
                ids = self._allocator.allocate(len(missing))
                break
            except OutOfBlocks:
                if not self._jobs:
                    raise
                self._pump()
        for (group, index), block_id in zip(missing, ids, strict=True):
            running.blocks[group][index] = block_id
            self._users[block_id] += 1

    def _begin(self, rate: Rate, spans: Sequence[Span], ended: Callable[[bool], None]) -> int:
        """A new job; its blocks stay until every rank has ended it."""
        while len(self._jobs) >= MAX_JOBS:
            self._pump()
        self._last_job += 1
        blocks = [block for span in spans for block in span.block_ids]
        self._users.update(blocks)

        def all_ended(ok: bool) -> None:
            self._unuse(blocks)
            ended(ok)

        self._jobs[self._last_job] = _Job(all_ended, rate, len(self._ranks))
        return self._last_job

    def _unuse(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._users[block] -= 1
            if not self._users[block]:
                del self._users[block]
                self._allocator.release([block])

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
        job = self._jobs[report.job]
        self._figures.count_job(report, job.rate)
        job.waiting -= 1
        job.ok &= report.ok
        if not job.waiting:
            del self._jobs[report.job]
            job.ended(job.ok)

    def __repr__(self) -> str:
        return f"<Engine {self._figures.requests} requests, {len(self._jobs)} jobs in flight>"
