"""The threads that call the backend, which may block.

Workers carry parts of batches out: they look at the slot, seal or verify, call the backend, and
look again. A put needs no pin. A slot is looked at before its bytes are read and again when their
check word is known: if it holds the chunk both times, the word is the chunk's. Bytes that change
later no longer fit it, so that a get finds a miss and no wrong bytes.

Gets and asks go before puts, and one thread less than may run carries puts: an engine waits for
what comes up, nobody for what goes down. Threads for puts give way to whoever else wants their
processor: a lane that copies a load, the broker, an engine.

The clerk is one more thread, for all other calls. Some of these must not overtake each other: a
chunk that a scan has found is reported before it is reported as gone.
"""

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TypeAlias

from kvd.errors import TierError
from kvd.logs.faults import fault_text
from kvd.machine.process import give_way
from kvd.tier.batches import Batch, Kind, Part, Place
from kvd.tier.contract import Capacity, Chunk, Outcome, Space, Tier
from kvd.tier.seal import Damaged, OtherChunk, check_of, seal, unseal
from kvd_proto.directory import SlotState

log = logging.getLogger("kvd.tier")
SALT_BYTES = 8
_SAY_AGAIN = 10.0  # seconds after which the same error is logged again
Rows: TypeAlias = list[tuple[bytes, tuple[int, int, int]]]
"""Keys and coverages of chunks."""


class Workers:
    """Threads around a backend. All methods are for one other thread.

    Args:
        tier: the backend; at least two threads run at a time, or puts would have none.
        name: of the tier, for the log.
        ended: called by a thread for each part that has ended.
    """

    def __init__(self, tier: Tier, name: str, ended: Callable[[Part], None]) -> None:
        self._transfers = Transfers(tier, name)
        self._ended = ended
        self._lock = threading.Lock()
        self._get_ready = threading.Condition(self._lock)
        self._put_ready = threading.Condition(self._lock)
        self._gets: deque[Part] = deque()
        self._puts: deque[Part] = deque()
        self._running: set[Part] = set()
        self._closed = False
        self._most = threads = max(2, tier.threads)
        for number in range(threads):
            threading.Thread(target=self._get, name=f"tier-get-{number}", daemon=True).start()
        for number in range(threads - 1):
            threading.Thread(target=self._put, name=f"tier-put-{number}", daemon=True).start()

    @property
    def busy(self) -> int:
        """Parts that a thread is in."""
        return len(self._running)

    @property
    def waiting(self) -> bool:
        """Whether a part waits."""
        return bool(self._gets or self._puts)

    @property
    def queued_bytes(self) -> int:
        """Of parts that wait."""
        with self._lock:
            return sum(part.nbytes for part in (*self._gets, *self._puts))

    def submit(self, parts: Iterable[Part]) -> None:
        """Have these carried out, in their order."""
        with self._lock:
            for part in parts:
                if part.batch.kind is Kind.PUT:
                    self._puts.append(part)
                    self._put_ready.notify()
                else:
                    self._gets.append(part)
                    self._get_ready.notify()

    def take_useless(self) -> list[Part]:
        """Take what is late by now, or whose slots have moved on, of what waits.

        Its outcome is set. While all threads hang, nothing waits longer for them than it must.
        """
        now = time.monotonic()
        taken: list[Part] = []
        with self._lock:
            for queue in (self._gets, self._puts):
                if not queue:
                    continue
                parts = list(queue)
                queue.clear()
                for part in parts:
                    (taken if _useless(part, now) else queue).append(part)
            if taken:
                self._put_ready.notify()  # a get that was to run before it may have gone
        return taken

    def take_all(self) -> list[Part]:
        """Take all that waits; nothing of it is begun."""
        with self._lock:
            taken = [*self._gets, *self._puts]
            self._gets.clear()
            self._puts.clear()
        for part in taken:
            part.batch.fail(Outcome.LATE, "", part.begin, part.end)
        return taken

    def close(self) -> None:
        """Have threads end that have nothing to do, or are done."""
        with self._lock:
            self._closed = True
            self._get_ready.notify_all()
            self._put_ready.notify_all()

    def _get(self) -> None:
        self._work(self._gets, self._get_ready)

    def _put(self) -> None:
        give_way()
        self._work(self._puts, self._put_ready)

    def _work(self, queue: deque[Part], ready: threading.Condition) -> None:
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

    def __repr__(self) -> str:
        return (
            f"<Workers, {self.busy} busy, {len(self._gets)} gets and {len(self._puts)} puts wait>"
        )


