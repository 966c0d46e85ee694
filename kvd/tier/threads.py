"""The threads that call the backend, which may block.

Workers execute parts of batches: check the slots, seal or verify, call the backend, check again. A
put needs no pin: if a slot holds the chunk before its bytes are read and after their check word is
computed, the word is the chunk's. If the bytes change later, they no longer match the word, and a
get is a miss instead of wrong bytes.

Gets and asks come before puts, and one thread is never used for puts, since engines wait for gets
but not for puts. Put threads have low priority: they yield the processor to lanes, broker, engines.

The clerk is one more thread, for all other calls, in order: a chunk found by a scan must be
reported before it is reported as gone.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

from kvd.errors import TierError
from kvd.logs import safe_repr
from kvd.machine.process import lower_priority
from kvd.tier.batches import Batch, BatchPart, Damaged, OtherChunk, checksum_of, seal, unseal
from kvd.tier.contract import Chunk, Outcome, Space, TierBackend
from kvd.wire.tiering import Get, Lookup, Put
from kvd_proto.directory import SlotState

log = logging.getLogger("kvd.tier")
_SAY_AGAIN = 10.0  # seconds after which the same error is logged again
T = TypeVar("T")


class BatchThreads:
    """The threads that run parts on a backend. Only the loop's thread calls the methods.

    Args:
        tier: the backend; at least two threads run at a time, or puts would have none.
        name: of the tier, for the log.
        ended: called by a thread for each part that has ended.
    """

    def __init__(self, tier: TierBackend, name: str, ended: Callable[[BatchPart], None]) -> None:
        self._transfers = BatchExecutor(tier, name)
        self._ended = ended
        self._lock = threading.Lock()
        self._get_ready = threading.Condition(self._lock)
        self._put_ready = threading.Condition(self._lock)
        self._gets: deque[BatchPart] = deque()
        self._puts: deque[BatchPart] = deque()
        self._running: set[BatchPart] = set()
        self._closed = False
        self._most = threads = max(2, tier.threads)
        for number in range(threads):
            threading.Thread(target=self._get, name=f"tier-get-{number}", daemon=True).start()
        for number in range(threads - 1):
            threading.Thread(target=self._put, name=f"tier-put-{number}", daemon=True).start()

    @property
    def busy(self) -> int:
        """Number of parts that threads run now."""
        return len(self._running)

    @property
    def waiting(self) -> bool:
        """Whether a part waits."""
        return bool(self._gets or self._puts)

    @property
    def queued_bytes(self) -> int:
        """Bytes of the parts that wait."""
        with self._lock:
            return sum(part.nbytes for part in (*self._gets, *self._puts))

    def submit(self, parts: Iterable[BatchPart]) -> None:
        """Queue parts, in order."""
        with self._lock:
            for part in parts:
                if isinstance(part.batch.order, Put):
                    self._puts.append(part)
                    self._put_ready.notify()
                else:
                    self._gets.append(part)
                    self._get_ready.notify()

    def take(self, *, all_parts: bool = False) -> list[BatchPart]:
        """Remove waiting parts that are late or whose slots were reused, or all; return them.

        Their outcomes are set. So no part waits beyond its deadline, even if all threads hang.
        """
        now = math.inf if all_parts else time.monotonic()
        taken: list[BatchPart] = []
        with self._lock:
            for queue in (self._gets, self._puts):
                parts = list(queue)
                queue.clear()
                for part in parts:
                    (taken if _useless(part, now) else queue).append(part)
            if taken:
                self._put_ready.notify()  # a get ahead of a put may have been removed
        return taken

    def close(self) -> None:
        """Have the threads exit once their queues are empty."""
        with self._lock:
            self._closed = True
            self._get_ready.notify_all()
            self._put_ready.notify_all()

    def _get(self) -> None:
        self._work(self._gets, self._get_ready)

    def _put(self) -> None:
        lower_priority()
        self._work(self._puts, self._put_ready)

    def _work(self, queue: deque[BatchPart], ready: threading.Condition) -> None:
        while True:
            with self._lock:
                while not queue or len(self._running) >= self._most:
                    if self._closed and not queue:
                        return
                    ready.wait()
                part = queue.popleft()
                self._running.add(part)
            part.batch.begins()
            self._transfers.run(part)
            with self._lock:
                self._running.discard(part)
                (self._get_ready if self._gets else self._put_ready).notify()
            self._ended(part)


def _useless(part: BatchPart, now: float) -> bool:
    batch = part.batch
    if now > batch.deadline:
        outcome = Outcome.LATE
    elif batch.stale or (not isinstance(batch.order, Lookup) and not _holds_any(part)):
        outcome = Outcome.GONE
    else:
        return False
    batch.fail(outcome, "", part.begin, part.end)
    return True


def _holds_any(part: BatchPart) -> bool:
    batch = part.batch
    state = SlotState.READY if isinstance(batch.order, Put) else SlotState.WRITING
    return any(
        batch.place.holds(batch.slots[i], batch.generations[i], state, batch.order.keys[i])
        for i in range(part.begin, part.end)
    )


class BatchExecutor:
    """Executes parts on a backend. May be used by several threads at a time.

    Args:
        tier: the backend.
        name: of the tier, for the log.
    """

    def __init__(self, tier: TierBackend, name: str) -> None:
        self._tier = tier
        self._name = name
        self._lock = threading.Lock()
        self._said: tuple[str, float] = ("", 0.0)

    def run(self, part: BatchPart) -> None:
        """Execute a part, and set the outcome of each of its chunks. Raises nothing."""
        batch = part.batch
        try:
            if time.monotonic() > batch.deadline:
                batch.fail(Outcome.LATE, "", part.begin, part.end)
            elif batch.space is None or batch.stale:
                batch.fail(Outcome.GONE, "", part.begin, part.end)
            elif isinstance(batch.order, Put):
                self._put(part, batch.space)
            elif isinstance(batch.order, Get):
                self._get(part, batch.space)
            else:
                self._ask(part, batch.space)
        except TierError as error:
            batch.fail(Outcome.FAILED, str(error), part.begin, part.end)
            self._say(f"{self._name}: a {batch.kind} of {len(batch.order.keys)} failed: {error}")
        except Exception as error:
            batch.fail(Outcome.FAILED, safe_repr(error), part.begin, part.end)
            log.exception("%s: a bug in the tier failed a %s", self._name, batch.kind)

    def _put(self, part: BatchPart, space: Space) -> None:
        batch, place = part.batch, part.batch.place
        chunks, numbers = [], []
        for i in range(part.begin, part.end):
            slot, generation, key = batch.slots[i], batch.generations[i], batch.order.keys[i]
            batch.outcomes[i] = Outcome.GONE
            if not place.holds(slot, generation, SlotState.READY, key):
                continue
            shares = place.shares(slot)
            description = place.description(slot, generation)
            checksum = checksum_of(shares)
            if not place.holds(slot, generation, SlotState.READY, key):
                continue
            coverage = batch.coverages[i]
            head = seal(space, key, coverage, checksum, description)
            chunks.append(Chunk(space, key, shares, head, coverage, checksum))
            numbers.append(i)
        outcomes = self._tier.put(chunks, batch.deadline) if chunks else []
        moved_on = []
        for i, outcome in zip(numbers, outcomes, strict=True):
            batch.outcomes[i] = outcome
            if outcome is Outcome.OK and not self._is_still(batch, i, SlotState.READY):
                batch.outcomes[i] = Outcome.GONE
                moved_on.append(batch.order.keys[i])
        if moved_on:  # the bytes written may be those of the slot's next chunk
            self._remove(space, moved_on)

    def _get(self, part: BatchPart, space: Space) -> None:
        batch, place = part.batch, part.batch.place
        chunks, numbers = [], []
        for i in range(part.begin, part.end):
            slot, generation, key = batch.slots[i], batch.generations[i], batch.order.keys[i]
            batch.outcomes[i] = Outcome.GONE
            if place.holds(slot, generation, SlotState.WRITING, key):
                chunks.append(Chunk(space, key, place.shares(slot)))
                numbers.append(i)
        outcomes = self._tier.get(chunks, batch.deadline) if chunks else []
        for i, chunk, outcome in zip(numbers, chunks, outcomes, strict=True):
            batch.outcomes[i] = outcome
            if outcome is Outcome.OK:
                batch.outcomes[i] = self._verify(batch, i, chunk)

    def _verify(self, batch: Batch, i: int, chunk: Chunk) -> Outcome:
        try:
            sealed = unseal(chunk.head, chunk.space, chunk.key)
            if checksum_of(chunk.shares) != sealed.checksum:
                raise Damaged("the check word does not fit the bytes")
        except OtherChunk as error:
            self._say(f"{self._name}: a record is dropped: {error}")
            self._remove(chunk.space, [chunk.key])
            return Outcome.ABSENT
        except Damaged as error:
            text = f"slot {batch.slots[i]}: {error}"
            log.warning("%s: a damaged record is dropped, %s", self._name, text)
            batch.error = text
            self._remove(chunk.space, [chunk.key])
            return Outcome.CORRUPT
        if not self._is_still(batch, i, SlotState.WRITING):
            return Outcome.GONE
        batch.coverages[i] = sealed.coverage
        batch.descriptions[i] = sealed.description
        return Outcome.OK

    def _ask(self, part: BatchPart, space: Space) -> None:
        batch = part.batch
        keys = batch.order.keys[part.begin : part.end]
        found = self._tier.contains(space, keys, batch.deadline) if keys else []
        for i, there in zip(range(part.begin, part.end), found, strict=True):
            batch.outcomes[i] = Outcome.OK if there else Outcome.ABSENT

    def _remove(self, space: Space, keys: Sequence[bytes]) -> None:
        try:
            self._tier.remove(space, keys)
        except TierError as error:  # harmless: a get verifies the check word again
            self._say(f"{self._name}: a record that should go stays: {error}")

    @staticmethod
    def _is_still(batch: Batch, i: int, state: SlotState) -> bool:
        holds = batch.place.holds(batch.slots[i], batch.generations[i], state, batch.order.keys[i])
        return holds and not batch.stale

    def _say(self, text: str) -> None:
        """Log a warning; if it repeats the last one, only every `_SAY_AGAIN` seconds."""
        now = time.monotonic()
        with self._lock:
            if self._said[0] == text and now < self._said[1]:
                return
            self._said = text, now + _SAY_AGAIN
        log.warning("%s", text)


class SerialThread:
    """One thread for calls of the backend that must not overtake each other.

    Args:
        tell: called by the thread with a callback for the loop.
    """

    def __init__(self, tell: Callable[[Callable[[], None]], None]) -> None:
        self._tell = tell
        self._tasks: SimpleQueue[Callable[[], Callable[[], None]] | None] = SimpleQueue()
        threading.Thread(target=self._work, name="tier-clerk", daemon=True).start()

    def ask(self, call: Callable[[], T], then: Callable[[T | TierError], None]) -> None:
        """Have the thread run `call`, and then the loop `then` with the result or the error."""

        def task() -> Callable[[], None]:
            try:
                return partial(then, call())
            except TierError as error:
                return partial(then, error)
            except Exception as error:
                log.exception("a bug in the tier's backend")
                return partial(then, TierError(safe_repr(error)))

        self._tasks.put(task)

    def close(self) -> None:
        """Have the thread exit once its tasks are done."""
        self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._tell(task())
