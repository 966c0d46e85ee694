"""Runs jobs on a device: admits, starts, feeds pieces, stops, ends.

No sockets: what has ended is taken by the caller, who reports it.
"""

import logging
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator

from kvd.errors import IntegrityError, LaneError
from kvd.lane.device import NO_RUNS, CompletedTransfer, Device, Direction, Transfer
from kvd.lane.jobs import VOID_TEXT, JobState, LaneJob, needs_control_page, outside
from kvd.lane.queue import JobQueue, QueueLimits
from kvd.lane.workers import LaneWorker
from kvd_proto.errors import JobShapeError
from kvd_proto.messages import Job, JobStatus, Load

_log = logging.getLogger(__name__)


class Runner:
    """All jobs of a lane.

    Args:
        device: where the bytes are moved.
        limits: per engine, of what waits.
        clock: monotonic nanoseconds.

    Attributes:
        stopping: no more jobs are taken; the loop ends when those that are here have ended.
        last_way: of the piece that the device was given last.
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
        self._next_deadline = math.inf  # none is earlier
        self._ended: list[LaneJob] = []
        self._waiting: list[tuple[Collection[LaneJob], Callable[[], None]]] = []
        self.last_way = Direction.STORE

    # ------------------------------------------------------------ requests

    def submit(self, worker: LaneWorker, request: Job, request_id: int) -> None:
        """Take a job. It may end at once, as refused.

        Raises:
            JobShapeError: its blocks do not fit the worker's layout or arena, a store names a
                slot twice, or it needs a control page and the worker has none.
            LaneError: the lane is stopping, the job's worker has no binding, or its number is in
                use.
        """
        if self.stopping:
            raise LaneError("the lane is stopping")
        binding = worker.binding
        if binding is None or worker.leaving:
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
            slots = request.blocks.slots.tolist()
            if len(set(slots)) != len(slots):
                raise JobShapeError("a store names a slot twice")
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
        for victim in self._queue.push(job):
            self.stop(victim, JobStatus.SHED, self._queue.full_text(binding.order.owner))

    def stop(self, job: LaneJob, status: JobStatus, text: str) -> None:
        """End a job as soon as nothing of it moves any more; that may be now."""
        if job.state in (JobState.DRAINING, JobState.ENDED):
            return
        job.outcome = (status, text)
        self._queue.remove(job)
        job.state = JobState.DRAINING if job.in_flight else JobState.ENDED
        self._settle(job)

    def prioritize(self, job: LaneJob) -> None:
        """Let a job that is waited for go first."""
        self._queue.prioritize(job)

    def when_ended(self, jobs: Collection[LaneJob], action: Callable[[], None]) -> None:
        """Let `take_due` return `action` once all of `jobs` have ended."""
        self._waiting.append((jobs, action))

    # ------------------------------------------------------------ the work

    def turn(self) -> bool:
        """Expire, start and feed jobs, look at the device; whether anything moved on.

        A piece is short while others wait for its direction, so that turns come round quickly,
        and else long. What comes later waits for what the device was given before it: for as many
        bytes as that has in flight in one direction, whatever the pieces.
        """
        now = self.clock()
        if now >= self._next_deadline:
            for job in self:
                if job.deadline_ns <= now:
                    self.stop(job, JobStatus.TIMEOUT, f"not done in {job.request.deadline_ms} ms")
            open_ = (job.deadline_ns for job in self if job.deadline_ns > now)
            self._next_deadline = min(open_, default=math.inf)
        moved = bool(len(self._queue)) and self._feed_all(now)
        for finished in self._device.progress():
            self._piece_done(finished)
            moved = True
        return moved

    def take_ended(self) -> list[LaneJob]:
        """Jobs that have ended since the last call, in order."""
        ended, self._ended = self._ended, []
        return ended

    def take_due(self) -> list[Callable[[], None]]:
        """What was to wait for jobs that have all ended, and were taken before."""
        if not self._waiting:
            return []
        due, waiting = [], []
        for jobs, action in self._waiting:
            if any(job.unfinished for job in jobs):
                waiting.append((jobs, action))
            else:
                due.append(action)
        self._waiting = waiting
        return due

    # ------------------------------------------------------------- looking

    def find(self, worker: LaneWorker, numbers: Iterable[int]) -> list[LaneJob]:
        """A worker's unfinished jobs of these numbers, each once."""
        found = (self._jobs.get((worker, number)) for number in dict.fromkeys(numbers))
        return [job for job in found if job is not None]

    def jobs_of(self, worker: LaneWorker) -> list[LaneJob]:
        """A worker's unfinished jobs."""
        return [job for job in self if job.worker is worker]

    def __iter__(self) -> Iterator[LaneJob]:
        """All unfinished jobs."""
        return iter(list(self._jobs.values()))

    def __len__(self) -> int:
        return len(self._jobs)

    def figures(self) -> dict[str, int]:
        """Jobs that have not started, for how long the oldest waits, bytes that the device has."""
        waiting = [job.accepted_ns for job in self if job.state is JobState.QUEUED]
        now = self.clock()
        return {
            "queued_jobs": len(waiting),
            "oldest_job_ns": now - min(waiting, default=now),
            "bytes_in_flight": sum(job.in_flight_bytes for job in self),
        }

    def check_integrity(self) -> None:
        """Raise IntegrityError where jobs, queue and transfers disagree."""
        self._queue.check_integrity()
        if sum(job.in_flight for job in self) != self._device.in_flight:
            raise IntegrityError(f"{self!r}: jobs and transfers in flight differ")
        queued = set(self._queue)
        for job in self:
            waits = job in queued
            if job.state is JobState.QUEUED and not waits:
                raise IntegrityError(f"{job!r} is queued nowhere")
            if job.state is JobState.DRAINING and (waits or not job.in_flight):
                raise IntegrityError(f"{job!r} drains nothing, or waits for a turn")

    # ------------------------------------------------------------- details

    def _feed_all(self, now: int) -> bool:
        """Give the device what it has room for; whether that was anything."""
        queue, has_room, reached = self._queue, self._device.has_room, _reached(now)
        fed = False
        while len(queue):
            loads, stores = has_room(Direction.LOAD), has_room(Direction.STORE)
            head = queue.next(reached, loads=loads, stores=stores)
            if head is None:
                break
            self._feed(head)
            fed = True
        return fed

    def _feed(self, job: LaneJob) -> None:
        """Give the device the job's next piece, if it still may move."""
        if job.state is JobState.QUEUED and not self._start(job):
            return
        if not job.all_given:
            if job.void:
                self.stop(job, JobStatus.VOID, VOID_TEXT)
                return
            self._submit_piece(job)
        if job.all_given:
            self._queue.remove(job)
            self._conclude(job)

    def _start(self, job: LaneJob) -> bool:
        job.leave_out_lost()
        refusal = job.objection() or outside(job, self._device)
        if refusal is None:
            try:
                job.plan(self._device)
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

    def _submit_piece(self, job: LaneJob) -> None:
        device, way = self._device, job.direction
        end, nbytes = job.moves.piece(job.given, device.bulk_bytes[way])
        short = device.piece_bytes[way]
        if nbytes > short and (job.layer_ends or self._queue.is_contended(job)):
            end, nbytes = job.moves.piece(job.given, short)
        try:
            device.submit(Transfer(job, job.worker.memory, way, job.moves, job.given, end, nbytes))
        except LaneError as error:
            self.stop(job, JobStatus.FAILED, str(error))
            return
        self.last_way = way
        job.given = end
        job.in_flight += 1
        job.in_flight_bytes += nbytes

    def _piece_done(self, finished: CompletedTransfer) -> None:
        job: LaneJob = finished.transfer.job
        job.in_flight -= 1
        job.in_flight_bytes -= finished.transfer.nbytes
        job.moved_bytes += finished.nbytes
        job.copy_ns += finished.nanoseconds
        if finished.error:
            fields = {**job.worker.identity.fields, "job": job.request.job}
            _log.error("%r failed: %s", job, finished.error, extra=fields)
            self.stop(job, JobStatus.FAILED, finished.error)
        elif job.layer_ends:
            self._tell_layers(job)
        if job.state is JobState.DRAINING and not job.in_flight:
            job.state = JobState.ENDED
            self._settle(job)
        else:
            self._conclude(job)

    @staticmethod
    def _tell_layers(job: LaneJob) -> None:
        """Tell the worker of layers that are in, while the chunks are the job's own."""
        arrived = bisect_right(job.layer_ends, job.moved_bytes)
        if job.state is JobState.COPYING and arrived > job.layers_told and job.objection() is None:
            job.layers_told = arrived
            job.worker.control.set_layers(job.progress_word, arrived)

    def _conclude(self, job: LaneJob) -> None:
        """End a job all of whose bytes have moved: as good, if its chunks are still its own."""
        if job.state is JobState.COPYING and not job.in_flight and job.all_given:
            job.outcome = job.objection() or (JobStatus.OK, "")
            job.state = JobState.ENDED
            self._settle(job)

    def _settle(self, job: LaneJob) -> None:
        if job.unfinished:
            return
        job.ended_ns = self.clock()
        del self._jobs[job.worker, job.request.job]
        job.moves = NO_RUNS  # the numbers of many runs are much memory
        self._ended.append(job)

    def __repr__(self) -> str:
        return f"<Runner {len(self)} jobs, {self._device.in_flight} transfers in flight>"


def _reached(now: int) -> Callable[[LaneJob], bool]:
    """Whether a job may start, by one reading of each worker's timeline; notes how long it waits.

    A number that is reached between two looks would let the later one of two jobs go first. A store
    waits for the broker, too.
    """
    seen: dict[LaneWorker, int] = {}

    def reached(job: LaneJob) -> bool:
        worker = job.worker
        if worker not in seen:
            seen[worker] = worker.control.timeline
        if seen[worker] < job.request.after:
            job.late_ns = job.late_ns or now
            return False
        if job.late_ns and not job.stream_wait_ns:
            job.stream_wait_ns = now - job.late_ns
        return not job.awaits_broker()

    return reached
