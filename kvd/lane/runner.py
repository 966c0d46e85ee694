"""All jobs of a lane: it admits them, starts them, submits their transfers, and ends them.

No sockets: the caller takes the jobs that have ended, and reports them.
"""

import logging
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator

from kvd.errors import IntegrityError, LaneError
from kvd.lane.device import NO_RUNS, CompletedTransfer, Device, Direction, Transfer
from kvd.lane.jobs import (
    VOID_TEXT,
    JobState,
    LaneJob,
    check_pinned,
    chunks_of_rank,
    needs_control_page,
    select,
)
from kvd.lane.queue import JobQueue, QueueLimits
from kvd.lane.workers import LaneWorker
from kvd_proto.errors import JobShapeError
from kvd_proto.messages import Job, JobStatus, Load

_log = logging.getLogger(__name__)


class Runner:
    """All jobs of a lane. `limits` are of each engine's queue.

    Attributes:
        clock: monotonic nanoseconds.
        stopping: no more jobs are accepted; the loop ends once the present ones have ended.
        last_direction: of the last transfer submitted.
    """

    def __init__(
        self,
        device: Device,
        limits: QueueLimits | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.stopping = False
        self._device = device
        self.clock = clock
        self._queue: JobQueue[LaneJob] = JobQueue(limits)
        self._jobs: dict[tuple[LaneWorker, int], LaneJob] = {}
        self._next_deadline = math.inf  # a lower bound
        self._ended: list[LaneJob] = []
        self._callbacks: list[tuple[Collection[LaneJob], Callable[[], None]]] = []
        self.last_direction = Direction.STORE

    # ------------------------------------------------------------ requests

    def submit(self, worker: LaneWorker, request: Job, request_id: int) -> None:
        """Accept a job. It may end at once.

        Raises:
            JobShapeError: its blocks do not fit the worker's layout or arena, a store names a
                slot twice or a chunk that has had its store, or it needs a control page and the
                worker has none.
            LaneError: the lane is stopping, the worker has no binding, or the job's number is in
                use.
        """
        if self.stopping:
            raise LaneError("the lane is stopping")
        binding = worker.binding
        if binding is None or worker.is_leaving:
            raise LaneError("this worker's engine is not complete: no jobs are taken")
        if (worker, request.job) in self._jobs:
            raise LaneError(f"job {request.job} of this session has not ended")
        if not worker.has_control_page and needs_control_page(request):
            raise JobShapeError(
                "this worker registered without a control page: its jobs have after, word, epoch"
                " and progress 0; register with one to use them"
            )
        load = isinstance(request, Load)
        request.blocks.check(worker.layout, binding.order.num_slots)
        if not load:
            slots, generations = request.blocks.slots.array(), request.blocks.generations.array()
            if len(set(slots)) != len(slots):
                raise JobShapeError("a store names a slot twice")
            own_indices = chunks_of_rank(worker, slots)
            binding.accepted_stores.accept(
                select(slots, own_indices), select(generations, own_indices)
            )
        job = LaneJob(
            engine=binding.order.owner,
            worker=worker,
            load=load,
            nbytes=worker.expander.listed_bytes(request.blocks),
            binding=binding,
            request=request,
            request_id=request_id,
            accepted_ns=self.clock(),
        )
        self._jobs[worker, request.job] = job
        self._next_deadline = min(self._next_deadline, job.deadline_ns)
        for shed_job in self._queue.push(job):
            self.stop(shed_job, JobStatus.SHED, self._queue.full_text(binding.order.owner))

    def stop(self, job: LaneJob, status: JobStatus, text: str) -> None:
        """End a job once nothing of it moves any more, which may be now."""
        if job.state in (JobState.DRAINING, JobState.ENDED):
            return
        job.outcome = (status, text)
        self._queue.remove(job)
        job.state = JobState.DRAINING if job.transfers_in_flight else JobState.ENDED
        self._retire_if_ended(job)

    def prioritize(self, job: LaneJob) -> None:
        """Put a job that a worker waits for before others."""
        self._queue.prioritize(job)

    def when_ended(self, jobs: Collection[LaneJob], callback: Callable[[], None]) -> None:
        """Have `take_due_callbacks` return `callback` once all of `jobs` have ended."""
        self._callbacks.append((jobs, callback))

    # ------------------------------------------------------------ work

    def run_once(self) -> bool:
        """Time out, start and submit jobs, then poll the device; return whether anything moved on.

        A transfer is short while other jobs wait for its direction, so that turns come round
        quickly, and long otherwise. The device's bytes in flight, not the size of transfers, bound
        how long a new job waits.
        """
        now = self.clock()
        if now >= self._next_deadline:
            for job in self:
                if job.deadline_ns <= now:
                    self.stop(job, JobStatus.TIMEOUT, f"not done in {job.request.deadline_ms} ms")
            deadlines = (job.deadline_ns for job in self if job.deadline_ns > now)
            self._next_deadline = min(deadlines, default=math.inf)
        moved = bool(len(self._queue)) and self._submit_transfers(now)
        for completed in self._device.progress():
            self._complete_transfer(completed)
            moved = True
        return moved

    def take_ended(self) -> list[LaneJob]:
        """Return the jobs that have ended since the last call, in order."""
        ended, self._ended = self._ended, []
        return ended

    def take_due_callbacks(self) -> list[Callable[[], None]]:
        """Return callbacks of `when_ended` whose jobs have all ended."""
        if not self._callbacks:
            return []
        due_callbacks, pending = [], []
        for jobs, callback in self._callbacks:
            if any(job.unfinished for job in jobs):
                pending.append((jobs, callback))
            else:
                due_callbacks.append(callback)
        self._callbacks = pending
        return due_callbacks

    # ------------------------------------------------------------ queries

    def find_jobs(self, worker: LaneWorker, numbers: Iterable[int]) -> list[LaneJob]:
        """Return a worker's unfinished jobs of these numbers, each once."""
        jobs = (self._jobs.get((worker, number)) for number in dict.fromkeys(numbers))
        return [job for job in jobs if job is not None]

    def jobs_of(self, worker: LaneWorker) -> list[LaneJob]:
        """Return a worker's unfinished jobs."""
        return [job for job in self if job.worker is worker]

    def __iter__(self) -> Iterator[LaneJob]:
        """Iterate over all unfinished jobs."""
        return iter(list(self._jobs.values()))

    def __len__(self) -> int:
        return len(self._jobs)

    def gauges(self) -> dict[str, int]:
        """Return the number of queued jobs, the age of the oldest, and the bytes in flight."""
        accepted = [job.accepted_ns for job in self if job.state is JobState.QUEUED]
        now = self.clock()
        return {
            "queued_jobs": len(accepted),
            "oldest_job_ns": now - min(accepted, default=now),
            "bytes_in_flight": sum(job.bytes_in_flight for job in self),
        }

    def check_integrity(self) -> None:
        """Raise IntegrityError if jobs, queue and transfers disagree."""
        self._queue.check_integrity()
        if sum(job.transfers_in_flight for job in self) != self._device.in_flight:
            raise IntegrityError(f"{len(self)} jobs and the device differ in transfers in flight")
        queued = set(self._queue)
        for job in self:
            is_queued = job in queued
            if job.state is JobState.QUEUED and not is_queued:
                raise IntegrityError(f"{job!r} is queued nowhere")
            if job.state is JobState.DRAINING and (is_queued or not job.transfers_in_flight):
                raise IntegrityError(f"{job!r} drains nothing, or waits for a turn")

    # ------------------------------------------------------------ details

    def _submit_transfers(self, now: int) -> bool:
        """Submit transfers while the device has room; return whether there were any."""
        queue, has_room, may_start = self._queue, self._device.has_room, _start_check(now)
        submitted = False
        while len(queue):
            loads, stores = has_room(Direction.LOAD), has_room(Direction.STORE)
            job = queue.next(may_start, loads=loads, stores=stores)
            if job is None:
                break
            self._advance(job)
            submitted = True
        return submitted

    def _advance(self, job: LaneJob) -> None:
        """Start a queued job, then submit its next transfer; stop the job if it may not move."""
        if job.state is JobState.QUEUED and not self._start(job):
            return
        if not job.all_submitted:
            if job.is_void:
                self.stop(job, JobStatus.VOID, VOID_TEXT)
                return
            self._submit_transfer(job)
        if job.all_submitted:
            self._queue.remove(job)
            self._complete_if_moved(job)

    def _start(self, job: LaneJob) -> bool:
        """Check the job's slots and prepare its runs; stop it and return False if either fails."""
        job.drop_lost_chunks()
        refusal = job.check_slots() or check_pinned(job, self._device)
        if refusal is None:
            try:
                job.prepare(self._device)
            except JobShapeError as error:
                refusal = (JobStatus.REFUSED, str(error))
            except LaneError as error:
                refusal = (JobStatus.FAILED, str(error))
        if refusal is not None:
            self.stop(job, *refusal)
            return False
        job.state = JobState.COPYING
        job.started_ns = self.clock()
        self._queue.start(job)
        return True

    def _submit_transfer(self, job: LaneJob) -> None:
        device, direction, begin = self._device, job.direction, job.num_submitted
        end, nbytes = job.runs.next_piece(begin, device.bulk_bytes[direction])
        short_bytes = device.piece_bytes[direction]
        if nbytes > short_bytes and (job.layer_ends or self._queue.is_contended(job)):
            end, nbytes = job.runs.next_piece(begin, short_bytes)
        memory = job.worker.memory
        try:
            device.submit(Transfer(job, memory, direction, job.runs, begin, end, nbytes))
        except LaneError as error:
            self.stop(job, JobStatus.FAILED, str(error))
            return
        self._queue.count_moved(job, nbytes)
        self.last_direction = direction
        job.num_submitted = end
        job.transfers_in_flight += 1
        job.bytes_in_flight += nbytes

    def _complete_transfer(self, completed: CompletedTransfer) -> None:
        """Count a transfer that has ended; report layers, or end the job if that was its last."""
        job: LaneJob = completed.transfer.job
        job.transfers_in_flight -= 1
        job.bytes_in_flight -= completed.transfer.nbytes
        job.moved_bytes += completed.arrived_bytes
        job.copy_ns += completed.nanoseconds
        if completed.error:
            fields = {**job.worker.identity.fields, "job": job.request.job}
            _log.error("%r failed: %s", job, completed.error, extra=fields)
            self.stop(job, JobStatus.FAILED, completed.error)
        elif job.layer_ends:
            self._report_layers(job)
        if job.state is JobState.DRAINING and not job.transfers_in_flight:
            job.state = JobState.ENDED
            self._retire_if_ended(job)
        else:
            self._complete_if_moved(job)

    @staticmethod
    def _report_layers(job: LaneJob) -> None:
        """Write to the control page which layers have arrived, if the slots are still valid."""
        num_layers = bisect_right(job.layer_ends, job.moved_bytes)
        if (
            job.state is JobState.COPYING
            and num_layers > job.num_layers_reported
            and job.check_slots() is None
        ):
            job.num_layers_reported = num_layers
            job.worker.control.set_layers(job.progress_word, num_layers)

    def _complete_if_moved(self, job: LaneJob) -> None:
        """End a job whose bytes have all moved: OK if its slots are still valid."""
        if job.state is JobState.COPYING and not job.transfers_in_flight and job.all_submitted:
            job.outcome = job.check_slots() or (JobStatus.OK, "")
            job.state = JobState.ENDED
            self._retire_if_ended(job)

    def _retire_if_ended(self, job: LaneJob) -> None:
        if job.unfinished:
            return
        job.ended_ns = self.clock()
        del self._jobs[job.worker, job.request.job]
        job.runs = NO_RUNS  # many runs take much memory
        self._ended.append(job)


def _start_check(now: int) -> Callable[[LaneJob], bool]:
    """Return a function that says whether a job may start; it records how long the job waits.

    Each job waits for its worker's timeline, a store for the broker as well. The function reads a
    timeline once: if a number were reached between two readings, the later of two jobs could start
    first.
    """
    timelines: dict[LaneWorker, int] = {}

    def may_start(job: LaneJob) -> bool:
        worker = job.worker
        if worker not in timelines:
            timelines[worker] = worker.control.timeline
        if timelines[worker] < job.request.after:
            job.late_since_ns = job.late_since_ns or now
            return False
        if job.late_since_ns and not job.stream_wait_ns:
            job.stream_wait_ns = now - job.late_since_ns
        return not job.awaits_broker()

    return may_start
