"""The order of jobs: a pure data structure, without clocks, sockets or memory.

In a lane, loads that a worker waits for come first: its engine stands still. Then come stores that
a worker waits for, and other loads; then the other stores. Engines take turns, piece by piece:
after a piece of one engine's job come the other engines, so an engine that waits for all its stores
delays only its own loads. Within an engine, stores that are waited for come before loads; otherwise
the queue is first in, first out, with two exceptions:

- A worker whose timeline is behind does not delay the engine's other workers. Its own jobs of one
  urgency and direction do wait for each other, since a timeline only grows.
- Loads and stores do not delay each other, since the device may have room for one of the two only.

So only jobs of one worker, urgency and direction start in the order of their arrival.

Limits, per engine: the number and the bytes of jobs that have not started. Above them the oldest
store that is not waited for is shed. A load is refused only if the loads alone fill the queue. A
job that is alone in its engine's queue is always accepted, so no job is too large.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Generic, TypeAlias, TypeVar

from kvd.errors import IntegrityError


class Urgency(IntEnum):
    """Urgency of jobs, the most urgent first."""

    AWAITED_LOAD = 0
    AWAITED_STORE = 1
    LOAD = 2
    STORE = 3


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Limits of one engine's jobs that have not started."""

    jobs: int = 4096
    nbytes: int = 64 * 2**30


@dataclass(eq=False, slots=True, kw_only=True)
class QueuedJob:
    """A job as the queue knows it. Only the queue writes `urgency`, `order` and `started`.

    `nbytes` counts against the engine's limit; `order` numbers jobs as they arrive.
    """

    engine: Hashable
    worker: Hashable
    load: bool
    nbytes: int
    urgency: Urgency = Urgency.STORE
    order: int = -1
    started: bool = False


J = TypeVar("J", bound=QueuedJob)
_Line = OrderedDict[J, None]
_LineKey: TypeAlias = tuple[Hashable, bool]
"""A worker, and whether the line is of its loads or of its stores."""
_CLASSES = ((Urgency.AWAITED_LOAD,), (Urgency.AWAITED_STORE, Urgency.LOAD), (Urgency.STORE,))
"""Priority classes; within one, engines take turns."""
_CLASS_OF = {urgency: number for number, members in enumerate(_CLASSES) for urgency in members}


@dataclass(slots=True)
class _EngineQueue(Generic[J]):
    """One engine's jobs, in lines by urgency, worker and direction.

    The counts are of jobs that have not started.
    """

    lines: tuple[dict[_LineKey, _Line[J]], ...] = field(default_factory=lambda: ({}, {}, {}, {}))
    num_jobs: int = 0
    nbytes: int = 0
    num_loads: int = 0
    load_bytes: int = 0

    def count(self, job: J, sign: int) -> None:
        self.num_jobs += sign
        self.nbytes += sign * job.nbytes
        if job.load:
            self.num_loads += sign
            self.load_bytes += sign * job.nbytes

    def heads(self, urgency: Urgency, loads: bool, stores: bool) -> list[J]:
        """Return the first job of each line of these directions, the oldest first."""
        heads = [
            next(iter(line))
            for (_, load), line in self.lines[urgency].items()
            if (loads if load else stores)
        ]
        if len(heads) > 1:
            heads.sort(key=_by_order)
        return heads

    def has_jobs(self, load: bool, above: Urgency | None = None) -> bool:
        """Return whether there is a load (or store), more urgent than `above` if that is given."""
        for lines in self.lines[:above]:
            for _, line_load in lines:
                if line_load == load:
                    return True
        return False

    def oldest_store(self) -> J | None:
        """Return the oldest store that is not waited for and has not started."""
        lines = self.lines[Urgency.STORE].values()
        heads = (next((job for job in line if not job.started), None) for line in lines)
        return min((job for job in heads if job is not None), key=_by_order, default=None)

    def has_class(self, number: int) -> bool:
        """Return whether there are jobs of a priority class."""
        return any(self.lines[urgency] for urgency in _CLASSES[number])


