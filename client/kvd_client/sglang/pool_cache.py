"""One pool of one rank: what the daemon has of its pages, and the jobs that move them."""

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
from kvd_client.arguments import Blocks
from kvd_client.engine_options import EngineOptions, OptionsError, Seconds, convert_options
from kvd_client.errors import cause, get_logger
from kvd_client.sglang.pages import NO_PAGE, PagePool, Piece
from kvd_client.torch_memory import work_so_far
from kvd_proto.arrays import MAX_ARRAY_ITEMS

Rows = npt.NDArray[np.uint32]
"""[chunks, blocks per chunk]: the page of each block; `NO_PAGE` for those that are left out."""
JOB_BLOCKS = MAX_ARRAY_ITEMS

log = get_logger("kvd_client.sglang")


class PoolCache:
    """A pool's chunks. May be used by several threads.

    Args:
        pool: of this rank.
        factor: pages of a chunk.
        engine: name of the inference server's rank.
        fingerprint: of the pool.
        options: the operator's.

    Attributes:
        pool, factor: as given.
        held: the blocks of a key's READY chunk, from shared memory.

    Raises:
        KvdClientError: the memory cannot be shared, or with `required` is not taken.
    """

    def __init__(
        self, pool: PagePool, factor: int, engine: str, fingerprint: Fingerprint, options: Options
    ) -> None:
        self.pool = pool
        self.factor = factor
        self._options = options
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._ended: dict[int, JobResult] = {}
        self._forgotten: set[int] = set()
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
            shared, layout = pool.share(factor)
            try:
                self.worker.register(shared.memory, layout, fingerprint, required=options.required)
            finally:
                shared.close()
            self.scheduler = Scheduler(
                options.runtime_dir, name, deadline=options.deadline, counts_tokens=True
            )
        except BaseException:
            self.worker.close()
            raise
        self.held = self.scheduler.held

    # ----------------------------------------------------------------- loads

    def pin(self, pieces: Sequence[Piece]) -> LoadTicket | None:
        """Pin chunks for a request; None where one of them is not there any more."""
        return self.pin_blocks([p.key for p in pieces], [p.blocks for p in pieces])

    def pin_blocks(self, keys: Collection[bytes], blocks: Collection[Blocks]) -> LoadTicket | None:
        """`pin`, of chunks and their blocks."""
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

    def load(self, rows: Rows, slots: Any, generations: Any, stream: Any) -> int | None:
        """Begin to load, layer by layer; return the job's number, None where no lane takes it.

        Args:
            rows: where the chunks' blocks go.
            slots: of the chunks.
            generations: of these slots.
            stream: on which the pages were used last; None for host memory.
        """
        return self._submit(
            partial(self.worker.submit, Load, layerwise=True), rows, slots, generations, stream
        )

    def layers_loaded(self, job: int) -> int:
        """How many layers of a load have arrived, from shared memory."""
        return self.worker.layers_loaded(job)

    # ---------------------------------------------------------------- stores

    def offer(self, pieces: Sequence[Piece]) -> StoreTicket:
        """Ask for slots, for a while where the pool must make room first."""
        keys, blocks = [p.key for p in pieces], [p.blocks for p in pieces]
        if (self.scheduler.loans or 0) < len(keys):
            new = sum(self.held(key) is None for key in keys)
            if new:
                self.scheduler.reserve(new, self._options.loan_timeout)
        return self.scheduler.prepare_store(keys, blocks)

    def store(self, rows: Rows, ticket: StoreTicket) -> int | None:
        """Begin to store pages whose bytes have been written; as `load`."""
        submit = partial(self.worker.submit, Store)
        return self._submit(submit, rows, ticket.slots, ticket.generations, None)

    def end_store(self, ticket: StoreTicket, *, success: bool) -> None:
        """Tell how a store has ended."""
        self.scheduler.complete_store(ticket, success)

    # ------------------------------------------------------------------ jobs

    def rows(self, pieces: Sequence[Piece], indices: Any) -> Rows:
        """The pages of pieces, from SGLang's indices of them: a tensor of host or device memory.

        Raises:
            ValueError: a page that is none of the pool's, or the padding page.
        """
        pages = (indices[:: self.pool.page_tokens] // self.pool.page_tokens).cpu().numpy()
        if len(pages) and not NO_PAGE < pages.min() <= pages.max() < self.pool.num_pages:
            raise ValueError(
                f"pages {pages.min()}..{pages.max()} are not within 1..{self.pool.num_pages - 1}"
            )
        rows = np.full((len(pieces), self.factor), NO_PAGE, np.uint32)
        for row, piece in zip(rows, pieces, strict=True):
            row[piece.block : piece.block + piece.pages] = pages[
                piece.page : piece.page + piece.pages
            ]
        return rows

    def jobs(self, chunks: int) -> list[slice]:
        """Cut so many chunks into as many jobs as they need."""
        most = max(1, JOB_BLOCKS // self.factor)
        return [slice(begin, begin + most) for begin in range(0, chunks, most)]

    def result(self, job: int) -> JobResult | None:
        """How a job has ended, once; None while it has not."""
        with self._lock:
            for result in self.worker.get_finished():
                if result.job_id in self._forgotten:
                    self._forgotten.remove(result.job_id)
                else:
                    self._ended[result.job_id] = result
            return self._ended.pop(job, None)

    def forget(self, job: int) -> None:
        """Nobody will ask for this job's result."""
        with self._lock:
            if self._ended.pop(job, None) is None:
                self._forgotten.add(job)

    def cancel(self, job: int) -> None:
        """Ask for a job to be stopped; it still ends by itself."""
        self.worker.cancel([job])

    def close(self) -> None:
        """End both sessions."""
        self.worker.close()
        self.scheduler.close()

    def _submit(
        self, submit: Any, rows: Rows, slots: Any, generations: Any, stream: Any
    ) -> int | None:
        number = next(self._numbers)
        try:
            blocks = JobBlocks.of(rows.reshape(-1), [rows.size], [0], slots, generations)
            taken = submit(number, blocks, after=work_so_far(self.worker, stream))
        except Exception as error:  # noqa: BLE001  # of torch or the driver too: a miss
            log.warning("a job of %d chunks is not submitted: %s", len(rows), cause(error))
            return None
        if not taken:
            self.result(number)  # it has failed already
            return None
        return number

    def __repr__(self) -> str:
        return f"<PoolCache {self.pool.name}, {self.factor} pages a chunk, {self.worker!r}>"


def failed(result: JobResult) -> str:
    """Why a job came to nothing; empty where it did not."""
    return "" if result.status is JobStatus.OK else f"{result.status}: {result.text}"


# TODO options.py
# """The settings under `linker_extra_config`, checked before the engine starts."""

PLACE = "--unified-cache-external-linker-config: linker_extra_config"


class Options(EngineOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An engine's settings about its daemon; those of every engine are in `EngineOptions`.

    Attributes:
        chunk_tokens: tokens of a chunk where SGLang's pages have fewer; larger pages are a chunk
            each. Engines that are to share chunks need the same.
        lease: seconds for which what a lookup has found stays pinned for its request.
        layerwise: false: a request's forward pass begins when all of its load is in, and a load
            that fails is computed instead. true: it begins with the first layer, and SGLang aborts
            the requests of a load that fails.
        load_timeout: seconds in which a load must be in; the engine's scheduler waits so long for
            it, or with `layerwise` its forward pass, also while the daemon is restarted.
        store_timeout: seconds after which a store is given up; until then the tree keeps its pages.
        loan_timeout: seconds that a store waits for room in the pool.
    """

    chunk_tokens: Annotated[int, Meta(ge=1, le=4096)] = 16
    lease: Seconds = 60.0
    layerwise: bool = False
    load_timeout: Seconds = 10.0
    store_timeout: Seconds = 30.0
    loan_timeout: Seconds = 0.5


def read_options(extra: Mapping[str, Any] | None) -> Options:
    """Return the options of an engine.

    Raises:
        OptionsError: naming the key, its value and what is possible.
    """
    options = convert_options(Options, extra or {}, PLACE)
    if options.lease < 2 * options.load_timeout:  # a pin must outlast its load
        raise OptionsError(
            f"{PLACE}: lease={options.lease:g} is below twice load_timeout="
            f"{options.load_timeout:g}; raise lease, or lower load_timeout"
        )
    return options
