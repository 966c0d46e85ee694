"""Which job is next: a pure data structure, without clocks, sockets or memory.

Order: jobs that are waited for, and loads, before stores. Engines take turns,
piece by piece: after a piece of one engine's job the other engines come first. An
engine that waits for all its stores thus holds up its own loads only. Within an
engine what is waited for goes before loads, and else first in, first out, except
that a worker whose timeline is behind does not hold up the engine's other
workers. (One worker's jobs do wait for each other: its timeline only grows.)

Bounds, per engine: a number of jobs and of bytes that have not started. Above
them the oldest store that is not waited for is shed; a load is refused only when
the loads alone fill the queue. A job alone in its engine's queue is always taken,
so that no job is too large for ever.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Generic, TypeVar

from kvd.errors import IntegrityError

J = TypeVar("J", bound=Hashable)


def _always(_job: object) -> bool:
    return True


class Urgency(IntEnum):
    """Classes of work, the most urgent first."""

    WAITED_FOR = 0
    LOAD = 1
    STORE = 2


@dataclass(frozen=True, slots=True)
class Limits:
    """What one engine may have queued."""

    jobs: int = 4096
    nbytes: int = 64 * 2**30


@dataclass(slots=True)
class _Entry(Generic[J]):
    job: J
    engine: int
    worker: int
    load: bool
    nbytes: int
    urgency: Urgency
    order: int
    started: bool = False


_Line = OrderedDict[J, _Entry[J]]
_TIERS = ((Urgency.WAITED_FOR, Urgency.LOAD), (Urgency.STORE,))
"""Within a tier engines take turns."""
_TIER_OF = {urgency: tier for tier, members in enumerate(_TIERS) for urgency in members}


@dataclass(slots=True)
class _Engine(Generic[J]):
    """One engine's jobs: a line for each worker and urgency, and counts of those not started."""

    lines: tuple[dict[int, _Line[J]], ...] = field(
        default_factory=lambda: tuple({} for _ in Urgency)
    )
    jobs: int = 0
    nbytes: int = 0
    loads: int = 0
    load_bytes: int = 0

    def count(self, entry: _Entry[J], sign: int) -> None:
        self.jobs += sign
        self.nbytes += sign * entry.nbytes
        if entry.load:
            self.loads += sign
            self.load_bytes += sign * entry.nbytes

    def heads(self, urgency: Urgency) -> list[_Entry[J]]:
        """The first job of each worker's line, the oldest in front."""
        lines = self.lines[urgency].values()
        return sorted((next(iter(line.values())) for line in lines), key=_by_order)

    def oldest_store(self) -> _Entry[J] | None:
        """The oldest store that is not waited for and has not started."""
        lines = self.lines[Urgency.STORE].values()
        first = (next((e for e in line.values() if not e.started), None) for line in lines)
        return min((entry for entry in first if entry is not None), key=_by_order, default=None)

    def has(self, tier: int) -> bool:
        return any(self.lines[urgency] for urgency in _TIERS[tier])


