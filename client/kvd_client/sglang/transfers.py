"""Loads and stores of SGLang's requests and tree nodes, as jobs of their pools.

With `layerwise`, SGLang aborts the requests of a load that fails; it does not compute them. So a
load that fails because its lane or daemon has gone is submitted again to the next one, which has
kept the chunks, until the deadline. Only a running copy is waited for longer: its pages must not be
given to other requests while it may write.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvd_client import LoadTicket, StoreAnswer, StoreTicket
from kvd_client.errors import get_logger
from kvd_client.sglang.pages import PagesInChunk, split_into_chunks
from kvd_client.sglang.pool_cache import PageRows, PoolCache, failure_reason
from kvd_client.tickets import BlockRange

MAX_TRIES = 5  # failures of jobs that a lane has accepted
RETRY_SECONDS = 0.01
MIN_NAP_SECONDS, MAX_NAP_SECONDS = 20e-6, 500e-6
LOG_SECONDS = 5.0

log = get_logger("kvd_client.sglang")


@dataclass(slots=True)
class PoolLoad:
    """The pinned chunks of one request in one pool, and the pages to load them into."""

    cache: PoolCache
    chunks: Sequence[PagesInChunk]
    rows: PageRows
    ticket: LoadTicket

    def unpin(self) -> None:
        """End the pins."""
        self.cache.unpin(self.ticket)


@dataclass(slots=True)
class LoadJob:
    """One job of a batch, with its retries.

    Attributes:
        slots, generations: of the pinned chunks.
        ticket: the job's own pins, made by a retry; None: those of its `PoolLoad`s hold.
        job: id of the running job; None: none is running.
        complete: all bytes are loaded.
        failure: why it failed for good; empty: it has not.
        next_try: by time.monotonic.
        last_failure: why the last try failed.
    """

    cache: PoolCache
    keys: list[bytes]
    blocks: list[BlockRange]
    rows: PageRows
    slots: Any
    generations: Any
    stream: Any
    ticket: LoadTicket | None = None
    job: int | None = None
    complete: bool = False
    failure: str = ""
    num_failures: int = 0
    next_try: float = 0.0
    last_failure: str = field(default="no lane takes the job")

    @classmethod
    def of(cls, loads: Sequence[PoolLoad], stream: Any) -> "list[LoadJob]":
        """Return the jobs of loads in one pool."""
        cache = loads[0].cache
        chunks = [chunk for load in loads for chunk in load.chunks]
        rows = np.concatenate([load.rows for load in loads])
        slots = np.concatenate([load.ticket.slots for load in loads])
        generations = np.concatenate([load.ticket.generations for load in loads])
        return [
            cls(
                cache=cache,
                keys=[chunk.key for chunk in chunks[part]],
                blocks=[chunk.blocks for chunk in chunks[part]],
                rows=rows[part],
                slots=slots[part],
                generations=generations[part],
                stream=stream,
            )
            for part in cache.job_slices(len(chunks))
        ]

    @property
    def ended(self) -> bool:
        """Whether it is complete or failed for good; then nothing of it writes any more."""
        return self.complete or bool(self.failure)

    @property
    def num_layers(self) -> int:
        """How many layers the running job has loaded."""
        return 0 if self.job is None else self.cache.layers_loaded(self.job)

    def submit(self) -> None:
        """Submit a job for the pinned chunks."""
        self.job = self.cache.load(self.rows, self.slots, self.generations, self.stream)
        self.next_try = time.monotonic() + RETRY_SECONDS

    def update(self, deadline: float, max_tries: int) -> None:
        """Process the job's result. Retry a failure, up to `max_tries` times, until `deadline`."""
        if self.ended:
            return
        if self.job is not None:
            result = self.cache.result(self.job)
            if result is None:
                return
            self.job = None
            if not (reason := failure_reason(result)):
                self.complete = True
                return
            self.last_failure = reason
            self.num_failures += 1
        now = time.monotonic()
        if now >= deadline or self.num_failures >= max_tries:
            self.failure = self.last_failure
        elif now >= self.next_try:
            self._retry()

    def _retry(self) -> None:
        """Pin the chunks at the present daemon and submit the job again."""
        self.next_try = time.monotonic() + RETRY_SECONDS
        if not (self.cache.scheduler.attached and self.cache.worker.registered):
            self.last_failure = "no daemon serves this engine"
            return
        ticket = self.cache.pin_blocks(self.keys, self.blocks)
        if ticket is None:
            self.failure = f"{self.last_failure}; the chunks are not in the cache any more"
            return
        log.info("a load of %d chunks is submitted again: %s", len(self.keys), self.last_failure)
        self.unpin()
        self.ticket = ticket
        self.slots, self.generations = ticket.slots, ticket.generations
        self.submit()

    def unpin(self) -> None:
        """End the job's own pins."""
        if self.ticket is not None:
            self.cache.unpin(self.ticket)
        self.ticket = None