class JobQueue(Generic[J]):
    """Jobs in the order in which their pieces are to be moved; a job stays until `remove`."""

    def __init__(self, limits: QueueLimits | None = None) -> None:
        self._limits = limits or QueueLimits()
        self._jobs: set[J] = set()
        self._engines: dict[Hashable, _EngineQueue[J]] = {}
        self._turns: tuple[OrderedDict[Hashable, None], ...] = tuple(
            OrderedDict() for _ in _CLASSES
        )
        self._next_order = 0

    def push(self, job: J) -> list[J]:
        """Queue a job; return the jobs shed for it, which may be `job` itself.

        Shed jobs are not in the queue. A job may be pushed once.
        """
        engine = self._engines.setdefault(job.engine, _EngineQueue())
        load_bytes = engine.load_bytes + job.nbytes
        if job.load and engine.num_loads and self._exceeds(engine.num_loads + 1, load_bytes):
            return [job]
        job.urgency = Urgency.LOAD if job.load else Urgency.STORE
        job.order = self._next_order
        self._next_order += 1
        self._jobs.add(job)
        engine.count(job, 1)
        self._insert(job)
        shed: list[J] = []
        while engine.num_jobs > 1 and self._exceeds(engine.num_jobs, engine.nbytes):
            oldest = engine.oldest_store()
            if oldest is None:
                break
            self.remove(oldest)
            shed.append(oldest)
        return shed

    def next(
        self, may_start: Callable[[J], bool], *, loads: bool = True, stores: bool = True
    ) -> J | None:
        """Return the job whose next transfer is submitted now; None if no job may move.

        The job's engine takes its next turn last.

        Args:
            may_start: whether a job may start; called at most once per worker, urgency and
                direction.
            loads: whether the device has room for a load's transfer.
            stores: whether the device has room for a store's transfer.
        """
        for urgencies, turns in zip(_CLASSES, self._turns, strict=True):
            for number in turns:
                engine = self._engines[number]
                for urgency in urgencies:
                    if not engine.lines[urgency]:
                        continue
                    for job in engine.heads(urgency, loads, stores):
                        if job.started or may_start(job):
                            turns.move_to_end(number)
                            return job
        return None

    def is_contended(self, job: J) -> bool:
        """Return whether other jobs wait for the direction of this queued job.

        Jobs of other engines count, and more urgent ones of its own engine.
        """
        for number, engine in self._engines.items():
            if engine.has_jobs(job.load, job.urgency if number == job.engine else None):
                return True
        return False

    def start(self, job: J) -> None:
        """Mark a job as started: it no longer counts against the limits, and is never shed."""
        if not job.started:
            job.started = True
            self._engines[job.engine].count(job, -1)

    def prioritize(self, job: J) -> None:
        """Put a load that a worker waits for before all jobs but such loads.

        A store that is waited for comes before its engine's other jobs, except such loads.
        """
        urgency = Urgency.AWAITED_LOAD if job.load else Urgency.AWAITED_STORE
        if job in self._jobs and job.urgency is not urgency:
            self._unlink(job)
            job.urgency = urgency
            self._insert(job)

    def remove(self, job: J) -> None:
        """Remove a job that has ended or needs no more turns; ignore an unknown job."""
        if job not in self._jobs:
            return
        self._jobs.remove(job)
        self._unlink(job)
        engine = self._engines[job.engine]
        if not job.started:
            engine.count(job, -1)
        if not any(engine.lines):
            del self._engines[job.engine]

    def full_text(self, engine: Hashable) -> str:
        """Return the error text of a job that was shed."""
        queue = self._engines.get(engine) or _EngineQueue[J]()
        return (
            f"the engine's queue is full: {queue.num_jobs} jobs of {queue.nbytes} bytes wait; the"
            f" limits are max_queued_jobs = {self._limits.jobs} and max_queued_bytes ="
            f" {self._limits.nbytes}, and stores go first"
        )

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[J]:
        return iter(self._jobs)

    def check_integrity(self) -> None:
        """Compare every count and index with the jobs.

        Raises:
            IntegrityError: they differ.
        """
        for number, engine in self._engines.items():
            jobs = {job for job in self._jobs if job.engine == number}
            recount = _EngineQueue[J](engine.lines)
            for job in jobs:
                recount.count(job, 0 if job.started else 1)
            if recount != engine:
                raise IntegrityError(f"engine {number} is counted as {engine}, it has {recount}")
            listed = {
                job
                for urgency, lines in zip(Urgency, engine.lines, strict=True)
                for key, line in lines.items()
                for job in line
                if (job.urgency, _line_key(job)) == (urgency, key)
            }
            if not jobs or listed != jobs:
                raise IntegrityError(f"the queue lists other jobs of engine {number} than it has")
        if {job.engine for job in self._jobs} - self._engines.keys():
            raise IntegrityError("the queue has jobs of an engine that it does not list")
        for number, turns in enumerate(self._turns):
            if set(turns) != {e for e, queue in self._engines.items() if queue.has_class(number)}:
                raise IntegrityError(f"the engines {list(turns)} take turns in class {number}")

    def _exceeds(self, num_jobs: int, nbytes: int) -> bool:
        return num_jobs > self._limits.jobs or nbytes > self._limits.nbytes

    def _insert(self, job: J) -> None:
        self._turns[_CLASS_OF[job.urgency]].setdefault(job.engine)
        lines = self._engines[job.engine].lines[job.urgency]
        line = lines.setdefault(_line_key(job), OrderedDict())
        # A job that is prioritized late may be older than those prioritized before it.
        younger: list[J] = []
        if line and next(reversed(line)).order > job.order:
            younger = [other for other in line if other.order > job.order]
        line[job] = None
        for other in younger:
            line.move_to_end(other)

    def _unlink(self, job: J) -> None:
        engine, number = self._engines[job.engine], _CLASS_OF[job.urgency]
        lines, key = engine.lines[job.urgency], _line_key(job)
        line = lines[key]
        del line[job]
        if not line:
            del lines[key]
        if not engine.has_class(number):
            del self._turns[number][job.engine]


def _line_key(job: QueuedJob) -> _LineKey:
    return job.worker, job.load


def _by_order(job: QueuedJob) -> int:
    return job.order
