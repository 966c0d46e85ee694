"""Which job is next: a pure data structure, without clocks, sockets or memory.

Order: jobs that are waited for, and loads, before stores. Engines take turns,
piece by piece: after a piece of one engine's job the other engines come first. An
engine that waits for all its stores thus holds up its own loads only. Within an
engine what is waited for goes before loads, and else first in, first out, except
that nobody waits for what cannot move now:

- A worker whose timeline is behind does not hold up the engine's other workers. Its
  own jobs of one urgency and direction do wait for each other: its timeline only grows.
- Loads and stores do not hold up each other: the device may have room for one of
  the two alone. So only jobs of one worker, urgency and direction begin in the
  order in which they came.

Bounds, per engine: a number of jobs and of bytes that have not started. Above
them the oldest store that is not waited for is shed; a load is refused only when
the loads alone fill the queue. A job alone in its engine's queue is always taken,
so that no job is too large for ever.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Generic, TypeAlias, TypeVar

from kvd.errors import IntegrityError


class Urgency(IntEnum):
    """Classes of work, the most urgent first."""

    WAITED_FOR = 0
    LOAD = 1
    STORE = 2


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What one engine may have queued."""

    jobs: int = 4096
    nbytes: int = 64 * 2**30


@dataclass(eq=False, slots=True, kw_only=True)
class QueuedJob:
    """What the queue knows of a job; `urgency`, `order` and `started` are the queue's own.

    engine, worker: whose it is.
    nbytes: what it counts for.
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
_Whose: TypeAlias = tuple[Hashable, bool]
"""A worker, and whether its loads or its stores."""
_TIERS = ((Urgency.WAITED_FOR, Urgency.LOAD), (Urgency.STORE,))
"""Within a tier engines take turns."""
_TIER_OF = {urgency: tier for tier, members in enumerate(_TIERS) for urgency in members}


@dataclass(slots=True)
class _EngineQueue(Generic[J]):
    """One engine's jobs, in lines by urgency, worker and direction; counts of those not started."""

    lines: tuple[dict[_Whose, _Line[J]], ...] = field(default_factory=lambda: ({}, {}, {}))
    jobs: int = 0
    nbytes: int = 0
    loads: int = 0
    load_bytes: int = 0

    def count(self, job: J, sign: int) -> None:
        self.jobs += sign
        self.nbytes += sign * job.nbytes
        if job.load:
            self.loads += sign
            self.load_bytes += sign * job.nbytes

    def heads(self, urgency: Urgency, loads: bool, stores: bool) -> list[J]:
        """The first job of each line of these directions, the oldest in front."""
        found = [
            next(iter(line))
            for (_, load), line in self.lines[urgency].items()
            if (loads if load else stores)
        ]
        if len(found) > 1:
            found.sort(key=_by_order)
        return found

    def waits(self, load: bool, before: Urgency | None = None) -> bool:
        """Whether there is a load, or a store; more urgent than `before` where that is given."""
        for lines in self.lines[:before]:
            for _, one in lines:
                if one == load:
                    return True
        return False

    def oldest_store(self) -> J | None:
        """The oldest store that is not waited for and has not started."""
        lines = self.lines[Urgency.STORE].values()
        first = (next((job for job in line if not job.started), None) for line in lines)
        return min((job for job in first if job is not None), key=_by_order, default=None)

    def has(self, tier: int) -> bool:
        return any(self.lines[urgency] for urgency in _TIERS[tier])


