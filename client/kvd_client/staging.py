"""Jobs of a worker whose memory the daemon does not map: copied through staging pages.

A job is done in pieces of whole chunks. Each piece borrows a run of pages, and is a job of the host
lane between its pages and the pool:

    store   WAITING ──gather──▶ COPYING ──▶ AT_LANE ──answer──▶ ended
    load    WAITING ──────────▶ AT_LANE ──answer──▶ LOADED ──scatter──▶ COPYING ──▶ ended

The owner of a run releases it when the piece has ended: nothing reads or writes its pages then. One
thread moves pieces on. It waits for pages, for the lane and for the device; calls of the engine's
step never do, but for `wait`.

- A gather begins when the engine's work on the blocks has finished, and the lane gets the piece
  when the gather has. A scatter begins when the lane has answered and the engine's earlier work on
  the blocks has finished; the engine gets the result when the scatter has.
- A voided store reads its blocks no more, or its bytes go nowhere: the lane has not got its pieces,
  or discards them (`JobTable`).
- A load that is cancelled, or a piece of which fails, ends when no scatter of it runs: none will
  begin, and what the lane still writes are pages, which have no new owner before it has answered.
"""

import contextlib
import itertools
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any

from kvd_client.errors import InternalError, UsageError, cause, get_logger
from kvd_client.jobs import JobResult, JobTable, voided_text
from kvd_client.readiness import Readiness
from kvd_client.staged_job import RunningPiece, StagedJob
from kvd_client.staging_layout import PageRing, split_job
from kvd_client.staging_memory import BlockCopier, Copy, StagingMemory
from kvd_client.timeline import Timeline
from kvd_proto.jobs import JobBlocks
from kvd_proto.messages import JobStatus, Load, Store

PIECE_BYTES = 8 * 2**20
PIECE_IDS = 2**62  # job ids from here on are those of pieces
MAX_AT_LANE = 16  # pieces of each kind
POLL_SECONDS = 0.001  # between looks at running copies, and at numbers that have no event
IDLE_SECONDS = 1.0

_ENDED = "staging has ended; nothing is loaded or stored until memory is registered again"
_SUSPENDED = "the engine has suspended copies of its memory"

log = get_logger()


