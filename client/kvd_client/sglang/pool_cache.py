"""A device pool of a rank at the daemon: the settings, its chunks, and the jobs that move them."""

import itertools
import threading
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from kvd_client import (
    Fingerprint,
    JobBlocks,
    JobResult,
    JobStatus,
    KvdClientError,
    Load,
    LoadTicket,
    Scheduler,
    Store,
    StoreTicket,
    Worker,
)
from kvd_client.adapters import EngineOptions, OptionsError, Seconds, convert_options
from kvd_client.errors import cause, get_logger
from kvd_client.sglang.pages import NO_PAGE, PagePool, PagesInChunk
from kvd_client.tickets import BlockRange
from kvd_client.torch_memory import work_so_far
from kvd_proto.jobs import MAX_ARRAY_ITEMS

OPTIONS_NAME = "--unified-cache-external-linker-config: linker_extra_config"
PageRows = npt.NDArray[np.uint32]
"""[chunks, blocks per chunk]: the page of each block; `NO_PAGE` for blocks that are left out."""
JOB_BLOCKS = MAX_ARRAY_ITEMS

log = get_logger("kvd_client.sglang")


class SglangOptions(EngineOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings under `linker_extra_config`; `EngineOptions` has those of every engine.

    Attributes:
        chunk_tokens: tokens of a chunk. A page with more tokens is a chunk of its own. Engines
            share chunks only if they have the same value.
        lease: seconds for which the chunks of a lookup stay pinned for its request.
        layerwise: false: a request's forward pass begins when its load is complete, and a request
            whose load fails is computed. true: it begins with the first layer, and SGLang aborts
            the requests of a load that fails. Staged loads have no layers: the first waits for all.
        load_timeout: seconds for a load, daemon restarts included. The engine's scheduler waits
            for it, with `layerwise` the forward pass.
        store_timeout: seconds after which a store is given up. Until then the tree keeps its pages.
        loan_timeout: seconds that a store waits for slots in the pool.
    """

    chunk_tokens: Annotated[int, Meta(ge=1, le=4096)] = 16
    lease: Seconds = 60.0
    layerwise: bool = False
    load_timeout: Seconds = 10.0
    store_timeout: Seconds = 30.0
    loan_timeout: Seconds = 0.5


def read_options(extra: Mapping[str, Any] | None) -> SglangOptions:
    """Return the settings of an engine.

    Raises:
        OptionsError: naming the key, its value and what is possible.
    """
    options = convert_options(SglangOptions, extra or {}, OPTIONS_NAME)
    if options.lease < 2 * options.load_timeout:  # a pin must outlast its load
        raise OptionsError(
            f"{OPTIONS_NAME}: lease={options.lease:g} is below twice load_timeout="
            f"{options.load_timeout:g}; raise lease, or lower load_timeout"
        )
    return options


class PoolCache:
    """The chunks of a device pool: a scheduler's and a worker's session. Thread-safe.

    Args:
        pool: a device pool of this rank.
        pages_per_chunk: pages of a chunk.
        engine: name of the engine's rank.
        fingerprint: of the pool.
        options: the engine's settings.

    Attributes:
        pool, pages_per_chunk: as passed.
        blocks_of: returns the blocks of a key's READY chunk, read from shared memory.

    Raises:
        KvdClientError: the memory cannot be shared, or with `required` the daemon refuses it.
    """

    def __init__(
        self,
        pool: PagePool,
        pages_per_chunk: int,
        engine: str,
        fingerprint: Fingerprint,
        options: SglangOptions,
    ) -> None:
        self.pool = pool
        self.pages_per_chunk = pages_per_chunk
        self._options = options
        self._job_ids = itertools.count(1)
        self._lock = threading.Lock()
        self._results: dict[int, JobResult] = {}
        self._abandoned: set[int] = set()  # jobs whose results are dropped
        name = f"{engine}-{pool.name}"
        self.worker = Worker(
            options.runtime_dir,
            name,
            0,
            1,
            deadline=options.deadline,
            job_timeout=options.store_timeout,
        )
        try:
            tensors, layout = pool.describe(pages_per_chunk)
            self.worker.register(
                tensors,
                layout,
                fingerprint,
                required=options.required,
                transfer=options.transfer,
                staging_bytes=options.staging_bytes,
            )
            self.scheduler = Scheduler(
                options.runtime_dir, name, deadline=options.deadline, counts_tokens=True
            )
        except BaseException:
            self.worker.close()
            raise
        self.blocks_of = self.scheduler.cached_blocks

    # ----------------------------------------------------------------- loads

    def pin(self, chunks: Sequence[PagesInChunk]) -> LoadTicket | None:
        """Pin chunks for a request; None: one of them is gone."""
        return self.pin_blocks([chunk.key for chunk in chunks], [chunk.blocks for chunk in chunks])

    def pin_blocks(
        self, keys: Collection[bytes], blocks: Collection[BlockRange]
    ) -> LoadTicket | None:
        """Pin these blocks of chunks; None: one of them is gone."""
        try:
            ticket = self.scheduler.prepare_load(keys, self._options.lease, blocks)
        except KvdClientError as error:  # too many for one request, or closed
            log.warning("%d chunks are not pinned: %s", len(keys), error)
            return None
        if len(ticket) == len(keys):
            return ticket
        self.scheduler.complete_load(ticket)
        return None

    def unpin(self, ticket: LoadTicket) -> None:
        """End the pin."""
        self.scheduler.complete_load(ticket)

    def load(self, rows: PageRows, slots: Any, generations: Any, stream: Any) -> int | None:
        """Submit a load; return the job's id, None: it failed.

        Args:
            rows: the pages to load into.
            slots: of the chunks.
            generations: of these slots.
            stream: that used the pages last; None for host memory.
        """
        return self._submit(
            partial(self.worker.submit, Load, layerwise=True), rows, slots, generations, stream
        )

    def layers_loaded(self, job: int) -> int:
        """Return how many layers of a load are complete, from shared memory."""
        return self.worker.layers_loaded(job)

    # ---------------------------------------------------------------- stores

    def offer(self, chunks: Sequence[PagesInChunk]) -> StoreTicket:
        """Request slots for chunks; wait up to `loan_timeout` while the pool has none free."""
        keys, blocks = [chunk.key for chunk in chunks], [chunk.blocks for chunk in chunks]
        if (self.scheduler.loans or 0) < len(keys):
            num_new = sum(self.blocks_of(key) is None for key in keys)
            if num_new:
                self.scheduler.reserve(num_new, self._options.loan_timeout)
        return self.scheduler.prepare_store(keys, blocks)

    def store(self, rows: PageRows, ticket: StoreTicket) -> int | None:
        """Submit a store of pages that are written; return the job's id, None: it failed."""
        submit = partial(self.worker.submit, Store)
        return self._submit(submit, rows, ticket.slots, ticket.generations, None)

    def end_store(self, ticket: StoreTicket, *, success: bool) -> None:
        """Complete a store at the daemon."""
        self.scheduler.complete_store(ticket, success)

    # ------------------------------------------------------------------ jobs

    def rows(self, chunks: Sequence[PagesInChunk], indices: Any) -> PageRows:
        """Return the pages of the chunks' blocks, from SGLang's indices (host or device memory).

        Raises:
            ValueError: a page is outside the pool, or the padding page.
        """
        pages = (indices[:: self.pool.page_tokens] // self.pool.page_tokens).cpu().numpy()
        if len(pages) and not NO_PAGE < pages.min() <= pages.max() < self.pool.num_pages:
            raise ValueError(
                f"pages {pages.min()}..{pages.max()} are not within 1..{self.pool.num_pages - 1}"
            )
        rows = np.full((len(chunks), self.pages_per_chunk), NO_PAGE, np.uint32)
        for row, chunk in zip(rows, chunks, strict=True):
            end = chunk.page + chunk.num_pages
            row[chunk.block : chunk.block + chunk.num_pages] = pages[chunk.page : end]
        return rows

    def job_slices(self, num_chunks: int) -> list[slice]:
        """Divide so many chunks into as few jobs as possible."""
        chunks_per_job = max(1, JOB_BLOCKS // self.pages_per_chunk)
        return [
            slice(begin, begin + chunks_per_job) for begin in range(0, num_chunks, chunks_per_job)
        ]

    def result(self, job: int) -> JobResult | None:
        """Return the job's result, once; None: it has not ended."""
        with self._lock:
            for result in self.worker.get_finished():
                if result.job_id in self._abandoned:
                    self._abandoned.remove(result.job_id)
                else:
                    self._results[result.job_id] = result
            return self._results.pop(job, None)

    def abandon(self, job: int) -> None:
        """Drop the job's result, now or when it comes."""
        with self._lock:
            if self._results.pop(job, None) is None:
                self._abandoned.add(job)

    def cancel(self, job: int) -> None:
        """Request that a job is stopped. Its result comes nevertheless."""
        self.worker.cancel([job])

    def close(self) -> None:
        """End both sessions."""
        self.worker.close()
        self.scheduler.close()

    def _submit(
        self, submit: Any, rows: PageRows, slots: Any, generations: Any, stream: Any
    ) -> int | None:
        job = next(self._job_ids)
        try:
            blocks = JobBlocks.of(rows.reshape(-1), [rows.size], [0], slots, generations)
            submitted = submit(job, blocks, after=work_so_far(self.worker, stream))
        except Exception as error:  # noqa: BLE001  # also from torch or the driver: a miss
            log.warning("a job of %d chunks is not submitted: %s", len(rows), cause(error))
            return None
        if not submitted:
            self.result(job)  # a failure, which the caller knows by None
            return None
        return job


def failure_reason(result: JobResult) -> str:
    """Return why a job failed; empty: it did not."""
    return "" if result.status is JobStatus.OK else f"{result.status}: {result.text}"
