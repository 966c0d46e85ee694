"""The jobs of a worker that have not ended, and the lanes that they were given to.

A job ends with the lane's answer, or with the lane's death, which its lifeline
shows without doubt. Only a store can also be ended from here: a new number at its
word of the control page makes the lane discard whatever it still copies for it.
An answer may be lost with the connection: jobs of a lost connection end when the lane has
answered the Join of the next one.
"""

import select
import threading
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from kvd_client.errors import UsageError, get_logger
from kvd_client.lane_link import LaneLink
from kvd_client.memory import ControlPage
from kvd_client.readiness import Readiness
from kvd_proto.errors import ProtoError
from kvd_proto.jobs import EPOCH_WORDS, PROGRESS_WORDS, TIMELINE_WORD
from kvd_proto.messages import Cancel, Done, Error, JobStatus, Load, Message, Store, Wait

POLL_SECONDS = 0.02
HURRY_SECONDS = 0.002  # after which the lane is asked to do waited-for jobs first

_LANE_ENDED = "the lane process has ended; nothing is loaded or stored until another one serves"

log = get_logger()


@dataclass(frozen=True, slots=True)
class JobResult:
    """How one job ended.

    Attributes:
        status: OK where every byte was moved; else why not, for programs; `text` for people.
        bytes: moved by this rank.
        seconds: spent copying, as the lane measured it.
    """

    job_id: int
    status: JobStatus
    bytes: int = 0
    seconds: float = 0.0
    text: str = ""

    @property
    def success(self) -> bool:
        """Whether every byte was moved."""
        return self.status is JobStatus.OK


@dataclass(frozen=True, slots=True)
class _Running:
    link: LaneLink
    request_id: int
    word: int  # a store's own word of the control page; 0 for a load
    progress: int  # number of a load's own progress word; 0 where it has none
    submitted: float

    @property
    def is_store(self) -> bool:
        """Whether it can be voided."""
        return self.word > 0


