"""The engine's scheduler: serves prompts with few GPU blocks, and with kvd behind them.

For every prompt: bring up what tiers have of it, look its chunks up, load the longest usable
prefix, compute the rest step by step, and store what each step made. Stores run on while the next
steps and prompts are computed; a prompt's blocks are free when it is served and its stores have
ended.
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
from kvd_tools.demo.memory import chunk_key
from kvd_tools.demo.processes import Finished, Ranks, Step
from kvd_tools.demo.workload import (
    BLOCKS_PER_CHUNK,
    FULL,
    NULL_BLOCK,
    WINDOW,
    Prompt,
    full_blocks,
    longest_hit,
    step_ends,
    window_blocks,
)
from kvd_tools.errors import DemoError

SEEK_SECONDS = 1.0  # a real engine waits for as long as computing would take
BEGIN_SECONDS = 0.05  # in which a promotion, or a question to a shared tier, must have begun
LOOK_SECONDS = 0.01
SETTLE_SECONDS = 10.0  # until what is on its way down has arrived

Figures = dict[str, int | float | None]
NO_FIGURES: Figures = {
    "tier_stored_chunks": None,
    "tier_loaded_chunks": None,
    "tier_in_GBps": None,
    "tier_out_GBps": None,
}


def bring_up(scheduler: Scheduler, prompt: Prompt) -> None:
    """Seek what tiers have of a prompt's head, and wait for what is on its way."""
    wanted: list[bytes] = []
    for piece in prompt:
        full, window = (chunk_key(piece, group) for group in (FULL, WINDOW))
        if scheduler.lookup(full) is LookupResult.MISS:
            if scheduler.find_tier(full) == NO_TIER:
                break
            wanted.append(full)
        if scheduler.lookup(window) is LookupResult.MISS and scheduler.find_tier(window) != NO_TIER:
            wanted.append(window)
    if not wanted:
        return
    scheduler.request_promotion(wanted)
    scheduler.end_step()
    begun = time.monotonic()
    while (waited := time.monotonic() - begun) < SEEK_SECONDS:
        found = [scheduler.lookup(key) for key in wanted]
        moving = LookupResult.HIT_PENDING in found
        if not moving and (waited > BEGIN_SECONDS or not _may_begin(scheduler, wanted, found)):
            return
        select.select([scheduler], [], [], LOOK_SECONDS)
        scheduler.take_ready()


def _may_begin(scheduler: Scheduler, keys: list[bytes], found: list[LookupResult]) -> bool:
    missing = (key for key, result in zip(keys, found, strict=True) if result is LookupResult.MISS)
    return any(scheduler.find_tier(key) != NO_TIER for key in missing)


def settled_figures(scheduler: Scheduler) -> Figures:
    """What the daemon's tiers have done when nothing is on its way any more.

    A status that did not come in time names no tiers, and is asked for again.
    """
    end = time.monotonic() + SETTLE_SECONDS
    while True:
        tiers: list[dict[str, Any]] = scheduler.status().get("tiers", [])
        waiting = sum(tier["queued_put_bytes"] + tier["queued_get_bytes"] for tier in tiers)
        if (tiers and not waiting) or time.monotonic() > end:
            return figures([tier["counters"] for tier in tiers])
        time.sleep(LOOK_SECONDS)


def figures(tiers: list[dict[str, Any]]) -> Figures:
    """The figures of all tiers together; of none where there is no tier. Rates in 1e9 bytes/s.

    A rate is of the time in which anything was on its way; None where nothing was.
    """
    if not tiers:
        return NO_FIGURES
    return {
        "tier_stored_chunks": sum(counts["puts"]["ok"] for counts in tiers),
        "tier_loaded_chunks": sum(counts["gets"]["ok"] for counts in tiers),
        "tier_in_GBps": _rate(tiers, "put"),
        "tier_out_GBps": _rate(tiers, "get"),
    }


def _rate(tiers: list[dict[str, Any]], way: str) -> float | None:
    seconds = sum(counts[f"{way}_seconds"] for counts in tiers)
    nbytes = sum(counts[f"{way}_bytes"] for counts in tiers)
    return round(nbytes / seconds / 1e9, 3) if nbytes and seconds else None


