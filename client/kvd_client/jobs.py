"""The unfinished jobs of a worker, and the lanes that run them.

A job ends with the lane's answer, or with the lane's death, which closes its lifeline. A store can
also be voided from here: a new epoch in its word of the control page makes the lane discard what it
still copies. An answer may be lost with the connection: jobs of a lost connection end when the lane
has answered the Join of the next one.
"""

import select
import threading
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from kvd_client.errors import InternalError, UsageError, get_logger
from kvd_client.lane_link import LaneLink
from kvd_client.readiness import Readiness
from kvd_client.timeline import ControlPage
from kvd_proto.errors import ProtoError
from kvd_proto.jobs import EPOCH_WORDS, PROGRESS_WORDS, TIMELINE_WORD
from kvd_proto.messages import Cancel, Done, Error, JobStatus, Load, Message, Store, Wait

POLL_SECONDS = 0.02
HURRY_SECONDS = 0.002  # after which the lane is told to do the awaited jobs first

_LANE_ENDED = "the lane process has ended; nothing is loaded or stored until another one serves"

log = get_logger()


@dataclass(frozen=True, slots=True)
class JobResult:
    """How one job ended.

    Attributes:
        status: OK if every byte was copied; else why not. `text` says it for people.
        bytes: copied for this rank.
        seconds: spent copying, as the lane measured it.
    """

    job_id: int
    status: JobStatus
    bytes: int = 0
    seconds: float = 0.0
    text: str = ""

    @property
    def success(self) -> bool:
        """Whether every byte was copied."""
        return self.status is JobStatus.OK


@dataclass(frozen=True, slots=True)
class _RunningJob:
    link: LaneLink
    request_id: int
    word: int  # a store's own word of the control page; 0 for a load
    progress: int  # number of a load's own progress word; 0: none
    submitted_at: float

    @property
    def is_store(self) -> bool:
        """Whether it can be voided."""
        return self.word > 0


