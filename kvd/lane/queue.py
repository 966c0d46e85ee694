"""Which job is next: a pure data structure, without clocks, sockets or memory.

Order: jobs that somebody waits for, and loads, before stores. Engines take turns,
piece by piece: after a piece of one engine's job the other engines come first. An
engine that waits for all its stores thus holds up its own loads only. Within an
engine what is waited for goes before loads, and else first in, first out, except
that a worker whose timeline is behind does not hold up the engine's other
workers. (One worker's jobs do wait for each other: its timeline only grows.)

Bounds, per engine: a number of jobs and of bytes that have not started. Above
them the oldest store that nobody waits for is shed; a load is refused only when
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


@dataclass(slots=True)
class _Share(Generic[J]):
    """What one engine has queued and not started."""

    loads: int = 0
    load_bytes: int = 0
    jobs: int = 0
    nbytes: int = 0
    sheddable: "OrderedDict[J, None]" = field(default_factory=OrderedDict)

    def count(self, entry: _Entry[J], sign: int) -> None:
        self.jobs += sign
        self.nbytes += sign * entry.nbytes
        if entry.load:
            self.loads += sign
            self.load_bytes += sign * entry.nbytes


_Fifo = OrderedDict[J, _Entry[J]]
_Engines = dict[int, dict[int, _Fifo[J]]]
_TIERS = ((Urgency.WAITED_FOR, Urgency.LOAD), (Urgency.STORE,))
"""Within a tier engines take turns."""
_TIER_OF = {urgency: tier for tier, members in enumerate(_TIERS) for urgency in members}


class JobQueue(Generic[J]):
    """Jobs that have not ended, in the order in which their pieces are to be moved.

    A job stays in the queue, at its place, until `remove`.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._entries: dict[J, _Entry[J]] = {}
        self._classes: tuple[_Engines[J], ...] = tuple({} for _ in Urgency)
        self._turns: tuple[OrderedDict[int, None], ...] = tuple(OrderedDict() for _ in _TIERS)
        self._shares: dict[int, _Share[J]] = {}
        self._order = 0

    def push(self, job: J, *, engine: int, worker: int, load: bool, nbytes: int) -> list[J]:
        """Queue a job; the jobs that have no place now, which are no longer in the queue.

        The answer may name `job` itself. A job may be pushed once.
        """
        if job in self._entries:
            raise ValueError(f"job {job!r} is queued already")
        share = self._shares.setdefault(engine, _Share())
        if load and share.loads and self._above(share.loads + 1, share.load_bytes + nbytes):
            return [job]
        urgency = Urgency.LOAD if load else Urgency.STORE
        entry = _Entry(job, engine, worker, load, nbytes, urgency, self._order)
        self._order += 1
        self._entries[job] = entry
        share.count(entry, 1)
        if not load:
            share.sheddable[job] = None
        self._insert(entry)
        shed = []
        while share.jobs > 1 and share.sheddable and self._above(share.jobs, share.nbytes):
            oldest = next(iter(share.sheddable))
            self.remove(oldest)
            shed.append(oldest)
        return shed

    def next(self, ready: Callable[[J], bool], fits: Callable[[J], bool] = _always) -> J | None:
        """The job whose piece is to be moved now, or None where no job may move.

        Its engine goes to the back of its tier. Asks once per worker and class at most.

        Args:
            ready: whether a job may start.
            fits: whether a job's next piece may be given to the device now.
        """
        for urgencies, turns in zip(_TIERS, self._turns, strict=True):
            for engine in turns:
                for head in self._heads(engine, urgencies):
                    if fits(head.job) and (head.started or ready(head.job)):
                        turns.move_to_end(engine)
                        return head.job
        return None

    def _heads(self, engine: int, urgencies: tuple[Urgency, ...]) -> Iterator[_Entry[J]]:
        """The first job of each of the engine's workers, the one to be asked first in front."""
        for urgency in urgencies:
            workers = self._classes[urgency].get(engine, {})
            yield from sorted((next(iter(f.values())) for f in workers.values()), key=_by_order)

    def start(self, job: J) -> None:
        """The job has started: it counts no longer against the bounds and is never shed."""
        entry = self._entries[job]
        if not entry.started:
            entry.started = True
            self._uncount(entry)

    def prioritize(self, job: J) -> None:
        """Put a job that is waited for before all that nobody waits for."""
        entry = self._entries.get(job)
        if entry is None or entry.urgency is Urgency.WAITED_FOR:
            return
        self._take_out(entry)
        entry.urgency = Urgency.WAITED_FOR
        self._insert(entry)
        self._shares[entry.engine].sheddable.pop(job, None)

    def remove(self, job: J) -> None:
        """The job has ended or needs no more turns. Unknown jobs are fine."""
        entry = self._entries.pop(job, None)
        if entry is None:
            return
        self._take_out(entry)
        if not entry.started:
            self._uncount(entry)
        share = self._shares[entry.engine]
        if not share.jobs and not any(entry.engine in engines for engines in self._classes):
            del self._shares[entry.engine]

    def full_text(self, engine: int) -> str:
        """What is said of a job that has no place."""
        share = self._shares.get(engine) or _Share[J]()
        return (
            f"the engine's queue is full: {share.jobs} jobs of {share.nbytes} bytes wait; the"
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
        listed = [
            entry.job
            for urgency, engines in zip(Urgency, self._classes, strict=True)
            for engine, workers in engines.items()
            for worker, fifo in workers.items()
            for entry in fifo.values()
            if (entry.urgency, entry.engine, entry.worker) == (urgency, engine, worker)
        ]
        if sorted(map(hash, listed)) != sorted(map(hash, self._entries)):
            raise IntegrityError(f"{self!r} lists {len(listed)} jobs in its classes")
        if any(not fifo for e in self._classes for w in e.values() for fifo in w.values()):
            raise IntegrityError(f"{self!r} keeps an empty line")
        for urgencies, turns in zip(_TIERS, self._turns, strict=True):
            if set(turns) != {engine for u in urgencies for engine in self._classes[u]}:
                raise IntegrityError(f"the engines {list(turns)} take turns at {urgencies}")
        for engine, share in self._shares.items():
            waiting = [e for e in self._entries.values() if e.engine == engine and not e.started]
            loads = [entry for entry in waiting if entry.load]
            stores = [e.job for e in waiting if not e.load and e.urgency is Urgency.STORE]
            figures = (share.jobs, share.nbytes, share.loads, share.load_bytes)
            if figures != (
                len(waiting),
                sum(entry.nbytes for entry in waiting),
                len(loads),
                sum(entry.nbytes for entry in loads),
            ) or stores != list(share.sheddable):
                raise IntegrityError(f"engine {engine} is counted as {share}")

    def _above(self, jobs: int, nbytes: int) -> bool:
        return jobs > self._limits.jobs or nbytes > self._limits.nbytes

    def _uncount(self, entry: _Entry[J]) -> None:
        share = self._shares[entry.engine]
        share.count(entry, -1)
        share.sheddable.pop(entry.job, None)

    def _insert(self, entry: _Entry[J]) -> None:
        self._turns[_TIER_OF[entry.urgency]].setdefault(entry.engine)
        workers = self._classes[entry.urgency].setdefault(entry.engine, {})
        fifo = workers.setdefault(entry.worker, OrderedDict())
        # A job that is prioritized late may be older than those prioritized before it.
        younger = [job for job, other in fifo.items() if other.order > entry.order]
        fifo[entry.job] = entry
        for job in younger:
            fifo.move_to_end(job)

    def _take_out(self, entry: _Entry[J]) -> None:
        engines = self._classes[entry.urgency]
        workers = engines[entry.engine]
        fifo = workers[entry.worker]
        del fifo[entry.job]
        if not fifo:
            del workers[entry.worker]
        if not workers:
            del engines[entry.engine]
            tier = _TIER_OF[entry.urgency]
            if not any(entry.engine in self._classes[urgency] for urgency in _TIERS[tier]):
                del self._turns[tier][entry.engine]

    def __repr__(self) -> str:
        waited, loads, stores = (sum(map(_length, e.values())) for e in self._classes)
        return f"<JobQueue {waited} waited for, {loads} loads, {stores} stores>"


def _by_order(entry: _Entry[J]) -> int:
    return entry.order


def _length(workers: dict[int, _Fifo[J]]) -> int:
    return sum(map(len, workers.values()))