JOB_SECONDS = 30.0  # a job that takes longer means that something hangs
LEND_SECONDS = 1.0  # until there are slots for a step
MAX_JOBS = 4  # in flight; an engine whose compute takes time has no more either
_TAKEN = {StoreAnswer.ACCEPTED, StoreAnswer.PRESENT, StoreAnswer.PENDING}


@dataclass(slots=True)
class _Request:
    """A prompt while it is served; block ids by group and logical index.

    users: serving it, and each of its jobs. It has its blocks until the last has ended.
    """

    prompt: Prompt
    blocks: tuple[dict[int, int], dict[int, int]] = field(default_factory=lambda: ({}, {}))
    users: int = 1
    loaded: bool = False

    def name(self, group: int, logical: range) -> ChunkBlocks:
        """Return these blocks of a group with the keys of the chunks that they lie in."""
        if not logical:
            return ChunkBlocks([], [])
        chunks = range(logical.start // BLOCKS_PER_CHUNK, -(-logical.stop // BLOCKS_PER_CHUNK))
        return ChunkBlocks(
            [chunk_key(self.prompt[chunk], group) for chunk in chunks],
            [self.blocks[group][index] for index in logical],
            logical.start,
        )


@dataclass(slots=True)
class _Job:
    """A job in flight on every rank."""

    ticket: StoreTicket | LoadTicket
    request: _Request
    waiting: int
    ok: bool = True


class Engine:
    """Drives one scheduler session and the ranks.

    Args:
        scheduler: attached.
        ranks: ready.
        num_blocks: of the GPU, with room for the longest prompt in both groups.

    Attributes:
        counts: what is measured, by the figures' names and, by kind, as the ranks report it.
        job_ns: of each job on each rank, from submission to seen finished.
    """

    def __init__(self, scheduler: Scheduler, ranks: Ranks, num_blocks: int) -> None:
        self._scheduler = scheduler
        self._ranks = ranks
        self._blocks = set(range(NULL_BLOCK + 1, num_blocks))
        self._free = deque(self._blocks)
        self._jobs: dict[int, _Job] = {}
        self._last_job = 0
        self._has_tiers = bool(scheduler.tiers)
        self.counts: Counter[str] = Counter()
        self.job_ns: list[int] = []

    def serve(self, prompt: Prompt) -> None:
        """Serve one prompt; its stores may still be running afterwards."""
        request = _Request(prompt)
        self.counts["requests"] += 1
        position = self._reuse(request)
        for end in step_ends(position, len(prompt)):
            full, window = full_blocks(position, end), window_blocks(end)
            fresh = range(max(window.start, full.start), window.stop)
            self._ranks.send_all(Step(self._allocate(request, full, fresh)))
            self._store(request, [request.name(FULL, full), request.name(WINDOW, window)])
            self._scheduler.end_step()
            position = end
        self._leave(request)

    def drain(self) -> None:
        """Wait for every job, then check that all blocks came back, each once."""
        while self._jobs:
            self._pump()
        self._count_evicted()
        if len(self._free) != len(self._blocks) or set(self._free) != self._blocks:
            raise DemoError(f"{len(self._free)} of {len(self._blocks)} blocks were given back")

    # ------------------------------------------------------------------ steps

    def _reuse(self, request: _Request) -> int:
        """Load the longest prefix that is there; return how many chunks."""
        prompt = request.prompt
        if self._has_tiers:
            bring_up(self._scheduler, prompt)
        prefix = takewhile(self._is_there, (chunk_key(piece, FULL) for piece in prompt))
        hit = longest_hit(
            len(list(prefix)),
            lambda chunk, first: self._is_there(chunk_key(prompt[chunk], WINDOW), first),
        )
        if not hit:
            return 0
        groups = self._allocate(request, full_blocks(0, hit), window_blocks(hit))
        keys, blocks = _offer(groups)
        ticket = self._scheduler.prepare_load(keys, blocks=blocks)
        if len(ticket) == len(keys):
            self._begin(ticket, groups, request)
            while request.users > 1:
                self._pump()
        self._scheduler.complete_load(ticket)
        if not request.loaded:  # a miss: computed again, into the same blocks
            self.counts["failed_loads"] += 1
            return 0
        self.counts["hit_chunks"] += len(keys)
        self.counts["loaded_chunks"] += len(keys)
        return hit

    def _is_there(self, key: bytes, first: int = 0) -> bool:
        """Whether the chunk can be loaded. One that is being stored is worth waiting for."""
        while True:
            started = time.perf_counter_ns()
            answer = self._scheduler.lookup(key, first)
            self.counts["lookup_ns"] += time.perf_counter_ns() - started
            self.counts["lookups"] += 1
            if answer is not LookupResult.HIT_PENDING or not self._jobs:
                return answer is LookupResult.HIT
            self._pump()

    def _store(self, request: _Request, groups: list[ChunkBlocks]) -> None:
        """Offer what a step made, and store what is accepted."""
        keys, blocks = _offer(groups)
        # Its steps take no time: unlike a real engine's they would use up what is lent to it.
        self._scheduler.reserve(len(keys), LEND_SECONDS)
        ticket = self._scheduler.prepare_store(keys, blocks)
        self._count_evicted()
        self.counts["refused_chunks"] += len(keys) - sum(a in _TAKEN for a in ticket.answers)
        if ticket.keys:
            self._begin(ticket, groups, request)

    def _count_evicted(self) -> None:
        while self._scheduler.changes_waiting:
            self.counts["evicted_chunks"] += len(self._scheduler.take_changes().removed)

    # ----------------------------------------------------------- blocks, jobs

    def _allocate(self, request: _Request, full: range, window: range) -> list[ChunkBlocks]:
        """Give the request these logical blocks of its groups; return them."""
        for held, logical in zip(request.blocks, (full, window), strict=True):
            for index in logical:
                while index not in held and not self._free:
                    self._pump()
                if index not in held:
                    held[index] = self._free.popleft()
        return [request.name(FULL, full), request.name(WINDOW, window)]

    def _leave(self, request: _Request) -> None:
        request.users -= 1
        if not request.users:
            for held in request.blocks:
                self._free.extend(held.values())

    def _begin(
        self, ticket: StoreTicket | LoadTicket, groups: list[ChunkBlocks], request: _Request
    ) -> None:
        while len(self._jobs) >= MAX_JOBS:
            self._pump()
        self._last_job += 1
        request.users += 1
        self._jobs[self._last_job] = _Job(ticket, request, len(self._ranks))
        self._ranks.send_all(Step(groups, self._last_job, ticket))

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
        result, counts = report.result, self.counts
        job = self._jobs[result.job_id]
        kind = "store" if isinstance(job.ticket, StoreTicket) else "load"
        self.job_ns.append(report.took_ns)
        counts["verified_bytes"] += report.verified
        counts["mismatched_bytes"] += report.mismatched
        if result.success:
            counts[f"{kind}_bytes"] += result.bytes
            counts[f"{kind}_ns"] += int(result.seconds * 1e9)
        job.waiting -= 1
        job.ok &= result.success
        if job.waiting:
            return
        del self._jobs[result.job_id]
        if isinstance(job.ticket, StoreTicket):
            self._scheduler.complete_store(job.ticket, job.ok)
            counts["stored_chunks"] += len(job.ticket) if job.ok else 0
            counts["failed_stores"] += not job.ok
        else:
            job.request.loaded = job.ok
        self._leave(job.request)


def _offer(groups: Sequence[ChunkBlocks]) -> tuple[list[bytes], list[BlockRange]]:
    """Return the groups' keys, and the blocks that are named of each chunk."""
    keys, blocks = [], []
    for group in groups:
        for at, key in enumerate(group.keys):
            first = 0 if at else group.first % BLOCKS_PER_CHUNK
            keys.append(key)
            blocks.append((first, BLOCKS_PER_CHUNK - first))
    return keys, blocks