class LoadBatch:
    """Loads that SGLang starts together, in as few jobs as possible.

    Args:
        loads: at least one.
        stream: that used the pages last; None for host memory.
        timeout: seconds for the whole batch.
        retry: whether failed jobs are submitted again, while there is time.
    """

    def __init__(
        self, loads: Sequence[PoolLoad], stream: Any, timeout: float, *, retry: bool = True
    ) -> None:
        by_pool: dict[PoolCache, list[PoolLoad]] = {}
        for load in loads:
            by_pool.setdefault(load.cache, []).append(load)
        self._loads = loads
        self._jobs = [job for same in by_pool.values() for job in LoadJob.of(same, stream)]
        self._started = time.monotonic()
        self._deadline = self._started + timeout
        self._max_tries = MAX_TRIES if retry else 0
        for job in self._jobs:
            job.submit()

    def wait_for(self, layer: int) -> None:
        """Wait until this layer (from 0) is loaded, or the load has ended.

        Jobs that are staged count no layers: each layer waits for all of them.
        """
        self._wait(lambda job: job.ended or job.num_layers > layer)

    def finish(self) -> bool:
        """Wait until nothing of the batch writes any more; return whether all bytes are loaded.

        At the deadline the running jobs are cancelled. Then only their lane can end the wait.
        """
        next_log = self._deadline
        cancelled: set[int] = set()
        while not self._wait(lambda job: job.ended, until=next_log):
            running = [(job.cache, job.job) for job in self._jobs if job.job is not None]
            for cache, job_id in running:
                if job_id not in cancelled:
                    cancelled.add(job_id)
                    cache.cancel(job_id)
                elif time.monotonic() > self._deadline + LOG_SECONDS:
                    log.error(
                        "load %d was stopped %.0f s ago and its lane has not answered; the engine"
                        " waits, for the lane may still write: see `kvd status`, or kill the lane",
                        job_id,
                        time.monotonic() - self._deadline,
                    )
            next_log = max(next_log, time.monotonic()) + LOG_SECONDS
        for load in self._loads:
            load.unpin()
        for job in self._jobs:
            job.unpin()
            if not job.complete:
                log.warning(
                    "%d chunks of pool %s were not loaded in %.1f s: %s",
                    len(job.keys),
                    job.cache.pool.name,
                    time.monotonic() - self._started,
                    job.failure,
                )
        return all(job.complete for job in self._jobs)

    def _wait(self, condition: Callable[[LoadJob], bool], until: float = float("inf")) -> bool:
        """Poll until the condition holds for all jobs; False: not before `until`."""
        nap = MIN_NAP_SECONDS
        while True:
            for job in self._jobs:
                job.update(self._deadline, self._max_tries)
            if all(condition(job) for job in self._jobs):
                return True
            now = time.monotonic()
            if now >= until:
                return False
            time.sleep(nap)
            nap = min(2 * nap, MAX_NAP_SECONDS)


class LayerCounter:
    """What SGLang's pools wait for before they read a layer. Method names are SGLang's.

    Attributes:
        consumer_index: number of the batch that the forward pass reads; -1: none.
    """

    def __init__(self) -> None:
        self.consumer_index = -1
        self._last = -1
        self._batches: dict[int, LoadBatch] = {}

    def add(self, batch: LoadBatch) -> int:
        """Add a started batch; return its number."""
        self._last += 1
        self._batches[self._last] = batch
        return self._last

    def set_consumer(self, index: int) -> None:
        """Set the number of the batch that the next forward pass reads."""
        self.consumer_index = index

    def wait_until(self, threshold: int) -> None:
        """Wait until this layer of that batch is loaded, or the load has failed."""
        batch = self._batches.get(self.consumer_index)
        if batch is not None:
            batch.wait_for(threshold)

    def finish(self, index: int) -> bool:
        """Wait until a batch writes no more; return whether all bytes are loaded."""
        batch = self._batches.pop(index, None)
        return batch is None or batch.finish()

    def finish_all(self) -> None:
        """Wait until no batch writes any more."""
        for index in list(self._batches):
            self.finish(index)
        self.consumer_index = -1