class JobQueue(Generic[J]):
    """Jobs that have not ended, in the order in which their pieces are to be moved.

    A job stays in the queue, at its place, until `remove`.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._entries: dict[J, _Entry[J]] = {}
        self._engines: dict[int, _Engine[J]] = {}
        self._turns: tuple[OrderedDict[int, None], ...] = tuple(OrderedDict() for _ in _TIERS)
        self._order = 0

    def push(self, job: J, *, engine: int, worker: int, load: bool, nbytes: int) -> list[J]:
        """Queue a job; return the jobs that have no place now and are no longer in the queue.

        The answer may name `job` itself. A job may be pushed once.
        """
        mine = self._engines.setdefault(engine, _Engine())
        if load and mine.loads and self._above(mine.loads + 1, mine.load_bytes + nbytes):
            return [job]
        urgency = Urgency.LOAD if load else Urgency.STORE
        entry = _Entry(job, engine, worker, load, nbytes, urgency, self._order)
        self._order += 1
        self._entries[job] = entry
        mine.count(entry, 1)
        self._insert(entry)
        shed: list[J] = []
        while mine.jobs > 1 and self._above(mine.jobs, mine.nbytes):
            oldest = mine.oldest_store()
            if oldest is None:
                break
            self.remove(oldest.job)
            shed.append(oldest.job)
        return shed

    def next(self, ready: Callable[[J], bool], fits: Callable[[J], bool] = _always) -> J | None:
        """Return the job whose piece is to be moved now, or None where no job may move.

        Its engine goes to the back of its tier. Asks once per worker and urgency at most.

        Args:
            ready: whether a job may start.
            fits: whether a job's next piece may be given to the device now.
        """
        for urgencies, turns in zip(_TIERS, self._turns, strict=True):
            for engine in turns:
                for urgency in urgencies:
                    for head in self._engines[engine].heads(urgency):
                        if fits(head.job) and (head.started or ready(head.job)):
                            turns.move_to_end(engine)
                            return head.job
        return None

    def start(self, job: J) -> None:
        """Note that a job has started: it no longer counts against the bounds and is never shed."""
        entry = self._entries[job]
        if not entry.started:
            entry.started = True
            self._engines[entry.engine].count(entry, -1)

    def prioritize(self, job: J) -> None:
        """Put a job that is waited for before all that are not."""
        entry = self._entries.get(job)
        if entry is None or entry.urgency is Urgency.WAITED_FOR:
            return
        self._take_out(entry)
        entry.urgency = Urgency.WAITED_FOR
        self._insert(entry)

    def remove(self, job: J) -> None:
        """Take out a job that has ended or needs no more turns; an unknown job is ignored."""
        entry = self._entries.pop(job, None)
        if entry is None:
            return
        self._take_out(entry)
        mine = self._engines[entry.engine]
        if not entry.started:
            mine.count(entry, -1)
        if not any(mine.lines):
            del self._engines[entry.engine]

    def full_text(self, engine: int) -> str:
        """Return the reason why a job has no place."""
        mine = self._engines.get(engine) or _Engine[J]()
        return (
            f"the engine's queue is full: {mine.jobs} jobs of {mine.nbytes} bytes wait; the"
            f" limits are max_queued_jobs = {self._limits.jobs} and max_queued_bytes ="
            f" {self._limits.nbytes}, and stores go first"
        )

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, job: J) -> bool:
        return job in self._entries

    def __iter__(self) -> Iterator[J]:
        return iter(self._entries)

    def check_integrity(self) -> None:
        """Compare every count and index with the entries.

        Raises:
            IntegrityError: they differ.
        """
        for number, mine in self._engines.items():
            own = [entry for entry in self._entries.values() if entry.engine == number]
            counted = _Engine[J](mine.lines)
            for entry in own:
                counted.count(entry, 0 if entry.started else 1)
            if counted != mine:
                raise IntegrityError(f"engine {number} is counted as {mine}, it has {counted}")
            listed = {
                (entry.order, urgency, worker)
                for urgency, lines in zip(Urgency, mine.lines, strict=True)
                for worker, line in lines.items()
                for entry in line.values()
            }
            if not own or listed != {(e.order, e.urgency, e.worker) for e in own}:
                raise IntegrityError(f"{self!r} lists other jobs of engine {number} than it has")
        if {entry.engine for entry in self._entries.values()} - self._engines.keys():
            raise IntegrityError(f"{self!r} has jobs of an engine that it does not list")
        for tier, turns in enumerate(self._turns):
            if set(turns) != {number for number, e in self._engines.items() if e.has(tier)}:
                raise IntegrityError(f"the engines {list(turns)} take turns in tier {tier}")

    def _above(self, jobs: int, nbytes: int) -> bool:
        return jobs > self._limits.jobs or nbytes > self._limits.nbytes

    def _insert(self, entry: _Entry[J]) -> None:
        self._turns[_TIER_OF[entry.urgency]].setdefault(entry.engine)
        lines = self._engines[entry.engine].lines[entry.urgency]
        line = lines.setdefault(entry.worker, OrderedDict())
        # A job that is prioritized late may be older than those prioritized before it.
        younger = [job for job, other in line.items() if other.order > entry.order]
        line[entry.job] = entry
        for job in younger:
            line.move_to_end(job)

    def _take_out(self, entry: _Entry[J]) -> None:
        mine, tier = self._engines[entry.engine], _TIER_OF[entry.urgency]
        line = mine.lines[entry.urgency][entry.worker]
        del line[entry.job]
        if not line:
            del mine.lines[entry.urgency][entry.worker]
        if not mine.has(tier):
            del self._turns[tier][entry.engine]

    def __repr__(self) -> str:
        return f"<JobQueue {len(self)} jobs of {len(self._engines)} engines>"


def _by_order(entry: _Entry[J]) -> int:
    return entry.order
