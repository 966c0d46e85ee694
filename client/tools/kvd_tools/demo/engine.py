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

from kvd_client.scheduler import Scheduler
from kvd_proto.answers import LookupResult, StoreAnswer
from kvd_tools.demo.blocks import BlockAllocator
from kvd_tools.demo.content import chain, chunk_key
from kvd_tools.demo.errors import DemoError, OutOfBlocks
from kvd_tools.demo.plan import FULL, WINDOW, Shape, runs
from kvd_tools.demo.processes import Ranks
from kvd_tools.demo.report import Figures, Rate
from kvd_tools.demo.wire import Fetch, Fill, Finished, Save, Span
from kvd_tools.demo.workload import Request

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

    hashes: list[bytes]  # of its chunks
    blocks: list[dict[int, int]] = field(default_factory=lambda: [{}, {}])

    @property
    def chunks(self) -> int:
        """How many chunks can be cached."""
        return len(self.hashes)


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
        running = _Running(list(chain(request.full_pieces)))
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
        full = [chunk_key(h, FULL) for h in running.hashes]
        prefix = list(takewhile(self._is_there, full))
        window: dict[int, bytes] = {}  # the keys that were found, by chunk

        def there(chunk: int, skipped: int) -> bool:
            key = self._window_key(running, chunk, skipped)
            if key is not None:
                window[chunk] = key
            return key is not None

        hit = self._shape.longest_hit(len(prefix), there)
        if not hit:
            return 0
        window_chunks = self._shape.window_chunks(hit)
        keys = prefix[:hit] + [window[chunk] for chunk in window_chunks]
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

    def _window_key(self, running: _Running, chunk: int, skipped: int) -> bytes | None:
        """The key under which a window chunk is there, whole or but for its first blocks."""
        for variant in sorted({0, skipped}):
            key = chunk_key(running.hashes[chunk], WINDOW, variant)
            if self._is_there(key):
                return key
        return None

    def _is_there(self, key: bytes) -> bool:
        """Whether the chunk can be loaded. One that is being stored is worth waiting for."""
        while True:
            started = time.perf_counter_ns()
            answer = self._scheduler.lookup(key)
            self._figures.lookup_ns += time.perf_counter_ns() - started
            self._figures.lookups += 1
            if answer is not LookupResult.HIT_PENDING or not self._jobs:
                return answer is LookupResult.HIT
            self._pump()

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
        offered = {(FULL, c): chunk_key(running.hashes[c], FULL) for c in range(start, end)}
        for chunk in self._shape.window_chunks(end):
            skipped = self._shape.skipped(chunk, end)
            # A part is of no use where the whole chunk is.
            if not skipped or self._window_key(running, chunk, skipped) is None:
                offered[WINDOW, chunk] = chunk_key(running.hashes[chunk], WINDOW, skipped)
        ticket = self._scheduler.prepare_store(list(offered.values()))
        self._figures.evicted_chunks += len(ticket.evicted)
        self._figures.refused_chunks += len(offered) - sum(a in _TAKEN for a in ticket.answers)
        places = zip(ticket.slots.tolist(), ticket.generations.tolist(), strict=True)
        accepted = dict(zip(ticket.keys, places, strict=True))
        by_group = [
            runs(c for (g, c), key in offered.items() if g == group and key in accepted)
            for group in (FULL, WINDOW)
        ]
        # A job has one run of consecutive chunks a group; holes make several jobs.
        for parts in zip_longest(*by_group, fillvalue=range(0)):
            spans = [self._span(running, g, chunks, end) for g, chunks in enumerate(parts)]
            keys = [offered[g, c] for g, chunks in enumerate(parts) for c in chunks]
            self._save(spans, {key: accepted[key] for key in keys})
        # The window moves on: blocks behind it are not needed any more.
        window = running.blocks[WINDOW]
        behind = [i for i in window if i < self._shape.window_blocks(end).start]
        self._unuse([window.pop(i) for i in behind])

    def _save(self, spans: list[Span], places: dict[bytes, tuple[int, int]]) -> None:
        """Store these blocks; `places` are slot and generation by key, as the spans have them."""

        def ended(ok: bool) -> None:
            # A lane tells the rank and the broker at the same time: pending ones are written, too.
            summary = self._scheduler.complete_store(places.keys(), ok)
            self._figures.stored_chunks += summary.ready + summary.pending
            self._figures.failed_stores += not ok

        job = self._begin(self._figures.store, spans, ended)
        slots, generations = zip(*places.values(), strict=True)
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
            [chunk_key(running.hashes[chunk], group) for chunk in chunks],
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
