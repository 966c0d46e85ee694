"""The order of jobs: a pure data structure, without clocks, sockets or memory.

1. **Urgency.** Loads that a worker waits for come first: its engine stands still. Then come stores
   that a worker waits for and other loads, which share by bytes, as much for each engine. The other
   stores come last.
2. **Floor.** Nothing starves: an urgency's next piece is due once the others have moved
   `FLOOR_PART - 1` times the bytes of its last one, and then comes before more urgent jobs. So each
   gets at least 1 / `FLOOR_PART` of the bytes while it has jobs that may move, and loads that are
   waited for keep the rest. Unused turns are not saved.
3. **Engines** of one urgency share by bytes, however large their pieces are and however many jobs
   they have (start-time fair queueing): next is the engine that has moved the fewest bytes. An
   engine that had nothing to move starts level with the one that moved last.
4. **Within an engine and urgency** the queue is first in, first out, but a worker whose timeline is
   behind does not delay the engine's other workers. Its own jobs of one urgency do wait for each
   other, since a timeline only grows. So only jobs of one worker and urgency start in the order of
   their arrival.

The device may have room for loads or stores only: then the other direction's urgencies neither
delay a job nor come nearer to their floor.

Limits, per engine: the number and the bytes of jobs that have not started. Above them the oldest
store that is not waited for is shed. A load is refused only if the loads alone fill the queue. A
job that is alone in its engine's queue is always accepted, so no job is too large.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import product
from typing import Generic, TypeAlias, TypeVar

from kvd.errors import IntegrityError

FLOOR_PART = 24
"""Three urgencies yield to loads that are waited for, which so keep seven eighths at least."""


class Urgency(IntEnum):
    """Urgency of jobs, the most urgent first."""

    AWAITED_LOAD = 0
    AWAITED_STORE = 1
    LOAD = 2
    STORE = 3


_LOADS = (Urgency.AWAITED_LOAD, Urgency.LOAD)
_STORES = (Urgency.AWAITED_STORE, Urgency.STORE)
_LOADS_AHEAD = (*_LOADS, *_STORES)
_WITH_ROOM = {
    (loads, stores, stores_lead): tuple(
        urgency
        for urgency in (_LOADS_AHEAD if stores_lead else Urgency)
        if (loads if urgency in _LOADS else stores)
    )
    for loads, stores, stores_lead in product((False, True), repeat=3)
}
"""Urgencies that have room, the most urgent first: by whether loads have room, stores have, and
stores that are waited for are ahead of loads that are not."""


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
_Line: TypeAlias = OrderedDict[J, None]


@dataclass(slots=True)
class _EngineQueue(Generic[J]):
    """One engine's jobs, in lines by urgency and worker.

    The counts are of jobs that have not started.
    """

    lines: tuple[dict[Hashable, _Line[J]], ...] = field(
        default_factory=lambda: tuple({} for _ in Urgency)
    )
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

    def heads(self, urgency: Urgency) -> list[J]:
        """Return the first job of each line, the oldest first."""
        heads = [next(iter(line)) for line in self.lines[urgency].values()]
        if len(heads) > 1:
            heads.sort(key=_by_order)
        return heads

    def oldest_store(self) -> J | None:
        """Return the oldest store that is not waited for and has not started."""
        lines = self.lines[Urgency.STORE].values()
        heads = (next((job for job in line if not job.started), None) for line in lines)
        return min((job for job in heads if job is not None), key=_by_order, default=None)


class _Turns:
    """The turns of the engines that have jobs of one urgency, by bytes.

    An engine's tag is the position, in bytes, at which its next piece begins. `clock` is the tag of
    the piece that moved last; engines behind it had nothing to move, and lose that lead.
    """

    def __init__(self) -> None:
        self.engines: dict[Hashable, None] = {}
        self._tags: dict[Hashable, int] = {}  # those above `clock`, also of engines without jobs
        self._clock = 0

    def order(self) -> list[Hashable]:
        """Return the engines with jobs, the next one first."""
        if len(self.engines) < 2:  # nothing to sort
            return list(self.engines)
        return sorted(self.engines, key=self._tag)

    def count(self, engine: Hashable, nbytes: int) -> None:
        """Count a piece that an engine moves."""
        self._clock = self._tag(engine)
        self._tags = {other: tag for other, tag in self._tags.items() if tag > self._clock}
        self._tags[engine] = self._clock + nbytes

    def _tag(self, engine: Hashable) -> int:
        return self._tags.get(engine, self._clock)


class JobQueue(Generic[J]):
    """Jobs in the order in which their pieces are to be moved; a job stays until `remove`."""

    def __init__(self, limits: QueueLimits | None = None) -> None:
        self._limits = limits or QueueLimits()
        self._jobs: set[J] = set()
        self._engines: dict[Hashable, _EngineQueue[J]] = {}
        self._turns = tuple(_Turns() for _ in Urgency)
        self._next_order = 0
        self._with_room: tuple[Urgency, ...] = ()  # at the last call of `next`
        # Bytes that others may move before an urgency's next piece is due.
        self._until_due = [0 for _ in Urgency]
        # Bytes by which stores that are waited for are ahead of loads that are not; of each, times
        # the number of engines that have jobs of the other urgency.
        self._lead = 0

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

        Call `count_moved` with the bytes of that transfer before the next call.

        Args:
            may_start: whether a job may start; called at most once per worker and urgency.
            loads: whether the device has room for a load's transfer.
            stores: whether the device has room for a store's transfer.
        """
        until_due = self._until_due
        self._with_room = _WITH_ROOM[loads, stores, self._lead > 0]
        due = [urgency for urgency in self._with_room if until_due[urgency] <= 0]
        for urgency in (*due, *(u for u in self._with_room if until_due[u] > 0)):
            for number in self._turns[urgency].order():
                for job in self._engines[number].heads(urgency):
                    if job.started or may_start(job):
                        return job
            until_due[urgency] = max(until_due[urgency], 0)  # saves no turns
        return None

    def count_moved(self, job: J, nbytes: int) -> None:
        """Count a transfer of the job that `next` has returned."""
        urgency, until_due = job.urgency, self._until_due
        for other in self._with_room:
            until_due[other] -= nbytes
        until_due[urgency] = min(until_due[urgency] + nbytes, 0) + (FLOOR_PART - 1) * nbytes
        if urgency is Urgency.AWAITED_STORE:
            self._lead = min(self._lead, 0) + nbytes * len(self._turns[Urgency.LOAD].engines)
        elif urgency is Urgency.LOAD:
            engines = self._turns[Urgency.AWAITED_STORE].engines
            self._lead = max(self._lead, 0) - nbytes * len(engines)
        self._turns[urgency].count(job.engine, nbytes)

    def is_contended(self, job: J) -> bool:
        """Return whether other jobs wait for the direction of this queued job.

        Jobs of other engines count, and more urgent ones of its own engine.
        """
        for urgency in _LOADS if job.load else _STORES:
            engines = self._turns[urgency].engines
            if engines and (urgency < job.urgency or len(engines) > (job.engine in engines)):
                return True
        return False

    def start(self, job: J) -> None:
        """Mark a job as started: it no longer counts against the limits, and is never shed."""
        if not job.started:
            job.started = True
            self._engines[job.engine].count(job, -1)

    def prioritize(self, job: J) -> None:
        """Raise the urgency of a job that a worker waits for."""
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
                for worker, line in lines.items()
                for job in line
                if (job.urgency, job.worker) == (urgency, worker)
            }
            if not jobs or listed != jobs:
                raise IntegrityError(f"the queue lists other jobs of engine {number} than it has")
        if {job.engine for job in self._jobs} - self._engines.keys():
            raise IntegrityError("the queue has jobs of an engine that it does not list")
        for urgency, turns in zip(Urgency, self._turns, strict=True):
            if set(turns.engines) != {e for e, q in self._engines.items() if q.lines[urgency]}:
                raise IntegrityError(f"the engines {turns.engines} take turns in {urgency!r}")

    def _exceeds(self, num_jobs: int, nbytes: int) -> bool:
        return num_jobs > self._limits.jobs or nbytes > self._limits.nbytes

    def _insert(self, job: J) -> None:
        self._turns[job.urgency].engines.setdefault(job.engine)
        lines = self._engines[job.engine].lines[job.urgency]
        line = lines.setdefault(job.worker, OrderedDict())
        # A job that is prioritized late may be older than those prioritized before it.
        younger: list[J] = []
        if line and next(reversed(line)).order > job.order:
            younger = [other for other in line if other.order > job.order]
        line[job] = None
        for other in younger:
            line.move_to_end(other)

    def _unlink(self, job: J) -> None:
        lines = self._engines[job.engine].lines[job.urgency]
        line = lines[job.worker]
        del line[job]
        if not line:
            del lines[job.worker]
        if not lines:
            del self._turns[job.urgency].engines[job.engine]


def _by_order(job: QueuedJob) -> int:
    return job.order