# ------------------------------------------------------------------- stores

_IN_POOL = (StoreAnswer.ACCEPTED, StoreAnswer.PRESENT, StoreAnswer.PENDING)
VOID_SECONDS = 5.0


@dataclass(slots=True)
class _StoreJob:
    cache: PoolCache
    job: int
    ticket: StoreTicket


@dataclass(slots=True)
class NodeStore:
    """The store of one tree node.

    Attributes:
        pages: for each pool its cache, the keys of the pages and SGLang's indices.
        events: after which the pages are written and the indices known.
        submitted: set when all jobs are submitted.
        complete: nothing was refused, nothing has failed.
    """

    pages: Sequence[tuple[PoolCache, list[bytes], Any]]
    events: Sequence[Any]
    submitted: threading.Event = field(default_factory=threading.Event)
    complete: bool = True
    jobs: list[_StoreJob] = field(default_factory=list)

    def submit(self) -> None:
        """Wait for the events, then submit the jobs."""
        for event in self.events:
            event.synchronize()
        for cache, keys, indices in self.pages:
            chunks = split_into_chunks(keys, cache.pages_per_chunk)
            rows = cache.rows(chunks, indices)  # before the offer: raises for invalid pages
            for part in cache.job_slices(len(chunks)):
                self._submit_job(cache, chunks[part], rows[part])

    def _submit_job(self, cache: PoolCache, chunks: Sequence[PagesInChunk], rows: PageRows) -> None:
        ticket = cache.offer(chunks)
        self.complete &= ticket.served and all(answer in _IN_POOL for answer in ticket.answers)
        answers = zip(chunks, ticket.answers, strict=False)
        if refused := [chunk.key for chunk, answer in answers if answer is StoreAnswer.FULL]:
            cache.scheduler.give_up(refused)  # SGLang does not offer a node again
        if not len(ticket):
            return
        accepted = set(ticket.keys)
        job = cache.store(rows[[chunk.key in accepted for chunk in chunks]], ticket)
        if job is None:
            self.complete = False
            cache.end_store(ticket, success=False)
        else:
            self.jobs.append(_StoreJob(cache, job, ticket))

    def update(self) -> bool:
        """Process the results of jobs; return whether all have ended."""
        if not self.submitted.is_set():
            return False
        for job in tuple(self.jobs):
            result = job.cache.result(job.job)
            if result is None:
                continue
            self.jobs.remove(job)
            reason = failure_reason(result)
            job.cache.end_store(job.ticket, success=not reason)
            if reason:
                self.complete = False
                log.warning("a store of %d chunks failed: %s", len(job.ticket), reason)
        return not self.jobs


class StoreQueue:
    """Stores of tree nodes, reported to SGLang in the order in which it offloaded the nodes.

    A thread submits them: it waits for the events after which pages are written, and for slots in
    the pool. SGLang's own thread waits for neither.
    """

    def __init__(self) -> None:
        self._to_submit: queue.SimpleQueue[NodeStore | None] = queue.SimpleQueue()
        self._unreported: deque[NodeStore] = deque()
        self._thread = threading.Thread(target=self._run, name="kvd-offload", daemon=True)
        self._thread.start()

    def add(self, store: NodeStore) -> None:
        """Queue a store."""
        self._unreported.append(store)
        self._to_submit.put(store)

    def num_ended(self) -> int:
        """Return how many stores have ended, counted from the oldest up to the first running."""
        count = 0
        for store in self._unreported:
            if not store.update():
                break
            count += 1
        return count

    def pop(self) -> bool:
        """Remove the oldest store, which has ended; return whether it is complete."""
        return self._unreported.popleft().complete

    def discard_all(self) -> None:
        """Wait until no store reads pages any more, and drop all of them."""
        for store in self._unreported:
            store.submitted.wait()
            for job in store.jobs:
                job.cache.worker.wait([job.job], VOID_SECONDS)  # voids the store at its end
                job.cache.abandon(job.job)
        self._unreported.clear()

    def close(self) -> None:
        """End the thread."""
        self._to_submit.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (store := self._to_submit.get()) is not None:
            try:
                store.submit()
            except Exception:  # a store that fails is a miss later
                log.exception("pages could not be stored")
                store.complete = False
            store.submitted.set()
