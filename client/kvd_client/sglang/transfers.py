"""Loads that were begun together, as few jobs as can be, and the layers of them that are in.

A load that is reported layer by layer and fails aborts its requests in SGLang; they are not
computed. So where its lane or daemon has gone it is begun anew with the daemon that follows, which
has kept the chunks, until the deadline. Nothing here waits longer, but for a copy that may still
write: pages must not be given to other requests before it has ended.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvd_client import LoadTicket, StoreAnswer, StoreTicket
from kvd_client.arguments import Blocks
from kvd_client.errors import get_logger
from kvd_client.sglang.pages import Piece, cut
from kvd_client.sglang.pool_cache import PoolCache, Rows, failed

TRIES = 5  # that a lane has taken and not done
AGAIN_SECONDS = 0.01
SHORTEST_NAP, LONGEST_NAP = 20e-6, 500e-6
SAY_SECONDS = 5.0

log = get_logger("kvd_client.sglang")


@dataclass(slots=True)
class Wanted:
    """Pinned chunks of one request in one pool, and where they go."""

    cache: PoolCache
    pieces: Sequence[Piece]
    rows: Rows
    ticket: LoadTicket

    def drop(self) -> None:
        """It is loaded, or will not be."""
        self.cache.unpin(self.ticket)


@dataclass(slots=True)
class Part:
    """What a batch loads in one pool, as far as one job can have it.

    slots, generations: of the chunks, pinned.
    ticket: of the pins that were made when it was begun anew.
    job: under way; None while none is.
    done: every byte is in.
    why: it has failed for good; empty while there is hope.
    """

    cache: PoolCache
    keys: list[bytes]
    blocks: list[Blocks]
    rows: Rows
    slots: Any
    generations: Any
    stream: Any
    ticket: LoadTicket | None = None
    job: int | None = None
    done: bool = False
    why: str = ""
    tries: int = 0
    again: float = 0.0
    last: str = field(default="no lane takes the job")

    @classmethod
    def of(cls, wanted: Sequence[Wanted], stream: Any) -> "list[Part]":
        """Of one pool."""
        cache = wanted[0].cache
        pieces = [piece for each in wanted for piece in each.pieces]
        rows = np.concatenate([each.rows for each in wanted])
        slots = np.concatenate([each.ticket.slots for each in wanted])
        generations = np.concatenate([each.ticket.generations for each in wanted])
        return [
            cls(
                cache=cache,
                keys=[piece.key for piece in pieces[some]],
                blocks=[piece.blocks for piece in pieces[some]],
                rows=rows[some],
                slots=slots[some],
                generations=generations[some],
                stream=stream,
            )
            for some in cache.jobs(len(pieces))
        ]

    @property
    def settled(self) -> bool:
        """Whether it has ended, well or badly, and nothing of it writes any more."""
        return self.done or bool(self.why)

    @property
    def layers(self) -> int:
        """How many layers are in, while it has not ended."""
        return 0 if self.job is None else self.cache.layers_loaded(self.job)

    def begin(self) -> None:
        """Submit what is pinned."""
        self.job = self.cache.load(self.rows, self.slots, self.generations, self.stream)
        self.again = time.monotonic() + AGAIN_SECONDS

    def look(self, deadline: float, tries: int) -> None:
        """Take in how the job has ended; begin again where that may help, up to `tries` times."""
        if self.settled:
            return
        if self.job is not None:
            result = self.cache.result(self.job)
            if result is None:
                return
            self.job = None
            if not (reason := failed(result)):
                self.done = True
                return
            self.last = reason
            self.tries += 1
        now = time.monotonic()
        if now >= deadline or self.tries >= tries:
            self.why = self.last
        elif now >= self.again:
            self._try_again()

    def _try_again(self) -> None:
        """Pin the chunks at the daemon that is there now, and load them from it."""
        self.again = time.monotonic() + AGAIN_SECONDS
        if not (self.cache.scheduler.attached and self.cache.worker.registered):
            self.last = "no daemon serves this engine"
            return
        ticket = self.cache.pin_blocks(self.keys, self.blocks)
        if ticket is None:
            self.why = f"{self.last}; the chunks are not in the cache any more"
            return
        log.info("a load of %d chunks is begun anew: %s", len(self.keys), self.last)
        self.release()
        self.ticket = ticket
        self.slots, self.generations = ticket.slots, ticket.generations
        self.begin()

    def release(self) -> None:
        """End the pins of its own."""
        if self.ticket is not None:
            self.cache.unpin(self.ticket)
        self.ticket = None


class Batch:
    """Loads that SGLang has started together.

    Args:
        wanted: at least one.
        stream: on which the pages were used last; None for host memory.
        timeout: seconds in which all of it must be in.
        again: begin anew what has failed, as long as there is time.
    """

    def __init__(
        self, wanted: Sequence[Wanted], stream: Any, timeout: float, *, again: bool = True
    ) -> None:
        by_pool: dict[PoolCache, list[Wanted]] = {}
        for each in wanted:
            by_pool.setdefault(each.cache, []).append(each)
        self._wanted = wanted
        self._parts = [part for several in by_pool.values() for part in Part.of(several, stream)]
        self._begun = time.monotonic()
        self._deadline = self._begun + timeout
        self._tries = TRIES if again else 0
        for part in self._parts:
            part.begin()

    def wait_for(self, layer: int) -> None:
        """Return when this layer is in, or will not be.

        Args:
            layer: from 0.
        """
        self._wait(lambda part: part.settled or part.layers > layer)

    def finish(self) -> bool:
        """Return when nothing of it writes any more: whether every byte is in."""
        said = self._deadline
        cancelled: set[int] = set()
        while not self._wait(lambda part: part.settled, until=said):
            jobs = [(part.cache, part.job) for part in self._parts if part.job is not None]
            for cache, job in jobs:
                if job not in cancelled:
                    cancelled.add(job)
                    cache.cancel(job)
                elif time.monotonic() > self._deadline + SAY_SECONDS:
                    log.error(
                        "load %d was stopped %.0f s ago and its lane has not answered; the engine"
                        " waits, for the lane may still write: see `kvd status`, or kill the lane",
                        job,
                        time.monotonic() - self._deadline,
                    )
            said = max(said, time.monotonic()) + SAY_SECONDS
        for each in self._wanted:
            each.drop()
        for part in self._parts:
            part.release()
            if not part.done:
                log.warning(
                    "%d chunks of pool %s were not loaded in %.1f s: %s",
                    len(part.keys),
                    part.cache.pool.name,
                    time.monotonic() - self._begun,
                    part.why,
                )
        return all(part.done for part in self._parts)

    def _wait(self, over: Callable[[Part], bool], until: float = float("inf")) -> bool:
        """Look at the jobs until all parts are over; false where the time is up before."""
        nap = SHORTEST_NAP
        while True:
            for part in self._parts:
                part.look(self._deadline, self._tries)
            if all(over(part) for part in self._parts):
                return True
            now = time.monotonic()
            if now >= until:
                return False
            time.sleep(nap)
            nap = min(2 * nap, LONGEST_NAP)

    def __repr__(self) -> str:
        return f"<Batch of {len(self._parts)} pools, {sum(p.settled for p in self._parts)} settled>"


class LayerCounter:
    """What SGLang's pools wait for before they read a layer.

    Attributes:
        consumer_index: the batch that the forward pass reads now; -1: none.
    """

    def __init__(self) -> None:
        self.consumer_index = -1
        self._last = -1
        self._batches: dict[int, Batch] = {}

    def add(self, batch: Batch) -> int:
        """Return the number of a batch that was begun."""
        self._last += 1
        self._batches[self._last] = batch
        return self._last

    def set_consumer(self, index: int) -> None:
        """Say which batch the next forward pass reads."""
        self.consumer_index = index

    def wait_until(self, threshold: int) -> None:
        """Return when a layer of that batch is in, or will not be; `finish` tells."""
        batch = self._batches.get(self.consumer_index)
        if batch is not None:
            batch.wait_for(threshold)

    def finish(self, index: int) -> bool:
        """Return when a batch does not write any more: whether all of it is in."""
        batch = self._batches.pop(index, None)
        return batch is None or batch.finish()

    def finish_all(self) -> None:
        """Return when no batch writes any more."""
        for index in list(self._batches):
            self.finish(index)
        self.consumer_index = -1


# TODO offloads.py
# """Stores of the tree's nodes: begun by a thread of their own, told in the order of their beginning.
#
# The thread waits for the events after which pages have been written and their numbers are known,
# and for room in the pool; SGLang's own thread waits for nothing.
# """

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