def _useless(part: Part, now: float) -> bool:
    batch = part.batch
    if now > batch.deadline:
        outcome = Outcome.LATE
    elif batch.stale or (batch.kind is not Kind.ASK and not _holds_any(part)):
        outcome = Outcome.GONE
    else:
        return False
    batch.fail(outcome, "", part.begin, part.end)
    return True


def _holds_any(part: Part) -> bool:
    batch = part.batch
    state = SlotState.READY if batch.kind is Kind.PUT else SlotState.WRITING
    return any(
        batch.place.holds(batch.slots[i], batch.generations[i], state, batch.keys[i])
        for i in range(part.begin, part.end)
    )


class Transfers:
    """Carries out parts on a backend; from several threads at a time.

    Args:
        tier: the backend.
        name: of the tier, for the log.
    """

    def __init__(self, tier: Tier, name: str) -> None:
        self._tier = tier
        self._name = name
        self._lock = threading.Lock()
        self._said: tuple[str, float] = ("", 0.0)

    def run(self, part: Part) -> None:
        """Carry it out; every chunk of it has its outcome then. Raises nothing."""
        batch = part.batch
        try:
            if time.monotonic() > batch.deadline:
                batch.fail(Outcome.LATE, "", part.begin, part.end)
            elif batch.space is None or batch.stale:
                batch.fail(Outcome.GONE, "", part.begin, part.end)
            elif batch.kind is Kind.PUT:
                self._put(part, batch.space)
            elif batch.kind is Kind.GET:
                self._get(part, batch.space)
            else:
                self._ask(part, batch.space)
        except TierError as error:
            batch.fail(Outcome.FAILED, str(error), part.begin, part.end)
            self._say(f"{self._name}: a {batch.kind.name} of {len(batch.keys)} failed: {error}")
        except Exception as error:
            batch.fail(Outcome.FAILED, fault_text(error), part.begin, part.end)
            log.exception("%s: a bug in the tier failed a %s", self._name, batch.kind.name)

    def _put(self, part: Part, space: Space) -> None:
        batch, place = part.batch, part.batch.place
        chunks, numbers = [], []
        for i in range(part.begin, part.end):
            slot, generation, key = batch.slots[i], batch.generations[i], batch.keys[i]
            batch.outcomes[i] = Outcome.GONE
            if not place.holds(slot, generation, SlotState.READY, key):
                continue
            shares = place.shares(slot)
            description = place.description(slot, generation)
            check = check_of(shares)
            if not place.holds(slot, generation, SlotState.READY, key):
                continue
            coverage = batch.coverages[i]
            head = seal(space, key, coverage, check, description)
            chunks.append(Chunk(space, key, shares, head, coverage, check))
            numbers.append(i)
        outcomes = self._tier.put(chunks, batch.deadline) if chunks else []
        moved_on = []
        for i, outcome in zip(numbers, outcomes, strict=True):
            batch.outcomes[i] = outcome
            if outcome is Outcome.OK and not self._is_still(batch, i, SlotState.READY):
                batch.outcomes[i] = Outcome.GONE
                moved_on.append(batch.keys[i])
        if moved_on:  # what was written may be of the slot's next chunk
            self._remove(space, moved_on)

    def _get(self, part: Part, space: Space) -> None:
        batch, place = part.batch, part.batch.place
        chunks, numbers = [], []
        for i in range(part.begin, part.end):
            slot, generation, key = batch.slots[i], batch.generations[i], batch.keys[i]
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
            if check_of(chunk.shares) != sealed.check:
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

    def _ask(self, part: Part, space: Space) -> None:
        batch = part.batch
        keys = batch.keys[part.begin : part.end]
        found = self._tier.contains(space, keys, batch.deadline) if keys else []
        for i, there in zip(range(part.begin, part.end), found, strict=True):
            batch.outcomes[i] = Outcome.OK if there else Outcome.ABSENT

    def _remove(self, space: Space, keys: Sequence[bytes]) -> None:
        try:
            self._tier.remove(space, keys)
        except TierError as error:  # a get compares the check word again
            self._say(f"{self._name}: a record that should go stays: {error}")

    @staticmethod
    def _is_still(batch: Batch, i: int, state: SlotState) -> bool:
        holds = batch.place.holds(batch.slots[i], batch.generations[i], state, batch.keys[i])
        return holds and not batch.stale

    def _say(self, text: str) -> None:
        """Log an error, the same one only now and then."""
        now = time.monotonic()
        with self._lock:
            if self._said[0] == text and now < self._said[1]:
                return
            self._said = text, now + _SAY_AGAIN
        log.warning("%s", text)


