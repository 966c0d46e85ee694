"""The demo's scheduler: serves prompts with few GPU blocks, and with kvd behind them.

For each prompt:

1. bring up the chunks that only tiers have;
2. look up its chunks and load the longest usable prefix;
3. compute the rest step by step, and store the chunks of each step.

Stores continue while later steps and prompts are computed. The blocks of a prompt become free when
it has been served and its stores have ended.
"""

import select
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from kvd_client.decisions import NO_TIER
from kvd_client.scheduler import Scheduler
from kvd_client.tickets import BlockRange, ChunkBlocks, LoadTicket, StoreAnswer, StoreTicket
from kvd_proto.directory import LookupResult
from kvd_tools.demo.processes import RankProcesses, RankReport, RankStep
from kvd_tools.demo.workload import (
    BLOCKS_PER_CHUNK,
    FULL,
    NULL_BLOCK,
    WINDOW,
    Prompt,
    chunk_key,
    full_blocks,
    longest_hit,
    step_ends,
    window_blocks,
)
from kvd_tools.errors import DemoError

PROMOTION_SECONDS = 1.0  # a real engine waits for as long as computing would take
BEGIN_SECONDS = 0.05  # for a promotion, or a query of a shared tier, to begin
POLL_SECONDS = 0.01
SETTLE_SECONDS = 10.0  # for demotions in flight to end

Figures = dict[str, int | float | None]
NO_FIGURES: Figures = {
    "tier_stored_chunks": None,
    "tier_loaded_chunks": None,
    "tier_in_GBps": None,
    "tier_out_GBps": None,
}


def promote_prefix(scheduler: Scheduler, prompt: Prompt) -> None:
    """Request promotion of the prompt's leading chunks in tiers; wait until it has ended."""
    keys: list[bytes] = []
    for piece in prompt:
        full, window = (chunk_key(piece, group) for group in (FULL, WINDOW))
        if scheduler.lookup(full) is LookupResult.MISS:
            if scheduler.find_tier(full) == NO_TIER:
                break
            keys.append(full)
        if scheduler.lookup(window) is LookupResult.MISS and scheduler.find_tier(window) != NO_TIER:
            keys.append(window)
    if not keys:
        return
    scheduler.request_promotion(keys)
    scheduler.end_step()
    started = time.monotonic()
    while (waited := time.monotonic() - started) < PROMOTION_SECONDS:
        results = [scheduler.lookup(key) for key in keys]
        pending = LookupResult.HIT_PENDING in results
        if not pending and (waited > BEGIN_SECONDS or not _may_begin(scheduler, keys, results)):
            return
        select.select([scheduler], [], [], POLL_SECONDS)
        scheduler.take_ready()


def _may_begin(scheduler: Scheduler, keys: list[bytes], results: list[LookupResult]) -> bool:
    """Whether a tier may have one of the chunks that are not in memory."""
    pairs = zip(keys, results, strict=True)
    missing = (key for key, result in pairs if result is LookupResult.MISS)
    return any(scheduler.find_tier(key) != NO_TIER for key in missing)


def settled_figures(scheduler: Scheduler) -> Figures:
    """Return what the daemon's tiers have done, once their queues are empty.

    After `SETTLE_SECONDS` the figures are returned as they are. A status is empty if the daemon did
    not answer in time; it is requested again.
    """
    end = time.monotonic() + SETTLE_SECONDS
    while True:
        tiers: list[dict[str, Any]] = scheduler.status().get("tiers", [])
        queued_bytes = sum(tier["queued_put_bytes"] + tier["queued_get_bytes"] for tier in tiers)
        if (tiers and not queued_bytes) or time.monotonic() > end:
            return figures([tier["counters"] for tier in tiers])
        time.sleep(POLL_SECONDS)


def figures(tiers: list[dict[str, Any]]) -> Figures:
    """Return the figures of all tiers together, from their counters; `NO_FIGURES` without tiers.

    Rates are in 1e9 bytes a second, over the time with a transfer in flight; None: no transfer.
    """
    if not tiers:
        return NO_FIGURES
    return {
        "tier_stored_chunks": sum(counts["puts"]["ok"] for counts in tiers),
        "tier_loaded_chunks": sum(counts["gets"]["ok"] for counts in tiers),
        "tier_in_GBps": _rate(tiers, "put"),
        "tier_out_GBps": _rate(tiers, "get"),
    }


def _rate(tiers: list[dict[str, Any]], direction: str) -> float | None:
    seconds = sum(counts[f"{direction}_seconds"] for counts in tiers)
    nbytes = sum(counts[f"{direction}_bytes"] for counts in tiers)
    return round(nbytes / seconds / 1e9, 3) if nbytes and seconds else None