class StagedJobs:
    """The unfinished jobs of one worker. May be used by any thread.

    Args:
        staging: the registered pages.
        copier: between them and the engine's blocks.
        lane_jobs: the jobs of the lane, whose results this object takes.
        timeline: of the worker.
        readiness: readable while `take_finished` has results.
        is_registered: whether the worker is.
        writer: rank and world size of the worker.
        store_seconds: a store that has not ended after this time is voided.
    """

    def __init__(
        self,
        staging: StagingMemory,
        copier: BlockCopier,
        lane_jobs: JobTable,
        timeline: Timeline,
        readiness: Readiness,
        *,
        is_registered: Callable[[], bool],
        writer: tuple[int, int],
        store_seconds: float,
    ) -> None:
        self._staging = staging
        self._copier = copier
        self._lane_jobs = lane_jobs
        self._timeline = timeline
        self.readiness = readiness
        self._is_registered = is_registered
        layout = staging.pages.layout
        self._layout = layout
        self._writer = writer if layout.replicated else None
        self._store_seconds = store_seconds
        self._rings: dict[type[Store | Load], PageRing]
        self._rings = dict(zip((Store, Load), staging.pages.rings(), strict=True))
        pages_per_piece = max(1, PIECE_BYTES // staging.pages.page_bytes)
        self._pages_per_piece = min(pages_per_piece, self._rings[Load].size)
        self._piece_ids = itertools.count(PIECE_IDS)

        self._changed = threading.Condition()
        self._jobs: dict[int, StagedJob] = {}
        self._queues: dict[type[Store | Load], deque[StagedJob]]
        self._queues = {Store: deque(), Load: deque()}
        self._at_lane: dict[int, RunningPiece] = {}
        self._loaded: deque[RunningPiece] = deque()
        self._copying: list[RunningPiece] = []
        self._finished: list[JobResult] = []
        self._is_suspended = False
        self._has_failed = False  # the thread has ended
        self._is_closed = False
        self._is_left = False  # `close` has returned: results go to the lane's jobs

        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._wake_fd, select.POLLIN)
        self._poll.register(lane_jobs.readiness.fileno(), select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="kvd-staging", daemon=True)
        self._thread.start()

    # ------------------------------------------------------- calls of a worker

    def submit(
        self,
        kind: type[Store] | type[Load],
        *,
        is_registered: bool,
        layerwise: bool = False,
        expedited: bool = False,
        job: int,
        blocks: JobBlocks,
        after: int,
        deadline_ms: int,
    ) -> bool:
        """Queue a job, or record its failure; return whether it is queued.

        Layers are not loaded one by one: `layers_loaded` stays 0 until the job ends.

        Raises:
            UsageError: the id is in use, or too large.
        """
        del layerwise
        if job >= PIECE_IDS:
            raise UsageError(f"job_id={job}: below 2**62 is needed with staging")
        pieces = split_job(
            blocks, self._layout, self._pages_per_piece, self._writer if kind is Store else None
        )
        staged = StagedJob(
            job, kind, after, expedited, time.monotonic() + deadline_ms / 1000, pieces
        )
        with self._changed:
            if job in self._jobs:
                raise UsageError(f"job {job} has not ended; give the next one another number")
            text = _SUSPENDED if self._is_suspended else ""
            if self._has_failed or self._is_closed:
                text = _ENDED
            if not is_registered or not self._lane_jobs.has_lane:
                text = self._lane_jobs.no_lane_reason
            if text:
                self._report(JobResult(job, JobStatus.FAILED, text=text))
                return False
            self._jobs[job] = staged
            queue = self._queues[kind]
            if expedited:
                queue.appendleft(staged)
            else:
                queue.append(staged)
        self._wake()
        return True

    def layers_loaded(self, job_id: int) -> int:
        """See `Worker.layers_loaded`."""
        del job_id
        return 0

    def take_finished(self) -> list[JobResult]:
        """Return the results of jobs that have ended since the last call. Never blocks."""
        with self._changed:
            self.readiness.clear()
            finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: Iterable[int], timeout: float) -> frozenset[int]:
        """See `Worker.wait`."""
        end = time.monotonic() + timeout
        awaited = frozenset(job_ids)
        with self._changed:
            at_lane = awaited - self._jobs.keys()
            self._hasten(awaited)
        self._wake()
        with self._changed:
            self._changed.wait_for(lambda: not awaited & self._jobs.keys(), timeout)
            unfinished = awaited & self._jobs.keys()
            stores = [job for job in unfinished if self._jobs[job].kind is Store]
            if stores:
                self._void(stores, timeout)
        if stores:
            self._wake()
        # Jobs from before this registration, whose memory was exported.
        still_at_lane = self._lane_jobs.wait(at_lane, max(0.0, end - time.monotonic()))
        return unfinished - frozenset(stores) | still_at_lane

    def cancel(self, job_ids: Iterable[int]) -> None:
        """See `Worker.cancel`."""
        with self._changed:
            staged = frozenset(job_ids) & self._jobs.keys()
            for job_id in staged:
                self._stop(self._jobs[job_id], JobStatus.CANCELLED, "cancelled")
        self._lane_jobs.cancel(frozenset(job_ids) - staged)
        self._wake()

    def suspend(self, timeout: float) -> bool:
        """Stop all jobs, and let no copy touch the engine's memory until `resume`.

        Returns:
            Whether no copy touches it. False: a copy of the device has not ended in time.
        """
        end = time.monotonic() + timeout
        with self._changed:
            self._is_suspended = True
            for job in tuple(self._jobs.values()):
                self._stop(job, JobStatus.CANCELLED, _SUSPENDED)
        self._wake()
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._copying, max(0.0, end - time.monotonic())
            )

    def resume(self) -> None:
        """Take jobs again."""
        with self._changed:
            self._is_suspended = False

    def close(self, timeout: float) -> bool:
        """Stop all jobs and the thread. The lane's jobs report what has not been taken here.

        Loads that are scattered are reported when that has ended, perhaps later, all others now. A
        lane that does not answer may still use the pages, which have no other use any more.

        Returns:
            As `suspend`.
        """
        is_free = self.suspend(timeout)
        with self._changed:
            self._is_closed = True
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)
        self._thread.join(timeout)
        with self._changed:
            self._is_left = True
            finished, self._finished = self._finished, []
            self.readiness.clear()
            self._lane_jobs.forget(tuple(self._at_lane))
            self._lane_jobs.report(finished)
            self._report_all_failed("the worker has left")
        return is_free

    def abandon(self) -> None:
        """In a forked child: drop everything without taking the parent's lock."""
        self._changed = threading.Condition()
        self._jobs, self._finished, self._is_closed = {}, [], True

    def check_integrity(self) -> None:
        """Compare the pieces with the pages that have owners.

        Raises:
            InternalError: they differ.
        """
        with self._changed:
            running = [*self._at_lane.values(), *self._loaded, *self._copying]
            for kind, ring in self._rings.items():
                ring.check_integrity()
                owned = sum(piece.run.count for piece in running if piece.job.kind is kind)
                if owned != ring.in_use:
                    raise InternalError(f"pieces own {owned} pages, {ring.in_use} are in use")
            for job in self._jobs.values():
                if job.num_running != sum(piece.job is job for piece in running):
                    raise InternalError(f"job {job.job_id} has lost a piece")

    # ------------------------------------------------- called under `_changed`

    def _report(self, result: JobResult) -> None:
        if self._is_left:
            self._lane_jobs.report([result])
        else:
            self._finished.append(result)
            self.readiness.set()
        self._changed.notify_all()

    def _report_all_failed(self, text: str) -> None:
        """Report all jobs as failed, but for loads that are being scattered."""
        for job in tuple(self._jobs.values()):
            if job.kind is Store or not job.num_copying:
                del self._jobs[job.job_id]
                self._report(JobResult(job.job_id, JobStatus.FAILED, text=text))

    def _end_if_over(self, job: StagedJob) -> None:
        """Report a job that has ended."""
        if job.is_over and job in self._queues[job.kind]:
            self._queues[job.kind].remove(job)
        if job.has_ended and self._jobs.get(job.job_id) is job:
            del self._jobs[job.job_id]
            self._report(job.result())

    def _stop(self, job: StagedJob, status: JobStatus, text: str) -> None:
        """Begin no further piece or scatter of a job, and have the lane stop the others."""
        job.stop(status, text)
        at_lane = [piece.piece_id for piece in self._at_lane.values() if piece.job is job]
        if at_lane and job.kind is Store:
            self._lane_jobs.void(at_lane, text)
        elif at_lane:
            self._lane_jobs.cancel(at_lane)
        for piece in [piece for piece in self._loaded if piece.job is job]:
            self._loaded.remove(piece)
            self._end_piece(piece, None)
        self._end_if_over(job)

    def _void(self, job_ids: Collection[int], seconds: float) -> None:
        text = voided_text(job_ids, seconds)
        for job in [self._jobs[job_id] for job_id in job_ids]:
            self._stop(job, JobStatus.VOID, text)

    def _hasten(self, job_ids: frozenset[int]) -> None:
        """Do these jobs first, here and in the lane."""
        for queue in self._queues.values():
            first = [job for job in queue if job.job_id in job_ids]
            for job in reversed(first):
                job.expedited = True
                queue.remove(job)
                queue.appendleft(job)
        self._lane_jobs.hasten(
            piece.piece_id for piece in self._at_lane.values() if piece.job.job_id in job_ids
        )

    def _end_piece(self, piece: RunningPiece, result: JobResult | None) -> None:
        """Release a piece's pages; result: None if nothing of its job counts any more."""
        job = piece.job
        self._rings[job.kind].release(piece.run)
        job.num_running -= 1
        if result is not None:
            job.results.append(result)
            stale_store = job.kind is Store and result.status is JobStatus.STALE
            if not result.success and not stale_store:
                self._stop(job, result.status, result.text)
                return
        self._end_if_over(job)

    # ------------------------------------------------------------- the thread

    def _wake(self) -> None:
        with self._changed:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        self._staging.populate()
        try:
            with self._copier.opened():
                try:
                    while not self._is_closed:
                        if not self._advance():
                            self._wait_for_news()
                finally:
                    self._end_all()
        except Exception:
            log.exception("staging has failed; all jobs from now on are misses")
            self._end_all()
        self._copier.close()
        with self._changed:
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _end_all(self) -> None:
        """Report all jobs as failed, when no copy touches the engine's memory any more."""
        with self._changed:
            self._has_failed = True
        while any(not _has_ended(piece) for piece in self._copying):
            time.sleep(POLL_SECONDS)
        with self._changed:
            for piece in self._copying:
                piece.job.num_copying -= 1
            self._copying.clear()
            self._report_all_failed(_ENDED)
            self._changed.notify_all()  # of `suspend`

    def _wait_for_news(self) -> None:
        with self._changed:
            reached = self._timeline.reached
            waits = self._loaded or any(job.after > reached for job in self._queues[Store])
            seconds = POLL_SECONDS if self._copying or waits else IDLE_SECONDS
        if self._poll.poll(seconds * 1000):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)

    def _advance(self) -> bool:
        """Move pieces on; return whether there may be more to do at once.

        Loads come first. Copies start one at a time, for a copy of host memory is done at once:
        meanwhile the lane is busy, and a load waits for one gather at most.
        """
        has_moved = self._take_answers()
        has_moved |= self._end_copies()
        self._void_overdue()
        while self._begin_load():
            has_moved = True
        return self._scatter_next() or self._begin_store() or has_moved

    def _take_answers(self) -> bool:
        """Process what the lane has answered."""
        with self._changed:
            if self._is_closed:  # they may be results of another way by now
                return False
            results = self._lane_jobs.take_finished()
            for result in results:
                piece = self._at_lane.pop(result.job_id, None)
                if piece is None:
                    if result.job_id < PIECE_IDS:  # submitted before the memory was registered
                        self._report(result)
                elif piece.job.kind is Load and result.success and piece.job.failure is None:
                    piece.result = result
                    self._loaded.append(piece)
                else:
                    self._end_piece(piece, result)
        return bool(results)

    def _end_copies(self) -> bool:
        """Process copies of the device that have ended."""
        has_moved = False
        for piece in tuple(self._copying):
            try:
                if piece.copy is None or not piece.copy.is_done():
                    continue
            except Exception as error:  # noqa: BLE001  # whatever the device reports: a miss
                self._end_copy(piece, error)
            else:
                self._end_copy(piece, None)
            has_moved = True
        return has_moved

    def _end_copy(self, piece: RunningPiece, error: Exception | None) -> None:
        with self._changed:
            self._copying.remove(piece)
            piece.job.num_copying -= 1
            self._changed.notify_all()  # of `suspend`
            if error is not None:
                text = f"the copy between blocks and staging pages failed: {cause(error)}"
                self._end_piece(piece, JobResult(piece.job.job_id, JobStatus.FAILED, text=text))
            elif piece.job.kind is Load:
                self._end_piece(piece, piece.result)
            elif piece.job.failure is not None:
                self._end_piece(piece, None)
            else:
                self._send(piece)

    def _void_overdue(self) -> None:
        now = time.monotonic()
        with self._changed:
            overdue = [
                job for job in self._jobs.values() if now >= job.deadline and job.failure is None
            ]
            stores = [job.job_id for job in overdue if job.kind is Store]
            if stores:
                self._void(stores, self._store_seconds)
            for job in overdue:
                if job.kind is Load:
                    self._stop(job, JobStatus.TIMEOUT, "not loaded within its time")

    def _send(self, piece: RunningPiece) -> None:
        """Give a piece to the lane. Called under `_changed`."""
        job = piece.job
        blocks = piece.piece.staged(piece.run, self._layout.null_block)
        self._at_lane[piece.piece_id] = piece
        self._lane_jobs.submit(
            job.kind,
            is_registered=self._is_registered(),
            expedited=job.expedited,
            job=piece.piece_id,
            blocks=blocks,
            after=self._timeline.reached,
            deadline_ms=max(1, round((job.deadline - time.monotonic()) * 1000)),
        )

    def _begin(self, job: StagedJob) -> RunningPiece | None:
        """Borrow pages for a job's next piece; None: there are none. Called under `_changed`."""
        piece = job.peek()
        if piece is None:  # it has none at all
            self._end_if_over(job)
            return None
        run = self._rings[job.kind].allocate(piece.num_pages)
        if run is None:
            return None
        job.begin()
        if job.is_over:
            self._queues[job.kind].remove(job)
        return RunningPiece(job, piece, run, next(self._piece_ids))

    def _start_copying(self, piece: RunningPiece) -> None:
        """Count a piece as being copied. Called under `_changed`."""
        piece.job.num_copying += 1
        self._copying.append(piece)

    def _num_at_lane(self, kind: type[Store] | type[Load]) -> int:
        return sum(piece.job.kind is kind for piece in self._at_lane.values())

    def _begin_load(self) -> bool:
        """Give the next piece of a load to the lane; return whether there was one."""
        with self._changed:
            queue = self._queues[Load]
            if not queue or self._num_at_lane(Load) >= MAX_AT_LANE:
                return False
            job = queue[0]
            piece = self._begin(job)
            if piece is None:
                return job.is_over  # then it has no pieces, and the next job may begin
            self._send(piece)
            return True

    def _scatter_next(self) -> bool:
        """Start the scatter of one loaded piece; return whether there was one."""
        with self._changed:
            for piece in self._loaded:
                events = self._timeline.events_until(piece.job.after)
                if events is not None:
                    self._loaded.remove(piece)
                    self._start_copying(piece)
                    break
            else:
                return False
        self._copy(piece, events, self._copier.scatter)
        return True

    def _begin_store(self) -> bool:
        """Start the gather of one piece of a store; return whether there was one."""
        with self._changed:
            if self._num_at_lane(Store) >= MAX_AT_LANE:
                return False
            for job in self._queues[Store]:
                events = self._timeline.events_until(job.after)
                if events is not None:
                    break
            else:
                return False
            piece = self._begin(job)
            if piece is None:
                return job.is_over  # then it has no pieces, and the next job may begin
            self._start_copying(piece)
        self._copy(piece, events, self._copier.gather)
        return True

    def _copy(self, piece: RunningPiece, events: list[Any], copy: Callable[..., Copy]) -> None:
        """Start a copy. Called without the lock: a copy of host memory is done in the call."""
        try:
            piece.copy = copy(piece.piece.segments, piece.run.first, events)
        except Exception as error:  # noqa: BLE001  # whatever the device reports: a miss
            self._end_copy(piece, error)


def _has_ended(piece: RunningPiece) -> bool:
    try:
        return piece.copy is None or piece.copy.is_done()
    except Exception:  # noqa: BLE001  # it has failed
        return True
