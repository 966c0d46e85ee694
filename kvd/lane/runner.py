"""Runs jobs on a device: admits, starts, feeds pieces, stops, ends.

No sockets: what has ended is taken by the caller, who reports it.
"""

import heapq
import logging
import time
from collections.abc import Callable, Collection, Iterator

import numpy as np

from kvd.errors import IntegrityError, LaneError
from kvd.lane.devices.device import Device, Direction, Finished, Transfer, TransferId
from kvd.lane.jobs import VOID_TEXT, JobState, LaneJob, ReplyTo, own_slots
from kvd.lane.queue import JobQueue, Limits
from kvd.lane.workers import Worker
from kvd_proto.errors import JobShapeError
from kvd_proto.messages import Job, JobStatus, Load

_log = logging.getLogger(__name__)
_SPARE_DEADLINES = 256  # of ended jobs, before they are thrown out


class Runner:
    """All jobs of a lane.

    Args:
        device: where the bytes are moved.
        limits: per engine, of what waits.
        clock: monotonic nanoseconds.

    Attributes:
        stopping: no more jobs are taken; the loop ends when those that are here have ended.
    """

    def __init__(
        self,
        device: Device,
        limits: Limits | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.stopping = False
        self._device = device
        self._clock = clock
        self._queue: JobQueue[LaneJob] = JobQueue(limits)
        self._jobs: dict[Worker, dict[int, LaneJob]] = {}
        self._transfers: dict[TransferId, tuple[LaneJob, int]] = {}
        self._transfer_id = 0
        # A heap of numbers, which keep no ended job and none of its mappings alive.
        self._deadlines: list[tuple[int, int]] = []
        self._by_serial: dict[int, LaneJob] = {}
        self._serial = 0
        self._ended: list[LaneJob] = []
        self._last_way = Direction.STORE

    # ------------------------------------------------------------ requests

    def submit(self, worker: Worker, request: Job, reply: ReplyTo) -> None:
        """Take a job. It may end at once, as refused.

        Raises:
            JobShapeError: its blocks do not fit the worker's layout or arena, or a store names a
                slot twice.
            LaneError: the lane is stopping, the job's worker has no binding, or its number is in
                use.
        """
        if self.stopping:
            raise LaneError("the lane is stopping")
        binding = worker.binding
        if binding is None or worker.leaving:
            raise LaneError("this worker's engine is not complete: no jobs are taken")
        if self.find(worker, request.job) is not None:
            raise LaneError(f"job {request.job} of this session has not ended")
        load = isinstance(request, Load)
        request.blocks.check(worker.layout, binding.num_slots)
        chunks = request.blocks.chunks(worker.layout.blocks_per_chunk)
        own = np.ones(len(chunks.slots), dtype=np.bool_)
        if not load:
            if len(set(chunks.slots.tolist())) != len(chunks.slots):
                raise JobShapeError("a store names a slot twice")
            own = own_slots(worker, chunks.slots)
        self._serial += 1
        job = LaneJob(
            serial=self._serial,
            worker=worker,
            binding=binding,
            direction=Direction.LOAD if load else Direction.STORE,
            request=request,
            chunks=chunks,
            own=own,
            reply=reply,
            accepted_ns=self._clock(),
        )
        self._jobs.setdefault(worker, {})[request.job] = job
        self._watch_deadline(job)
        shed = self._queue.push(
            job,
            engine=binding.owner,
            worker=worker.session,
            load=load,
            nbytes=job.expected_bytes,
        )
        for victim in shed:
            self.stop(victim, JobStatus.SHED, self._queue.full_text(binding.owner))

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
        """Call `action` once all of `jobs` have ended and were reported; now if none is left."""
        left = [job for job in jobs if job.unfinished]
        if not left:
            action()
            return
        count = len(left)

        def one_less() -> None:
            nonlocal count
            count -= 1
            if not count:
                action()

        for job in left:
            job.on_end.append(one_less)

    # ------------------------------------------------------------ the work

    def turn(self) -> bool:
        """Expire, start and feed jobs, look at the device; whether anything moved on."""
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            late = self._by_serial.get(heapq.heappop(self._deadlines)[1])
            if late is not None:
                self.stop(late, JobStatus.TIMEOUT, f"not done in {late.request.deadline_ms} ms")
        moved = False
        while room := {way for way in Direction if self._device.has_room(way)}:
            job = self._queue.next(_reached(now), lambda job: job.direction in room)
            if job is None:
                break
            self._feed(job)
            moved = True
        for finished in self._device.progress():
            self._piece_done(finished)
            moved = True
        return moved

    def take_ended(self) -> list[LaneJob]:
        """Jobs that have ended since the last call, in order."""
        ended, self._ended = self._ended, []
        return ended

    # ------------------------------------------------------------- looking

    @property
    def now(self) -> int:
        """The clock's nanoseconds."""
        return self._clock()

    def find(self, worker: Worker, number: int) -> LaneJob | None:
        """A worker's unfinished job by its number."""
        return self._jobs.get(worker, {}).get(number)

    def jobs_of(self, worker: Worker) -> list[LaneJob]:
        """A worker's unfinished jobs."""
        return list(self._jobs.get(worker, {}).values())

    def __iter__(self) -> Iterator[LaneJob]:
        """All unfinished jobs."""
        return iter([job for mine in self._jobs.values() for job in mine.values()])

    def __len__(self) -> int:
        return sum(map(len, self._jobs.values()))

    @property
    def queued_jobs(self) -> int:
        """Jobs that have not started."""
        return sum(job.state is JobState.QUEUED for job in self)

    @property
    def stores_only(self) -> bool:
        """The device was last given a piece of a store: no load could move."""
        return self._last_way is Direction.STORE

    @property
    def oldest_job_ns(self) -> int:
        """How long ago the oldest job that has not started was accepted; 0 without one."""
        waiting = [job.accepted_ns for job in self if job.state is JobState.QUEUED]
        return self._clock() - min(waiting) if waiting else 0

    @property
    def bytes_in_flight(self) -> int:
        """Bytes that the device has been given and has not reported."""
        return sum(job.in_flight_bytes for job in self)

    def check_integrity(self) -> None:
        """Raise IntegrityError where jobs, queue and transfers disagree."""
        self._queue.check_integrity()
        if sum(job.in_flight for job in self) != len(self._transfers):
            raise IntegrityError(f"{self!r}: jobs and transfers in flight differ")
        for job in self:
            waits = job in self._queue
            if job.state is JobState.QUEUED and not waits:
                raise IntegrityError(f"{job!r} is queued nowhere")
            if job.state is JobState.DRAINING and (waits or not job.in_flight):
                raise IntegrityError(f"{job!r} drains nothing, or waits for a turn")

    # ------------------------------------------------------------- details

    def _watch_deadline(self, job: LaneJob) -> None:
        if len(self._deadlines) > 2 * len(self) + _SPARE_DEADLINES:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._by_serial]
            heapq.heapify(self._deadlines)
        self._by_serial[job.serial] = job
        heapq.heappush(self._deadlines, (job.deadline_ns, job.serial))

    def _feed(self, job: LaneJob) -> None:
        """Give the device the job's next piece, if it still may move."""
        if job.state is JobState.QUEUED and not self._start(job):
            return
        if job.next_piece < len(job.pieces):
            if job.void:
                self.stop(job, JobStatus.VOID, VOID_TEXT)
                return
            self._submit_piece(job)
        if job.next_piece == len(job.pieces):
            self._queue.remove(job)
            self._conclude(job)

    def _start(self, job: LaneJob) -> bool:
        refusal = job.objection()
        if refusal is None:
            try:
                job.plan(self._device.piece_bytes)
            except JobShapeError as error:
                refusal = (JobStatus.REFUSED, str(error))
        if refusal is not None:
            self.stop(job, *refusal)
            return False
        job.state = JobState.COPYING
        job.started_ns = self._clock()
        self._queue.start(job)
        return True

    def _submit_piece(self, job: LaneJob) -> None:
        copies, nbytes = job.pieces[job.next_piece]
        self._transfer_id += 1
        number = TransferId(self._transfer_id)
        base = job.binding.arena_base
        try:
            self._device.submit(
                Transfer(number, job.worker.memory, job.direction, base, copies, nbytes)
            )
        except LaneError as error:
            self.stop(job, JobStatus.FAILED, str(error))
            return
        self._transfers[number] = (job, nbytes)
        self._last_way = job.direction
        job.next_piece += 1
        job.in_flight += 1
        job.in_flight_bytes += nbytes

    def _piece_done(self, finished: Finished) -> None:
        job, submitted_bytes = self._transfers.pop(finished.id)
        job.in_flight -= 1
        job.in_flight_bytes -= submitted_bytes
        job.moved_bytes += finished.nbytes
        job.copy_ns += finished.nanoseconds
        if finished.error:
            _log.error("%s failed: %s", job.label, finished.error, extra=job.fields)
            self.stop(job, JobStatus.FAILED, finished.error)
        if job.state is JobState.DRAINING and not job.in_flight:
            job.state = JobState.ENDED
            self._settle(job)
        else:
            self._conclude(job)

    def _conclude(self, job: LaneJob) -> None:
        """End a job all of whose bytes have moved: as good, if its chunks are still its own."""
        if (
            job.state is JobState.COPYING
            and not job.in_flight
            and job.next_piece == len(job.pieces)
        ):
            job.outcome = job.objection() or (JobStatus.OK, "")
            job.state = JobState.ENDED
            self._settle(job)

    def _settle(self, job: LaneJob) -> None:
        if job.unfinished:
            return
        job.ended_ns = self._clock()
        del self._by_serial[job.serial]
        mine = self._jobs[job.worker]
        del mine[job.request.job]
        if not mine:
            del self._jobs[job.worker]
        job.pieces.clear()
        self._ended.append(job)

    def __repr__(self) -> str:
        return f"<Runner {len(self)} jobs, {len(self._transfers)} transfers in flight>"


def _reached(now: int) -> Callable[[LaneJob], bool]:
    """Whether a job may start, by one reading of each worker's timeline; notes how long it waits.

    A number that is reached between two looks would let the later one of two jobs go first.
    """
    seen: dict[Worker, int] = {}

    def reached(job: LaneJob) -> bool:
        worker = job.worker
        if worker not in seen:
            seen[worker] = worker.control.timeline
        if seen[worker] < job.request.after:
            job.late_ns = job.late_ns or now
            return False
        if job.late_ns and not job.stream_wait_ns:
            job.stream_wait_ns = now - job.late_ns
        return True

    return reached