JOB_SECONDS = 30.0  # a job that takes longer hangs
LEND_SECONDS = 1.0  # for the daemon to lend slots for a step
MAX_JOBS = 4  # in flight, as with an engine whose compute takes time
_TAKEN = {StoreAnswer.ACCEPTED, StoreAnswer.PRESENT, StoreAnswer.PENDING}


@dataclass(slots=True)
class _PromptRequest:
    """A prompt that is being served.

    Attributes:
        blocks: for each group, block ids by logical index.
        users: the request itself while it is served, and each of its jobs. The blocks become free
            when the last user leaves.
    """

    prompt: Prompt
    blocks: tuple[dict[int, int], dict[int, int]] = field(default_factory=lambda: ({}, {}))
    users: int = 1
    loaded: bool = False

    def chunk_blocks(self, group: int, logical: range) -> ChunkBlocks:
        """Return these blocks of a group, with the keys of their chunks."""
        if not logical:
            return ChunkBlocks([], [])
        chunks = range(logical.start // BLOCKS_PER_CHUNK, -(-logical.stop // BLOCKS_PER_CHUNK))
        return ChunkBlocks(
            [chunk_key(self.prompt[chunk], group) for chunk in chunks],
            [self.blocks[group][index] for index in logical],
            logical.start,
        )


@dataclass(slots=True)
class _RankJobs:
    """A transfer in flight: one job on every rank."""

    ticket: StoreTicket | LoadTicket
    request: _PromptRequest
    num_running: int
    ok: bool = True


class DemoEngine:
    """Drives one scheduler session and the ranks.

    Args:
        scheduler: attached.
        ranks: ready.
        num_blocks: of the GPU, enough for both groups of the longest prompt.

    Attributes:
        counts: measurements by the figures' names and, by kind, as the ranks report them.
        job_ns: duration of each job on each rank, from submission until its rank saw its result.
    """

    def __init__(self, scheduler: Scheduler, ranks: RankProcesses, num_blocks: int) -> None:
        self._scheduler = scheduler
        self._ranks = ranks
        self._all_blocks = set(range(NULL_BLOCK + 1, num_blocks))
        self._free_blocks = deque(self._all_blocks)
        self._jobs: dict[int, _RankJobs] = {}
        self._last_job = 0
        self._has_tiers = bool(scheduler.tiers)
        self.counts: Counter[str] = Counter()
        self.job_ns: list[int] = []

    def serve(self, prompt: Prompt) -> None:
        """Serve one prompt. Its stores may still be in flight afterwards."""
        request = _PromptRequest(prompt)
        self.counts["requests"] += 1
        position = self._load_prefix(request)
        for end in step_ends(position, len(prompt)):
            full, window = full_blocks(position, end), window_blocks(end)
            new_window = range(max(window.start, full.start), window.stop)
            self._ranks.send_all(RankStep(self._allocate(request, full, new_window)))
            groups = [request.chunk_blocks(FULL, full), request.chunk_blocks(WINDOW, window)]
            self._store(request, groups)
            self._scheduler.end_step()
            position = end
        self._leave(request)

    def finish_jobs(self) -> None:
        """Wait for all jobs, count the last evictions; check that each block was freed once."""
        while self._jobs:
            self._receive_reports()
        self._count_evicted()
        if (
            len(self._free_blocks) != len(self._all_blocks)
            or set(self._free_blocks) != self._all_blocks
        ):
            raise DemoError(
                f"{len(self._free_blocks)} of {len(self._all_blocks)} blocks were freed"
            )

    # ------------------------------------------------------------------ steps

    def _load_prefix(self, request: _PromptRequest) -> int:
        """Load the longest cached prefix; return its number of chunks.

        0 if nothing is cached or the load failed.
        """
        prompt = request.prompt
        if self._has_tiers:
            promote_prefix(self._scheduler, prompt)
        prefix = takewhile(self._is_cached, (chunk_key(piece, FULL) for piece in prompt))
        num_chunks = longest_hit(
            len(list(prefix)),
            lambda chunk, first: self._is_cached(chunk_key(prompt[chunk], WINDOW), first),
        )
        if not num_chunks:
            return 0
        groups = self._allocate(request, full_blocks(0, num_chunks), window_blocks(num_chunks))
        keys, blocks = _keys_and_blocks(groups)
        ticket = self._scheduler.prepare_load(keys, blocks=blocks)
        if len(ticket) == len(keys):
            self._submit(ticket, groups, request)
            while request.users > 1:
                self._receive_reports()
        self._scheduler.complete_load(ticket)
        if not request.loaded:  # a miss: the steps compute these chunks into the same blocks
            self.counts["failed_loads"] += 1
            return 0
        self.counts["hit_chunks"] += len(keys)
        self.counts["loaded_chunks"] += len(keys)
        return num_chunks

    def _is_cached(self, key: bytes, first: int = 0) -> bool:
        """Whether the chunk can be loaded; waits for chunks that are being stored."""
        while True:
            started = time.perf_counter_ns()
            result = self._scheduler.lookup(key, first)
            self.counts["lookup_ns"] += time.perf_counter_ns() - started
            self.counts["lookups"] += 1
            if result is not LookupResult.HIT_PENDING or not self._jobs:
                return result is LookupResult.HIT
            self._receive_reports()

    def _store(self, request: _PromptRequest, groups: list[ChunkBlocks]) -> None:
        """Offer the chunks of a step, and store the accepted ones."""
        keys, blocks = _keys_and_blocks(groups)
        # Steps take no time here and would outrun the loans. A real engine does not wait for any.
        self._scheduler.reserve(len(keys), LEND_SECONDS)
        ticket = self._scheduler.prepare_store(keys, blocks)
        self._count_evicted()
        num_taken = sum(answer in _TAKEN for answer in ticket.answers)
        self.counts["refused_chunks"] += len(keys) - num_taken
        if ticket.keys:
            self._submit(ticket, groups, request)

    def _count_evicted(self) -> None:
        """Count the chunks that the daemon has removed since the last call."""
        while self._scheduler.changes_waiting:
            self.counts["evicted_chunks"] += len(self._scheduler.take_changes().removed)

    # ----------------------------------------------------------- blocks, jobs

    def _allocate(self, request: _PromptRequest, full: range, window: range) -> list[ChunkBlocks]:
        """Allocate these logical blocks of the request's groups; return them."""
        for blocks, logical in zip(request.blocks, (full, window), strict=True):
            for index in logical:
                while index not in blocks and not self._free_blocks:
                    self._receive_reports()
                if index not in blocks:
                    blocks[index] = self._free_blocks.popleft()
        return [request.chunk_blocks(FULL, full), request.chunk_blocks(WINDOW, window)]

    def _leave(self, request: _PromptRequest) -> None:
        """Remove one of the request's users."""
        request.users -= 1
        if not request.users:
            for blocks in request.blocks:
                self._free_blocks.extend(blocks.values())

    def _submit(
        self, ticket: StoreTicket | LoadTicket, groups: list[ChunkBlocks], request: _PromptRequest
    ) -> None:
        """Submit a transfer to every rank, once fewer than MAX_JOBS are in flight."""
        while len(self._jobs) >= MAX_JOBS:
            self._receive_reports()
        self._last_job += 1
        request.users += 1
        self._jobs[self._last_job] = _RankJobs(ticket, request, len(self._ranks))
        self._ranks.send_all(RankStep(groups, self._last_job, ticket))

    def _receive_reports(self) -> None:
        """Process the ranks' reports; wait for at least one.

        Raises:
            DemoError: no report came within JOB_SECONDS.
        """
        reports = self._ranks.receive(JOB_SECONDS)
        if not reports:
            raise DemoError(f"{len(self._jobs)} jobs have not ended in {JOB_SECONDS:g} s")
        for report in reports:
            self._process(report)

    def _process(self, report: RankReport) -> None:
        """Count a report; complete its transfer if it is the last one."""
        result, counts = report.result, self.counts
        jobs = self._jobs[result.job_id]
        kind = "store" if isinstance(jobs.ticket, StoreTicket) else "load"
        self.job_ns.append(report.took_ns)
        counts["verified_bytes"] += report.verified
        counts["mismatched_bytes"] += report.mismatched
        if result.success:
            counts[f"{kind}_bytes"] += result.bytes
            counts[f"{kind}_ns"] += int(result.seconds * 1e9)
        jobs.num_running -= 1
        jobs.ok &= result.success
        if jobs.num_running:
            return
        del self._jobs[result.job_id]
        if isinstance(jobs.ticket, StoreTicket):
            self._scheduler.complete_store(jobs.ticket, jobs.ok)
            counts["stored_chunks"] += len(jobs.ticket) if jobs.ok else 0
            counts["failed_stores"] += not jobs.ok
        else:
            jobs.request.loaded = jobs.ok
        self._leave(jobs.request)


def _keys_and_blocks(groups: Sequence[ChunkBlocks]) -> tuple[list[bytes], list[BlockRange]]:
    """Return the keys of the groups' chunks, and which blocks of each chunk are named."""
    keys, blocks = [], []
    for group in groups:
        for index, key in enumerate(group.keys):
            first = 0 if index else group.first % BLOCKS_PER_CHUNK
            keys.append(key)
            blocks.append((first, BLOCKS_PER_CHUNK - first))
    return keys, blocks