class JobTable:
    """The unfinished jobs of one worker. May be used by any thread.

    Words of the control page void stores and count loaded layers. A store is voided after
    `store_seconds`. `readiness` is readable when `take_finished` has work to do.
    """

    def __init__(self, control: ControlPage, store_seconds: float) -> None:
        self._control = control
        # Each running store has its own word, so that stores can be voided one by one.
        self._free_words = list(range(EPOCH_WORDS - 1, TIMELINE_WORD, -1))
        self._free_progress = list(range(PROGRESS_WORDS, 0, -1))
        self._store_seconds = store_seconds
        self._lock = threading.Lock()
        self._lane: LaneLink | None = None
        self._has_lane_ended = False  # there was a lane, and it has died
        self._links: list[LaneLink] = []  # the lane's, and those of earlier lanes with running jobs
        self._running: dict[int, _RunningJob] = {}
        self._finished: list[JobResult] = []
        self.readiness = Readiness()

    # ----------------------------------------------------------------- lanes

    @property
    def has_lane(self) -> bool:
        """Whether a living lane takes jobs. Polls its lifeline, so that no death goes unnoticed."""
        with self._lock:
            return self._lane is not None and not self._lane.is_dead

    @property
    def no_lane_reason(self) -> str:
        """Why no lane takes jobs, if none does."""
        return _LANE_ENDED if self._has_lane_ended else "no lane serves this worker now"

    def set_lane(self, lane: LaneLink | None) -> None:
        """Send new jobs to this lane; None: to none. Jobs of earlier lanes go on until they end."""
        with self._lock:
            self._lane = lane
            self._has_lane_ended = False
            if lane is not None:
                self._links.append(lane)
            self._receive_answers()
            self._signal_finished()

    # ------------------------------------------------------------------ jobs

    def submit(
        self,
        kind: type[Store] | type[Load],
        *,
        is_registered: bool,
        layerwise: bool = False,
        expedited: bool = False,
        **fields: Any,
    ) -> bool:
        """Send a job to the lane, or record its failure; return whether the lane has it.

        Args:
            kind: of the message.
            is_registered: whether the worker is; if not, the job fails.
            layerwise: for a load: count its layers, if a progress word is free.
            expedited: the lane does the job first.
            fields: of the message, except for a store's word and epoch.

        Raises:
            UsageError: the id is in use, or the message is too large.
        """
        job_id: int = fields["job"]
        with self._lock:
            if job_id in self._running:
                raise UsageError(f"job {job_id} has not ended; give the next one another number")
            lane = self._lane if is_registered else None
            if lane is None:
                return self._reject(_failed(job_id, self.no_lane_reason))
            word = progress = 0
            if kind is Store:
                if not self._free_words:
                    text = f"{EPOCH_WORDS - 1} stores are running already; wait for some"
                    return self._reject(JobResult(job_id, JobStatus.SHED, text=text))
                word = self._free_words[-1]
                fields |= {"word": word, "epoch": self._control.epoch(word)}
            elif layerwise and self._free_progress:
                progress = self._free_progress[-1]
                self._control.set_layers(progress, 0)
                fields["progress"] = progress
            try:
                request_id = lane.send(kind(**fields))
            except ProtoError as error:
                raise UsageError(f"job {job_id} is too large: {error}") from error
            if not request_id:
                text = (
                    _LANE_ENDED if lane.is_dead else f"the lane takes no message: {lane.send_error}"
                )
                self._receive_answers()
                return self._reject(_failed(job_id, text))
            lane.job_by_request[request_id] = job_id
            if word:
                self._free_words.pop()
            if progress:
                self._free_progress.pop()
            self._running[job_id] = _RunningJob(lane, request_id, word, progress, time.monotonic())
            if expedited:
                lane.send(Wait(jobs=(job_id,)))
            self.readiness.remind()
            return True

    def _reject(self, result: JobResult) -> bool:
        """Record the failure of a job that no lane has, and return False for `submit`."""
        self._finished.append(result)
        self._signal_finished()
        return False

    def layers_loaded(self, job_id: int) -> int:
        """See `Worker.layers_loaded`."""
        job = self._running.get(job_id)
        return self._control.layers(job.progress) if job and job.progress else 0

    def take_finished(self) -> list[JobResult]:
        """Return the results of jobs that have ended since the last call. Never blocks."""
        with self._lock:
            self.readiness.clear()
            self._receive_answers()
            self._void_overdue()
            finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: Iterable[int], timeout: float) -> frozenset[int]:
        """See `Worker.wait`."""
        now = time.monotonic()
        end = now + timeout
        # Most jobs end before a message to the lane would help.
        hurry_at: float | None = now + HURRY_SECONDS
        unfinished = frozenset(job_ids)
        while True:
            poller = select.poll()
            with self._lock:
                unfinished &= self._running.keys()
                if not unfinished:
                    return unfinished
                for link in {self._running[job].link for job in unfinished}:
                    link.watch(poller)
            left_s = max(0.0, end - now)
            # Another thread may process the answer that this one waits for: check again regularly.
            poll_seconds = POLL_SECONDS if hurry_at is None else HURRY_SECONDS
            poller.poll(min(left_s, poll_seconds) * 1000)
            now = time.monotonic()
            with self._lock:
                unfinished &= self._running.keys()
                if hurry_at is not None and now >= hurry_at:
                    self._send_to_lanes(Wait, unfinished)
                    hurry_at = None
                self._receive_answers()
                unfinished &= self._running.keys()
                if not left_s:
                    stores = [job for job in unfinished if self._running[job].is_store]
                    self._void(stores, voided_text(stores, timeout))
                self._signal_finished()
                if not left_s:
                    return unfinished & self._running.keys()

    def cancel(self, job_ids: Iterable[int]) -> None:
        """Request lanes to stop these jobs; each still ends with its answer."""
        with self._lock:
            self._send_to_lanes(Cancel, frozenset(job_ids) & self._running.keys())
            self._receive_answers()
            self._signal_finished()

    def report(self, results: Iterable[JobResult]) -> None:
        """Add results for `take_finished`."""
        with self._lock:
            self._finished += results
            self._signal_finished()

    def hasten(self, job_ids: Iterable[int]) -> None:
        """Request lanes to do these jobs first."""
        with self._lock:
            self._send_to_lanes(Wait, frozenset(job_ids) & self._running.keys())

    def void(self, job_ids: Iterable[int], text: str) -> None:
        """End these stores: what lanes still copy of them is discarded."""
        with self._lock:
            self._void(frozenset(job_ids) & self._running.keys(), text)
            self._signal_finished()

    def forget(self, job_ids: Collection[int]) -> None:
        """Drop these jobs unreported; stores become void."""
        with self._lock:
            for job_id in self._running.keys() & frozenset(job_ids):
                job = self._running.pop(job_id)
                del job.link.job_by_request[job.request_id]
                self._free_words_of(job)
            self._finished = [done for done in self._finished if done.job_id not in job_ids]

    def close(self) -> None:
        """Drop every job and lane; unfinished stores become void."""
        with self._lock:
            for job in self._running.values():
                self._free_words_of(job)
            self._clear()

    def abandon(self) -> None:
        """In a forked child: drop everything without taking the parent's lock."""
        self._lock = threading.Lock()
        self._clear()

    def __len__(self) -> int:
        return len(self._running)

    def check_integrity(self) -> None:
        """Compare the jobs with what lanes still owe, and with the words of the control page.

        Raises:
            InternalError: they differ.
        """
        with self._lock:
            pending = {
                (id(link), request_id): job_id
                for link in self._links
                for request_id, job_id in link.job_by_request.items()
            }
            jobs = self._running.items()
            if pending != {(id(job.link), job.request_id): job_id for job_id, job in jobs}:
                raise InternalError(f"{len(jobs)} jobs run, lanes owe {len(pending)} other answers")
            if self._lane is not None and self._lane not in self._links:
                raise InternalError("the answers of the present lane are not received")
            running = self._running.values()
            words = self._free_words + [job.word for job in running if job.is_store]
            progress = self._free_progress + [job.progress for job in running if job.progress]
            if sorted(words) != list(range(TIMELINE_WORD + 1, EPOCH_WORDS)):
                raise InternalError("a store's word of the control page is lost, or used twice")
            if sorted(progress) != list(range(1, PROGRESS_WORDS + 1)):
                raise InternalError("a progress word is lost, or used twice")

    # -------------------------------------------------- called under the lock

    def _receive_answers(self) -> None:
        """Process the answers of lanes, and the death of dead lanes; reopen lost connections."""
        for link in tuple(self._links):
            answers, is_dead = link.receive()
            for header, message in answers:
                job_id = link.job_by_request.pop(header.request_id, None)
                if job_id is not None:
                    self._finish(_result(job_id, message))
                for request_id in link.lost_requests(header.request_id, message):
                    text = "the connection to the lane was lost"
                    self._finish(_failed(link.job_by_request.pop(request_id), text))
            if is_dead:
                for job_id in link.job_by_request.values():
                    self._finish(_failed(job_id, _LANE_ENDED))
                link.job_by_request.clear()
                if link is self._lane:
                    self._lane, self._has_lane_ended = None, True
            elif link.is_closed and (link.job_by_request or link is self._lane):
                link.reopen()
            if not link.job_by_request and link is not self._lane:
                link.close()
                self._links.remove(link)
        if self._running or any(link.is_closed for link in self._links):
            self.readiness.remind()  # to void overdue stores, and to reopen connections

    def _finish(self, result: JobResult) -> None:
        job = self._running.pop(result.job_id, None)
        if job is not None:
            self._free_words_of(job)
        self._finished.append(result)

    def _free_words_of(self, job: _RunningJob) -> None:
        """Free a job's words of the control page; a store's new epoch voids what still runs."""
        if job.is_store:
            self._control.next_epoch(job.word)
            self._free_words.append(job.word)
        if job.progress:
            self._free_progress.append(job.progress)

    def _signal_finished(self) -> None:
        """Wake event loops if there are results to take."""
        if self._finished:
            self.readiness.set()

    def _void(self, job_ids: Collection[int], text: str) -> None:
        for job_id in job_ids:
            job = self._running[job_id]
            del job.link.job_by_request[job.request_id]
            self._finish(JobResult(job_id, JobStatus.VOID, text=text))

    def _void_overdue(self) -> None:
        oldest_allowed = time.monotonic() - self._store_seconds
        overdue = [
            job_id
            for job_id, job in self._running.items()
            if job.is_store and job.submitted_at < oldest_allowed
        ]
        self._void(overdue, voided_text(overdue, self._store_seconds))

    def _send_to_lanes(self, kind: type[Wait] | type[Cancel], job_ids: Collection[int]) -> None:
        for link in {self._running[job].link for job in job_ids}:
            link.send(kind(jobs=tuple(job for job in job_ids if self._running[job].link is link)))

    def _clear(self) -> None:
        self.readiness.close()  # before the links: a fork shares the parent's epoll
        for link in self._links:
            link.close()
        self._links = []
        self._lane = None
        self._running = {}
        self._finished = []


def voided_text(stores: Collection[int], seconds: float) -> str:
    """Log that these stores are voided, if there are any; return the text of their results."""
    if stores:
        log.warning("%d stores voided, not done within %g s", len(stores), seconds)
    return f"voided: not done within {seconds:g} s"


def _failed(job_id: int, text: str) -> JobResult:
    return JobResult(job_id, JobStatus.FAILED, text=text)


def _result(job_id: int, message: Message | None) -> JobResult:
    if isinstance(message, Done):
        seconds = message.copy_ns / 1e9
        return JobResult(job_id, message.status, message.bytes, seconds, message.text)
    return _failed(job_id, message.text if isinstance(message, Error) else "an unreadable answer")
