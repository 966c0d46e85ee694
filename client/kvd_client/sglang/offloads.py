"""Stores of the tree's nodes: begun by a thread of their own, told in the order of their beginning.

The thread waits for the events after which pages have been written and their numbers are known,
and for room in the pool; SGLang's own thread waits for nothing.
"""

import queue
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvd_client import StoreAnswer, StoreTicket
from kvd_client.errors import get_logger
from kvd_client.sglang.coverage import Piece, cut
from kvd_client.sglang.pool_cache import PoolCache, Rows, failed

_THERE = (StoreAnswer.ACCEPTED, StoreAnswer.PRESENT, StoreAnswer.PENDING)
QUIET_SECONDS = 5.0

log = get_logger("kvd_client.sglang")


@dataclass(slots=True)
class _Job:
    cache: PoolCache
    number: int
    ticket: StoreTicket


@dataclass(slots=True)
class Offload:
    """One node's store.

    parts: of each pool its cache, keys and SGLang's indices.
    events: after which the pages are written, and the indices known.
    begun: its jobs are submitted.
    whole: nothing of it was refused or has failed.
    """

    parts: Sequence[tuple[PoolCache, list[bytes], Any]]
    events: Sequence[Any]
    begun: threading.Event = field(default_factory=threading.Event)
    whole: bool = True
    jobs: list[_Job] = field(default_factory=list)

    def begin(self) -> None:
        """Submit its jobs."""
        for event in self.events:
            event.synchronize()
        for cache, keys, indices in self.parts:
            self._store(cache, cut(keys, cache.factor), indices)

    def _store(self, cache: PoolCache, pieces: Sequence[Piece], indices: Any) -> None:
        rows = cache.rows(pieces, indices)  # before slots are asked for: it may refuse pages
        for some in cache.jobs(len(pieces)):
            self._store_some(cache, pieces[some], rows[some])

    def _store_some(self, cache: PoolCache, pieces: Sequence[Piece], rows: Rows) -> None:
        ticket = cache.offer(pieces)
        self.whole &= ticket.served and all(answer in _THERE for answer in ticket.answers)
        answers = zip(pieces, ticket.answers, strict=False)
        if refused := [piece.key for piece, answer in answers if answer is StoreAnswer.FULL]:
            cache.scheduler.give_up(refused)  # SGLang does not offer a node again
        if not len(ticket):
            return
        accepted = set(ticket.keys)
        number = cache.store(rows[[piece.key in accepted for piece in pieces]], ticket)
        if number is None:
            self.whole = False
            cache.end_store(ticket, success=False)
        else:
            self.jobs.append(_Job(cache, number, ticket))

    def ended(self) -> bool:
        """Whether nothing of it reads pages any more."""
        if not self.begun.is_set():
            return False
        for job in tuple(self.jobs):
            result = job.cache.result(job.number)
            if result is None:
                continue
            self.jobs.remove(job)
            reason = failed(result)
            job.cache.end_store(job.ticket, success=not reason)
            if reason:
                self.whole = False
                log.warning("a store of %d chunks came to nothing: %s", len(job.ticket), reason)
        return not self.jobs


class Offloads:
    """Stores that have not been told yet."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Offload | None] = queue.SimpleQueue()
        self._told: deque[Offload] = deque()
        self._thread = threading.Thread(target=self._run, name="kvd-offload", daemon=True)
        self._thread.start()

    def add(self, offload: Offload) -> None:
        """Begin a store as soon as its pages are written."""
        self._told.append(offload)
        self._waiting.put(offload)

    def completed(self) -> int:
        """How many have ended, from the oldest on."""
        count = 0
        for offload in self._told:
            if not offload.ended():
                break
            count += 1
        return count

    def pop(self) -> bool:
        """Take the oldest one, which has ended: whether all of it is stored."""
        return self._told.popleft().whole

    def quiesce(self) -> None:
        """Return when nothing reads pages any more, and forget all of them."""
        for offload in self._told:
            offload.begun.wait()
            for job in offload.jobs:
                job.cache.worker.wait([job.number], QUIET_SECONDS)  # voids it then
                job.cache.forget(job.number)
        self._told.clear()

    def close(self) -> None:
        """End the thread."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (offload := self._waiting.get()) is not None:
            try:
                offload.begin()
            except Exception:  # a store that fails is a miss later
                log.exception("pages could not be stored")
                offload.whole = False
            offload.begun.set()