class JobTable:
    """Every unfinished job of one worker. May be used by any thread.

    Words of the control page void stores; those that take `store_seconds` are given up.
    """

    def __init__(self, control: ControlPage, store_seconds: float) -> None:
        self._control = control
        # Every store under way has a word of its own, so that only the named ones are voided.
        self._free_words = list(range(EPOCH_WORDS - 1, TIMELINE_WORD, -1))
        self._free_progress = list(range(PROGRESS_WORDS, 0, -1))
        self._store_seconds = store_seconds
        self._lock = threading.Lock()
        self._lane: LaneLink | None = None
        self._lane_ended = False  # there was one, and it has died
        self._links: list[LaneLink] = []  # the lane, and predecessors with unanswered jobs
        self._running: dict[int, _Running] = {}
        self._finished: list[JobResult] = []
        self.readiness = Readiness()  # readable when `finished` has work to do

    # ----------------------------------------------------------------- lanes

    @property
    def has_lane(self) -> bool:
        """Whether jobs can be given to a lane; one that has died takes none, noticed or not."""
        with self._lock:
            return self._lane is not None and not self._lane.dead

    def set_lane(self, lane: LaneLink | None) -> None:
        """Give jobs to this lane from now on. Those of the one before go on until they end."""
        with self._lock:
            self._lane = lane
            self._lane_ended = False
            if lane is not None:
                self._links.append(lane)
            self._collect()
            self._tell()

    # ------------------------------------------------------------------ jobs

    def submit(
        self,
        kind: type[Store] | type[Load],
        *,
        usable: bool,
        layerwise: bool = False,
        **fields: Any,
    ) -> bool:
        """Give a job to the lane, or record its failure.

        Args:
            kind: of the message.
            usable: false where the worker is not registered.
            layerwise: of a load: its layers are to be counted, if a word is free for it.
            fields: of the message, but for a store's word and epoch.

        Raises:
            UsageError: the id is in use, or the message is too large.
        """
        job_id: int = fields["job"]
        with self._lock:
            if job_id in self._running:
                raise UsageError(f"job {job_id} has not ended; number the next one differently")
            lane = self._lane if usable else None
            if lane is None:
                text = _LANE_ENDED if self._lane_ended else "no lane serves this worker now"
                return self._reject(_failed(job_id, text))
            word = progress = 0
            if kind is Store:
                if not self._free_words:
                    text = f"{EPOCH_WORDS - 1} stores are under way already; wait for some"
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
                text = _LANE_ENDED if lane.dead else f"the lane takes no message: {lane.lack}"
                self._collect()
                return self._reject(_failed(job_id, text))
            lane.pending[request_id] = job_id
            if word:
                self._free_words.pop()
            if progress:
                self._free_progress.pop()
            running = _Running(lane, request_id, word, progress, time.monotonic())
            self._running[job_id] = running
            self.readiness.remind()
            return True

    def _reject(self, result: JobResult) -> bool:
        """Return false, as `submit` does for a job that no lane has."""
        self._finished.append(result)
        self._tell()
        return False

    def layers_loaded(self, job_id: int) -> int:
        """See `Worker.layers_loaded`."""
        running = self._running.get(job_id)
        return self._control.layers(running.progress) if running and running.progress else 0

    def finished(self) -> list[JobResult]:
        """Return what has ended since the last call. Never waits."""
        with self._lock:
            self.readiness.clear()
            self._collect()
            self._void_overdue()
            finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: Iterable[int], timeout: float) -> frozenset[int]:
        """See `Worker.wait`."""
        now = time.monotonic()
        end = now + timeout
        # Most jobs are done before the lane could be asked to hurry.
        hurry_at: float | None = now + HURRY_SECONDS
        left = frozenset(job_ids)
        while True:
            poller = select.poll()
            with self._lock:
                left &= self._running.keys()
                if not left:
                    return left
                for link in {self._running[job].link for job in left}:
                    link.watch(poller)
            seconds = max(0.0, end - now)
            # Another thread may process what this one waits for: look again now and then.
            pause = POLL_SECONDS if hurry_at is None else HURRY_SECONDS
            poller.poll(min(seconds, pause) * 1000)
            now = time.monotonic()
            with self._lock:
                left &= self._running.keys()
                if hurry_at is not None and now >= hurry_at:
                    self._tell_lanes(Wait, left)
                    hurry_at = None
                self._collect()
                left &= self._running.keys()
                if not seconds:
                    self._void([job for job in left if self._running[job].is_store], timeout)
                self._tell()
                if not seconds:
                    return left & self._running.keys()

    def cancel(self, job_ids: Iterable[int]) -> None:
        """Ask for these jobs to be stopped; they still end by themselves."""
        with self._lock:
            self._tell_lanes(Cancel, frozenset(job_ids) & self._running.keys())
            self._collect()
            self._tell()

    def close(self) -> None:
        """Forget every job and lane; stores that have not ended are void."""
        with self._lock:
            for running in self._running.values():
                self._free(running)
            self._forget()

    def abandon(self) -> None:
        """In a forked child: forget everything without taking the parent's lock."""
        self._lock = threading.Lock()
        self._forget()

    def __len__(self) -> int:
        return len(self._running)

    # ------------------------------------------------- under the lock, below

    def _collect(self) -> None:
        """Process lanes' answers, and the death of those that are dead."""
        for link in tuple(self._links):
            arrived, dead = link.receive()
            for header, message in arrived:
                job_id = link.pending.pop(header.request_id, None)
                if job_id is not None:
                    self._end(_result(job_id, message))
                for request_id in link.settled(header.request_id, message):
                    text = "the connection to the lane was lost"
                    self._end(_failed(link.pending.pop(request_id), text))
            if dead:
                for job_id in link.pending.values():
                    self._end(_failed(job_id, _LANE_ENDED))
                link.pending.clear()
                if link is self._lane:
                    self._lane, self._lane_ended = None, True
            elif link.closed and (link.pending or link is self._lane):
                link.reopen()
            if not link.pending and link is not self._lane:
                link.close()
                self._links.remove(link)
        if self._running or any(link.closed for link in self._links):
            self.readiness.remind()  # stores may be overdue, a connection is to be tried again

    def _end(self, result: JobResult) -> None:
        running = self._running.pop(result.job_id, None)
        if running is not None:
            self._free(running)
        self._finished.append(result)

    def _free(self, running: _Running) -> None:
        """Void whatever a lane may still do for a store, whose word serves the next one."""
        if running.is_store:
            self._control.next_epoch(running.word)
            self._free_words.append(running.word)
        if running.progress:
            self._free_progress.append(running.progress)

    def _tell(self) -> None:
        """Have event loops hear of results that nobody has fetched."""
        if self._finished:
            self.readiness.set()

    def _void(self, job_ids: Collection[int], seconds: float) -> None:
        if not job_ids:
            return
        log.warning("%d stores voided, not done within %g s", len(job_ids), seconds)
        for job_id in job_ids:
            running = self._running[job_id]
            del running.link.pending[running.request_id]
            text = f"voided: not done within {seconds:g} s"
            self._end(JobResult(job_id, JobStatus.VOID, text=text))

    def _void_overdue(self) -> None:
        limit = time.monotonic() - self._store_seconds
        late = [job for job, r in self._running.items() if r.is_store and r.submitted < limit]
        self._void(late, self._store_seconds)

    def _tell_lanes(self, kind: type[Wait] | type[Cancel], job_ids: Collection[int]) -> None:
        for link in {self._running[job].link for job in job_ids}:
            link.send(kind(jobs=tuple(job for job in job_ids if self._running[job].link is link)))

    def _forget(self) -> None:
        self.readiness.close()  # before the links: a fork shares the parent's epoll
        for link in self._links:
            link.close()
        self._links = []
        self._lane = None
        self._running = {}
        self._finished = []


def _failed(job_id: int, text: str) -> JobResult:
    return JobResult(job_id, JobStatus.FAILED, text=text)


def _result(job_id: int, message: Message | None) -> JobResult:
    if isinstance(message, Done):
        seconds = message.copy_ns / 1e9
        return JobResult(job_id, message.status, message.bytes, seconds, message.text)
    return _failed(job_id, message.text if isinstance(message, Error) else "an unreadable answer")