class JobQueue(Generic[J]):
    """Jobs that have not ended, in the order in which their pieces are to be moved.

    A job stays in the queue, at its place, until `remove`.
    """

    def __init__(self, limits: QueueLimits | None = None) -> None:
        self._limits = limits or QueueLimits()
        self._jobs: set[J] = set()
        self._engines: dict[Hashable, _EngineQueue[J]] = {}
        self._turns: tuple[OrderedDict[Hashable, None], ...] = tuple(OrderedDict() for _ in _TIERS)
        self._order = 0

    def push(self, job: J) -> list[J]:
        """Queue a job; return the jobs that have no place now and are no longer in the queue.

        The answer may name `job` itself. A job may be pushed once.
        """
        mine = self._engines.setdefault(job.engine, _EngineQueue())
        if job.load and mine.loads and self._above(mine.loads + 1, mine.load_bytes + job.nbytes):
            return [job]
        job.urgency = Urgency.LOAD if job.load else Urgency.STORE
        job.order = self._order
        self._order += 1
        self._jobs.add(job)
        mine.count(job, 1)
        self._insert(job)
        shed: list[J] = []
        while mine.jobs > 1 and self._above(mine.jobs, mine.nbytes):
            oldest = mine.oldest_store()
            if oldest is None:
                break
            self.remove(oldest)
            shed.append(oldest)
        return shed

    def next(
        self, ready: Callable[[J], bool], *, loads: bool = True, stores: bool = True
    ) -> J | None:
        """Return the job whose piece is to be moved now, or None where no job may move.

        Its engine goes to the back of its tier. Asks once per worker, urgency and direction at
        most.

        Args:
            ready: whether a job may start.
            loads: whether a load's next piece may be given to the device now.
            stores: the same of a store's.
        """
        for urgencies, turns in zip(_TIERS, self._turns, strict=True):
            for engine in turns:
                mine = self._engines[engine]
                for urgency in urgencies:
                    if not mine.lines[urgency]:
                        continue
                    for head in mine.heads(urgency, loads, stores):
                        if head.started or ready(head):
                            turns.move_to_end(engine)
                            return head
        return None

    def is_contended(self, job: J) -> bool:
        """Whether others wait for the direction of this job, which is in the queue.

        Those are any jobs of other engines, and more urgent ones of its own.
        """
        for engine, mine in self._engines.items():
            if mine.waits(job.load, job.urgency if engine == job.engine else None):
                return True
        return False

    def start(self, job: J) -> None:
        """Note that a job has started: it no longer counts against the bounds and is never shed."""
        if not job.started:
            job.started = True
            self._engines[job.engine].count(job, -1)

    def prioritize(self, job: J) -> None:
        """Put a job that is waited for before all that are not."""
        if job in self._jobs and job.urgency is not Urgency.WAITED_FOR:
            self._take_out(job)
            job.urgency = Urgency.WAITED_FOR
            self._insert(job)

    def remove(self, job: J) -> None:
        """Take out a job that has ended or needs no more turns; an unknown job is ignored."""
        if job not in self._jobs:
            return
        self._jobs.remove(job)
        self._take_out(job)
        mine = self._engines[job.engine]
        if not job.started:
            mine.count(job, -1)
        if not any(mine.lines):
            del self._engines[job.engine]

    def full_text(self, engine: Hashable) -> str:
        """Return the reason why a job has no place."""
        mine = self._engines.get(engine) or _EngineQueue[J]()
        return (
            f"the engine's queue is full: {mine.jobs} jobs of {mine.nbytes} bytes wait; the"
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
        for number, mine in self._engines.items():
            own = {job for job in self._jobs if job.engine == number}
            counted = _EngineQueue[J](mine.lines)
            for job in own:
                counted.count(job, 0 if job.started else 1)
            if counted != mine:
                raise IntegrityError(f"engine {number} is counted as {mine}, it has {counted}")
            listed = {
                job
                for urgency, lines in zip(Urgency, mine.lines, strict=True)
                for whose, line in lines.items()
                for job in line
                if (job.urgency, _whose(job)) == (urgency, whose)
            }
            if not own or listed != own:
                raise IntegrityError(f"{self!r} lists other jobs of engine {number} than it has")
        if {job.engine for job in self._jobs} - self._engines.keys():
            raise IntegrityError(f"{self!r} has jobs of an engine that it does not list")
        for tier, turns in enumerate(self._turns):
            if set(turns) != {number for number, e in self._engines.items() if e.has(tier)}:
                raise IntegrityError(f"the engines {list(turns)} take turns in tier {tier}")

    def _above(self, jobs: int, nbytes: int) -> bool:
        return jobs > self._limits.jobs or nbytes > self._limits.nbytes

    def _insert(self, job: J) -> None:
        self._turns[_TIER_OF[job.urgency]].setdefault(job.engine)
        lines = self._engines[job.engine].lines[job.urgency]
        line = lines.setdefault(_whose(job), OrderedDict())
        # A job that is prioritized late may be older than those prioritized before it.
        younger: list[J] = []
        if line and next(reversed(line)).order > job.order:
            younger = [other for other in line if other.order > job.order]
        line[job] = None
        for other in younger:
            line.move_to_end(other)

    def _take_out(self, job: J) -> None:
        mine, tier = self._engines[job.engine], _TIER_OF[job.urgency]
        lines, whose = mine.lines[job.urgency], _whose(job)
        line = lines[whose]
        del line[job]
        if not line:
            del lines[whose]
        if not mine.has(tier):
            del self._turns[tier][job.engine]

    def __repr__(self) -> str:
        return f"<JobQueue {len(self)} jobs of {len(self._engines)} engines>"


def _whose(job: QueuedJob) -> _Whose:
    return job.worker, job.load


def _by_order(job: QueuedJob) -> int:
    return job.order
