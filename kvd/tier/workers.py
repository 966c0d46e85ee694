"""The threads that carry parts of batches out, and what waits for them.

Gets and asks go before puts, and one thread less than may run carries puts: an engine waits for
what comes up, nobody for what goes down. Threads for puts give way to whoever else wants their
processor: a lane that copies a load, the broker, an engine.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from kvd.machine.process import give_way
from kvd.tier.batches import Kind, Part
from kvd.tier.transfers import Transfers
from kvd.wire.tiering import Outcome
from kvd_proto.directory import SlotState


class Workers:
    """Threads around a backend. All methods are for one other thread.

    Args:
        transfers: carries a part out.
        threads: how many run at a time; two at least, or puts would have none.
        ended: called by a thread for each part that has ended.
    """

    def __init__(self, transfers: Transfers, threads: int, ended: Callable[[Part], None]) -> None:
        self._transfers = transfers
        self._ended = ended
        self._lock = threading.Lock()
        self._get_ready = threading.Condition(self._lock)
        self._put_ready = threading.Condition(self._lock)
        self._gets: deque[Part] = deque()
        self._puts: deque[Part] = deque()
        self._running: set[Part] = set()
        self._closed = False
        self._most = threads = max(2, threads)
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