@dataclass(frozen=True, slots=True)
class Begun:
    """A namespace has begun with a salt, or, where `space` is None, has not: why."""

    place: Place
    asked: bytes
    salt: bytes = b""
    space: Space | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Listed:
    """The next chunks that a scan has found; `last`: there are no more."""

    space: Space
    rows: Rows
    last: bool


@dataclass(frozen=True, slots=True)
class Dropped:
    """Keys were removed, as the broker has ordered."""

    space: Space
    keys: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Tidied:
    """What the backend has dropped by itself: ids of spaces, and keys; and how full it is now."""

    gone: list[tuple[bytes, list[bytes]]]
    capacity: Capacity | None


Event: TypeAlias = Begun | Listed | Dropped | Tidied


class Clerk:
    """One thread; what it finds it tells in the order in which it was found.

    Args:
        tier: the backend.
        tell: called by the thread for each event.
    """

    def __init__(self, tier: Tier, tell: Callable[[Event], None]) -> None:
        self._tier = tier
        self._tell = tell
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._scans: dict[Space, Iterator[Rows]] = {}
        self._salts: dict[bytes, bytes] = {}  # of backends that note none
        threading.Thread(target=self._work, name="tier-clerk", daemon=True).start()

    def begin(self, place: Place) -> None:
        """Use a namespace from now on, with the salt that the broker named last."""
        self._tasks.put(partial(self._begin, place, place.asked))

    def scan(self, space: Space) -> None:
        """Report the next piece of what is kept of a space; from the start at first."""
        self._tasks.put(partial(self._scan, space))

    def forget(self, space: Space) -> None:
        """Report nothing more of a space."""
        self._tasks.put(partial(self._forget, space))

    def drop(self, space: Space, keys: Sequence[bytes]) -> None:
        """Remove these."""
        self._tasks.put(partial(self._drop, space, keys))

    def tidy(self) -> None:
        """Report what the backend has dropped by itself, and how full it is."""
        self._tasks.put(self._tidy)

    def close(self) -> None:
        """Have the thread end when its tasks are done."""
        self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:
                log.exception("a bug in the tier's backend")

    def _begin(self, place: Place, asked: bytes) -> None:
        try:
            salt = self._salted(place, asked)
            space = place.space_of(salt)
            self._tier.begin(space)
        except Exception as error:
            text = str(error)
            if not isinstance(error, TierError):
                text = fault_text(error)
                log.exception("a bug in the tier's backend: a namespace does not begin")
            self._tell(Begun(place, asked, error=text))
        else:
            self._tell(Begun(place, asked, salt, space))

    def _salted(self, place: Place, asked: bytes) -> bytes:
        """The salt with which a namespace begins, once it is noted and what was before is dropped.

        1. The one that the broker named.
        2. The one that the backend has noted, or that this process began with before.
        3. One that is drawn now: no chunk is ever kept under a name without a salt.
        """
        namespace = place.order.namespace
        known = self._salts.get(namespace, b"")
        salt = asked or self._tier.salt(namespace) or known or secrets.token_bytes(SALT_BYTES)
        before = self._tier.note_salt(namespace, salt) or known
        self._salts[namespace] = salt
        if before not in {b"", salt}:
            self._tier.drop_space(place.space_of(before))
        return salt

    def _scan(self, space: Space) -> None:
        rows: Rows | None = None
        try:
            if space not in self._scans:
                self._scans[space] = self._tier.scan(space)
            rows = next(self._scans[space], None)
        except TierError as error:
            log.warning("a scan of %s ends early: %s", space.id.hex()[:8], error)
        finally:
            if rows is None:
                self._forget(space)
            self._tell(Listed(space, rows or [], last=rows is None))

    def _forget(self, space: Space) -> None:
        self._scans.pop(space, None)

    def _drop(self, space: Space, keys: Sequence[bytes]) -> None:
        try:
            self._tier.remove(space, keys)
        except TierError as error:
            log.warning("%d chunks that should go stay: %s", len(keys), error)
        finally:
            self._tell(Dropped(space, keys))

    def _tidy(self) -> None:
        gone: list[tuple[bytes, list[bytes]]] = []
        capacity = None
        try:
            gone = self._tier.take_gone()
            capacity = self._tier.capacity()
        finally:
            self._tell(Tidied(gone, capacity))

    def __repr__(self) -> str:
        return f"<Clerk, {self._tasks.qsize()} tasks wait>"
