"""The threads that call the backend, which may block.

`BatchThreads` execute parts of batches: check the slots, seal or verify, call the backend, check
the slots again. A put needs no pin: if a slot holds the chunk before its bytes are read and after
their checksum is computed, the checksum is the chunk's. If the bytes change later, they no longer
match, and a get is a miss instead of wrong bytes.

Gets and asks come before puts, and one thread never executes puts, since engines wait for gets but
not for puts. Put threads have low priority: they yield the processor to lanes, broker and engines.

`SerialThread` makes all other calls, in order: a chunk found by a scan must be reported before it
is reported as gone.
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
_REPEAT_SECONDS = 10.0  # after which the same warning is logged again
T = TypeVar("T")


class BatchThreads:
    """The threads that execute parts of batches. Only the loop's thread calls the methods.

    Args:
        tier: the backend. At least two parts run at a time, or puts would have no thread.
        name: of the tier, for the log.
        on_end: called by a thread for each part that has ended.
    """

    def __init__(self, tier: TierBackend, name: str, on_end: Callable[[BatchPart], None]) -> None:
        self._executor = BatchExecutor(tier, name)
        self._on_end = on_end
        self._lock = threading.Lock()
        self._get_ready = threading.Condition(self._lock)
        self._put_ready = threading.Condition(self._lock)
        self._gets: deque[BatchPart] = deque()
        self._puts: deque[BatchPart] = deque()
        self._running: set[BatchPart] = set()
        self._closed = False
        self._max_running = threads = max(2, tier.threads)
        for number in range(threads):
            threading.Thread(target=self._run_gets, name=f"tier-get-{number}", daemon=True).start()
        for number in range(threads - 1):
            threading.Thread(target=self._run_puts, name=f"tier-put-{number}", daemon=True).start()

    @property
    def num_running(self) -> int:
        """Number of parts that threads execute now."""
        return len(self._running)

    @property
    def has_waiting(self) -> bool:
        """Whether a part waits for a thread."""
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

    def take_expired(self, *, all_parts: bool = False) -> list[BatchPart]:
        """Remove waiting parts that are late or whose slots were reused, or all; return them.

        Their outcomes are set. So no part waits beyond its deadline, even if all threads hang.
        """
        now = math.inf if all_parts else time.monotonic()
        expired: list[BatchPart] = []
        with self._lock:
            for queue in (self._gets, self._puts):
                parts = list(queue)
                queue.clear()
                for part in parts:
                    (expired if _expire(part, now) else queue).append(part)
            if expired:
                self._put_ready.notify()  # a get ahead of a put may have been removed
        return expired

    def close(self) -> None:
        """Have the threads exit once their queues are empty."""
        with self._lock:
            self._closed = True
            self._get_ready.notify_all()
            self._put_ready.notify_all()

    def _run_gets(self) -> None:
        self._run(self._gets, self._get_ready)

    def _run_puts(self) -> None:
        lower_priority()
        self._run(self._puts, self._put_ready)

    def _run(self, queue: deque[BatchPart], ready: threading.Condition) -> None:
        while True:
            with self._lock:
                while not queue or len(self._running) >= self._max_running:
                    if self._closed and not queue:
                        return
                    ready.wait()
                part = queue.popleft()
                self._running.add(part)
            part.batch.start_part()
            self._executor.execute(part)
            with self._lock:
                self._running.discard(part)
                (self._get_ready if self._gets else self._put_ready).notify()
            self._on_end(part)


def _expire(part: BatchPart, now: float) -> bool:
    """Set a part's outcome if it need not be executed any more; return whether that is so."""
    batch = part.batch
    if now > batch.deadline:
        outcome = Outcome.LATE
    elif batch.is_stale or (not isinstance(batch.order, Lookup) and not _holds_any(part)):
        outcome = Outcome.GONE
    else:
        return False
    batch.set_outcome(outcome, "", part.begin, part.end)
    return True


def _holds_any(part: BatchPart) -> bool:
    """Return whether a slot of the part still holds its chunk."""
    batch = part.batch
    state = SlotState.READY if isinstance(batch.order, Put) else SlotState.WRITING
    return any(
        batch.namespace.holds(batch.slots[i], batch.generations[i], state, batch.order.keys[i])
        for i in range(part.begin, part.end)
    )


class BatchExecutor:
    """Executes parts on a backend. Several threads may use it at a time."""

    def __init__(self, tier: TierBackend, name: str) -> None:
        self._tier = tier
        self._name = name
        self._lock = threading.Lock()
        self._last_warning: tuple[str, float] = ("", 0.0)  # and when it may be logged again

    def execute(self, part: BatchPart) -> None:
        """Execute a part, and set the outcome of each of its chunks. Raises nothing."""
        batch = part.batch
        try:
            if time.monotonic() > batch.deadline:
                batch.set_outcome(Outcome.LATE, "", part.begin, part.end)
            elif batch.space is None or batch.is_stale:
                batch.set_outcome(Outcome.GONE, "", part.begin, part.end)
            elif isinstance(batch.order, Put):
                self._put(part, batch.space)
            elif isinstance(batch.order, Get):
                self._get(part, batch.space)
            else:
                self._ask(part, batch.space)
        except TierError as error:
            batch.set_outcome(Outcome.FAILED, str(error), part.begin, part.end)
            self._warn(f"{self._name}: a {batch.kind} of {len(batch.order.keys)} failed: {error}")
        except Exception as error:
            batch.set_outcome(Outcome.FAILED, safe_repr(error), part.begin, part.end)
            log.exception("%s: a bug in the tier failed a %s", self._name, batch.kind)

    def _put(self, part: BatchPart, space: Space) -> None:
        """Put a part's chunks.

        1. Read, checksum and seal each chunk whose slot holds it before and afterwards.
        2. Have the backend put them.
        3. Remove chunks whose slots were reused: the bytes written may be of the next chunk.
        """
        batch, namespace = part.batch, part.batch.namespace
        chunks, indices = [], []
        for i in range(part.begin, part.end):
            slot, generation, key = batch.slots[i], batch.generations[i], batch.order.keys[i]
            batch.outcomes[i] = Outcome.GONE
            if not namespace.holds(slot, generation, SlotState.READY, key):
                continue
            shares = namespace.shares(slot)
            description = namespace.description(slot, generation)
            checksum = checksum_of(shares)
            if not namespace.holds(slot, generation, SlotState.READY, key):
                continue
            coverage = batch.coverages[i]
            head = seal(space, key, coverage, checksum, description)
            chunks.append(Chunk(space, key, shares, head, coverage, checksum))
            indices.append(i)
        outcomes = self._tier.put(chunks, batch.deadline) if chunks else []
        reused_keys = []
        for i, outcome in zip(indices, outcomes, strict=True):
            batch.outcomes[i] = outcome
            if outcome is Outcome.OK and not self._still_holds(batch, i, SlotState.READY):
                batch.outcomes[i] = Outcome.GONE
                reused_keys.append(batch.order.keys[i])
        if reused_keys:
            self._remove(space, reused_keys)

    def _get(self, part: BatchPart, space: Space) -> None:
        """Have the backend fill the slots that still await their chunks, then verify each chunk."""
        batch, namespace = part.batch, part.batch.namespace
        chunks, indices = [], []
        for i in range(part.begin, part.end):
            slot, generation, key = batch.slots[i], batch.generations[i], batch.order.keys[i]
            batch.outcomes[i] = Outcome.GONE
            if namespace.holds(slot, generation, SlotState.WRITING, key):
                chunks.append(Chunk(space, key, namespace.shares(slot)))
                indices.append(i)
        outcomes = self._tier.get(chunks, batch.deadline) if chunks else []
        for i, chunk, outcome in zip(indices, chunks, outcomes, strict=True):
            batch.outcomes[i] = outcome
            if outcome is Outcome.OK:
                batch.outcomes[i] = self._verify(batch, i, chunk)

    def _verify(self, batch: Batch, i: int, chunk: Chunk) -> Outcome:
        """Verify the seal of a chunk; return its outcome.

        OK: its bytes are in the slot. ABSENT: the record is of another chunk, and is dropped.
        CORRUPT: the record is damaged, and is dropped. GONE: the slot was reused meanwhile.
        """
        try:
            sealed = unseal(chunk.head, chunk.space, chunk.key)
            if checksum_of(chunk.shares) != sealed.checksum:
                raise Damaged("the bytes do not match their checksum")
        except OtherChunk as error:
            self._warn(f"{self._name}: a record is dropped: {error}")
            self._remove(chunk.space, [chunk.key])
            return Outcome.ABSENT
        except Damaged as error:
            text = f"slot {batch.slots[i]}: {error}"
            log.warning("%s: a damaged record is dropped, %s", self._name, text)
            batch.error = text
            self._remove(chunk.space, [chunk.key])
            return Outcome.CORRUPT
        if not self._still_holds(batch, i, SlotState.WRITING):
            return Outcome.GONE
        batch.coverages[i] = sealed.coverage
        batch.descriptions[i] = sealed.description
        return Outcome.OK

    def _ask(self, part: BatchPart, space: Space) -> None:
        batch = part.batch
        keys = batch.order.keys[part.begin : part.end]
        flags = self._tier.contains(space, keys, batch.deadline) if keys else []
        for i, is_stored in zip(range(part.begin, part.end), flags, strict=True):
            batch.outcomes[i] = Outcome.OK if is_stored else Outcome.ABSENT

    def _remove(self, space: Space, keys: Sequence[bytes]) -> None:
        try:
            self._tier.remove(space, keys)
        except TierError as error:  # harmless: a get verifies the checksum again
            self._warn(f"{self._name}: a record cannot be removed: {error}")

    @staticmethod
    def _still_holds(batch: Batch, i: int, state: SlotState) -> bool:
        slot, generation, key = batch.slots[i], batch.generations[i], batch.order.keys[i]
        return batch.namespace.holds(slot, generation, state, key) and not batch.is_stale

    def _warn(self, text: str) -> None:
        """Log a warning; if it repeats the last one, only every `_REPEAT_SECONDS`."""
        now = time.monotonic()
        with self._lock:
            last_text, repeat_at = self._last_warning
            if last_text == text and now < repeat_at:
                return
            self._last_warning = text, now + _REPEAT_SECONDS
        log.warning("%s", text)


class SerialThread:
    """One thread for calls of the backend that must not overtake each other.

    It passes each callback for the loop to `call_in_loop`.
    """

    def __init__(self, call_in_loop: Callable[[Callable[[], None]], None]) -> None:
        self._call_in_loop = call_in_loop
        self._tasks: SimpleQueue[Callable[[], Callable[[], None]] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="tier-serial", daemon=True).start()

    def submit(self, call: Callable[[], T], on_result: Callable[[T | TierError], None]) -> None:
        """Have the thread run `call`, then the loop run `on_result` with the result or error."""

        def task() -> Callable[[], None]:
            try:
                return partial(on_result, call())
            except TierError as error:
                return partial(on_result, error)
            except Exception as error:
                log.exception("a bug in the tier's backend")
                return partial(on_result, TierError(safe_repr(error)))

        self._tasks.put(task)

    def close(self) -> None:
        """Have the thread exit once its tasks are done."""
        self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._call_in_loop(task())
